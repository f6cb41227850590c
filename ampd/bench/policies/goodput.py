"""Goodput g90: the highest rate at which session-mean attainment is 90 %. A pure plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import sqrt
from typing import Final

from ampd.bench.policies.plans import Plan
from ampd.bench.policies.runs import rounded_rate
from ampd.bench.policies.search import Bracket

LEVEL: Final = 0.9
STEP: Final = 1.15
"""From the last rate of the grid to the next one, where it still attains the level; and down."""
MAX_STEPS: Final = 6
WIDTH: Final = 1.06
"""A wider bracket (high / low) is halved,"""
MAX_HALVINGS: Final = 1
"""so often."""


class Bound(StrEnum):
    """What a goodput is."""

    BETWEEN = "between"
    """Two rates that were run, close together."""
    AT_LEAST = "at least"
    """It attains the level at the highest rate that was run."""
    AT_MOST = "at most"
    """It fails it at the lowest rate that was run."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Sessions a second."""

    rate: float
    bound: Bound


def find_goodput(
    shares: Mapping[float, float], share_at: Callable[[float], Plan[float]]
) -> Plan[Goodput]:
    """From the shares at the rates that were run, at least one, and at some more."""
    known = dict(shares)
    for _ in range(MAX_STEPS):
        highest = max(known)
        if known[highest] < LEVEL:
            break
        known[rounded_rate(highest * STEP)] = yield from share_at(rounded_rate(highest * STEP))
    for _ in range(MAX_STEPS):
        lowest = min(known)
        if max(known.values()) >= LEVEL:
            break
        known[rounded_rate(lowest / STEP)] = yield from share_at(rounded_rate(lowest / STEP))
    for halving in range(MAX_HALVINGS + 1):
        bracket = bracket_of(known)
        if bracket is None:
            break
        if bracket.high <= bracket.low * WIDTH or halving == MAX_HALVINGS:
            return Goodput(bracket.crossing(LEVEL), Bound.BETWEEN)
        middle = rounded_rate(sqrt(bracket.low * bracket.high))
        known[middle] = yield from share_at(middle)
    if max(known.values()) < LEVEL:
        return Goodput(min(known), Bound.AT_MOST)
    return Goodput(max(known), Bound.AT_LEAST)


def bracket_of(shares: Mapping[float, float]) -> Bracket | None:
    """The highest rate that attains the level and the next one, which does not; None where one
    of them is missing."""
    rates = sorted(shares)
    for low, high in reversed(list(pairwise(rates))):
        if shares[low] >= LEVEL > shares[high]:
            return Bracket(low, shares[low], high, shares[high])
    return None
