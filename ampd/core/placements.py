"""What a coordinator has placed since the workers last published their load.

Loads in the shared store are a heartbeat old. Decisions that come faster than that would all
see the same idle worker and all choose it; so each coordinator adds its own recent placements
to what it reads. (Those of other coordinators show with the next heartbeat.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from ampd.core.model import WorkerView

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
        return tuple(self._with_placements(view, now_s) for view in views)

    def _with_placements(self, view: WorkerView, now_s: float) -> WorkerView:
        published_s = now_s - view.age_s - SETTLE_S
        unseen = [
            placement
            for placement in self._placements
            if placement.worker_id == view.info.worker_id and placement.placed_s >= published_s
        ]
        if not unseen:
            return view
        prefills = [placement.prefill_s for placement in unseen if placement.prefill_s > 0]
        load = replace(
            view.load,
            queued_tasks=view.load.queued_tasks + len(prefills),
            queued_prefill_s=view.load.queued_prefill_s + sum(prefills),
            kv_reserved_tokens=view.load.kv_reserved_tokens
            + sum(placement.reserved_tokens for placement in unseen),
        )
        return replace(view, load=load)
