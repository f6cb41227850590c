"""The prefill worker: a bounded queue of offered tasks, taken one ahead of the computation, and
tasks that wait at their homes for whoever can begin them (late binding).

The life of a task here: offered or seen (metadata alone) -> taken -> claimed at its home -> history
read, overlapping the computation of the task before -> computed -> completed at its home.
Nothing of it moves before it is taken; withdrawn at any stage, it frees what it took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

import structlog

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.late_binding import PullDecision
from ampd.core.local_prefill import calibrate
from ampd.core.model import (
    DrainStatus,
    PolicySpec,
    PrefillStats,
    PrefillTarget,
    PrefillTask,
    WorkerLoad,
)
from ampd.core.policies import AMPD, is_literal, number, queue_order
from ampd.core.prefill_queue import MIN_RETRY_AFTER_S, PrefillQueue
from ampd.core.prefix_cache import PrefixCache
from ampd.core.window import MeanWindow
from ampd.ports import Clock, Engine, Peers, PrefillReport, PrefillRequest, StateStore
from services.prefill.delivered import DeliveredResults, HomeLife
from services.prefill.late_tasks import LateTasks

log = structlog.get_logger(__name__)

TASKS_IN_ENGINE: Final = 2
"""The one that computes and the one whose history is read meanwhile."""

_UNREACHED: Final = frozenset({ErrorReason.WORKER_UNAVAILABLE, ErrorReason.STALE_INCARNATION})


@dataclass(slots=True, eq=False)
class TakenTask:
    """A task out of the queue, or chosen at its home, until its home has the result."""

    task_id: str
    session_id: str
    created_s: float
    home_address: str
    home_incarnation: int
    taken_s: float
    work_s: float
    """Predicted: what the engine is busy with it."""
    pulled: PullDecision | None = None
    """Why it was chosen; None: it was offered."""
    begun_s: float | None = None
    """When nothing was before it in the engine any more."""
    carrier: asyncio.Task[None] | None = None
    in_engine: bool = True
    """Whether it still holds one of the engine's places."""

    def rest_s(self, now_s: float) -> float:
        """Predicted rest of its work (s)."""
        if not self.in_engine:
            return 0.0
        return max(0.0, self.work_s - (0.0 if self.begun_s is None else now_s - self.begun_s))


class PrefillWorker:
    """The prefill worker's use case, behind `ampd.ports.PrefillHandler`."""

    def __init__(
        self,
        *,
        me: PrefillTarget,
        engine: Engine,
        peers: Peers,
        store: StateStore,
        cost: CostModel,
        policy: PolicySpec,
        max_queued_tasks: int,
        clock: Clock,
    ) -> None:
        """`me`: how homes find this life of the worker."""
        self._me = me
        self._worker_id = me.worker_id
        self._engine = engine
        self._peers = peers
        self._cost = cost
        self._clock = clock
        self._ttft = MeanWindow()
        self._queue = PrefillQueue(max_tasks=max_queued_tasks)
        self._cache = PrefixCache(engine.info.kv_capacity_tokens)
        """What its engine is likely to have of the sessions that it computed for."""
        self._late = LateTasks(
            store=store,
            cost=cost,
            cache=self._cache,
            capacity_tokens=engine.info.kv_capacity_tokens,
            clock=clock,
        )
        self._calibration = 1.0
        self._computed_until_s = -inf
        self._homes: dict[str, tuple[str, int]] = {}
        self._taken: dict[str, TakenTask] = {}
        self._delivered = DeliveredResults(engine=engine, peers=peers, clock=clock)
        self._wake = asyncio.Event()
        self._free = asyncio.Semaphore(TASKS_IN_ENGINE)
        self.draining = False
        self.apply_policy(policy)

    def apply_policy(self, policy: PolicySpec) -> None:
        """The policy in force from now on: it orders the queue, sets the window, and says whether
        tasks wait at their homes."""
        self._queue.order = queue_order(policy)
        self._ttft.window_s = number(policy, "window_s")
        self._counts_open = not is_literal(policy)
        self._late.enabled = policy.name == AMPD
        self._late.look_soon()
        self._wake.set()

    # --- what homes call ---------------------------------------------------------------------

    async def offer(self, task: PrefillTask, home_address: str, home_incarnation: int) -> None:
        """Queue the task; one that waits at home only if there is nothing else to do. Raises
        QUEUE_FULL with a retry hint, DRAINING. Idempotent."""
        if self.draining:
            raise AmpdError(ErrorReason.DRAINING, f"{self._worker_id} is draining")
        if task.task_id in self._homes or task.task_id in self._taken:
            return
        if task.waits_at_home and (any(self._in_engine()) or len(self._queue)):
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"{self._worker_id} has other work",
                retry_after_s=max(MIN_RETRY_AFTER_S, self._busy_s(self._clock())),
            )
        self._queue.add(
            task,
            now_s=self._clock(),
            compute_s=self._cost.t_pre(task.history_tokens, task.increment_tokens),
            read_s=self._cost.t_kv(task.history_tokens),
        )
        self._homes[task.task_id] = (home_address, home_incarnation)
        self._wake.set()

    async def withdraw(self, task_id: str) -> None:
        """The task is void: free all it took, at whatever stage it is. Idempotent."""
        if self._queue.remove(task_id) is not None:
            del self._homes[task_id]
            return
        taken = self._taken.get(task_id)
        if taken is not None and taken.carrier is not None:
            taken.carrier.cancel()
        await self._delivered.withdraw(task_id)

    # --- the pump ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Take tasks, one ahead of the computation, until cancelled."""
        async with asyncio.TaskGroup() as carriers:
            carriers.create_task(self._late.run(self._wake.set), name="late tasks")
            carriers.create_task(self._delivered.run(), name="delivered results")
            while True:
                await self._free.acquire()
                taken = await self._take()
                if not any(self._in_engine()):
                    taken.begun_s = taken.taken_s
                self._taken[taken.task_id] = taken
                taken.carrier = carriers.create_task(self._carry_out(taken))
                taken.carrier.add_done_callback(partial(self._end, taken))

    async def _take(self) -> TakenTask:
        """The next task that was offered; when there is none, one that waits at its home."""
        while True:
            self._wake.clear()
            now_s = self._clock()
            busy_s = self._busy_s(now_s)
            taken = self._offered(now_s, busy_s)
            if taken is None and not self.draining:
                taken = self._late_task(now_s, busy_s)
            if taken is not None:
                return taken
            wait_s = None if self.draining else self._late.wait_s(now_s, busy_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _offered(self, now_s: float, busy_s: float) -> TakenTask | None:
        queued = self._queue.take(now_s, busy_s=busy_s)
        if queued is None:
            return None
        task = queued.task
        address, incarnation = self._homes.pop(task.task_id)
        return TakenTask(
            task.task_id,
            task.session_id,
            task.created_s,
            address,
            incarnation,
            now_s,
            self._calibration * queued.compute_s,
        )

    def _late_task(self, now_s: float, busy_s: float) -> TakenTask | None:
        choice = self._late.choose(
            now_s, rest_s=busy_s, calibration=self._calibration, held=self._taken
        )
        if choice is None:
            return None
        task = choice.decision.task
        return TakenTask(
            task.task_id,
            task.session_id,
            task.created_s,
            choice.home_address,
            choice.home_incarnation,
            now_s,
            self._calibration * task.compute_s,
            pulled=choice.decision,
        )

    async def _carry_out(self, taken: TakenTask) -> None:
        """Claim, read, compute, complete. A withdrawal cancels it, which frees what it took."""
        task_id = taken.task_id
        home = self._peers.decode(taken.home_address, taken.home_incarnation)
        try:
            try:
                claimed = await home.claim(task_id, self._worker_id, self._me)
                if taken.pulled is not None:
                    self._late.claimed(taken.pulled)
                result = await self._engine.prefill(
                    PrefillRequest(task_id, claimed.tokens, claimed.history)
                )
            finally:
                self._leave_engine(taken)
            self._learn(taken, len(claimed.tokens), result.stats)
            try:
                report = PrefillReport(
                    result.kv, result.stats, queue_s=taken.taken_s - taken.created_s
                )
                await home.complete(task_id, self._worker_id, report)
            except BaseException:
                await asyncio.shield(self._engine.release(result.kv))
                raise
            now_s = self._clock()
            self._ttft.add(now_s, now_s - taken.created_s)
            home_life = HomeLife(taken.home_address, taken.home_incarnation)
            self._delivered.add(task_id, result.kv, home_life)
        except AmpdError as error:
            await self._report_failure(taken, error)

    def _learn(self, taken: TakenTask, tokens: int, stats: PrefillStats) -> None:
        """What the engine has of the session now, and how long the computation really took: only
        of one that had the engine for itself."""
        self._cache.put(taken.session_id, tokens)
        alone = stats.compute_start_s >= self._computed_until_s
        self._computed_until_s = max(self._computed_until_s, stats.compute_end_s)
        if alone and stats.computed_tokens and stats.compute_s > 0:
            predicted_s = self._cost.t_pre(tokens - stats.computed_tokens, stats.computed_tokens)
            self._calibration = calibrate(self._calibration, predicted_s, stats.compute_s)

    def _leave_engine(self, taken: TakenTask) -> None:
        """Make room for the next task, once."""
        if not taken.in_engine:
            return
        taken.in_engine = False
        self._free.release()
        following = next(self._in_engine(), None)
        if following is None:
            self._late.look_soon()
            self._wake.set()
        elif following.begun_s is None:
            following.begun_s = self._clock()

    def _end(self, taken: TakenTask, _carrier: asyncio.Task[None]) -> None:
        """The carrier is done, or was withdrawn before its first step, which nothing inside it
        would see."""
        self._leave_engine(taken)
        del self._taken[taken.task_id]

    async def _report_failure(self, taken: TakenTask, error: AmpdError) -> None:
        """The home goes on without this worker. One that could not be reached may be back."""
        if error.reason is ErrorReason.TASK_GONE:
            log.debug("task_gone", task=taken.task_id)
            return
        log.warning("task_ended", task=taken.task_id, reason=error.reason, error=error.message)
        if error.reason in _UNREACHED:
            self._late.shun(taken.home_address, taken.home_incarnation)
        home = self._peers.decode(taken.home_address, taken.home_incarnation)
        try:
            await home.fail(taken.task_id, self._worker_id, str(error))
        except AmpdError as failure:
            log.warning("fail_not_told", task=taken.task_id, reason=failure.reason)

    # --- drain -------------------------------------------------------------------------------

    def start_drain(self) -> None:
        """Offers are refused from now on; what was accepted is finished."""
        self.draining = True

    def drain_status(self) -> DrainStatus:
        """What is still to be done, and how long that may take; results are read at once."""
        load = self.load()
        return DrainStatus(load.queued_tasks, 0, load.queued_prefill_s, elapsed_s=0.0)

    @property
    def busy(self) -> bool:
        """Whether it has accepted tasks that are not finished."""
        return bool(len(self._queue) or self._taken)

    @property
    def lending(self) -> bool:
        """Whether a home has yet to read a result: all that its engine pins."""
        return self._engine.stats().kv_pinned_tokens > 0

    # --- load --------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """What routing needs to know of this worker now."""
        now_s = self._clock()
        open_s = self._queue.ages_s(now_s)
        open_s += [now_s - taken.created_s for taken in self._taken.values()]
        return WorkerLoad(
            draining=self.draining,
            queued_tasks=len(self._queue) + len(self._taken),
            queued_prefill_s=self._calibration * self._queue.total_s + self._busy_s(now_s),
            oldest_wait_s=max(open_s, default=0.0),
            ttft_window_s=self._ttft.statistic(now_s, open_s if self._counts_open else ()),
            calibration=self._calibration,
        )

    def _in_engine(self) -> Iterator[TakenTask]:
        """In the order in which they are computed."""
        return (taken for taken in self._taken.values() if taken.in_engine)

    def _busy_s(self, now_s: float) -> float:
        """Predicted rest of what is in the engine (s)."""
        return sum(taken.rest_s(now_s) for taken in self._in_engine())
