"""How a decode worker prefills beside its decodes under the policies of other systems: a fixed
budget of tokens for every step, as vLLM's chunked prefill has it.

All decodes take their token first; what is left of the budget goes to waiting prompts, the
first in order as much as it needs, then the next: only the last may be cut. No step looks at
the inter-token latency of the streams (`ampd.core.local_prefill` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ampd.core.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class LocalRule:
    """How a decode worker treats the prefills that it computes itself, and what it holds for
    sessions that pause."""

    budget_tokens: int | None = None
    """Tokens of a step, decodes included; None: ITL-safe chunks, one prompt at a time."""
    by_session: bool = False
    """Whether prompts go in the order in which their sessions arrived, not they themselves."""
    kv_ttl_s: float | None = None
    """How long a paused session's KV is safe from eviction (s); None: the worker's own lease."""


ITL_SAFE_RULE: Final = LocalRule()


def fill_budget(left_tokens: Iterable[int], spare_tokens: int) -> list[int]:
    """The chunks of the next step: of prompts with so many tokens left, in order, as many
    tokens of each as fit into `spare_tokens`. Shorter than the prompts where it ends."""
    chunks: list[int] = []
    for left in left_tokens:
        if spare_tokens <= 0:
            break
        chunks.append(min(left, spare_tokens))
        spare_tokens -= chunks[-1]
    return chunks


def joint_history_tokens(pieces: Sequence[tuple[int, int]]) -> int:
    """The history behind which one chunk of all `pieces`' tokens has as much attention to
    compute as the pieces have: (tokens, history tokens) of each, none of them empty. A cost model
    knows steps with one chunk only; short pieces without history are rounded up to 0."""
    tokens = sum(count for count, _ in pieces)
    pairs = sum(count * (history + count / 2) for count, history in pieces)
    return max(0, round(pairs / tokens - tokens / 2))


def fixed_prefill(
    cost: CostModel,
    *,
    history_tokens: int,
    increment_tokens: int,
    batch: int,
    context_tokens: int,
    budget_tokens: int,
) -> tuple[float, float]:
    """Predicted seconds of a whole prefill beside a batch (>= 1) that decodes, and of its
    longest step, which is what every stream sees. Each chunk is taken as one in the middle of
    the increment."""
    chunk = min(max(1, budget_tokens - batch), increment_tokens)
    middle = history_tokens + increment_tokens // 2
    step_s = cost.t_mixed(chunk, middle, batch, context_tokens)
    steps = -(-increment_tokens // chunk)
    return max(cost.t_pre(history_tokens, increment_tokens), steps * step_s), step_s
