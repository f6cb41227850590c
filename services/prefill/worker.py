"""The prefill worker: a bounded queue of offered tasks, taken one ahead of the computation.

The life of a task here: offered (metadata alone) -> taken -> claimed at its home -> history
read, overlapping the computation of the task before -> computed -> completed at its home.
Nothing of it moves before it is taken; withdrawn at any stage, it frees what it took.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import DrainStatus, KvHandle, PolicySpec, PrefillTask, WorkerLoad
from ampd.core.policies import is_literal, number, queue_order
from ampd.core.prefill_queue import PrefillQueue
from ampd.core.window import MeanWindow
from ampd.ports import Clock, Engine, Peers, PrefillReport, PrefillRequest

log = structlog.get_logger(__name__)

TASKS_IN_ENGINE: Final = 2
"""The one that computes and the one whose history is read meanwhile."""


@dataclass(slots=True, eq=False)
class TakenTask:
    """A task out of the queue, until its home has the result."""

    task: PrefillTask
    home_address: str
    home_incarnation: int
    taken_s: float
    compute_s: float
    """Predicted."""
    carrier: asyncio.Task[None] | None = None
    in_engine: bool = True
    """Whether it still holds one of the engine's places."""


@dataclass(frozen=True, slots=True)
class DeliveredResult:
    """A result that its home may still read, or withdraw."""

    kv: KvHandle
    until_s: float


class PrefillWorker:
    """The prefill worker's use case, behind `ampd.ports.PrefillHandler`."""

    def __init__(
        self,
        *,
        worker_id: str,
        engine: Engine,
        peers: Peers,
        cost: CostModel,
        policy: PolicySpec,
        max_queued_tasks: int,
        clock: Clock,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._peers = peers
        self._cost = cost
        self._clock = clock
        self._ttft = MeanWindow()
        self._queue = PrefillQueue(max_tasks=max_queued_tasks)
        self.apply_policy(policy)
        self._homes: dict[str, tuple[str, int]] = {}
        self._taken: dict[str, TakenTask] = {}
        self._delivered: dict[str, DeliveredResult] = {}
        self._wake = asyncio.Event()
        self._free = asyncio.Semaphore(TASKS_IN_ENGINE)
        self.draining = False

    def apply_policy(self, policy: PolicySpec) -> None:
        """The policy in force from now on: it orders the queue and sets the window."""
        self._queue.order = queue_order(policy)
        self._ttft.window_s = number(policy, "window_s")
        self._counts_open = not is_literal(policy)

    # --- what homes call ---------------------------------------------------------------------

    async def offer(self, task: PrefillTask, home_address: str, home_incarnation: int) -> None:
        """Queue the task. Raises QUEUE_FULL with a retry hint, DRAINING. Idempotent."""
        if self.draining:
            raise AmpdError(ErrorReason.DRAINING, f"{self._worker_id} is draining")
        if task.task_id in self._homes or task.task_id in self._taken:
            return
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
        delivered = self._delivered.pop(task_id, None)
        if delivered is not None:
            await self._engine.release(delivered.kv)

    # --- the pump ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Take tasks from the queue, one ahead of the computation, until cancelled."""
        async with asyncio.TaskGroup() as carriers:
            while True:
                await self._free.acquire()
                taken = await self._take()
                self._taken[taken.task.task_id] = taken
                taken.carrier = carriers.create_task(self._carry_out(taken))
                taken.carrier.add_done_callback(partial(self._end, taken))

    async def _take(self) -> TakenTask:
        while True:
            now_s = self._clock()
            queued = self._queue.take(now_s, busy_s=self._busy_s(now_s))
            if queued is not None:
                address, incarnation = self._homes.pop(queued.task.task_id)
                return TakenTask(queued.task, address, incarnation, now_s, queued.compute_s)
            self._wake.clear()
            await self._wake.wait()

    async def _carry_out(self, taken: TakenTask) -> None:
        """Claim, read, compute, complete. A withdrawal cancels it, which frees what it took."""
        task_id = taken.task.task_id
        home = self._peers.decode(taken.home_address, taken.home_incarnation)
        try:
            try:
                claimed = await home.claim(task_id, self._worker_id)
                result = await self._engine.prefill(
                    PrefillRequest(task_id, claimed.tokens, claimed.history)
                )
            finally:
                self._leave_engine(taken)
            try:
                report = PrefillReport(
                    result.kv, result.stats, queue_s=taken.taken_s - taken.task.created_s
                )
                await home.complete(task_id, self._worker_id, report)
            except BaseException:
                await asyncio.shield(self._engine.release(result.kv))
                raise
            now_s = self._clock()
            self._ttft.add(now_s, now_s - taken.task.created_s)
            self._remember(task_id, result.kv, now_s)
        except AmpdError as error:
            await self._report_failure(taken, error)

    def _leave_engine(self, taken: TakenTask) -> None:
        """Make room for the next task, once."""
        if taken.in_engine:
            taken.in_engine = False
            self._free.release()

    def _end(self, taken: TakenTask, _carrier: asyncio.Task[None]) -> None:
        """The carrier is done, or was withdrawn before its first step, which nothing inside it
        would see."""
        self._leave_engine(taken)
        del self._taken[taken.task.task_id]

    async def _report_failure(self, taken: TakenTask, error: AmpdError) -> None:
        """The home goes on without this worker. One that could not be reached may be back."""
        log.warning("task_ended", task=taken.task.task_id, reason=error.reason, error=error.message)
        if error.reason is ErrorReason.TASK_GONE:
            return
        home = self._peers.decode(taken.home_address, taken.home_incarnation)
        try:
            await home.fail(taken.task.task_id, self._worker_id, str(error))
        except AmpdError as failure:
            log.warning("fail_not_told", task=taken.task.task_id, reason=failure.reason)

    def _remember(self, task_id: str, kv: KvHandle, now_s: float) -> None:
        """Keep the result's handle for a withdrawal, as long as the engine keeps the KV."""
        self._delivered = {
            name: result for name, result in self._delivered.items() if result.until_s > now_s
        }
        self._delivered[task_id] = DeliveredResult(kv, now_s + kv.lease_s)

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
        open_s += [now_s - taken.task.created_s for taken in self._taken.values()]
        return WorkerLoad(
            draining=self.draining,
            queued_tasks=len(self._queue) + len(self._taken),
            queued_prefill_s=self._queue.total_s + self._busy_s(now_s),
            oldest_wait_s=max(open_s, default=0.0),
            ttft_window_s=self._ttft.statistic(now_s, open_s if self._counts_open else ()),
        )

    def _busy_s(self, now_s: float) -> float:
        """Predicted rest of what is in the engine (s)."""
        return sum(
            max(0.0, taken.compute_s - (now_s - taken.taken_s)) for taken in self._taken.values()
        )
