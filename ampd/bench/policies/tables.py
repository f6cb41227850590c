"""The tables of the policy benchmark, for terminal and page alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ampd.bench.policies.compare import (
    Metric,
    bars,
    comparisons,
    goodput_ratios,
    paper_claims,
    shares,
)
from ampd.bench.policies.contenders import Settings
from ampd.bench.policies.goodput import Bound, Goodput
from ampd.bench.policies.result import CellResult, Point, PolicyResult, Times
from ampd.bench.policies.statistics import Estimate, estimate
from ampd.bench.policies.study import SENSITIVITY, Layout, Part

DETAIL_FACTOR: Final = 1.0
"""The rate, in r50, of the tables that show one."""


@dataclass(frozen=True, slots=True)
class Table:
    """A title, headings, and rows of as many cells."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary_tables(result: PolicyResult) -> list[Table]:
    """What it comes to, over all cells; none without rows."""
    cells = result.cells
    tables = [
        _bars(cells),
        _goodput(cells),
        _comparisons(cells),
        _robustness(cells),
        _claims(cells),
        _sensitivity(cells),
    ]
    return [table for table in tables if table.rows]


def cell_tables(cell: CellResult) -> list[Table]:
    """All of one cell; none without rows."""
    tables = [_places(cell)]
    for layout in Layout:
        points = cell.of(Part.GRID, layout)
        name = "one layout" if layout is Layout.BALANCED else "own best layouts"
        tables.append(_attainment(f"Session-mean attainment, {name}", points))
        tables.append(_details(f"Rate {DETAIL_FACTOR:g} x r50, {name}", points))
    tables.append(_attainment("Ablation of ampd-paper, session-mean", cell.of(Part.ABLATION)))
    return [table for table in tables if table.rows]


def _bars(cells: Sequence[CellResult]) -> Table:
    rows = [(bar.what, bar.bar, bar.measured or "not run", _met(bar.met)) for bar in bars(cells)]
    return Table("Bars", ("What", "Bar", "Measured", "Met"), tuple(rows))


def _met(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "no"


def _goodput(cells: Sequence[CellResult]) -> Table:
    rows = [
        (
            ratio.cell,
            ratio.layout.value,
            _rate(ratio.ours),
            ratio.baseline,
            _rate(ratio.theirs),
            f"{ratio.ratio:.2f}" + ("" if ratio.exact else " (of bounds)"),
        )
        for ratio in goodput_ratios(cells)
    ]
    headings = ("Cell", "Layout", "ampd, sessions/s", "Best baseline", "Sessions/s", "Ratio")
    return Table("Goodput g90", headings, tuple(rows))


def _rate(goodput: Goodput | None) -> str:
    if goodput is None:
        return "-"
    bound = "" if goodput.bound is Bound.BETWEEN else f"{goodput.bound} "
    return f"{bound}{goodput.rate:.3g}"


def _comparisons(cells: Sequence[CellResult]) -> Table:
    """A row per cell, layout and metric, a column per rate."""
    found = comparisons(cells)
    factors = sorted({one.factor for one in found})
    keys = dict.fromkeys((one.cell, one.layout, one.metric) for one in found)
    by_key = {(one.cell, one.layout, one.metric, one.factor): one for one in found}
    rows = []
    for cell, layout, metric in keys:
        row = [cell, layout.value, metric.value]
        for factor in factors:
            one = by_key.get((cell, layout, metric, factor))
            row.append("-" if one is None else f"{_points(one.difference)} ({one.baseline})")
        rows.append(tuple(row))
    headings = ("Cell", "Layout", "Metric", *(f"{factor:g} x r50" for factor in factors))
    return Table("ampd minus the best baseline, in points", headings, tuple(rows))


def _points(difference: Estimate) -> str:
    half = "" if difference.half is None else f" ± {difference.half * 100:.1f}"
    return f"{difference.mean * 100:+.1f}{half}"


def _robustness(cells: Sequence[CellResult]) -> Table:
    rows = []
    names = dict.fromkeys(p.contender for c in cells for p in c.of(Part.ROBUSTNESS))
    for cell in cells:
        for layout in Layout:
            points = cell.of(Part.ROBUSTNESS, layout)
            for disturbance in dict.fromkeys(p.disturbance for p in points):
                here = {p.contender: p for p in points if p.disturbance == disturbance}
                shown = (_session_mean(here.get(name)) for name in names)
                rows.append((cell.name, layout.value, disturbance, *shown))
    headings = ("Cell", "Layout", "Disturbance", *names)
    return Table("Session-mean attainment when disturbed, at r50", headings, tuple(rows))


def _claims(cells: Sequence[CellResult]) -> Table:
    rows = tuple((claim.what, claim.paper, claim.ours) for claim in paper_claims(cells))
    return Table("Beside the paper's claims (not bars)", ("What", "Paper", "Simulated"), rows)


def _sensitivity(cells: Sequence[CellResult]) -> Table:
    rows = []
    for cell in cells:
        here = {p.contender: p for p in cell.of(Part.SENSITIVITY)}
        for setting, values in SENSITIVITY.items():
            found = [
                f"{value:g}: {_session_mean(here[f'{setting}={value:g}'])}"
                for value in values
                if f"{setting}={value:g}" in here
            ]
            if found:
                rows.append((cell.name, setting, ", ".join(found)))
    title = "ampd-paper by its settings, session-mean at r50"
    return Table(title, ("Cell", "Setting", "Value: attainment"), tuple(rows))


def _session_mean(point: Point | None) -> str:
    return "-" if point is None else str(estimate(point.session_mean))


def _places(cell: CellResult) -> Table:
    by_name = {(place.contender, place.layout): place for place in cell.places}
    rows = []
    for name in dict.fromkeys(place.contender for place in cell.places):
        own = by_name[name, Layout.OWN]
        balanced = by_name[name, Layout.BALANCED]
        rows.append(
            (
                name,
                f"{balanced.prefill} + {balanced.decode}",
                _rate(balanced.goodput),
                f"{own.prefill} + {own.decode}",
                _settings(own.settings),
                _rate(own.goodput),
            )
        )
    headings = ("Policy", "One layout (P + D)", "g90", "Own (P + D)", "Own settings", "g90")
    return Table("Layouts and goodput", headings, tuple(rows))


def _settings(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings) or "defaults"


def _attainment(title: str, points: Sequence[Point]) -> Table:
    """A row per contender, a column per rate."""
    factors = sorted({point.factor for point in points})
    rows = []
    for name in _contenders(points):
        here = {p.factor: p for p in points if p.contender == name}
        rows.append((name, *(_session_mean(here.get(factor)) for factor in factors)))
    return Table(title, ("Policy", *(f"{f:g} x r50" for f in factors)), tuple(rows))


def _details(title: str, points: Sequence[Point]) -> Table:
    rows = [
        (
            point.contender,
            *(str(estimate(shares(point, metric))) for metric in Metric),
            _times(point.ttft, 1),
            _times(point.itl, 1000),
            f"{point.local_share:.1%}",
            f"{point.history_moved_bytes / 1e9:.3g} / {point.increment_moved_bytes / 1e9:.3g}",
            f"{point.prefill_utilisation:.0%} / {point.decode_utilisation:.0%}",
            f"{point.refused_sessions:g} / {point.rebuilt_rounds:g}",
        )
        for point in points
        if point.factor == DETAIL_FACTOR
    ]
    headings = (
        "Policy",
        *(metric.value for metric in Metric),
        "TTFT mean / P50 / P95 / P99, s",
        "ITL, ms",
        "Local",
        "KV to P / to D, GB",
        "Busy P / D",
        "Refused / rebuilt",
    )
    return Table(title, headings, tuple(rows))


def _times(times: Times, scale: float) -> str:
    parts = (times.mean_s, times.p50_s, times.p95_s, times.p99_s)
    return " / ".join(f"{value * scale:.3g}" for value in parts)


def _contenders(points: Iterable[Point]) -> list[str]:
    return list(dict.fromkeys(point.contender for point in points))
