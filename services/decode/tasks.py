"""The home's prefill tasks: offered, claimed, completed, or void; the home alone decides.

A task is in the table from its offer until its KV was taken or it became void, so a claim or
a completion that finds none is `gone`, and nothing is computed or handed over twice. One that is
bound late waits in `services.decode.late_tasks` meanwhile, and belongs to whoever claims it first.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    KvHandle,
    PrefillTarget,
    PrefillTask,
    Rerouted,
    RoundOrder,
    Route,
    RouteReason,
)
from ampd.ports import ClaimedTask, Engine, Peers, PrefillReport, Tokens
from services.decode.late_tasks import BOUND_LATE, LateTasks
from services.decode.settings import HomeLimits

log = structlog.get_logger(__name__)

WITHDRAW_ATTEMPTS: Final = 30
WITHDRAW_RETRY_S: Final = 0.5
"""A call that was lost is no dead worker: what a void task took is free in seconds all the same."""
LATE_ATTEMPTS: Final = 2
"""How often a task bound late waits: a claimer that fails gives it back once."""


@dataclass(slots=True, eq=False)
class OfferedTask:
    """One task while a prefill worker has it or may take it; `done` gets its report or what went
    wrong."""

    task: PrefillTask
    target: PrefillTarget | None
    """Whose it is; None: it waits for whoever claims it first."""
    prompt: Tokens
    history: KvHandle | None
    done: asyncio.Future[PrefillReport]
    claimed: asyncio.Event
    lent: KvHandle | None = None


@dataclass(frozen=True, slots=True)
class ComputedPrefill:
    """A prefill worker's result, which waits there for the home to take it."""

    target: PrefillTarget
    task_id: str
    report: PrefillReport


class PrefillTasks:
    """All prefill tasks that this home has out, and their hand-over."""

    def __init__(
        self,
        *,
        worker_id: str,
        engine: Engine,
        peers: Peers,
        late: LateTasks,
        limits: HomeLimits,
        chores: asyncio.TaskGroup,
    ) -> None:
        self.late = late
        self._worker_id = worker_id
        self._engine = engine
        self._peers = peers
        self._limits = limits
        self._chores = chores
        self._offered: dict[str, OfferedTask] = {}
        self.closing = False
        """Set before the process ends: it does not wait for workers that cannot be told."""

    @property
    def claimed_tasks(self) -> int:
        """Tasks that prefill workers have claimed and not completed."""
        return sum(offered.claimed.is_set() for offered in self._offered.values())

    async def prefill(
        self,
        order: RoundOrder,
        prompt: Tokens,
        history: KvHandle | None,
        *,
        grace_s: float,
        begin_here: Callable[[], None],
    ) -> AsyncGenerator[Rerouted | ComputedPrefill, None]:
        """Try the order's targets in turn, or let the task wait for whoever claims it first: a
        result ends it, `Rerouted` to the home too.

        `prompt`: all there is to compute, the output so far of a resumed round included.
        `grace_s`: by how much the session's mean TTFT is within its SLO. `begin_here` is called
        in the step in which the home takes a task that waited.

        Yields nothing for a local order, or when the home takes what was not promised to anyone.
        Closing it early voids the task on both sides.
        """
        if order.reason in BOUND_LATE:
            late = self._prefill_late(order, prompt, history, grace_s, begin_here)
            async with aclosing(late) as places:
                async for place in places:
                    yield place
            return
        for attempt, target in enumerate(order.targets):
            if attempt:
                yield Rerouted(Route.REMOTE, RouteReason.REROUTED, target.worker_id)
            try:
                yield await self._prefill_at(target, order, prompt, history)
                return
            except AmpdError as error:
                self._log_failure(order, target, error)
        if order.targets:
            yield Rerouted(Route.LOCAL, RouteReason.FALLBACK_LOCAL, None)

    async def _prefill_at(
        self, target: PrefillTarget, order: RoundOrder, prompt: Tokens, history: KvHandle | None
    ) -> ComputedPrefill:
        """Offer, and wait until the worker has computed it, failed, or is lost."""
        offered = self._new(order, prompt, history, target)
        with self._out(offered):
            await self._peers.prefill(target).offer(offered.task)
            report = await self._outcome(offered, target)
        return ComputedPrefill(target, offered.task.task_id, report)

    async def _prefill_late(
        self,
        order: RoundOrder,
        prompt: Tokens,
        history: KvHandle | None,
        grace_s: float,
        begin_here: Callable[[], None],
    ) -> AsyncGenerator[Rerouted | ComputedPrefill, None]:
        """Let the task wait until somebody takes it, and again if that one fails."""
        told = order.targets[0] if order.targets else None
        placed = told.worker_id if told is not None else None
        reason = RouteReason.FALLBACK_LOCAL
        for _ in range(LATE_ATTEMPTS):
            offered = self._new(order, prompt, history, None)
            try:
                with self._out(offered):
                    if await self._waits(offered, told, grace_s, begin_here):
                        reason = RouteReason.LATE_BINDING
                        break
                    target = offered.target
                    if target is None:
                        break  # nobody has come
                    if target.worker_id != placed:
                        placed = target.worker_id
                        yield Rerouted(Route.REMOTE, RouteReason.PULLED, placed)
                    report = await self._outcome(offered, target)
            except AmpdError as error:
                self._log_failure(order, offered.target, error)
                told = None
                continue
            yield ComputedPrefill(target, offered.task.task_id, report)
            return
        if placed is not None or reason is RouteReason.FALLBACK_LOCAL:
            yield Rerouted(Route.LOCAL, reason, None)

    async def _waits(
        self,
        offered: OfferedTask,
        told: PrefillTarget | None,
        grace_s: float,
        begin_here: Callable[[], None],
    ) -> bool:
        """Until somebody has taken the task, or for as long as an offered one may wait; whether
        the home has. `told`: a worker that is to hear of it at once."""
        task_id = offered.task.task_id
        late = self.late.add(
            offered.task, grace_s=grace_s, begin_here=begin_here, told=told is not None
        )
        if late is None:
            return False
        try:
            if told is not None:
                self._chores.create_task(self._tell(told, offered.task), name="tell")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.claim_timeout_s):
                    await late.taken.wait()
            return late.here
        finally:
            self.late.remove(task_id)

    async def _tell(self, target: PrefillTarget, task: PrefillTask) -> None:
        """Let a worker know of a task that waits, for it to claim if it has nothing else to do."""
        try:
            await self._peers.prefill(target).offer(replace(task, waits_at_home=True))
        except AmpdError as error:
            log.debug("not_taken_at_once", task=task.task_id, reason=error.reason)
            self.late.show(task.task_id)

    def _new(
        self,
        order: RoundOrder,
        prompt: Tokens,
        history: KvHandle | None,
        target: PrefillTarget | None,
    ) -> OfferedTask:
        if not order.keep_history_tokens:
            history = None  # a rewind to the beginning: nothing of what is pinned is wanted
        cached_tokens = order.keep_history_tokens if history is not None else 0
        task = PrefillTask(
            # Unlike any of an earlier life of this worker, and short enough for the wire.
            task_id=f"{order.session_id[:32]}/{order.round_index}/{uuid.uuid4().hex[:16]}",
            session_id=order.session_id,
            round_index=order.round_index,
            home=self._worker_id,
            history_tokens=cached_tokens,
            increment_tokens=len(prompt) - cached_tokens,
            created_s=order.created_s,
            slo=order.slo,
        )
        return OfferedTask(
            task=task,
            target=target,
            prompt=prompt,
            history=history,
            done=asyncio.get_running_loop().create_future(),
            claimed=asyncio.Event(),
        )

    @contextmanager
    def _out(self, offered: OfferedTask) -> Generator[None, None, None]:
        """The task can be claimed and completed inside; it is void after any other end."""
        task_id = offered.task.task_id
        self._offered[task_id] = offered
        try:
            yield
        except BaseException:
            # Refused, lost, too late or cancelled: whatever the worker has of it is void.
            if offered.target is not None:
                self.void(offered.target, task_id)
            raise
        finally:
            del self._offered[task_id]
            if offered.done.done() and not offered.done.cancelled():
                # A task may fail before the answer to its offer is lost: nobody reads why.
                offered.done.exception()
            # Of a claim that was broken off nobody knows whether it lent.
            if offered.history is not None and offered.claimed.is_set():
                self._chores.create_task(self._engine.reclaim(offered.history), name="reclaim")

    async def _outcome(self, offered: OfferedTask, target: PrefillTarget) -> PrefillReport:
        limits = self._limits
        watch = asyncio.ensure_future(self._peers.prefill(target).lost())
        claim = asyncio.ensure_future(offered.claimed.wait())
        try:
            await _first(limits.claim_timeout_s, offered.done, watch, claim)
            if claim.done() and not offered.done.done() and not watch.done():
                await _first(limits.prefill_timeout_s, offered.done, watch)
            if offered.done.done():
                return offered.done.result()
            silent = "is gone" if watch.done() else "did not answer in time"
            raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, f"{target.worker_id} {silent}")
        finally:
            for future in (watch, claim, offered.done):
                future.cancel()
            with suppress(asyncio.CancelledError, AmpdError):
                await asyncio.gather(watch, claim, return_exceptions=True)

    def _log_failure(
        self, order: RoundOrder, target: PrefillTarget | None, error: AmpdError
    ) -> None:
        log.warning(
            "prefill_worker_failed",
            session=order.session_id,
            round=order.round_index,
            prefill_worker=None if target is None else target.worker_id,
            reason=error.reason,
            error=error.message,
        )

    def void(self, target: PrefillTarget, task_id: str) -> None:
        """The worker may free all it has of the task, its result included. Does not wait."""
        self._chores.create_task(self._withdraw(target, task_id), name="withdraw")

    async def _withdraw(self, target: PrefillTarget, task_id: str) -> None:
        for attempt in range(1, WITHDRAW_ATTEMPTS + 1):
            try:
                await self._peers.prefill(target).withdraw(task_id)
                return
            except AmpdError as error:
                # A worker that cannot be told is dead, or drops the task when its claim is gone
                # and its result when the lease on it ends.
                log.info("withdraw_failed", task=task_id, reason=error.reason)
                over = error.reason is ErrorReason.STALE_INCARNATION or self.closing
                if over or attempt == WITHDRAW_ATTEMPTS:
                    return
            await asyncio.sleep(WITHDRAW_RETRY_S)

    # --- what prefill workers call -----------------------------------------------------------

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        """The worker takes the task, from its queue or from those that wait for anyone: only now
        it gets tokens and history. `claimer`: where it is to be found.

        Raises TASK_GONE when the task is void, another's, or claimed already.
        """
        waiting = self._offered.get(task_id)
        if (
            waiting is not None
            and waiting.target is None
            and claimer is not None
            and claimer.worker_id == worker_id
            and self.late.claim(task_id)
        ):
            waiting.target = claimer
        offered = self._owned(task_id, worker_id)
        if offered.claimed.is_set():
            raise _gone(task_id)
        offered.claimed.set()
        if offered.history is not None:
            tokens = min(offered.task.history_tokens, offered.history.tokens)
            try:
                offered.lent = await self._engine.lend(offered.history, tokens)
            except AmpdError as error:
                # The pin is gone (its lease ended): the worker computes the history too.
                log.warning("history_not_lent", task=task_id, reason=error.reason)
            except asyncio.CancelledError:
                # The worker gave up waiting: it will not come back for the task.
                self._fail(offered, "its claim was broken off")
                raise
        if self._offered.get(task_id) is not offered:
            if offered.lent is not None:
                await self._engine.reclaim(offered.lent)
            raise _gone(task_id)
        return ClaimedTask(tokens=offered.prompt, history=offered.lent)

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        """The worker hands its result over. Raises TASK_GONE: nobody waits for it."""
        offered = self._owned(task_id, worker_id)
        if not offered.claimed.is_set() or offered.done.done():
            raise _gone(task_id)
        offered.done.set_result(report)

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        """The worker could not compute it: the round goes elsewhere. Unknown tasks are ignored."""
        offered = self._offered.get(task_id)
        if offered is not None and _is_of(offered, worker_id):
            self._fail(offered, error_message)

    def _fail(self, offered: OfferedTask, error_message: str) -> None:
        if not offered.done.done():
            offered.done.set_exception(AmpdError(ErrorReason.ENGINE_FAILED, error_message))

    def _owned(self, task_id: str, worker_id: str) -> OfferedTask:
        offered = self._offered.get(task_id)
        if offered is None or not _is_of(offered, worker_id):
            raise _gone(task_id)
        return offered


def _is_of(offered: OfferedTask, worker_id: str) -> bool:
    return offered.target is not None and offered.target.worker_id == worker_id


def _gone(task_id: str) -> AmpdError:
    return AmpdError(ErrorReason.TASK_GONE, f"task {task_id} is not to be had")


async def _first(timeout_s: float, *futures: Awaitable[object]) -> None:
    """Until one of them is done, or the time is over; none is cancelled."""
    await asyncio.wait(
        [asyncio.ensure_future(future) for future in futures],
        timeout=timeout_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
