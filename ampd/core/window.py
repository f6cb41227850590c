"""Windowed statistics of a worker: TTFT^ (prefill side) and ITL^ (decode side), spec 4.

The statistic is the mean over the window *and over what is still open*: the age of a task
that waits, or of a stream's newest gap, is a lower bound of the value it will have, so it
counts as soon as it is above the mean. A worker stuck behind one long task completes nothing,
and is not idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

DEFAULT_WINDOW_S: Final = 10.0
SLICES: Final = 20
"""A window is kept as that many sums: memory is bounded, whatever the rate of values."""


@dataclass(slots=True)
class _Slice:
    start_s: float
    total_s: float
    count: int


class MeanWindow:
    """The mean of the values (s) of the last `window_s` seconds, exact to one slice."""

    def __init__(self, window_s: float = DEFAULT_WINDOW_S) -> None:
        if window_s <= 0:
            raise ValueError(f"a window must be longer than 0 s, not {window_s}")
        self._window_s = window_s
        self._slices: deque[_Slice] = deque()

    @property
    def window_s(self) -> float:
        """Its length in seconds; setting it keeps the values."""
        return self._window_s

    @window_s.setter
    def window_s(self, window_s: float) -> None:
        if window_s <= 0:
            raise ValueError(f"a window must be longer than 0 s, not {window_s}")
        self._window_s = window_s

    def add(self, now_s: float, value_s: float, count: int = 1) -> None:
        """Count a value that became known at `now_s`, or `count` values of that mean."""
        newest = self._slices[-1] if self._slices else None
        if newest is None or now_s >= newest.start_s + self._window_s / SLICES:
            self._drop_old(now_s)
            newest = _Slice(now_s, 0.0, 0)
            self._slices.append(newest)
        newest.total_s += value_s * count
        newest.count += count

    def statistic(self, now_s: float, open_ages_s: Iterable[float] = ()) -> float:
        """Mean seconds over the window and over the ages of what is still open; 0 when there
        is neither. Pass no ages for the paper's literal window."""
        self._drop_old(now_s)
        total_s, count = 0.0, 0
        for part in self._slices:
            total_s += part.total_s
            count += part.count
        mean_s = total_s / count if count else 0.0
        for age_s in open_ages_s:
            if age_s > mean_s:
                total_s += age_s
                count += 1
        return total_s / count if count else 0.0

    def _drop_old(self, now_s: float) -> None:
        while self._slices and self._slices[0].start_s <= now_s - self._window_s:
            self._slices.popleft()
