"""Prefill tasks that wait at their home for whoever can begin them (late binding, spec 4).

The home publishes them with its load; a prefill worker claims one, or the home itself begins it
when `ampd.core.late_binding` says that it would be sooner. One list, changed in single steps of
the event loop: the first who asks has the task, and nobody else.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import structlog

from ampd.core.cost_model import CostModel
from ampd.core.late_binding import (
    HOME_BACKLOG_TOKENS,
    MAX_SHOWN_TASKS,
    RemoteOutlook,
    Task,
    TaskMirror,
    can_decode_more,
    remote_outlook,
    take_home,
    task,
)
from ampd.core.model import (
    PrefillTask,
    Role,
    RouteReason,
    Slo,
    WaitingPrefill,
    WorkerLoad,
)
from ampd.ports import Clock, StateStore
from ampd.runtime.known_workers import KnownWorkers

log = structlog.get_logger(__name__)

BOUND_LATE: Final = frozenset({RouteReason.IDLE_PREFILL_WORKER, RouteReason.LATE_BINDING})
"""Orders for these reasons wait for whoever comes first."""
MAX_WAITING_TASKS: Final = 1024
"""Tasks that wait at once; one more is the home's own."""
LOOK_S: Final = 0.05
"""How soon the home looks again at tasks that it did not take, and how long a worker that is told
of one has to claim it before the home may."""
READ_EVERY_S: Final = 0.1
"""How often it asks the store for the workers while something waits."""
BLIND_S: Final = 2.0
"""How long it goes by the workers it knew when the store does not answer: from then on it expects
nothing of them."""


@dataclass(frozen=True, slots=True)
class PrefillState:
    """What the home's next prefill depends on."""

    load: WorkerLoad
    coming_rounds: int
    """Rounds whose prefill is with a prefill worker: they will decode here."""
    backlog_tokens: int
    """Prompt tokens that the home has yet to compute itself."""
    calibration: float
    """Measured over predicted time of its steps."""
    itl_slo_s: float
    """The strictest of the rounds that decode; infinite when there are none."""


@dataclass(slots=True, eq=False)
class LateTask:
    """A task that waits. `taken` is set when somebody has it, `here` if that is the home."""

    task: PrefillTask
    grace_s: float
    begin_here: Callable[[], None]
    promised_until_s: float
    """Until then the home leaves it to the worker that is being told of it."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    here: bool = False

    def shown(self, now_s: float) -> WaitingPrefill:
        """As others see it."""
        task, slo = self.task, self.task.slo
        return WaitingPrefill(
            task.task_id,
            task.session_id,
            task.history_tokens,
            task.increment_tokens,
            now_s - task.created_s,
            slo.ttft_s,
            self.grace_s,
        )


class LateTasks:
    """The home's list. It costs nothing while it is empty."""

    def __init__(
        self,
        *,
        worker_id: str,
        store: StateStore,
        cost: CostModel,
        chores: asyncio.TaskGroup,
        clock: Clock,
    ) -> None:
        self._worker_id = worker_id
        self._cost = cost
        self._chores = chores
        self._clock = clock
        self._known = KnownWorkers(store, clock=clock)
        self._expected_cost = cost
        self._mirror = TaskMirror(cost)
        self._waiting: dict[str, LateTask] = {}
        self._order: list[Task] = []
        """The same by deadline."""
        self._attendant: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[bool] | None = None
        self._changed = asyncio.Event()
        self._shown: frozenset[str] = frozenset()
        self.state: Callable[[], PrefillState] = _no_state
        """The home's; set by it."""
        self.publish: Callable[[], None] = _nothing
        """Called when others should see a change before the next heartbeat."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, task_: PrefillTask, *, grace_s: float, begin_here: Callable[[], None], told: bool
    ) -> LateTask | None:
        """Let the task wait; None when too many do. `begin_here` is called in the step in which
        the home takes it; `told`: a worker is being told of it, the others need not hurry."""
        if len(self._waiting) >= MAX_WAITING_TASKS:
            return None
        now_s = self._clock()
        late = LateTask(task_, grace_s, begin_here, now_s + LOOK_S if told else now_s)
        self._waiting[task_.task_id] = late
        insort(self._order, self._task(late, now_s))
        if self._attendant is None:
            self._attendant = self._chores.create_task(self._attend(), name="late tasks")
        self.look()
        if not told:
            self.publish()
        return late

    def claim(self, task_id: str) -> bool:
        """A prefill worker takes the task; False: it does not wait (any more)."""
        late = self._take(task_id)
        if late is not None:
            late.taken.set()
        return late is not None

    def remove(self, task_id: str) -> bool:
        """The task waits no longer; False: it was taken."""
        return self._take(task_id) is not None

    def show(self, task_id: str) -> None:
        """The worker that was told of it does not come: it is anybody's, the home's too."""
        late = self._waiting.get(task_id)
        if late is not None:
            late.promised_until_s = self._clock()
            self.publish()
            self.look()

    def look(self) -> None:
        """Something has changed that the home's own take depends on."""
        self._changed.set()

    def shown(self, now_s: float) -> tuple[WaitingPrefill, ...]:
        """What the home publishes: nothing while one more stream would cost the others their
        ITL."""
        shown: tuple[WaitingPrefill, ...] = ()
        if self._order and self._can_decode_more(self.state()):
            shown = tuple(
                self._waiting[task_.task_id].shown(now_s)
                for task_ in islice(self._order, MAX_SHOWN_TASKS)
            )
        self._shown = frozenset(waiting.task_id for waiting in shown)
        return shown

    def _take(self, task_id: str) -> LateTask | None:
        late = self._waiting.pop(task_id, None)
        if late is None:
            return None
        self._order = [task_ for task_ in self._order if task_.task_id != task_id]
        if task_id in self._shown:
            self.publish()
        if not self._waiting:
            self.look()
        return late

    # --- the home's own take -----------------------------------------------------------------

    async def _attend(self) -> None:
        """As long as something waits: take what is better prefilled here."""
        if self._clock() - self._known.read_s > READ_EVERY_S:
            await self._read()
        while self._waiting:
            self._changed.clear()
            self._take_home()
            self._read_again()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                if not self._shown:
                    self.publish()  # a lost hint, or there is room for one more stream again
        self._attendant = None

    def _read_again(self) -> None:
        """Ask the store for the workers, beside all else."""
        reading = self._reader is not None and not self._reader.done()
        if not reading and self._clock() - self._known.asked_s > READ_EVERY_S:
            self._reader = self._chores.create_task(self._read(), name="read workers")

    async def _read(self) -> bool:
        answered = await self._known.read()
        self.look()
        return answered

    def _take_home(self) -> None:
        if not self._waiting:
            return
        now_s = self._clock()
        outlook = self._outlook(now_s)
        while self._order:
            state = self.state()
            if state.backlog_tokens >= HOME_BACKLOG_TOKENS or not self._can_decode_more(state):
                return
            decision = take_home(
                [t for t in self._order if self._waiting[t.task_id].promised_until_s <= now_s],
                outlook,
                now_s=now_s,
                cost=self._cost,
                calibration=state.calibration,
                load=state.load,
                itl_slo_s=self._itl_slo(state).itl_s,
            )
            if decision is None:
                return
            late = self._take(decision.task.task_id)
            assert late is not None  # noqa: S101 - it was in the list
            log.debug(
                "taken_at_home",
                task=decision.task.task_id,
                local_s=round(decision.local_s, 6),
                remote_s=round(decision.remote_s, 6),
            )
            late.here = True
            late.begin_here()
            late.taken.set()

    def _can_decode_more(self, state: PrefillState) -> bool:
        return can_decode_more(
            self._cost, state.load, self._itl_slo(state), coming=state.coming_rounds
        )

    def _itl_slo(self, state: PrefillState) -> Slo:
        """The strictest ITL SLO of those that decode and of the first that waits."""
        first = self._waiting[self._order[0].task_id].task.slo
        return Slo(first.ttft_s, min(first.itl_s, state.itl_slo_s), first.itl_statistic)

    def _outlook(self, now_s: float) -> RemoteOutlook:
        """What the prefill workers would make of all that waits, here and elsewhere."""
        known = self._known
        if now_s - known.read_s > BLIND_S:
            return RemoteOutlook({}, 0)
        others = [view for view in known.views if view.info.worker_id != self._worker_id]
        cost = next(
            (v.info.cost for v in others if v.info.role is Role.PREFILL and v.info.cost), None
        )
        if cost is not None and cost is not self._expected_cost:
            self._expected_cost = cost
            self._mirror = TaskMirror(cost)
            self._order = sorted(self._task(late, now_s) for late in self._waiting.values())
        # What waits here is better known than what was published of it.
        tasks = sorted([*self._mirror.tasks(others, known.read_s), *self._order])
        return remote_outlook(tasks, others, now_s)

    def _task(self, late: LateTask, now_s: float) -> Task:
        return task(late.shown(now_s), self._worker_id, now_s, self._expected_cost)


def _no_state() -> PrefillState:
    raise AssertionError("no home has been set")


def _nothing() -> None:
    """Nobody is to be told."""
