"""Moving idle sessions between homes, and how long a drain takes (spec 2.7, 3 and 7).

A session goes with its KV where reading that costs the next home less time than computing it;
otherwise it goes with its tokens alone, and its next round computes the KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ampd.core.cost_model import CostModel, link_between
from ampd.core.model import WorkerInfo


class MoveReason(StrEnum):
    """Why a session moves with its KV, or without."""

    READ_CHEAPER = "read_cheaper"
    COMPUTE_CHEAPER = "compute_cheaper"
    NO_KV = "no_kv"
    """Its home holds none, or KV that the next home's engine could not use."""


@dataclass(frozen=True, slots=True)
class MoveDecision:
    """How a session goes to its next home, with the times that were compared, in seconds."""

    worker_id: str
    reason: MoveReason
    kv_tokens: int
    """History whose KV is moved; 0: none."""
    read_s: float
    """Predicted: reading the KV there, and computing what it lacks."""
    compute_s: float
    """Predicted: computing the whole history there."""


def decide_move(
    source: WorkerInfo, target: WorkerInfo, *, history_tokens: int, kv_tokens: int
) -> MoveDecision:
    """Whether the KV of the first `kv_tokens` of a session's history goes along from its home
    `source` to `target`. A tie is for reading: it leaves the target's time to its streams."""
    cost = target.cost or CostModel()
    compute_s = cost.t_pre(0, history_tokens)
    if not kv_tokens or not _same_layout(source, target):
        return MoveDecision(target.worker_id, MoveReason.NO_KV, 0, 0.0, compute_s)
    missing = history_tokens - kv_tokens
    link = link_between(source.host, target.host)
    read_s = cost.t_kv(kv_tokens, link) + (cost.t_pre(kv_tokens, missing) if missing else 0.0)
    if read_s <= compute_s:
        return MoveDecision(target.worker_id, MoveReason.READ_CHEAPER, kv_tokens, read_s, compute_s)
    return MoveDecision(target.worker_id, MoveReason.COMPUTE_CHEAPER, 0, read_s, compute_s)


def _same_layout(source: WorkerInfo, target: WorkerInfo) -> bool:
    """Whether KV of one is KV of the other as it lies."""
    return (source.model, source.engine, source.kv_block_tokens, source.kv_bytes_per_token) == (
        target.model,
        target.engine,
        target.kv_block_tokens,
        target.kv_bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class RemainingRound:
    """What a running round may still take: its prefill if it has said nothing yet, and its
    tokens at the most."""

    history_tokens: int
    increment_tokens: int
    """To prefill; 0: it decodes."""
    output_tokens: int
    context_tokens: int


def drain_estimate_s(
    cost: CostModel,
    rounds: Iterable[RemainingRound],
    session_tokens: Iterable[int],
    *,
    concurrent_moves: int,
) -> float:
    """Seconds until the rounds have run out and every session has been moved, those of the
    rounds too: an upper estimate, since rounds may end early and moves need not read KV."""
    rounds = tuple(rounds)
    context_tokens = sum(r.context_tokens for r in rounds)
    step_s = cost.t_dec(len(rounds), context_tokens) if rounds else 0.0
    rest_s = max(
        (
            (cost.t_pre(r.history_tokens, r.increment_tokens) if r.increment_tokens else 0.0)
            + r.output_tokens * step_s
            for r in rounds
        ),
        default=0.0,
    )
    return rest_s + sum(map(cost.t_kv, session_tokens)) / concurrent_moves
