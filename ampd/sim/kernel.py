"""The event heap: virtual seconds, and what happens when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Kernel:
    """Runs actions in the order of their instants; those of one instant in the order in which
    they were asked for."""

    __slots__ = ("_count", "_heap", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` at `time_s`, which is not before now."""
        self._count += 1
        heappush(self._heap, (time_s, self._count, action, argument))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now_s, _, action, argument = heappop(heap)
            action(argument)
