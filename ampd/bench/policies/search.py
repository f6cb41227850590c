"""Searches: where attainment falls through a level, and which layout is best. Pure plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from ampd.bench.policies.plans import Plan
from ampd.bench.policies.runs import rounded_rate

MAX_WIDENINGS: Final = 16
"""Steps up or down until a level is bracketed."""
MAX_HALVINGS: Final = 8

Score = tuple[float, ...]
"""What a search maximises; later parts break ties."""


class NeverCrossedError(Exception):
    """No rate was found on the other side of the level."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """Two rates (sessions/s) with the attainment there: at the level or above it, and below."""

    low: float
    low_share: float
    high: float
    high_share: float

    def crossing(self, level: float) -> float:
        """The rate in between where a straight line falls through the level."""
        fall = self.low_share - self.high_share
        if fall <= 0:
            return self.low
        return self.low + (self.high - self.low) * (self.low_share - level) / fall


def find_crossing(
    share_at: Callable[[float], Plan[float]],
    *,
    level: float,
    guess: float,
    step: float,
    tolerance: float,
) -> Plan[float]:
    """The rate at which `share_at` falls through `level`: from the guess in factors of `step`
    until it is bracketed, then by halves until high / low <= 1 + tolerance, then by a line.

    Raises NeverCrossedError.
    """
    bracket = yield from _bracketed(share_at, level, rounded_rate(guess), step)
    for _ in range(MAX_HALVINGS):
        if bracket.high <= bracket.low * (1 + tolerance):
            break
        middle = rounded_rate(sqrt(bracket.low * bracket.high))
        share = yield from share_at(middle)
        if share >= level:
            bracket = Bracket(middle, share, bracket.high, bracket.high_share)
        else:
            bracket = Bracket(bracket.low, bracket.low_share, middle, share)
    return bracket.crossing(level)


def _bracketed(
    share_at: Callable[[float], Plan[float]], level: float, guess: float, step: float
) -> Plan[Bracket]:
    rate, share = guess, (yield from share_at(guess))
    rising = share >= level
    for _ in range(MAX_WIDENINGS):
        further = rounded_rate(rate * step if rising else rate / step)
        its_share = yield from share_at(further)
        if (its_share >= level) != rising:
            if rising:
                return Bracket(rate, share, further, its_share)
            return Bracket(further, its_share, rate, share)
        rate, share = further, its_share
    raise NeverCrossedError(f"attainment stays on one side of {level:.0%} up to {rate:g} a second")


def best_split(
    evaluate: Callable[[Sequence[int]], Plan[Mapping[int, Score]]], *, workers: int, least: int
) -> Plan[int]:
    """How many of the workers prefill best, `least` at the fewest, all but one at the most: the
    quarters first, then the neighbours of the best in ever smaller steps. Of equals the one
    nearest to a half."""
    most = workers - 1
    if most <= least:
        return least
    scores: dict[int, Score] = {}

    def look_at(splits: Sequence[int]) -> Plan[int]:
        inside = {min(most, max(least, split)) for split in splits}
        new = sorted(inside - scores.keys())
        if new:
            scores.update((yield from evaluate(new)))
        return max(scores, key=lambda split: (scores[split], -abs(split - workers / 2), split))

    best = yield from look_at([least, *(workers * quarter // 4 for quarter in (1, 2, 3))])
    step = workers // 8
    while step > 1:
        best = yield from look_at([best - step, best + step])
        step //= 2
    known = 0
    while known < len(scores):
        known = len(scores)
        best = yield from look_at([best - 1, best + 1])
    return best
