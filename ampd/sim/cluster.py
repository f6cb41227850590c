"""A simulated cluster: a coordinator that decides by `ampd.core`, workers, and clients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

from ampd.core import binding
from ampd.core.errors import AmpdError
from ampd.core.late_binding import RemoteOutlook, remote_outlook
from ampd.core.lifecycle import MAX_PREFIX_HOLDERS
from ampd.core.model import (
    BindDecision,
    ItlStatistic,
    Role,
    RoundTimings,
    Slo,
    WorkerInfo,
    WorkerView,
)
from ampd.core.placements import Placement, RecentPlacements
from ampd.core.policies import ROUND_ROBIN, resolve
from ampd.core.routing import RouteTask, route
from ampd.core.slo import attainment
from ampd.sim.decode_worker import LOOK_S, SimDecodeWorker
from ampd.sim.kernel import Kernel
from ampd.sim.prefill_worker import SimPrefillWorker
from ampd.sim.report import Distribution, LoggedDecision, SimReport, Totals, kv_ratios
from ampd.sim.rounds import SimRound, SimSession
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import SessionPlan, Workload


def simulate(
    settings: SimSettings,
    workload: Workload,
    *,
    rate: float,
    horizon_s: float,
    warm_up_s: float = 0.0,
    seed: int = 0,
) -> SimReport:
    """Sessions arrive for `horizon_s` and run to their end; those that arrive after `warm_up_s`
    count. Of a workload that starts in steady state, the rounds that begin between the two
    count, and none begins later. A function of its arguments alone.

    Raises INVALID_FIELD for a policy or setting that is wrong, KV_TOO_SMALL never: what no
    worker can hold is counted as refused.
    """
    cluster = SimCluster(
        settings, workload, rate=rate, horizon_s=horizon_s, warm_up_s=warm_up_s, seed=seed
    )
    cluster.run()
    cluster.check()
    return cluster.report()


class SimCluster:
    """See `simulate`. Coordinator and clients are one: calls between processes take no time."""

    def __init__(
        self,
        settings: SimSettings,
        workload: Workload,
        *,
        rate: float,
        horizon_s: float,
        warm_up_s: float,
        seed: int,
    ) -> None:
        self.settings = settings
        self.kernel = Kernel()
        self.totals = Totals(warm_up_s, horizon_s)
        self._workload = workload
        self._rate, self._horizon_s = rate, horizon_s
        self._warm_up_s, self._seed = warm_up_s, seed
        self._slo: Slo = workload.slo
        self._policy = resolve(settings.policy)
        self._round_robin = self._policy.settings.get("choice") == ROUND_ROBIN
        self._rng = random.Random(seed + 1)  # noqa: S311 - a model, not a secret
        self._turn = 0
        self._recent = RecentPlacements()
        self._gap_statistics = (
            settings.gap_statistics or self._slo.itl_statistic is not ItlStatistic.MEAN
        )
        self.prefill = tuple(
            SimPrefillWorker(
                self._info(f"prefill-{index}", Role.PREFILL, spec),
                spec,
                settings,
                self._policy,
                self._slo,
                kernel=self.kernel,
                totals=self.totals,
                phase_s=self._phase_s(),
            )
            for index, spec in enumerate(settings.prefill)
        )
        self.decode = tuple(
            SimDecodeWorker(
                self._info(f"decode-{index}", Role.DECODE, spec),
                spec,
                settings,
                self._policy,
                self._slo,
                kernel=self.kernel,
                totals=self.totals,
                gap_statistics=self._gap_statistics,
                finished=self._finished,
                refused=self._refused,
                outlook=self._outlook,
                offers=self._offer_late,
                phase_s=self._phase_s(),
            )
            for index, spec in enumerate(settings.decode)
        )
        self._by_id = {worker.info.worker_id: worker for worker in self.prefill}
        self._homes = {worker.info.worker_id: worker for worker in self.decode}
        for worker in self.prefill:
            worker.homes = self._homes
            worker.others = self.prefill
        self._outlook_s = -inf
        if self.prefill:
            self._mirror = self.prefill[0].mirror
            for worker in self.prefill:
                if worker.info.cost is self.prefill[0].info.cost:
                    worker.mirror = self._mirror
        self._outlook_now = RemoteOutlook({}, 0)
        self._open = 0
        self._counted: list[SimSession] = []
        self._counted_local = 0
        self._log: list[LoggedDecision] = []

    def _outlook(self, now_s: float) -> RemoteOutlook:
        """What homes expect of the prefill workers, looked at every so often."""
        if now_s - self._outlook_s >= LOOK_S:
            self._outlook_s = now_s
            views = [worker.view(now_s) for worker in (*self.decode, *self.prefill)]
            tasks = self._mirror.tasks(views, now_s) if self.prefill else []
            self._outlook_now = remote_outlook(tasks, views, now_s)
        return self._outlook_now

    def _offer_late(self) -> None:
        for worker in self.prefill:
            if worker.idle:
                worker.look()

    def _info(self, worker_id: str, role: Role, spec: WorkerSpec) -> WorkerInfo:
        return WorkerInfo(
            worker_id=worker_id,
            role=role,
            incarnation=1,
            address="",
            host="",
            kv_block_tokens=self.settings.kv_block_tokens,
            kv_capacity_tokens=spec.kv_capacity_tokens,
            kv_bytes_per_token=self.settings.kv_bytes_per_token,
            cost=spec.cost,
        )

    def _phase_s(self) -> float:
        return self._rng.random() * self.settings.heartbeat_s

    # --- clients -----------------------------------------------------------------------------

    def run(self) -> None:
        """Until every round has ended."""
        plans = self._workload.sessions(rate=self._rate, horizon_s=self._horizon_s, seed=self._seed)
        alive = []
        for plan in plans:
            if not plan.alive:
                self._arrive_next(plan, plans)
                break
            alive.append(plan)
        for plan in alive:
            self._preload(plan)
        self.kernel.run()

    def _arrive_next(self, plan: SessionPlan, plans: Iterator[SessionPlan]) -> None:
        self.kernel.at(plan.arrival_s, self._arrive, (plan, plans))

    def _arrive(self, arrival: tuple[SessionPlan, Iterator[SessionPlan]]) -> None:
        plan, plans = arrival
        following = next(plans, None)
        if following is not None:
            self._arrive_next(following, plans)
        self._open += 1
        self._begin(SimSession(plan))

    def _preload(self, plan: SessionPlan) -> None:
        """A session in the middle of its life: bound, and resident where there is room."""
        session = SimSession(plan)
        round_ = SimRound(session, 0.0, self.settings.max_tokens_factor)
        decisions = self._bind(round_)
        self._open += 1
        if decisions:
            session.home = self._homes[decisions[0].worker_id]
            session.home.preload(round_)
        self._come_back(session, plan.arrival_s)

    def _come_back(self, session: SimSession, begin_s: float) -> None:
        """Begin the next round then. In steady state none begins behind the horizon: the session
        keeps its KV until there."""
        if self._workload.steady and begin_s >= self._horizon_s:
            self.kernel.at(max(self.kernel.now_s, self._horizon_s), self._close, session)
        else:
            self.kernel.at(begin_s, self._begin, session)

    def _begin(self, session: SimSession) -> None:
        """The session's next round."""
        now_s = self.kernel.now_s
        round_ = SimRound(session, now_s, self.settings.max_tokens_factor)
        if round_.bound:
            decisions = self._bind(round_)
            if not decisions:
                self._refused(round_)
                return
            self._settle_in(round_, decisions)
        self._route(round_)
        home = session.home
        assert home is not None  # noqa: S101 - bound above
        home.submit(round_)

    def _finished(self, round_: SimRound, gaps_s: tuple[float, float]) -> None:
        """A round has settled: count it, go on after the tool, or close the session."""
        now_s, session, totals = self.kernel.now_s, round_.session, self.totals
        local = round_.prefilled_by is None
        totals.rounds += 1
        totals.local_rounds += local
        totals.rerouted_rounds += round_.rerouted
        self._remember_holder(round_)
        if self.settings.decision_log:
            self._log_decision(round_)
        if self._counts(round_):
            self._count(round_, now_s, gaps_s, local=local)
        session.next_round += 1
        rounds = session.plan.rounds
        if session.next_round < len(rounds):
            plan = rounds[session.next_round]
            self._come_back(session, max(now_s + plan.think_s, plan.earliest_s))
        else:
            self._close(session)

    def _refused(self, round_: SimRound) -> None:
        """No KV memory holds the round: the session ends."""
        self.totals.refused_sessions += 1
        self._close(round_.session)

    def _close(self, session: SimSession) -> None:
        self._open -= 1
        if session.home is not None:
            session.home.close(session.plan.session_id)
        if session.timings:
            self._counted.append(session)

    # --- the coordinator ---------------------------------------------------------------------

    def _bind(self, round_: SimRound) -> list[BindDecision]:
        """The homes that could take the session, best first; none: it fits nowhere."""
        now_s = self.kernel.now_s
        views = [worker.view(now_s) for worker in self.decode]
        try:
            decisions = binding.bind(
                self._recent.shown_in(views, now_s),
                prompt_tokens=round_.prompt_tokens,
                max_tokens=round_.max_tokens,
                footprint=binding.resident_footprint(views),
            )
        except AmpdError:
            return []
        best = decisions[0]
        self._recent.add(Placement(best.worker_id, now_s, reserved_tokens=best.footprint_tokens))
        return decisions

    def _settle_in(self, round_: SimRound, decisions: list[BindDecision]) -> None:
        """The first home that has room at once, else the best, to wait there."""
        chosen = decisions[0]
        for decision in decisions:
            home = self._homes[decision.worker_id]
            if home.has_room(home.demand(round_)):
                chosen = decision
                break
        round_.session.home = self._homes[chosen.worker_id]
        round_.footprint_tokens = chosen.footprint_tokens

    def _route(self, round_: SimRound) -> None:
        now_s, session = self.kernel.now_s, round_.session
        home = session.home
        assert home is not None  # noqa: S101 - bound before it is routed
        views = [home.view(now_s)]
        views += [worker.view(now_s) for worker in self.prefill]
        shown: tuple[WorkerView, ...] = self._recent.shown_in(views, now_s)
        if self._round_robin:
            self._turn += 1
            tie_seed = self._turn - 1
        else:
            tie_seed = self._rng.getrandbits(32)
        decision = route(
            RouteTask(round_.keep_tokens, round_.plan.increment_tokens, self._slo, session.holders),
            home=shown[0],
            prefill_workers=shown[1:],
            policy=self._policy,
            tie_seed=tie_seed,
        )
        chosen = decision.prefill_worker or home.info.worker_id
        compute_s = next((c.compute_s for c in decision.candidates if c.worker_id == chosen), 0.0)
        self._recent.add(Placement(chosen, now_s, prefill_s=compute_s))
        round_.decision = decision
        if decision.prefill_worker is not None:
            names = (decision.prefill_worker, *decision.fallbacks)
            round_.targets = tuple(
                self._by_id[name] for name in names[: self.settings.max_prefill_attempts]
            )

    def _remember_holder(self, round_: SimRound) -> None:
        """As `ampd.core.lifecycle.settle` does: who computed how much of the history."""
        session, by = round_.session, round_.prefilled_by
        keep = round_.keep_tokens
        holders: dict[str, int] = {}
        if by is not None:
            holders[by.info.worker_id] = round_.prompt_tokens
        for name, tokens in session.holders.items():
            if name not in holders and len(holders) < MAX_PREFIX_HOLDERS:
                holders[name] = min(tokens, keep)
        session.holders = holders

    # --- counting ----------------------------------------------------------------------------

    def _counts(self, round_: SimRound) -> bool:
        steady = self._workload.steady
        since_s = round_.created_s if steady else round_.session.plan.arrival_s
        return self._warm_up_s <= since_s < self._horizon_s

    def _count(
        self, round_: SimRound, now_s: float, gaps_s: tuple[float, float], *, local: bool
    ) -> None:
        gaps = round_.output_tokens - 1
        p95_s, max_s = gaps_s
        round_.session.timings.append(
            RoundTimings(
                round_.queue_s,
                round_.read_s,
                round_.compute_s,
                round_.return_s,
                round_.first_token_s - round_.created_s,
                (now_s - round_.first_token_s) / gaps if gaps else 0.0,
                p95_s,
                max_s,
                now_s - round_.created_s,
            )
        )
        self._counted_local += local

    def _log_decision(self, round_: SimRound) -> None:
        decision, home, by = round_.decision, round_.session.home, round_.prefilled_by
        assert decision is not None  # noqa: S101 - it was routed
        assert home is not None  # noqa: S101 - and bound
        here = home.info.worker_id
        self._log.append(
            LoggedDecision(
                session_id=round_.session.plan.session_id,
                round_index=round_.index,
                created_s=round_.created_s,
                home=here,
                bound=round_.bound,
                route=decision.route,
                reason=decision.reason,
                ordered=decision.prefill_worker or here,
                prefilled_by=here if by is None else by.info.worker_id,
                history_tokens=round_.history_tokens,
                increment_tokens=round_.new_tokens,
                predicted_ttft_s=decision.predicted_ttft_s,
                ttft_s=round_.first_token_s - round_.created_s,
                state_age_s=decision.state_age_s,
            )
        )

    # --- the end -----------------------------------------------------------------------------

    def check(self) -> None:
        """AssertionError unless every session has ended and every book balances."""
        for worker in self.decode:
            worker.ledger.check()
            if worker.ledger.sessions or not worker.idle:
                raise AssertionError(f"{worker.info.worker_id} is not empty at the end")
        if self._open or not all(worker.idle for worker in self.prefill):
            raise AssertionError(f"{self._open} sessions have not ended")

    def report(self) -> SimReport:
        """What it came to."""
        totals, kv_bytes = self.totals, self.settings.kv_bytes_per_token
        timings = [t for session in self._counted for t in session.timings]
        counted_s = max(0.0, self._horizon_s - self._warm_up_s)
        return SimReport(
            workload=self._workload.name,
            policy=self._policy,
            slo=self._slo,
            rate=self._rate,
            horizon_s=self._horizon_s,
            warm_up_s=self._warm_up_s,
            seed=self._seed,
            prefill_workers=len(self.prefill),
            decode_workers=len(self.decode),
            attainment=attainment((self._slo, session.timings) for session in self._counted),
            ttft=Distribution.of([t.ttft_s for t in timings]),
            itl=Distribution.of([t.itl_mean_s for t in timings if t.itl_mean_s > 0]),
            queue=Distribution.of([t.queue_s for t in timings]),
            read=Distribution.of([t.read_s for t in timings]),
            compute=Distribution.of([t.compute_s for t in timings]),
            returned=Distribution.of([t.return_s for t in timings]),
            kv_ratios=kv_ratios(timings),
            local_share=self._counted_local / len(timings) if timings else 0.0,
            rounds=totals.rounds,
            rerouted_rounds=totals.rerouted_rounds,
            refused_sessions=totals.refused_sessions,
            evictions=totals.evictions,
            rebuilt_rounds=totals.rebuilt_rounds,
            rebuilt_tokens=totals.rebuilt_tokens,
            history_moved_tokens=totals.history_moved_tokens,
            history_moved_bytes=totals.history_moved_tokens * kv_bytes,
            increment_moved_tokens=totals.increment_moved_tokens,
            increment_moved_bytes=totals.increment_moved_tokens * kv_bytes,
            prefill_utilisation=_share(self.prefill, counted_s),
            decode_utilisation=_share(self.decode, counted_s),
            end_s=self.kernel.now_s,
            decisions=tuple(self._log),
        )


def _share(
    workers: tuple[SimPrefillWorker, ...] | tuple[SimDecodeWorker, ...], counted_s: float
) -> float:
    """The part of the counted time that they are busy, their mean."""
    if not workers or counted_s <= 0:
        return 0.0
    return sum(worker.busy_s for worker in workers) / (len(workers) * counted_s)
