"""What a coordinator has placed since the workers last published their load.

Loads in the shared store are a heartbeat old. Decisions that come faster than that would all
see the same idle worker and all choose it; so each coordinator adds its own recent placements
to what it reads. (Those of other coordinators show with the next heartbeat.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
        self._placements: deque[Placement] = deque(maxlen=MAX_PLACEMENTS)

    def add(self, placement: Placement) -> None:
        """Remember a placement; instants never go back."""
        self._placements.append(placement)

    def shown_in(self, views: Iterable[WorkerView], now_s: float) -> tuple[WorkerView, ...]:
        """The views with the placements that their loads do not show."""
        views = tuple(views)
        oldest_s = now_s - max((view.age_s for view in views), default=0.0) - SETTLE_S
        while self._placements and self._placements[0].placed_s < oldest_s:
            self._placements.popleft()
        if not self._placements:
            return views
        by_worker: dict[str, list[Placement]] = {}
        for placement in self._placements:
            by_worker.setdefault(placement.worker_id, []).append(placement)
        shown = []
        for view in views:
            placements = by_worker.get(view.info.worker_id)
            shown.append(_with_placements(view, placements, now_s) if placements else view)
        return tuple(shown)


def _with_placements(view: WorkerView, placements: Sequence[Placement], now_s: float) -> WorkerView:
    """The view with those of its worker's placements that its load does not show."""
    published_s = now_s - view.age_s - SETTLE_S
    tasks = reserved_tokens = 0
    prefill_s = 0.0
    for placement in placements:
        if placement.placed_s >= published_s:
            tasks += placement.prefill_s > 0
            prefill_s += placement.prefill_s
            reserved_tokens += placement.reserved_tokens
    if not (tasks or reserved_tokens):
        return view
    # Written out: `dataclasses.replace` would take most of a decision's time.
    old = view.load
    load = WorkerLoad(
        draining=old.draining,
        queued_tasks=old.queued_tasks + tasks,
        queued_prefill_s=old.queued_prefill_s + prefill_s,
        oldest_wait_s=old.oldest_wait_s,
        ttft_window_s=old.ttft_window_s,
        itl_window_s=old.itl_window_s,
        running_rounds=old.running_rounds,
        running_context_tokens=old.running_context_tokens,
        sessions=old.sessions,
        kv_pinned_tokens=old.kv_pinned_tokens,
        kv_running_tokens=old.kv_running_tokens,
        kv_reserved_tokens=old.kv_reserved_tokens + reserved_tokens,
        tools=old.tools,
        drain_estimate_s=old.drain_estimate_s,
        calibration=old.calibration,
        waiting=old.waiting,
    )
    return WorkerView(view.info, load, view.age_s)
