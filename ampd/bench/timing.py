"""Times of calls as quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of one call's times in seconds. The tenth percentile is what it takes where
    nothing else runs on the core; the others hold other processes' work too."""

    calls: int
    p10_s: float
    p50_s: float
    p99_s: float

    @staticmethod
    def of(times_s: Sequence[float]) -> Spread:
        """Of at least one time."""
        ordered = sorted(times_s)

        def quantile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return Spread(len(ordered), quantile(0.1), quantile(0.5), quantile(0.99))
