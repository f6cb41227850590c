"""Loads as coordinators see them: as old as the last heartbeat.

No event marks a heartbeat. A worker's state only changes in its own event handlers, so each of
them first publishes the state as it was at the last heartbeat that has passed by now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import floor

from ampd.core.model import WorkerInfo, WorkerLoad, WorkerView


class PublishedLoad(ABC):
    """A worker's last published load; a subclass knows its load at an instant."""

    def __init__(self, info: WorkerInfo, *, heartbeat_s: float, phase_s: float) -> None:
        self.info = info
        self._heartbeat_s = heartbeat_s
        self._phase_s = phase_s
        self._published_s = 0.0
        self._published = WorkerLoad()
        self.next_heartbeat_s = phase_s

    @abstractmethod
    def load(self, at_s: float) -> WorkerLoad:
        """The load at an instant since the last change."""

    def publish(self, now_s: float) -> None:
        """Call before any change once `next_heartbeat_s` has come."""
        interval_s = self._heartbeat_s
        if interval_s > 0:
            beats = floor((now_s - self._phase_s) / interval_s)
            self._published_s = max(0.0, min(now_s, self._phase_s + beats * interval_s))
            self.next_heartbeat_s = max(
                self._phase_s + (beats + 1) * interval_s, self.next_heartbeat_s
            )
        else:
            self._published_s = now_s
        self._published = self.load(self._published_s)

    def view(self, now_s: float) -> WorkerView:
        """What a coordinator reads now."""
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        return WorkerView(self.info, self._published, now_s - self._published_s)
