"""The queue of a prefill worker: bounded, in arrival order, served by spec 5.

It holds what is waiting; the task that computes and the one whose history is being read have
left it. All instants are on the worker's clock, sizes in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PrefillTask
from ampd.core.reordering import Job, select_enumerated, select_moore_hodgson

DEFAULT_MAX_TASKS: Final = 1024
"""The bound of the queue."""
MIN_RETRY_AFTER_S: Final = 0.1
"""No client is asked to come back sooner."""


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """How the next task is chosen.

    `window`: so many tasks from the head are looked at, 1 being first come, first served;
    None is the whole queue, ordered exactly by Moore-Hodgson. `bound`: how often one task may
    be moved back. `by_arrival`: the SLO clock starts when a task enters this queue (the
    paper), not when it was created.
    """

    window: int | None = 1
    bound: int = 1
    by_arrival: bool = False


FIFO: Final = QueueOrder()


@dataclass(slots=True)
class QueuedPrefill:
    """A task that waits: `compute_s` and `read_s` are its predicted computation and history
    read."""

    task: PrefillTask
    arrived_s: float
    compute_s: float
    read_s: float
    postponed: int = 0


class PrefillQueue:
    """`order` may be replaced at any time, when the policy changes."""

    def __init__(self, *, max_tasks: int = DEFAULT_MAX_TASKS, order: QueueOrder = FIFO) -> None:
        self.order = order
        self._max_tasks = max_tasks
        self._waiting: dict[str, QueuedPrefill] = {}  # by task id, in arrival order

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> tuple[QueuedPrefill, ...]:
        """In arrival order."""
        return tuple(self._waiting.values())

    @property
    def total_s(self) -> float:
        """Predicted seconds to compute all that waits, reads taken as hidden."""
        return sum(entry.compute_s for entry in self._waiting.values())

    def oldest_wait_s(self, now_s: float) -> float:
        """The age of the task created longest ago, 0 when empty."""
        return max(self.ages_s(now_s), default=0.0)

    def ages_s(self, now_s: float) -> list[float]:
        """The age of every waiting task since its creation: what TTFT^ counts as open."""
        return [now_s - entry.task.created_s for entry in self._waiting.values()]

    def can_add(self) -> bool:
        """Whether there is room for one more."""
        return len(self._waiting) < self._max_tasks

    def add(
        self,
        task: PrefillTask,
        *,
        now_s: float,
        compute_s: float,
        read_s: float = 0.0,
    ) -> None:
        """Put a task at the end. A repeated `task_id` changes nothing.

        Raises QUEUE_FULL; the retry hint is the predicted time until a place is free.
        """
        if task.task_id in self._waiting:
            return
        if not self.can_add():
            next_s = min(entry.compute_s for entry in self._waiting.values())
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"the prefill queue holds its {self._max_tasks} tasks",
                retry_after_s=max(MIN_RETRY_AFTER_S, next_s),
            )
        self._waiting[task.task_id] = QueuedPrefill(task, now_s, compute_s, read_s)

    def take(self, now_s: float, busy_s: float = 0.0) -> QueuedPrefill | None:
        """Remove and return the task to serve next; None when nothing waits.

        `busy_s`: what is left of the computation in progress. It delays every completion, and
        hides as much of a history read.
        """
        if not self._waiting:
            return None
        entries = list(self._waiting.values())
        window, bound = self.order.window, self.order.bound
        if window == 1 or len(entries) == 1:
            index = 0
        else:
            jobs = self._jobs(entries if window is None else entries[:window], busy_s)
            if window is None:
                index = select_moore_hodgson(jobs, now_s + busy_s, bound)
            else:
                index = select_enumerated(jobs, now_s + busy_s, window)
        for passed in entries[:index]:
            passed.postponed += 1
        return self._waiting.pop(entries[index].task.task_id)

    def remove(self, task_id: str) -> QueuedPrefill | None:
        """Take a task out that is void, cancelled or past its deadline (its home withdraws both);
        None when it is not waiting here."""
        return self._waiting.pop(task_id, None)

    def _jobs(self, entries: list[QueuedPrefill], busy_s: float) -> list[Job]:
        """What the selection sees. A read is hidden by the computation before it: which one
        depends on the order, so each task is charged what the shortest of them cannot hide."""
        hidden_s = min(entry.compute_s for entry in entries)
        if busy_s > 0:
            hidden_s = min(hidden_s, busy_s)
        return [
            Job(
                (entry.arrived_s if self.order.by_arrival else entry.task.created_s)
                + entry.task.slo.ttft_s,
                entry.compute_s + max(0.0, entry.read_s - hidden_s),
                entry.postponed,
            )
            for entry in entries
        ]
