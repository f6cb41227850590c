"""The searches of the policy benchmark on functions whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.bench.policies.goodput import LEVEL, Bound, find_goodput
from ampd.bench.policies.plans import Plan, together
from ampd.bench.policies.search import NeverCrossedError, Score, best_split, find_crossing


def finish(plan: Plan[Any]) -> Any:
    """What a plan returns that has nothing to be run."""
    try:
        runs = next(plan)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"wants {runs}")


def falling(at: float, asked: list[float] | None = None) -> Callable[[float], Plan[float]]:
    """Attainment that falls from 1 to 0 and is a half at that rate."""

    def share_at(rate: float) -> Plan[float]:
        yield from ()
        if asked is not None:
            asked.append(rate)
        return 1 / (1 + exp(min(500.0, 20.0 * (rate / at - 1))))

    return share_at


@given(at=st.floats(1e-3, 1e3), off=st.floats(0.1, 10))
def test_a_crossing_is_found_from_a_wrong_guess(at: float, off: float) -> None:
    asked: list[float] = []
    found = finish(
        find_crossing(falling(at, asked), level=0.5, guess=at * off, step=1.3, tolerance=0.02)
    )
    assert found == pytest.approx(at, rel=0.01)
    assert len(asked) < 20


def test_what_never_falls_is_an_error() -> None:
    def always(_: float) -> Plan[float]:
        yield from ()
        return 1.0

    with pytest.raises(NeverCrossedError):
        finish(find_crossing(always, level=0.5, guess=1.0, step=1.3, tolerance=0.02))


@given(workers=st.integers(2, 32), least=st.integers(0, 1), data=st.data())
def test_the_best_split_of_a_single_hill_is_found(
    workers: int, least: int, data: st.DataObject
) -> None:
    top = data.draw(st.integers(least, workers - 1))
    looked_at: list[int] = []

    def evaluate(splits: Sequence[int]) -> Plan[Mapping[int, Score]]:
        yield from ()
        looked_at.extend(splits)
        return {split: (-abs(split - top),) for split in splits}

    assert finish(best_split(evaluate, workers=workers, least=least)) == top
    assert len(set(looked_at)) == len(looked_at)
    assert all(least <= split < workers for split in looked_at)


def test_of_equal_splits_the_middle_one_wins() -> None:
    def evaluate(splits: Sequence[int]) -> Plan[Mapping[int, Score]]:
        yield from ()
        return dict.fromkeys(splits, (1.0,))

    assert finish(best_split(evaluate, workers=8, least=0)) == 4


def shares(at: float, rates: Sequence[float]) -> dict[float, float]:
    return {rate: finish(falling(at)(rate)) for rate in rates}


G90_OF_10 = 10 * (1 + -2.1972 / 20)
"""Where the curve that is a half at 10 is at 0.9."""


@pytest.mark.parametrize("rates", [(5.0, 8.0, 10.0, 12.0), (1.0, 2.0), (12.0, 14.0)])
def test_goodput_is_found_inside_beyond_and_below_the_grid(rates: tuple[float, ...]) -> None:
    found = finish(find_goodput(shares(10.0, rates), falling(10.0)))
    if max(rates) < 5:
        # Too far away for the steps that it takes: a bound, and said to be one.
        assert found.bound is Bound.AT_LEAST
        assert max(rates) < found.rate <= G90_OF_10
    else:
        assert found.bound is Bound.BETWEEN
        assert found.rate == pytest.approx(G90_OF_10, rel=0.02)


def test_a_policy_that_never_attains_has_a_goodput_below() -> None:
    def never(_: float) -> Plan[float]:
        yield from ()
        return LEVEL - 0.1

    found = finish(find_goodput({5.0: 0.5}, never))
    assert found.bound is Bound.AT_MOST
    assert found.rate < 5.0


def test_goodput_is_the_highest_of_several_crossings() -> None:
    found = finish(find_goodput({1.0: 0.95, 1.02: 0.8, 1.04: 0.95, 1.06: 0.85}, falling(1.0)))
    assert found.rate == pytest.approx(1.05)


def test_plans_together_want_their_runs_at_once() -> None:
    def asks(*steps: str) -> Plan[Any]:
        heard = []
        for step in steps:
            heard += yield [step]  # type: ignore[misc]
        return heard

    both = together([asks("a", "b"), asks("c"), asks()])
    assert next(both) == ["a", "c"]
    assert both.send(["A", "C"]) == ["b"]  # type: ignore[list-item]
    with pytest.raises(StopIteration) as end:
        both.send(["B"])  # type: ignore[list-item]
    assert end.value.value == [["A", "B"], ["C"], []]
