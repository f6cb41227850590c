"""Plots of a profile: measured against fitted. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ampd.profiling.fit import FunctionFit, KvSample, predicted_s
from ampd.profiling.profile_file import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ampd.ports import StepSample

SIZE_INCHES: Final = (10.0, 9.0)
DPI: Final = 120

_Times = Sequence[tuple[float, float]]
"""(measured, fitted) in seconds."""


def plot_profile(profile: Profile, path: Path) -> None:
    """Draw measured against fitted seconds of every function, the held-out points apart.

    Raises ImportError without matplotlib, OSError, and ValueError for an ending that it does
    not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{profile.model} on {profile.device}, TP {profile.tp} ({profile.engine})")
    prefill, decode, mixed, kv = figure.subplots(2, 2).flat
    fit = profile.fit
    for axes, name, function, kind in (
        (prefill, "T_pre", fit.prefill, _is_prefill),
        (decode, "T_dec", fit.decode, _is_decode),
        (mixed, "T_mixed", fit.mixed, _is_mixed),
    ):
        seen = [_step(profile, s) for s in profile.samples if kind(s)]
        apart = [_step(profile, s) for s in profile.held_out if kind(s)]
        _draw(axes, name, function, seen, apart)
    transfers = fit.kv_same_host if fit.kv_same_host.samples else fit.kv
    moved, moved_apart = (_moves(profile, s) for s in (profile.kv_samples, profile.kv_held_out))
    _draw(kv, "T_kv", transfers, moved, moved_apart)
    figure.savefig(path, dpi=DPI)


def _is_prefill(step: StepSample) -> bool:
    return not step.batch


def _is_decode(step: StepSample) -> bool:
    return not step.chunk_tokens


def _is_mixed(step: StepSample) -> bool:
    return bool(step.batch and step.chunk_tokens)


def _step(profile: Profile, step: StepSample) -> tuple[float, float]:
    return step.seconds, predicted_s(profile.cost, step)


def _moves(profile: Profile, samples: Iterable[KvSample]) -> _Times:
    return [(s.seconds, profile.cost.t_kv(s.tokens, s.link)) for s in samples]


def _draw(axes: Axes, name: str, fit: FunctionFit, seen: _Times, apart: _Times) -> None:
    axes.set_title(name)
    axes.set_xlabel("measured, s")
    axes.set_ylabel("fitted, s")
    times = [second for pair in (*seen, *apart) for second in pair if second > 0]
    if not times:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = (min(times), max(times))
    axes.plot(ends, ends, color="0.7", linewidth=1, zorder=0)
    for pairs, label, marker in ((seen, "fitted to", "o"), (apart, "held out", "x")):
        if pairs:
            measured, fitted = zip(*pairs, strict=True)
            axes.scatter(measured, fitted, s=18, marker=marker, label=label)
    axes.set_title(
        f"{name}: error {fit.median_error:.1%} median, {fit.p95_error:.1%} P95", fontsize="medium"
    )
    axes.legend(loc="upper left")
