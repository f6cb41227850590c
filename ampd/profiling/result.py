"""From measured points to a profile: fitted to the grid, judged by the points held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from ampd.core.cost_model import CostModel, KvCost, Link
from ampd.core.errors import AmpdError, ErrorReason
from ampd.profiling.campaign import DECODE, KV, MIXED, PREFILL, as_sample, merged
from ampd.profiling.fit import FitReport, FunctionFit, KvSample, fit_cost_model, predicted_s
from ampd.profiling.journal import Journal, Point, Subject
from ampd.profiling.profile_file import Profile

LEAST_HELD_OUT: Final = 5
"""With fewer held-out points of a kind the errors are those of folds of the grid."""


def profile_of(
    journal: Journal,
    subject: Subject,
    *,
    link: Link,
    other_link: KvCost,
    kv_bytes_per_token: int,
    provenance: Mapping[str, str],
) -> Profile:
    """The profile of what the journal holds, its transfers having taken `link`; `other_link` is
    T_kv where none were measured.

    Raises ENGINE_FAILED when it holds no engine step.
    """
    points = merged(journal)
    grid = [point for point in points if not point.held_out]
    apart = [point for point in points if point.held_out]
    prefills = [as_sample(point) for point in grid if point.kind == PREFILL]
    # Decode steps are what a mixed one tends to as its chunk shrinks; prefills alone are left
    # out of T_mixed unless there is nothing else.
    steps = [as_sample(point) for point in grid if point.kind in (DECODE, MIXED)]
    transfers = _transfers(grid, link)
    if not prefills:
        raise AmpdError(ErrorReason.ENGINE_FAILED, "no engine step was measured")
    cost, report = fit_cost_model(steps or prefills, prefills=prefills, kv_samples=transfers)
    measured = cost.kv if transfers else other_link
    cost = replace(
        cost,
        kv=measured if link is Link.CROSS_HOST else other_link,
        kv_same_host=measured if link is Link.SAME_HOST and transfers else None,
    )
    kv = _judged(report.kv, cost, apart, KV, link)
    report = FitReport(
        prefill=_judged(report.prefill, cost, apart, PREFILL),
        decode=_judged(report.decode, cost, apart, DECODE),
        mixed=_judged(report.mixed, cost, apart, MIXED),
        kv=kv if link is Link.CROSS_HOST else FunctionFit(),
        kv_same_host=kv if link is Link.SAME_HOST else FunctionFit(),
    )
    return Profile(
        model=subject.model,
        device=subject.device,
        engine=subject.engine,
        tp=subject.tp,
        cost=cost,
        fit=report,
        samples=tuple(as_sample(point) for point in grid if point.kind != KV),
        held_out=tuple(as_sample(point) for point in apart if point.kind != KV),
        kv_samples=transfers,
        kv_held_out=_transfers(apart, link),
        kv_bytes_per_token=kv_bytes_per_token,
        provenance=dict(provenance),
    )


def _transfers(points: Sequence[Point], link: Link) -> tuple[KvSample, ...]:
    return tuple(
        KvSample(point.chunk_tokens, median(point.seconds), link)
        for point in points
        if point.kind == KV
    )


def _judged(
    fit: FunctionFit,
    cost: CostModel,
    points: Sequence[Point],
    kind: str,
    link: Link = Link.CROSS_HOST,
) -> FunctionFit:
    """The fit with its errors on the held-out points of its kind."""
    apart = [point for point in points if point.kind == kind]
    if len(apart) < LEAST_HELD_OUT:
        return fit
    errors = []
    for point in apart:
        predicted = (
            cost.t_kv(point.chunk_tokens, link)
            if kind == KV
            else predicted_s(cost, as_sample(point))
        )
        errors.append(abs(predicted / median(point.seconds) - 1))
    return replace(
        fit,
        held_out=len(apart),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
    )
