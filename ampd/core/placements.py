"""What a coordinator has placed since the workers last published their load.

Loads in the shared store are a heartbeat old. Decisions that come faster than that would all
see the same idle worker and all choose it; so each coordinator adds its own recent placements
to what it reads. (Those of other coordinators show with the next heartbeat.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ampd.core.model import WorkerLoad, WorkerView

MAX_PLACEMENTS: Final = 4096
"""Placements remembered; the oldest are forgotten first."""
SETTLE_S: Final = 0.05
"""A load published this soon after a placement may not show it yet."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision in favour of a worker: predicted prefill work (s) or KV reserved (tokens)."""

    worker_id: str
    placed_s: float
    prefill_s: float = 0.0
    reserved_tokens: int = 0


class RecentPlacements:
    """A coordinator's own placements, as long as loads may not show them."""

    def __init__(self) -> None:
        self._placements: deque[Placement] = deque()
        self._workers: dict[str, _PlacedOnWorker] = {}

    def add(self, placement: Placement) -> None:
        """Remember a placement; instants never go back."""
        self._placements.append(placement)
        placed = self._workers.get(placement.worker_id)
        if placed is None:
            placed = self._workers[placement.worker_id] = _PlacedOnWorker()
        placed.add(placement)
        if len(self._placements) > MAX_PLACEMENTS:
            oldest = self._placements.popleft()
            placements = self._workers[oldest.worker_id].placements
            placements.popleft()
            if not placements:
                del self._workers[oldest.worker_id]

    def shown_in(self, views: Iterable[WorkerView], now_s: float) -> tuple[WorkerView, ...]:
        """The views with the placements that their loads do not show."""
        shown = []
        for view in views:
            placed = self._workers.get(view.info.worker_id)
            if placed is not None:
                published_s = now_s - view.age_s - SETTLE_S
                if placed.newest_s >= published_s:
                    load = placed.shown_in(view.load, published_s)
                    view = WorkerView(view.info, load, view.age_s)
            shown.append(view)
        return tuple(shown)


class _PlacedOnWorker:
    """The placements on one worker, the oldest first: at least one."""

    def __init__(self) -> None:
        self.placements: deque[Placement] = deque()
        self.newest_s = 0.0
        # Most decisions see a worker as the one before did: what it was shown then.
        self._published: WorkerLoad | None = None
        self._count = 0
        self._shown = WorkerLoad()

    def add(self, placement: Placement) -> None:
        self.placements.append(placement)
        self.newest_s = placement.placed_s
        self._published = None

    def shown_in(self, load: WorkerLoad, published_s: float) -> WorkerLoad:
        """The load with the placements since then: at least one."""
        count = 0
        for placement in reversed(self.placements):
            if placement.placed_s < published_s:
                break
            count += 1
        if load is not self._published or count != self._count:
            newest = islice(self.placements, len(self.placements) - count, None)
            self._published, self._count = load, count
            self._shown = _with_placements(load, newest)
        return self._shown


def _with_placements(load: WorkerLoad, placements: Iterable[Placement]) -> WorkerLoad:
    tasks = reserved_tokens = 0
    prefill_s = 0.0
    for placement in placements:
        tasks += placement.prefill_s > 0
        prefill_s += placement.prefill_s
        reserved_tokens += placement.reserved_tokens
    if not (tasks or reserved_tokens):
        return load
    # Written out: `dataclasses.replace` would take most of a decision's time.
    return WorkerLoad(
        draining=load.draining,
        queued_tasks=load.queued_tasks + tasks,
        queued_prefill_s=load.queued_prefill_s + prefill_s,
        oldest_wait_s=load.oldest_wait_s,
        ttft_window_s=load.ttft_window_s,
        itl_window_s=load.itl_window_s,
        running_rounds=load.running_rounds,
        running_context_tokens=load.running_context_tokens,
        sessions=load.sessions,
        kv_pinned_tokens=load.kv_pinned_tokens,
        kv_running_tokens=load.kv_running_tokens,
        kv_reserved_tokens=load.kv_reserved_tokens + reserved_tokens,
        tools=load.tools,
        drain_estimate_s=load.drain_estimate_s,
        calibration=load.calibration,
        waiting=load.waiting,
    )
