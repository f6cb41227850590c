"""Where a round goes: candidates for its home, the route of its prefill, the order to the home.

The decisions are `ampd.core.binding` and `ampd.core.routing`; this adds what they need to know
of this coordinator's own placements since the workers last published their load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

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


class Placer:
    """Binds and routes by the core's rules; remembers what it has placed."""

    def __init__(
        self, *, clock: Clock, tie_seed: Callable[[], int], max_prefill_attempts: int
    ) -> None:
        self._clock = clock
        self._tie_seed = tie_seed
        self._max_prefill_attempts = max_prefill_attempts
        self._recent = RecentPlacements()

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
        decode = [view for view in decode if binding_of(view.info) not in lost]
        for view in decode:
            if session.home == binding_of(view.info) and not view.load.draining:
                return deque([Candidate(view, None)])
        now_s = self._clock()
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
