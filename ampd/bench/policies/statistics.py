"""Means with their intervals, and goodput. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final, NamedTuple

T_QUANTILES: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t at 97.5 % with 1, 2, ... degrees of freedom."""
NORMAL_QUANTILE: Final = 1.96
"""With more degrees of freedom than the table has: up to 6 % too small."""


class Estimate(NamedTuple):
    """A mean, and half of its 95 % interval; None of a single value: nothing is known."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value, taken as independent."""
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Estimate(mean, None)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    freedom = count - 2
    quantile = T_QUANTILES[freedom] if freedom < len(T_QUANTILES) else NORMAL_QUANTILE
    return Estimate(mean, quantile * deviation / sqrt(count))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Of values from the same seeds: what is random in both falls out. ValueError unless there
    are as many of both."""
    return estimate([a - b for a, b in zip(ours, theirs, strict=True)])


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of at least one ratio above 0."""
    product = 1.0
    for ratio in ratios:
        product *= ratio ** (1 / len(ratios))
    return product
