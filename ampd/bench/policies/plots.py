"""Plots of the policy benchmark. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ampd.bench.policies.compare import Metric, shares
from ampd.bench.policies.contenders import is_ours
from ampd.bench.policies.result import CellResult, Point, PolicyResult
from ampd.bench.policies.statistics import estimate
from ampd.bench.policies.study import SENSITIVITY, Layout, Part
from ampd.core.policies import AMPD_PAPER
from ampd.sim.report import KV_RATIO_EDGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS: Final = 4
PANEL_INCHES: Final = (3.6, 2.8)
DPI: Final = 80
"""Small files: they are committed."""
BREAKDOWN_FACTOR: Final = 1.0
"""The rate, in r50, of the plots that show one."""

_Draw = Callable[["Axes", CellResult], None]


def plot_all(result: PolicyResult, folder: Path) -> list[tuple[str, Path]]:
    """Draw what the result has points for; title and file of each.

    Raises ImportError without matplotlib, and OSError.
    """
    plots: list[tuple[str, Path]] = []
    for name, title, draw, part in _PLOTS:
        cells = [cell for cell in result.cells if cell.of(part)]
        if cells:
            path = folder / f"policies-{name}.png"
            _figure(title, cells, draw, path)
            plots.append((title, path))
    return plots


def _figure(title: str, cells: Sequence[CellResult], draw: _Draw, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(cells))
    rows = ceil(len(cells) / columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, cell in zip(panels.flat, cells, strict=False):
        axes.set_title(cell.name, fontsize=8)
        axes.tick_params(labelsize=7)
        draw(axes, cell)
    for axes in panels.flat[len(cells) :]:
        axes.axis("off")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    # No date or version inside: the same result draws the same file.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _attainment(layout: Layout) -> _Draw:
    def draw(axes: Axes, cell: CellResult) -> None:
        _lines(axes, cell.of(Part.GRID, layout))

    return draw


def _ablation(axes: Axes, cell: CellResult) -> None:
    _lines(axes, cell.of(Part.ABLATION))


def _lines(axes: Axes, points: Sequence[Point]) -> None:
    """Session-mean attainment against rate, with intervals."""
    for name in dict.fromkeys(point.contender for point in points):
        line = sorted((p for p in points if p.contender == name), key=lambda p: p.factor)
        found = [estimate(shares(p, Metric.SESSION_MEAN)) for p in line]
        axes.errorbar(
            [p.factor for p in line],
            [e.mean for e in found],
            yerr=[e.half or 0.0 for e in found],
            label=name,
            linewidth=2.2 if is_ours(name) else 1.0,
            marker="o",
            markersize=3,
        )
    axes.set_xlabel("rate / r50", fontsize=7)
    axes.set_ylim(-0.03, 1.03)


def _at_r50(cell: CellResult) -> list[Point]:
    points = cell.of(Part.GRID, Layout.OWN)
    nearest = min((p.factor for p in points), key=lambda f: abs(f - BREAKDOWN_FACTOR))
    return [point for point in points if point.factor == nearest]


def _ttft_parts(axes: Axes, cell: CellResult) -> None:
    points = _at_r50(cell)
    left = [0.0] * len(points)
    for label, widths in (
        ("queue", [point.queue_s for point in points]),
        ("read", [point.read_s for point in points]),
        ("compute", [point.compute_s for point in points]),
        ("return", [point.return_s for point in points]),
    ):
        axes.barh([p.contender for p in points], widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _limit(axes, cell.ttft_slo_s)
    axes.set_xlabel("s", fontsize=7)


def _itl(axes: Axes, cell: CellResult) -> None:
    points = _at_r50(cell)
    axes.barh(
        [p.contender for p in points],
        [p.itl.mean_s * 1000 for p in points],
        xerr=([0.0] * len(points), [max(0.0, p.itl.p99_s - p.itl.mean_s) * 1000 for p in points]),
    )
    _limit(axes, cell.itl_slo_s * 1000)
    axes.set_xlabel("ms", fontsize=7)


def _limit(axes: Axes, slo: float) -> None:
    """What is far beyond the SLO is cut off."""
    axes.axvline(slo, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, 2 * slo)


def _local_share(axes: Axes, cell: CellResult) -> None:
    points = cell.of(Part.GRID, Layout.OWN)
    for name in dict.fromkeys(point.contender for point in points):
        line = sorted((p for p in points if p.contender == name), key=lambda p: p.factor)
        axes.plot([p.factor for p in line], [p.local_share for p in line], label=name, marker="o")
    axes.set_xlabel("rate / r50", fontsize=7)
    axes.set_ylim(-0.03, 1.03)


def _kv_time(axes: Axes, cell: CellResult) -> None:
    counts = [0] * (len(KV_RATIO_EDGES) + 1)
    for point in cell.of(Part.GRID):
        if point.contender == AMPD_PAPER:
            counts = [a + b for a, b in zip(counts, point.kv_ratios, strict=True)]
    total = sum(counts) or 1
    labels = [f"<{edge:g}" for edge in KV_RATIO_EDGES] + [f"≥{KV_RATIO_EDGES[-1]:g}"]
    axes.bar(labels, [count / total for count in counts])
    axes.tick_params(axis="x", rotation=60)


def _sensitivity(axes: Axes, cell: CellResult) -> None:
    points = {p.contender: p for p in cell.of(Part.SENSITIVITY)}
    for setting, values in SENSITIVITY.items():
        found = [
            (index, estimate(points[f"{setting}={value:g}"].session_mean).mean)
            for index, value in enumerate(values)
            if f"{setting}={value:g}" in points
        ]
        label = f"{setting}: {', '.join(f'{value:g}' for value in values)}"
        axes.plot(*zip(*found, strict=True), label=label, marker="o")
    axes.set_xlabel("value, from the smallest", fontsize=7)
    axes.set_ylim(-0.03, 1.03)


def _robustness(axes: Axes, cell: CellResult) -> None:
    points = cell.of(Part.ROBUSTNESS, Layout.OWN)
    names = list(dict.fromkeys(point.contender for point in points))
    height = 0.8 / len(names)
    kinds = list(dict.fromkeys(point.disturbance for point in points))
    for number, name in enumerate(names):
        its = [p for p in points if p.contender == name]
        axes.barh(
            [kinds.index(p.disturbance) + number * height for p in its],
            [estimate(p.session_mean).mean for p in its],
            height=height,
            label=name,
        )
    axes.set_yticks([index + 0.4 for index in range(len(kinds))], kinds, fontsize=6)
    axes.set_xlim(0, 1)


_PLOTS: Final[tuple[tuple[str, str, _Draw, Part], ...]] = (
    (
        "attainment-balanced",
        "Session-mean attainment against rate, one layout",
        _attainment(Layout.BALANCED),
        Part.GRID,
    ),
    (
        "attainment-own",
        "Session-mean attainment against rate, own best layouts",
        _attainment(Layout.OWN),
        Part.GRID,
    ),
    ("ttft", "Parts of the mean TTFT at r50, own layouts", _ttft_parts, Part.GRID),
    ("itl", "Mean ITL at r50 (line: P99), own layouts", _itl, Part.GRID),
    ("local-share", "Share of local prefills, own layouts", _local_share, Part.GRID),
    ("kv-time", "KV time over compute time, ampd-paper's remote prefills", _kv_time, Part.GRID),
    ("ablation", "Ablation of ampd-paper", _ablation, Part.ABLATION),
    ("sensitivity", "ampd-paper by its settings, at r50", _sensitivity, Part.SENSITIVITY),
    ("robustness", "Disturbed, at r50, own layouts", _robustness, Part.ROBUSTNESS),
)
"""Name of the file, title, what draws a cell, and the points that it needs."""
