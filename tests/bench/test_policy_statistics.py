"""Intervals, comparisons and bars of the policy benchmark against numbers computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ampd.bench.policies.compare import bars, comparisons, goodput_ratios
from ampd.bench.policies.goodput import Bound, Goodput
from ampd.bench.policies.result import CellResult, Point, Times
from ampd.bench.policies.statistics import (
    Estimate,
    estimate,
    geometric_mean,
    paired_difference,
)
from ampd.bench.policies.study import Layout, Part, Place

NOTHING = Times(0.0, 0.0, 0.0, 0.0)


def point(contender: str, factor: float, *session_mean: float, **more: object) -> Point:
    made = Point(
        part=Part.GRID,
        contender=contender,
        layout=Layout.OWN,
        disturbance="none",
        factor=factor,
        rate=factor,
        prefill=4,
        decode=4,
        settings=(),
        round=session_mean,
        session_mean=session_mean,
        session_strict=session_mean,
        ttft=NOTHING,
        itl=NOTHING,
        queue_s=0.0,
        read_s=0.0,
        compute_s=0.0,
        return_s=0.0,
        local_share=0.0,
        history_moved_bytes=0.0,
        increment_moved_bytes=0.0,
        kv_ratios=(),
        sessions=100,
        refused_sessions=0,
        rebuilt_rounds=0,
        prefill_utilisation=0.0,
        decode_utilisation=0.0,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def place(contender: str, rate: float, bound: Bound = Bound.BETWEEN) -> Place:
    return Place(contender, Layout.OWN, 4, 4, (), Goodput(rate, bound))


def cell(*points: Point, places: tuple[Place, ...] = (), name: str = "Qwen3-32B/x") -> CellResult:
    return CellResult(name, "", 8, 60.0, 360.0, 1.0, 0.05, 1.0, 4, places, points)


def test_an_interval_of_five_values() -> None:
    # Deviation 1.5811, t(4) 2.776: 2.776 * 1.5811 / sqrt(5).
    assert estimate([1, 2, 3, 4, 5]) == pytest.approx((3.0, 1.9630), abs=1e-3)
    assert estimate([0.7]) == Estimate(0.7, None)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        found = estimate([rng.gauss(5.0, 2.0) for _ in range(5)])
        held += abs(found.mean - 5.0) <= (found.half or 0.0)
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_what_both_share_falls_out_of_a_paired_difference() -> None:
    found = paired_difference([0.9, 0.5, 0.7], [0.8, 0.4, 0.6])
    assert found == pytest.approx((0.1, 0.0), abs=1e-12)
    with pytest.raises(ValueError, match="longer than"):
        paired_difference([1.0], [1.0, 2.0])


def test_a_geometric_mean() -> None:
    assert geometric_mean([2.0, 0.5, 4.0, 0.25]) == pytest.approx(1.0)


def test_each_rate_is_compared_with_the_baseline_that_is_best_there() -> None:
    found = comparisons(
        [
            cell(
                point("ampd", 1.0, 0.9, 0.9),
                point("always-remote", 1.0, 0.92, 0.94),
                point("cheapest", 1.0, 0.1, 0.2),
                point("ampd", 1.2, 0.8, 0.8),
                point("always-remote", 1.2, 0.1, 0.1),
                point("cheapest", 1.2, 0.3, 0.5),
            )
        ]
    )
    by_round = [c for c in found if c.metric == "session-mean"]
    assert [(c.factor, c.baseline) for c in by_round] == [(1.0, "always-remote"), (1.2, "cheapest")]
    assert [c.difference.mean for c in by_round] == pytest.approx([-0.03, 0.4])
    assert [c.met for c in by_round] == [False, True]


def test_bars_are_missed_by_the_worst_case_and_silent_without_runs() -> None:
    good = cell(
        point("ampd", 1.2, 0.95),
        point("always-remote", 1.2, 0.3),
        point("ampd", 1.0, 0.8, part=Part.ROBUSTNESS, disturbance="all, slow prefill worker"),
        places=(place("ampd", 13.0), place("always-remote", 10.0)),
    )
    assert [bar.met for bar in bars([good])] == [True] * 5
    bad = cell(
        point("ampd", 1.2, 0.5),
        point("always-remote", 1.2, 0.6),
        point("ampd", 1.0, 0.7, part=Part.ROBUSTNESS, disturbance="all, slow decode worker"),
        places=(place("ampd", 9.0), place("always-remote", 10.0)),
    )
    assert [bar.met for bar in bars([good, bad])] == [False] * 5
    assert [bar.met for bar in bars([cell()])] == [None] * 5


def test_a_ratio_of_bounds_is_marked() -> None:
    places = (place("ampd", 2.0, Bound.AT_LEAST), place("cheapest", 1.0))
    (ratio,) = goodput_ratios([cell(places=places)])
    assert (ratio.ratio, ratio.exact) == (2.0, False)
