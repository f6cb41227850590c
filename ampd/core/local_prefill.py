"""How many prompt tokens the next step of a decode worker may prefill: the ITL-safe chunk.

Every running stream has a *bank*: the time its mean inter-token latency may still waste,
`itl_slo * (emitted - 1) - (now - first token)`. A step may take 0.97 of the ITL SLO plus the
bank; a stream in debt pays a quarter of it back per step. The chunk is the largest whose
predicted step keeps within that for every stream that can still be saved.

Prefill is never starved for ever: with a stream that would forbid even the smallest chunk for
more than SAVE_HORIZON_STEPS pure decode steps its SLO cannot be had together with any
prefill, so it leaves the minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ampd.core.cost_model import CostModel
from ampd.core.model import ItlStatistic

TARGET: Final = 0.97
"""Share of the ITL SLO that a step aims at: on vLLM on a CPU every stream kept its SLO with it."""
DEBT_SHARE: Final = 0.25
"""Share of a negative bank that the next step pays back."""
MAX_STEP_SLOS: Final = 2.0
"""No step is longer than this many ITL SLOs, however large the banks."""
MIN_CHUNK_TOKENS: Final = 16
"""A smaller chunk costs more than it brings: the step decodes only."""
SAVE_HORIZON_STEPS: Final = 32
"""Pure decode steps for which one stream may hold back all prefill."""
LOST_STEP_DECODES: Final = 4.0
"""With none but lost streams a step takes at most this many pure decode steps: they miss
their SLO anyway, but should not stand still for seconds."""
CALIBRATION_WEIGHT: Final = 0.05
"""Weight of one measured step in the running mean."""
CALIBRATION_STEP: Final = 2.0
"""One measurement counts as at most this factor off: an outlier is not a trend."""
CALIBRATION_MAX: Final = 10.0
"""Calibrations stay between 1/10 and 10."""


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """A decoding stream: tokens emitted, the instant of the first one, its ITL SLO (s)."""

    emitted_tokens: int
    first_token_s: float
    itl_slo_s: float
    itl_statistic: ItlStatistic = ItlStatistic.MEAN
    """P95 and MAX have no bank: every single step counts."""


def chunk_tokens(
    *,
    cost: CostModel,
    calibration: float,
    now_s: float,
    streams: Sequence[StreamProgress],
    context_tokens: int,
    chunk_history_tokens: int,
    max_chunk_tokens: int,
) -> int:
    """Prompt tokens to prefill in the next step; 0: a pure decode step.

    `streams` decode in the step, `context_tokens` being their contexts in all;
    `chunk_history_tokens` is the KV before the chunk; `calibration` scales the cost model's
    predictions (see `calibrate`). At most `max_chunk_tokens` (>= 1), which may be what is
    left of the prompt: a rest below MIN_CHUNK_TOKENS is prefilled like any other chunk.
    """
    if not streams:
        return max_chunk_tokens
    batch = len(streams)
    smallest = min(MIN_CHUNK_TOKENS, max_chunk_tokens)
    smallest_s = calibration * cost.t_mixed(smallest, chunk_history_tokens, batch, context_tokens)
    decode_s = calibration * cost.t_mixed(0, chunk_history_tokens, batch, context_tokens)
    limit_s = inf
    for stream in streams:
        limit_s = min(limit_s, _stream_limit_s(stream, now_s, smallest_s, decode_s))
    if limit_s == inf:
        limit_s = max(
            LOST_STEP_DECODES * decode_s,
            MAX_STEP_SLOS * min(stream.itl_slo_s for stream in streams),
            smallest_s,
        )
    if smallest_s > limit_s:
        return 0
    chunk = cost.mixed_chunk(
        limit_s / calibration, chunk_history_tokens, batch, context_tokens, max_chunk_tokens
    )
    return max(chunk, smallest)


def local_prefill_s(
    cost: CostModel,
    *,
    history_tokens: int,
    increment_tokens: int,
    batch: int,
    context_tokens: int,
    itl_slo_s: float,
) -> float:
    """Predicted seconds of a whole prefill in ITL-safe chunks beside a batch that decodes, each
    chunk taken as one in the middle of the increment. Without a batch: `t_pre`."""
    alone_s = cost.t_pre(history_tokens, increment_tokens)
    if not batch:
        return alone_s
    middle = history_tokens + increment_tokens // 2
    limit_s = TARGET * itl_slo_s
    chunk = cost.mixed_chunk(limit_s, middle, batch, context_tokens, increment_tokens)
    chunk = min(max(MIN_CHUNK_TOKENS, chunk), increment_tokens)
    steps = -(-increment_tokens // chunk)
    return max(alone_s, steps * cost.t_mixed(chunk, middle, batch, context_tokens))


def calibrate(calibration: float, predicted_s: float, measured_s: float) -> float:
    """The running mean of measured over predicted, one step later.

    `predicted_s` is the cost model's own prediction, not yet calibrated. A prediction of 0
    teaches nothing.
    """
    if predicted_s <= 0:
        return calibration
    ratio = measured_s / (predicted_s * calibration)
    ratio = min(CALIBRATION_STEP, max(1 / CALIBRATION_STEP, ratio))
    calibration *= 1 + CALIBRATION_WEIGHT * (ratio - 1)
    return min(CALIBRATION_MAX, max(1 / CALIBRATION_MAX, calibration))


def _stream_limit_s(
    stream: StreamProgress, now_s: float, smallest_s: float, decode_s: float
) -> float:
    """The longest next step that this stream allows; infinite when it cannot be saved.

    `smallest_s`, `decode_s`: the step with the smallest chunk, and with none.
    """
    slo_s = stream.itl_slo_s
    target_s = TARGET * slo_s
    if stream.itl_statistic is not ItlStatistic.MEAN:
        return target_s if smallest_s <= target_s else inf
    bank_s = slo_s * (stream.emitted_tokens - 1) - (now_s - stream.first_token_s)
    # The bank at which the smallest chunk fits, and what a pure decode step adds to the bank.
    excess_s = smallest_s - target_s
    needed_s = excess_s if excess_s > 0 else excess_s / DEBT_SHARE
    if bank_s < needed_s and needed_s - bank_s > SAVE_HORIZON_STEPS * (slo_s - decode_s):
        return inf
    # The cap never forbids the smallest chunk: a bank that can pay for it would only grow.
    cap_s = max(MAX_STEP_SLOS * slo_s, smallest_s)
    return min(cap_s, target_s + (bank_s if bank_s >= 0 else bank_s * DEBT_SHARE))
