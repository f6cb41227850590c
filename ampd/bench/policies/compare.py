"""`ampd` against the best baseline, everywhere, and against the bars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ampd.bench.policies.cells import MODELS
from ampd.bench.policies.contenders import is_ours
from ampd.bench.policies.goodput import Bound, Goodput
from ampd.bench.policies.result import CellResult, Point
from ampd.bench.policies.statistics import Estimate, estimate, geometric_mean, paired_difference
from ampd.bench.policies.study import Layout, Part
from ampd.core.policies import AMPD_PAPER

WORST_DIFFERENCE: Final = -0.01
"""The bar of every comparison of attainment: 1 point."""
MEAN_GOODPUT_RATIO: Final = 1.2
"""The bar of the mean g90 over that of the best baseline, on own layouts;"""
LEAST_GOODPUT_RATIO: Final = 1.0
"""and of each."""
OVERLOAD_FACTOR: Final = 1.2
OVERLOAD_MODELS: Final = MODELS[:2]
OVERLOAD_SHARE: Final = 0.85
"""The bar of session-mean attainment at `OVERLOAD_FACTOR`, for these models on every trace."""
DISTURBED_SHARE: Final = 0.75
"""The bar of session-mean attainment with all disturbances at once, at r50."""


class Metric(StrEnum):
    """Units of attainment."""

    ROUND = "round"
    SESSION_MEAN = "session-mean"
    SESSION_STRICT = "session-strict"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ampd` minus the baseline that is best in this metric here, seed by seed."""

    cell: str
    layout: Layout
    factor: float
    metric: Metric
    ours: Estimate
    baseline: str
    theirs: Estimate
    difference: Estimate

    @property
    def met(self) -> bool:
        """Whether the mean is within the bar."""
        return self.difference.mean >= WORST_DIFFERENCE


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """g90 of `ampd` over the best baseline's."""

    cell: str
    layout: Layout
    ours: Goodput
    baseline: str
    theirs: Goodput

    @property
    def ratio(self) -> float:
        """With bounds taken for values."""
        return self.ours.rate / self.theirs.rate

    @property
    def exact(self) -> bool:
        """Whether both were found between two rates."""
        return self.ours.bound is self.theirs.bound is Bound.BETWEEN


@dataclass(frozen=True, slots=True)
class Bar:
    """One of the benchmark's bars, and what was measured: nothing where it was not run."""

    what: str
    bar: str
    measured: str
    met: bool | None


def shares(point: Point, metric: Metric) -> tuple[float, ...]:
    """The attainments of its seeds."""
    match metric:
        case Metric.ROUND:
            return point.round
        case Metric.SESSION_MEAN:
            return point.session_mean
        case Metric.SESSION_STRICT:
            return point.session_strict


def comparisons(cells: Sequence[CellResult]) -> list[Comparison]:
    """All of the grid: one for each cell, layout, rate and metric in which `ampd` and a baseline
    were run."""
    return [
        compared
        for cell in cells
        for layout in Layout
        for points in _by_factor(cell.of(Part.GRID, layout))
        for metric in Metric
        if (compared := _compared(cell.name, points, metric)) is not None
    ]


def _by_factor(points: Sequence[Point]) -> Iterator[list[Point]]:
    for factor in sorted({point.factor for point in points}):
        yield [point for point in points if point.factor == factor]


def _compared(cell: str, points: Sequence[Point], metric: Metric) -> Comparison | None:
    ours = next((p for p in points if is_ours(p.contender)), None)
    baselines = [p for p in points if not is_ours(p.contender)]
    if ours is None or not baselines:
        return None
    best = max(baselines, key=lambda p: (estimate(shares(p, metric)).mean, p.contender))
    our_shares, their_shares = shares(ours, metric), shares(best, metric)
    return Comparison(
        cell=cell,
        layout=ours.layout,
        factor=ours.factor,
        metric=metric,
        ours=estimate(our_shares),
        baseline=best.contender,
        theirs=estimate(their_shares),
        difference=paired_difference(our_shares, their_shares),
    )


def goodput_ratios(cells: Sequence[CellResult]) -> list[GoodputRatio]:
    """One for each cell and layout in which `ampd` and a baseline have a goodput."""
    ratios = []
    for cell in cells:
        for layout in Layout:
            found = {
                place.contender: place.goodput
                for place in cell.places
                if place.layout is layout and place.goodput is not None
            }
            ours = next((found[name] for name in found if is_ours(name)), None)
            theirs = {name: g for name, g in found.items() if not is_ours(name)}
            if ours is None or not theirs:
                continue
            best = max(theirs, key=lambda name: (theirs[name].rate, name))
            ratios.append(GoodputRatio(cell.name, layout, ours, best, theirs[best]))
    return ratios


def bars(cells: Sequence[CellResult]) -> list[Bar]:
    """Each bar of the benchmark against what was run of it."""
    compared = comparisons(cells)
    ratios = [r for r in goodput_ratios(cells) if r.layout is Layout.OWN]
    return [
        _comparison_bar(compared),
        _mean_ratio_bar(ratios),
        _least_ratio_bar(ratios),
        _overload_bar(cells),
        _disturbed_bar(cells),
    ]


def _comparison_bar(compared: Sequence[Comparison]) -> Bar:
    what = "`ampd` minus the best baseline, in points, the worst comparison"
    bar = f"≥ {WORST_DIFFERENCE * 100:.0f}"
    if not compared:
        return Bar(what, bar, "", None)
    worst = min(compared, key=lambda c: c.difference.mean)
    met = sum(c.met for c in compared)
    where = f"{worst.cell}, {worst.layout}, {worst.factor:g} x r50, {worst.metric}"
    measured = f"{worst.difference.mean * 100:.1f} ({where}); {met} of {len(compared)} within"
    return Bar(what, bar, measured, met == len(compared))


def _mean_ratio_bar(ratios: Sequence[GoodputRatio]) -> Bar:
    what = "g90 over the best baseline's, own layouts, geometric mean"
    bar = f"≥ {MEAN_GOODPUT_RATIO:g}"
    if not ratios:
        return Bar(what, bar, "", None)
    mean = geometric_mean([r.ratio for r in ratios])
    return Bar(what, bar, f"{mean:.2f} over {len(ratios)} cells", mean >= MEAN_GOODPUT_RATIO)


def _least_ratio_bar(ratios: Sequence[GoodputRatio]) -> Bar:
    what = "the same, the worst cell"
    bar = f"≥ {LEAST_GOODPUT_RATIO:g}"
    if not ratios:
        return Bar(what, bar, "", None)
    worst = min(ratios, key=lambda r: r.ratio)
    return Bar(what, bar, f"{worst.ratio:.2f} ({worst.cell})", worst.ratio >= LEAST_GOODPUT_RATIO)


def _overload_bar(cells: Sequence[CellResult]) -> Bar:
    models = " and ".join(OVERLOAD_MODELS)
    what = f"session-mean of `ampd` at {OVERLOAD_FACTOR:g} x r50, own layouts, {models}, the worst"
    points = [
        (cell.name, point)
        for cell in cells
        if cell.name.startswith(OVERLOAD_MODELS)
        for point in cell.of(Part.GRID, Layout.OWN)
        if is_ours(point.contender) and point.factor == OVERLOAD_FACTOR
    ]
    return _least_share_bar(what, OVERLOAD_SHARE, points)


def _disturbed_bar(cells: Sequence[CellResult]) -> Bar:
    what = (
        "session-mean of `ampd` with all disturbances at once, at 1 x r50, own layouts, the worst"
    )
    points = [
        (f"{cell.name}, {point.disturbance}", point)
        for cell in cells
        for point in cell.of(Part.ROBUSTNESS, Layout.OWN)
        if is_ours(point.contender) and point.disturbance.startswith("all")
    ]
    return _least_share_bar(what, DISTURBED_SHARE, points)


def _least_share_bar(what: str, bar: float, points: Sequence[tuple[str, Point]]) -> Bar:
    if not points:
        return Bar(what, f"≥ {bar:g}", "", None)
    where, worst = min(points, key=lambda named: estimate(named[1].session_mean).mean)
    share = estimate(worst.session_mean)
    return Bar(what, f"≥ {bar:g}", f"{share} ({where})", share.mean >= bar)


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """What the paper says, beside what was simulated; no bar."""

    what: str
    paper: str
    ours: str


def paper_claims(cells: Sequence[CellResult]) -> list[PaperClaim]:
    """Those that the runs have something to say about."""
    gains: dict[str, list[float]] = {}
    locals_: list[float] = []
    for cell in cells:
        for points in _by_factor(cell.of(Part.GRID, Layout.OWN)):
            by_name = {point.contender: point for point in points}
            paper = by_name.get(AMPD_PAPER)
            if paper is None:
                continue
            locals_.append(paper.local_share)
            for other in ("always-remote", "colocated"):
                if other in by_name and (theirs := _mean_share(by_name[other])) > 0:
                    gains.setdefault(other, []).append(_mean_share(paper) / theirs - 1)
    claims = [
        PaperClaim(
            f"`ampd-paper` over {name}, session-mean, {system}", claimed, _spread(gains[name])
        )
        for name, system, claimed in (
            ("always-remote", "what Dynamo does", "+67.29 % on average"),
            ("colocated", "what vLLM does", "+339.74 % on average"),
        )
        if name in gains
    ]
    if locals_:
        span = f"{min(locals_):.1%} to {max(locals_):.1%}"
        claims.append(PaperClaim("local share of `ampd-paper`", "13.9 % to 31.7 %", span))
    for what, claimed, left_out in (
        ("adaptive routing alone", "+27 % to +350 %", "no adaptive routing"),
        ("reordering", "+13 % to +15 %", "no reordering"),
    ):
        found = list(_ablated(cells, left_out))
        if found:
            claims.append(PaperClaim(f"gain by {what}, session-mean", claimed, _spread(found)))
    return claims


def _ablated(cells: Sequence[CellResult], left_out: str) -> Iterator[float]:
    for cell in cells:
        for points in _by_factor(cell.of(Part.ABLATION)):
            mean = {point.contender: _mean_share(point) for point in points}
            if mean.get(left_out, 0.0) > 0:
                yield mean[AMPD_PAPER] / mean[left_out] - 1


def _mean_share(point: Point) -> float:
    return estimate(point.session_mean).mean


def _spread(gains: Sequence[float]) -> str:
    ordered = sorted(gains)
    median = ordered[len(ordered) // 2]
    return f"{ordered[0]:+.0%} to {ordered[-1]:+.0%}, median {median:+.0%} ({len(ordered)} cases)"
