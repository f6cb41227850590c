"""The result as it is kept and committed: per series the mean over seeds, attainment of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ampd.bench.policies.cells import Cell
from ampd.bench.policies.contenders import Settings
from ampd.bench.policies.runs import Outcome
from ampd.bench.policies.study import Layout, Part, Place, Scope, Series, Study
from ampd.bench.provenance import Provenance
from ampd.sim.report import Distribution
from ampd.sim.workload import open_workload

DIGITS: Final = 5
"""Significant digits of what is kept."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, each the mean over the seeds' runs."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """A contender at one rate. Attainments (0..1): one per seed, in the order of the scope; all
    else is the mean over the seeds."""

    part: Part
    contender: str
    layout: Layout
    disturbance: str
    factor: float
    """The rate in r50."""
    rate: float
    """Sessions a second."""
    prefill: int
    decode: int
    settings: Settings
    round: tuple[float, ...]
    session_mean: tuple[float, ...]
    session_strict: tuple[float, ...]
    ttft: Times
    itl: Times
    queue_s: float
    read_s: float
    compute_s: float
    return_s: float
    local_share: float
    history_moved_bytes: float
    increment_moved_bytes: float
    kv_ratios: tuple[int, ...]
    """Summed over the seeds; see `ampd.sim.report.kv_ratios`."""
    sessions: float
    """That counted."""
    refused_sessions: float
    rebuilt_rounds: float
    prefill_utilisation: float
    decode_utilisation: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell. Times in seconds, rates in sessions a second."""

    name: str
    profile: str
    workers: int
    warm_up_s: float
    end_s: float
    ttft_slo_s: float
    itl_slo_s: float
    r50: float
    r50_prefill: int
    places: tuple[Place, ...]
    points: tuple[Point, ...]

    def of(self, part: Part, layout: Layout | None = None) -> tuple[Point, ...]:
        """The points of a part, and of a layout."""
        return tuple(p for p in self.points if p.part is part and layout in (None, p.layout))


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One run of the benchmark."""

    provenance: Provenance
    code: str
    """Fingerprint of the deciding code."""
    scope: Scope
    runs: int
    """Simulations behind it, those known from before included."""
    rounds: int
    """Simulated in this call, in `simulated_s` seconds of processes."""
    simulated_s: float
    clipped_rounds: int
    """Of the recorded agent sessions: rounds that were cut to the longest context."""
    cells: tuple[CellResult, ...]


def cell_result(found: Study) -> CellResult:
    """What is kept of a study."""
    cell: Cell = found.cell
    slo = open_workload(cell.workload).slo
    return CellResult(
        name=cell.name,
        profile=cell.profile,
        workers=cell.workers,
        warm_up_s=found.span.warm_up_s,
        end_s=found.span.end_s,
        ttft_slo_s=slo.ttft_s,
        itl_slo_s=slo.itl_s,
        r50=found.r50,
        r50_prefill=found.r50_prefill,
        places=found.places,
        points=tuple(_point(series) for series in found.series),
    )


def _point(series: Series) -> Point:
    outcomes, run = series.outcomes, series.run

    def mean(value: Callable[[Outcome], float]) -> float:
        return _rounded(sum(value(outcome) for outcome in outcomes) / len(outcomes))

    def each(value: Callable[[Outcome], float]) -> tuple[float, ...]:
        return tuple(_rounded(value(outcome)) for outcome in outcomes)

    return Point(
        part=series.part,
        contender=series.contender,
        layout=series.layout,
        disturbance=series.disturbance,
        factor=series.factor,
        rate=run.rate,
        prefill=run.prefill,
        decode=run.decode,
        settings=run.settings,
        round=each(lambda o: o.attainment.round),
        session_mean=each(lambda o: o.attainment.session_mean),
        session_strict=each(lambda o: o.attainment.session_strict),
        ttft=_times([outcome.ttft for outcome in outcomes]),
        itl=_times([outcome.itl for outcome in outcomes]),
        queue_s=mean(lambda o: o.queue_s),
        read_s=mean(lambda o: o.read_s),
        compute_s=mean(lambda o: o.compute_s),
        return_s=mean(lambda o: o.return_s),
        local_share=mean(lambda o: o.local_share),
        history_moved_bytes=mean(lambda o: o.history_moved_bytes),
        increment_moved_bytes=mean(lambda o: o.increment_moved_bytes),
        kv_ratios=tuple(map(sum, zip(*(o.kv_ratios for o in outcomes), strict=True))),
        sessions=mean(lambda o: o.attainment.sessions),
        refused_sessions=mean(lambda o: o.refused_sessions),
        rebuilt_rounds=mean(lambda o: o.rebuilt_rounds),
        prefill_utilisation=mean(lambda o: o.prefill_utilisation),
        decode_utilisation=mean(lambda o: o.decode_utilisation),
    )


def _times(times: Sequence[Distribution]) -> Times:
    def mean(value: Callable[[Distribution], float]) -> float:
        return _rounded(sum(value(one) for one in times) / len(times))

    return Times(
        mean(lambda one: one.mean_s),
        mean(lambda one: one.p50_s),
        mean(lambda one: one.p95_s),
        mean(lambda one: one.p99_s),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
