"""Fit a cost model to measured steps (spec 3): non-negative least squares on relative error.

Every coefficient is non-negative and every feature rises with its sizes, so a fit can be
neither negative nor falling. The size that matters most (increment, chunk, batch) is cut into
segments, each a feature with a slope of its own: a function may bend up (compute takes over
from memory) or down (all experts are loaded). Accuracy is reported on samples that the fit has
not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ampd.core.cost_model import (
    CostModel,
    DecodeCost,
    Hinges,
    KvCost,
    Link,
    MixedCost,
    PrefillCost,
)
from ampd.ports import StepSample

Array = NDArray[np.float64]

MIN_SAMPLES: Final = 3
"""With fewer samples of a kind its function is read off the mixed steps."""
MAX_HINGES: Final = 6
MIN_SAMPLES_PER_HINGE: Final = 4
HINGE_REACH: Final = 4.0
"""A bend needs sizes up to this many times its own behind it: the last slope extrapolates, and
must not rest on the noise of two neighbouring sizes."""
ROBUST_ROUNDS: Final = 5
ROBUST_ERRORS: Final = 2.0
"""A sample further off than this many median errors weighs less (Huber): a step that another
process disturbed says little of the engine."""
ROBUST_MIN_ERROR: Final = 0.01
"""Relative errors below this are no reason to weigh a sample less."""
FOLDS: Final = 5
"""When the error is measured, each fifth of the samples is held out in turn."""
MIN_HELD_OUT_SAMPLES: Final = 15
"""With fewer samples the error is that of the fit itself (`held_out` = 0)."""
NNLS_TOLERANCE: Final = 1e-10
NNLS_ROUNDS_PER_FEATURE: Final = 10


@dataclass(frozen=True, slots=True)
class KvSample:
    """One measured KV transfer, and the link that it took."""

    tokens: int
    seconds: float
    link: Link = Link.CROSS_HOST


@dataclass(frozen=True, slots=True)
class FunctionFit:
    """How well one function fits: relative errors, and the sizes it was fitted on.

    `held_out`: samples that the errors were measured on, each by a fit that had not seen it:
    points kept apart for it, else each fifth of the samples in turn. 0: too few, the errors are
    those of the fit itself. `smallest`,
    `largest`: range of the increment, chunk or transfer in tokens, or of the batch. Beyond it
    the last slope goes on.
    """

    samples: int = 0
    held_out: int = 0
    median_error: float = 0.0
    p95_error: float = 0.0
    smallest: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True)
class FitReport:
    """The fit of each function, T_kv by link; zero samples: it was taken from another one, or
    is not known."""

    prefill: FunctionFit = FunctionFit()
    decode: FunctionFit = FunctionFit()
    mixed: FunctionFit = FunctionFit()
    kv: FunctionFit = FunctionFit()
    kv_same_host: FunctionFit = FunctionFit()


def fit_cost_model(
    samples: Sequence[StepSample],
    *,
    prefills: Sequence[StepSample] = (),
    kv: KvCost | None = None,
    kv_samples: Sequence[KvSample] = (),
) -> tuple[CostModel, FitReport]:
    """The cost model of measured steps. T_mixed is fitted to all of them, T_dec to those that
    only decode, T_pre to `prefills`, each whole in however many steps, or without any to the
    steps that only prefill. T_kv is `kv` when given, else fitted.

    Raises ValueError when there are no samples with a positive time.
    """
    steps = [s for s in samples if s.seconds > 0 and s.chunk_tokens + s.batch > 0]
    if not steps:
        raise ValueError("no measured steps to fit a cost model to")
    mixed, mixed_fit = fit_mixed(steps)
    prefills = [s for s in prefills or steps if s.seconds > 0 and not s.batch]
    if len(prefills) >= MIN_SAMPLES:
        prefill, prefill_fit = fit_prefill(prefills)
    else:
        prefill = PrefillCost(
            mixed.base_s, mixed.token_s, 0.0, mixed.attention_pair_s, mixed.hinges
        )
        prefill_fit = FunctionFit()
    decodes = [s for s in steps if not s.chunk_tokens]
    if len(decodes) >= MIN_SAMPLES:
        decode, decode_fit = fit_decode(decodes)
    else:
        decode = DecodeCost(mixed.base_s, mixed.sequence_s, mixed.context_token_s)
        if mixed.batch_counts:
            slope = mixed.sequence_s + mixed.token_s
            decode = replace(decode, sequence_s=slope, hinges=mixed.hinges)
        decode_fit = FunctionFit()
    kv_fit = FunctionFit()
    if kv is None:
        kv = KvCost()
        if kv_samples:
            kv, kv_fit = fit_kv(kv_samples)
    return (
        CostModel(prefill, decode, mixed, kv),
        FitReport(prefill_fit, decode_fit, mixed_fit, kv_fit),
    )


def fit_prefill(
    samples: Sequence[StepSample], folds: int = FOLDS
) -> tuple[PrefillCost, FunctionFit]:
    """T_pre from prefill-only steps: their chunk is the increment."""
    chunk, history, _, _, seconds = _columns(samples)
    hinges = _hinge_places(chunk)
    features = [np.ones_like(chunk), history, chunk * (history + chunk / 2)]
    coefficients, fitted = _fit([*features, *_segments(chunk, hinges)], seconds, chunk, folds)
    base, history_token, pair, token, *slopes = coefficients
    return PrefillCost(base, token, history_token, pair, _hinges(token, hinges, slopes)), fitted


def fit_decode(samples: Sequence[StepSample], folds: int = FOLDS) -> tuple[DecodeCost, FunctionFit]:
    """T_dec from decode-only steps."""
    _, _, batch, context, seconds = _columns(samples)
    hinges = _hinge_places(batch)
    features = [np.ones_like(batch), context]
    coefficients, fitted = _fit([*features, *_segments(batch, hinges)], seconds, batch, folds)
    base, context_token, sequence, *slopes = coefficients
    return DecodeCost(base, sequence, context_token, _hinges(sequence, hinges, slopes)), fitted


def fit_mixed(samples: Sequence[StepSample], folds: int = FOLDS) -> tuple[MixedCost, FunctionFit]:
    """T_mixed from steps of any kind. Its line bends in the chunk, or in chunk and batch
    together: whichever meets samples better that it has not seen."""
    chunk, history, batch, context, seconds = _columns(samples)
    found = []
    for batch_counts in (False, True):
        tokens = chunk + batch if batch_counts else chunk
        hinges = _hinge_places(tokens)
        features = [np.ones_like(chunk), batch, context, chunk * (history + chunk / 2)]
        features += _segments(tokens, hinges)
        coefficients, fitted = _fit(features, seconds, chunk, folds)
        base, sequence, context_token, pair, token, *slopes = coefficients
        bends = _hinges(token, hinges, slopes)
        cost = MixedCost(base, token, sequence, context_token, pair, bends, batch_counts)
        found.append((cost, fitted))
    # Where both are exact, the simpler.
    return min(
        found, key=lambda one: (max(one[1].p95_error, ROBUST_MIN_ERROR), one[0].batch_counts)
    )


def fit_kv(samples: Sequence[KvSample]) -> tuple[KvCost, FunctionFit]:
    """T_kv (alpha-beta) from transfers that moved something."""
    moved = [s for s in samples if s.tokens > 0 and s.seconds > 0]
    if not moved:
        return KvCost(), FunctionFit()
    tokens = np.array([s.tokens for s in moved], dtype=np.float64)
    seconds = np.array([s.seconds for s in moved], dtype=np.float64)
    coefficients, fitted = _fit([np.ones_like(tokens), tokens], seconds, tokens)
    return KvCost(*coefficients), fitted


def predicted_s(cost: CostModel, step: StepSample) -> float:
    """What a cost model says of such a step: T_pre without decodes, T_dec without a chunk."""
    if not step.batch:
        return cost.t_pre(step.chunk_history_tokens, step.chunk_tokens)
    if not step.chunk_tokens:
        return cost.t_dec(step.batch, step.context_tokens)
    return cost.t_mixed(
        step.chunk_tokens, step.chunk_history_tokens, step.batch, step.context_tokens
    )


def nnls(matrix: Array, target: Array, start: Array | None = None) -> Array:
    """min |matrix x - target| over x >= 0 (Lawson and Hanson's active-set method), sooner from
    the solution `start` of a problem much like it."""
    count = matrix.shape[1]
    x = np.zeros(count) if start is None else start
    active = x > 0
    enters = not active.any()
    tolerance = NNLS_TOLERANCE * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(NNLS_ROUNDS_PER_FEATURE * count):
        if enters:
            gradient = np.where(active, -np.inf, matrix.T @ (target - matrix @ x))
            if active.all() or gradient.max() <= tolerance:
                break
            active[int(gradient.argmax())] = True
        enters = True
        while True:
            solution = np.zeros(count)
            solution[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            negative = active & (solution <= 0)
            if not negative.any():
                break
            # As far towards the solution as x stays non-negative; what is 0 there leaves.
            step = float((x[negative] / (x[negative] - solution[negative])).min())
            x = x + step * (solution - x)
            active &= x > NNLS_TOLERANCE * max(1.0, float(x.max()))
            x[~active] = 0.0
            if not active.any():
                solution = np.zeros(count)
                break
        x = solution
    return x


def _columns(samples: Sequence[StepSample]) -> tuple[Array, Array, Array, Array, Array]:
    rows = np.array(
        [
            (s.chunk_tokens, s.chunk_history_tokens, s.batch, s.context_tokens, s.seconds)
            for s in samples
        ],
        dtype=np.float64,
    )
    chunk, history, batch, context, seconds = rows.T
    return chunk, history, batch, context, seconds


def _fit(
    features: Sequence[Array], seconds: Array, sizes: Array, folds: int = FOLDS
) -> tuple[tuple[float, ...], FunctionFit]:
    """The coefficients over all samples, and the errors of fits without each part of them."""
    matrix = np.stack(features, axis=1)
    coefficients = _solve(matrix, seconds)
    count = len(seconds)
    predicted = matrix @ coefficients
    held_out = folds > 0 and count >= MIN_HELD_OUT_SAMPLES
    if held_out:
        # In order of time, so that every fold has its part of every size range.
        fold = np.empty(count, dtype=int)
        fold[np.argsort(seconds, kind="stable")] = np.arange(count) % folds
        for out in range(min(folds, count)):
            seen = fold != out
            predicted[~seen] = matrix[~seen] @ _solve(matrix[seen], seconds[seen])
    errors = np.abs(predicted - seconds) / seconds
    return tuple(coefficients.tolist()), FunctionFit(
        samples=count,
        held_out=count if held_out else 0,
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
        smallest=int(sizes.min()),
        largest=int(sizes.max()),
    )


def _solve(matrix: Array, seconds: Array) -> Array:
    """Least squares of the relative errors, in rounds that weigh outliers less and less."""
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    relative: Array = matrix / scale / seconds[:, None]
    weights = np.ones_like(seconds)
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(ROBUST_ROUNDS):
        coefficients = nnls(relative * weights[:, None], weights, coefficients)
        errors = np.abs(relative @ coefficients - 1)
        most = max(ROBUST_MIN_ERROR, ROBUST_ERRORS * float(np.median(errors)))
        if (errors <= most).all():
            break
        weights = np.sqrt(np.minimum(1.0, most / np.maximum(errors, most)))
    scaled: Array = coefficients / scale
    return scaled


def _hinge_places(sizes: Array) -> list[float]:
    """Where the line may bend: interior sizes at equal shares of the distinct ones."""
    distinct = np.unique(sizes)
    interior = distinct[1:][distinct[1:] * HINGE_REACH <= distinct.max(initial=0.0)]
    count = min(MAX_HINGES, len(sizes) // MIN_SAMPLES_PER_HINGE - 1, len(interior))
    if count <= 0:
        return []
    picks = ((np.arange(count) + 0.5) * len(interior) / count).astype(int)
    return [float(interior[pick]) for pick in picks]


def _segments(sizes: Array, places: Sequence[float]) -> list[Array]:
    """How much of a size lies before the first place, between two of them, behind the last."""
    edges = [0.0, *places, np.inf]
    return [np.clip(sizes - start, 0.0, end - start) for start, end in pairwise(edges)]


def _hinges(slope: float, places: Sequence[float], slopes: Sequence[float]) -> Hinges:
    """The bends of a chain of lines: `slope` is that of the first, `slopes` of the others."""
    hinges = []
    for at, wanted in zip(places, slopes, strict=True):
        change = wanted - slope
        if change:
            hinges.append((at, change))
            slope += change  # as the cost model sums it; rounding cannot make it negative
    return tuple(hinges)
