"""Where a round goes: candidates for its home, the route of its prefill, the order to the home.

The decisions are `ampd.core.binding` and `ampd.core.routing`; this adds what they need to know
of this coordinator's own placements since the workers last published their load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from ampd.core import binding
from ampd.core.lifecycle import RunningRound, SessionRecord
from ampd.core.model import (
    Binding,
    PrefillTarget,
    RoundOrder,
    RouteDecision,
    SessionFacts,
    WorkerView,
)
from ampd.core.placements import Placement, RecentPlacements
from ampd.core.routing import RouteTask, route
from ampd.ports import Clock
from services.coordinator.round import Candidate, Round, binding_of

SEEN_S: Final = 30.0
"""How long a home that has fallen silent is asked before its sessions go elsewhere, and how long
one that could not be reached is not asked again."""
MAX_SEEN_HOMES: Final = 1024
"""Homes remembered before old ones are forgotten."""


class Placer:
    """Binds and routes by the core's rules; remembers what it has placed."""

    def __init__(
        self, *, clock: Clock, tie_seed: Callable[[], int], max_prefill_attempts: int
    ) -> None:
        self._clock = clock
        self._tie_seed = tie_seed
        self._max_prefill_attempts = max_prefill_attempts
        self._recent = RecentPlacements()
        self._seen: dict[Binding, tuple[WorkerView, float]] = {}
        self._lost: dict[Binding, float] = {}

    def homes(
        self,
        session: SessionRecord,
        running: RunningRound,
        decode: Sequence[WorkerView],
        lost: Collection[Binding] = (),
    ) -> deque[Candidate]:
        """The session's home if it lives and stays; else where binding would put it, best first.

        Of several new homes one that has room at once is better than one to wait for: the best
        comes again at the end, to wait there. `lost`: homes that cannot be reached, whatever the
        shared store says. Raises NO_DECODE_WORKER, KV_TOO_SMALL.
        """
        now_s = self._clock()
        self._remember(decode, now_s)
        decode = [view for view in decode if binding_of(view.info) not in lost]
        for view in decode:
            if session.home == binding_of(view.info) and not view.load.draining:
                return deque([Candidate(view, None)])
        if session.home is not None and session.home not in lost:
            silent = self._silent(session.home, decode, now_s)
            if silent is not None:
                return deque([Candidate(silent, None)])
        decisions = binding.bind(
            self._recent.shown_in(decode, now_s),
            prompt_tokens=running.keep_history_tokens + running.increment_tokens,
            max_tokens=running.max_tokens,
            footprint=binding.resident_footprint(decode),
        )
        best = decisions[0]
        self._recent.add(Placement(best.worker_id, now_s, reserved_tokens=best.footprint_tokens))
        by_id = {view.info.worker_id: view for view in decode}
        homes = deque(Candidate(by_id[d.worker_id], d, waits=False) for d in decisions)
        homes.append(Candidate(by_id[best.worker_id], best))
        return homes

    def lose(self, home: Binding) -> None:
        """That home could not be reached."""
        self._lost[home] = self._clock()

    def _remember(self, decode: Sequence[WorkerView], now_s: float) -> None:
        for view in decode:
            self._seen[binding_of(view.info)] = (view, now_s)
        if len(self._seen) > MAX_SEEN_HOMES or len(self._lost) > MAX_SEEN_HOMES:
            self._seen = {k: v for k, v in self._seen.items() if now_s - v[1] < SEEN_S}
            self._lost = {k: s for k, s in self._lost.items() if now_s - s < SEEN_S}

    def _silent(
        self, home: Binding, decode: Sequence[WorkerView], now_s: float
    ) -> WorkerView | None:
        """A session's home that the store has not heard of for a lease, as it was last seen: it
        may be cut off from the store alone, and knows best how far its sessions are."""
        view, seen_s = self._seen.get(home, (None, 0.0))
        if view is None or now_s - seen_s > SEEN_S or view.load.draining:
            return None
        if now_s - self._lost.get(home, float("-inf")) < SEEN_S:
            return None
        replaced = any(other.info.worker_id == home.worker_id for other in decode)
        return None if replaced else view

    def route(self, round_: Round, home: WorkerView, *, rebuilt: bool) -> RouteDecision:
        """Where to prefill. `rebuilt`: the session is new to its home, no history KV is there."""
        keep = round_.keep_history_tokens
        new_tokens = len(round_.increment) + len(round_.output.token_ids)
        task = RouteTask(
            history_tokens=0 if rebuilt else keep,
            increment_tokens=new_tokens + (keep if rebuilt else 0),
            slo=round_.session.slo,
            cached_tokens=dict(round_.session.prefix_holders),
        )
        now_s = self._clock()
        (home, *prefill) = self._recent.shown_in((home, *round_.prefill), now_s)
        decision = route(
            task,
            home=home,
            prefill_workers=prefill,
            policy=round_.policy,
            tie_seed=self._tie_seed(),
        )
        chosen = decision.prefill_worker or home.info.worker_id
        compute_s = next((c.compute_s for c in decision.candidates if c.worker_id == chosen), 0.0)
        self._recent.add(Placement(chosen, now_s, prefill_s=compute_s))
        return decision

    def order(self, round_: Round, decision: RouteDecision, home: Candidate) -> RoundOrder:
        """What the home is told: the chosen prefill worker first, then those to fall back on."""
        session = round_.session
        by_id = {view.info.worker_id: view.info for view in round_.prefill}
        names = (decision.prefill_worker, *decision.fallbacks) if decision.prefill_worker else ()
        return RoundOrder(
            session_id=session.session_id,
            request_id=round_.request_id,
            round_index=round_.round_index,
            keep_history_tokens=round_.keep_history_tokens,
            increment=round_.increment,
            sampling=round_.sampling,
            slo=session.slo,
            created_s=round_.created_s,
            reason=decision.reason,
            targets=tuple(
                PrefillTarget(name, by_id[name].incarnation, by_id[name].address)
                for name in names[: self._max_prefill_attempts]
            ),
            footprint_tokens=0 if home.bind is None else home.bind.footprint_tokens,
            resumed=round_.output.resumed(),
            admission_wait_s=None if home.waits else 0.0,
            detached=round_.detached,
            attempt_id=round_.attempt_id,
            discarded=session.discarded,
            facts=SessionFacts(
                session.tenant, session.model, session.created_unix_s, dict(session.labels)
            ),
        )
