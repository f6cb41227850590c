"""A prefill worker: the live one's queue, one task read while the one before it computes.

The same as `services.prefill.worker` with an engine that computes one prefill at a time: a
task leaves the queue when one of the engine's two places is free, reads what the worker's
prefix cache lacks of its history, computes, and goes home.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ampd.core.late_binding import (
    AHEAD_S,
    CLAIM_S,
    StarvedShare,
    Task,
    TaskMirror,
    pull,
    speed_of,
)
from ampd.core.local_prefill import calibrate
from ampd.core.model import PolicySpec, PrefillTask, Slo, WorkerInfo, WorkerLoad
from ampd.core.policies import AMPD, is_literal, number, queue_order
from ampd.core.prefill_queue import PrefillQueue
from ampd.core.prefix_cache import PrefixCache
from ampd.core.window import MeanWindow
from ampd.sim.kernel import Kernel
from ampd.sim.links import LinkEnd, transfer_end_s
from ampd.sim.noise import Noise
from ampd.sim.published import PublishedLoad
from ampd.sim.report import Totals
from ampd.sim.rounds import SimRound
from ampd.sim.settings import SimSettings, WorkerSpec

if TYPE_CHECKING:
    from ampd.sim.decode_worker import SimDecodeWorker

TASKS_IN_ENGINE: Final = 2
"""The one that computes and the one whose history is read meanwhile."""


class SimPrefillWorker(PublishedLoad):
    """See the module."""

    def __init__(
        self,
        info: WorkerInfo,
        spec: WorkerSpec,
        settings: SimSettings,
        policy: PolicySpec,
        slo: Slo,
        *,
        kernel: Kernel,
        totals: Totals,
        phase_s: float,
    ) -> None:
        super().__init__(info, heartbeat_s=settings.heartbeat_s, phase_s=phase_s)
        self.link = LinkEnd()
        self.busy_s = 0.0
        """Seconds of computing, within the counted time."""
        self._cost = spec.cost
        self._actual = spec.cost.scaled(spec.slowdown)
        self._noise = Noise(settings.noise, f"{info.worker_id} {phase_s}")
        self._settings = settings
        self._slo = slo
        self._kernel = kernel
        self._totals = totals
        self._counts_open = not is_literal(policy)
        self._ttft = MeanWindow(number(policy, "window_s"))
        self._queue = PrefillQueue(max_tasks=settings.max_queued_tasks, order=queue_order(policy))
        self._rounds: dict[str, SimRound] = {}
        self._timeouts: deque[tuple[float, str]] = deque()
        self._cache = PrefixCache(spec.kv_capacity_tokens)
        self._in_engine: list[SimRound] = []
        self._ready: list[SimRound] = []
        self._computing = False
        self._computed_s = 0.0
        """When the present computation is expected to end."""
        self._calibration = 1.0
        self._turn = 0
        self._binds_late = policy.name == AMPD
        self._starved = StarvedShare()
        self.mirror = TaskMirror(spec.cost)
        self.homes: dict[str, SimDecodeWorker] = {}
        """Under late binding it takes what waits there; by worker id."""
        self.others: tuple[SimPrefillWorker, ...] = ()
        """All prefill workers, itself included."""

    @property
    def idle(self) -> bool:
        """Whether it holds no task."""
        return not (self._rounds or self._in_engine)

    def offer(self, round_: SimRound) -> bool:
        """Queue a task; False: the queue is full."""
        if not self._queue.can_add():
            return False
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        session = round_.session
        round_.task_id = f"{session.plan.session_id}/{round_.index}/{round_.attempt}"
        assert session.home is not None  # noqa: S101 - a round has a home
        task = PrefillTask(
            round_.task_id,
            session.plan.session_id,
            round_.index,
            session.home.info.worker_id,
            round_.history_tokens,
            round_.new_tokens,
            round_.created_s,
            self._slo,
        )
        self._queue.add(
            task,
            now_s=now_s,
            compute_s=self._cost.t_pre(round_.history_tokens, round_.new_tokens),
            read_s=self._cost.t_kv(round_.history_tokens),
        )
        self._rounds[task.task_id] = round_
        self._fill_engine(now_s)
        if task.task_id in self._rounds:
            timeout_s = now_s + self._settings.claim_timeout_s
            self._timeouts.append((timeout_s, task.task_id))
            if len(self._timeouts) == 1:
                self._kernel.at(timeout_s, self._expire, None)
        return True

    def hint(self, home: SimDecodeWorker, round_: SimRound) -> bool:
        """A task waits at its home: take it if there is nothing else to do."""
        if self._in_engine:
            return False
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        return self._claim(home, round_.task_id, now_s)

    def look(self, _: None = None) -> None:
        """Late binding: take what waits at the homes, if the computation is over or nearly so."""
        now_s = self._kernel.now_s
        if len(self._in_engine) >= (TASKS_IN_ENGINE if self._computing else 1):
            return
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        views = [home.view(now_s) for home in self.homes.values()]
        tasks = self.mirror.tasks(views, now_s)
        if not tasks:
            return
        tasks = list(tasks)
        rest_s = max(0.0, self._computed_s - now_s) if self._computing else 0.0
        others = (other.view(now_s) for other in self.others)
        speed = speed_of(others, self._cost, self._calibration)

        def work_s(task: Task) -> float:
            # The present computation hides the read.
            return self._calibration * task.compute_s + max(0.0, self._read_s(task) - rest_s)

        while tasks:
            decision = pull(tasks, work_s, now_s=now_s + rest_s, speed=speed, starved=self._starved)
            if decision is None:
                return
            chosen = decision.task
            ahead_s = CLAIM_S + self._read_s(chosen)
            if rest_s > ahead_s:
                self._look_at(self._computed_s - ahead_s)
                return
            if self._claim(self.homes[chosen.home], chosen.task_id, now_s):
                self._starved.add(decision)
                return
            tasks.remove(chosen)

    def _look_at(self, at_s: float) -> None:
        """Look once then; an instant that has come to be too late anyway counts for nothing."""
        if at_s > self._kernel.now_s:
            self._kernel.at(at_s, self.look, None)

    def _claim(self, home: SimDecodeWorker, task_id: str, now_s: float) -> bool:
        round_ = home.claim(task_id)
        if round_ is None:
            return False
        compute_s = self._cost.t_pre(round_.history_tokens, round_.new_tokens)
        self._take(round_, self._calibration * compute_s, now_s)
        return True

    def _read_s(self, task: Task) -> float:
        cached_tokens = self._cache.tokens(task.session_id)
        return self._cost.t_kv(max(0, task.history_tokens - cached_tokens))

    def load(self, at_s: float) -> WorkerLoad:
        """What routing needs to know, as the live worker publishes it."""
        open_s = self._queue.ages_s(at_s)
        open_s += [at_s - round_.created_s for round_ in self._in_engine]
        return WorkerLoad(
            queued_tasks=len(open_s),
            queued_prefill_s=self._calibration * self._queue.total_s + self._rest_s(at_s),
            oldest_wait_s=max(open_s, default=0.0),
            ttft_window_s=self._ttft.statistic(at_s, open_s if self._counts_open else ()),
            calibration=self._calibration,
        )

    def _rest_s(self, at_s: float) -> float:
        """Predicted rest of what is in the engine (s)."""
        return sum(
            max(0.0, round_.predicted_s - (at_s - round_.taken_s)) for round_ in self._in_engine
        )

    def _fill_engine(self, now_s: float) -> None:
        while len(self._in_engine) < TASKS_IN_ENGINE:
            queued = self._queue.take(now_s, busy_s=self._rest_s(now_s))
            if queued is None:
                return
            round_ = self._rounds.pop(queued.task.task_id)
            self._take(round_, self._calibration * queued.compute_s, now_s)

    def _take(self, round_: SimRound, predicted_s: float, now_s: float) -> None:
        """Out of the queue: read what is missing here of the history."""
        round_.predicted_s, round_.taken_s = predicted_s, now_s
        round_.queue_s = now_s - round_.created_s
        self._turn += 1
        round_.turn = self._turn
        self._in_engine.append(round_)
        session, home = round_.session, round_.session.home
        assert home is not None  # noqa: S101 - a round has a home
        cached = self._cache.use(session.plan.session_id, round_.keep_tokens)
        round_.have_tokens = max(cached, round_.history_tokens)
        read_tokens = max(0, round_.history_tokens - cached)
        if not read_tokens:
            self._has_history(round_)
            return
        self._totals.history_moved_tokens += read_tokens
        end_s = transfer_end_s(
            now_s,
            read_tokens,
            source=home.link,
            target=self.link,
            cost=self._actual,
            contention=self._settings.link_contention,
        )
        self._kernel.at(end_s, self._read, round_)

    def _read(self, round_: SimRound) -> None:
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        round_.read_s = now_s - round_.taken_s
        self._has_history(round_)

    def _has_history(self, round_: SimRound) -> None:
        self._ready.append(round_)
        if not self._computing:
            self._compute(self._kernel.now_s)

    def _compute(self, now_s: float) -> None:
        """Begin with what was taken first, of what is ready."""
        ready = self._ready
        round_ = ready[0] if len(ready) == 1 else min(ready, key=_turn)
        ready.remove(round_)
        self._computing = True
        have = round_.have_tokens
        tokens = round_.history_tokens + round_.new_tokens - have
        seconds = self._actual.t_pre(have, tokens) * self._noise.factor()
        round_.compute_s = seconds
        round_.expected_s = self._cost.t_pre(have, tokens)
        self._computed_s = now_s + self._calibration * round_.expected_s
        if self._binds_late:
            self._look_at(self._computed_s - AHEAD_S)
        self.busy_s += self._totals.counted_s(now_s, now_s + seconds)
        self._kernel.at(now_s + seconds, self._computed, round_)

    def _computed(self, round_: SimRound) -> None:
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._computing = False
        self._calibration = calibrate(self._calibration, round_.expected_s, round_.compute_s)
        self._in_engine.remove(round_)
        self._ttft.add(now_s, now_s - round_.created_s)
        session, home = round_.session, round_.session.home
        assert home is not None  # noqa: S101 - a round has a home
        self._cache.put(session.plan.session_id, round_.history_tokens + round_.new_tokens)
        self._totals.increment_moved_tokens += round_.new_tokens
        end_s = transfer_end_s(
            now_s,
            round_.new_tokens,
            source=self.link,
            target=home.link,
            cost=self._actual,
            contention=self._settings.link_contention,
        )
        round_.return_s = end_s - now_s
        round_.prefilled_by = self
        arrive: Callable[[SimRound], None] = home.arrived
        self._kernel.at(end_s, arrive, round_)
        if self._ready:
            self._compute(now_s)
        if self._binds_late:
            self.look()
        else:
            self._fill_engine(now_s)

    def _expire(self, _: None) -> None:
        """Give back what has waited too long; look again when the next one will have."""
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        expired = []
        timeouts, rounds = self._timeouts, self._rounds
        while timeouts and (timeouts[0][0] <= now_s or timeouts[0][1] not in rounds):
            task_id = timeouts.popleft()[1]
            waiting = rounds.pop(task_id, None)
            if waiting is not None:
                self._queue.remove(task_id)
                expired.append(waiting)
        if timeouts:
            self._kernel.at(timeouts[0][0], self._expire, None)
        for round_ in expired:
            assert round_.session.home is not None  # noqa: S101 - a round has a home
            round_.session.home.prefill_elsewhere(round_)


def _turn(round_: SimRound) -> int:
    return round_.turn
