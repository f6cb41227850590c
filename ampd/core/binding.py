"""Memory-aware binding of a session's first round to its home (spec 2, step 1).

Candidates are ordered by unreserved KV: capacity less the estimated footprint of every
session bound there. The estimate is soft, only the order depends on it. Workers that could not
admit the round now come last, running rounds being the only KV that cannot be evicted: there
the round would wait. The worker itself has the last word when it admits the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import BindDecision, BindReason, Role, WorkerView

RETRY_AFTER_S: Final = 1.0
"""When no home can take the session now: a worker that starts registers about that soon."""


@dataclass(frozen=True, slots=True)
class FootprintEstimate:
    """The mean KV (tokens) that sessions hold, over so many of them."""

    sessions: int = 0
    mean_tokens: float = 0.0

    def tokens(self, first_round_tokens: int) -> int:
        """What a new session will hold: the mean, at least its first round."""
        return max(first_round_tokens, round(self.mean_tokens))


def bind(
    workers: Iterable[WorkerView],
    *,
    prompt_tokens: int,
    max_tokens: int,
    footprint: FootprintEstimate,
) -> list[BindDecision]:
    """The decode workers that can take a session whose first round has `prompt_tokens`
    (history to rebuild included) and `max_tokens`, best first; never empty.

    Raises NO_DECODE_WORKER (none is live and not draining; with a retry hint), KV_TOO_SMALL (no
    worker's whole KV holds prompt + max_tokens).
    """
    live = [view for view in workers if view.info.role is Role.DECODE and not view.load.draining]
    if not live:
        raise AmpdError(
            ErrorReason.NO_DECODE_WORKER,
            "no live decode worker can take the session",
            retry_after_s=RETRY_AFTER_S,
        )
    round_tokens = prompt_tokens + max_tokens
    footprint_tokens = footprint.tokens(round_tokens)
    candidates = []
    for view in live:
        info, load = view.info, view.load
        needed = blocks(round_tokens, info.kv_block_tokens)
        if needed <= info.kv_capacity_tokens:
            waits = needed > info.kv_capacity_tokens - load.kv_running_tokens
            free = info.kv_capacity_tokens - load.kv_reserved_tokens
            decision = BindDecision(info.worker_id, BindReason.MOST_FREE_KV, free, footprint_tokens)
            candidates.append((waits, -free, info.worker_id, decision))
    if not candidates:
        largest = max(view.info.kv_capacity_tokens for view in live)
        raise AmpdError(
            ErrorReason.KV_TOO_SMALL,
            f"prompt {prompt_tokens} + max_tokens {max_tokens} exceed the largest KV memory "
            f"of {largest} tokens",
            metadata={"kv_capacity_tokens": str(largest)},
        )
    return [decision for *_, decision in sorted(candidates, key=lambda c: c[:3])]


def resident_footprint(workers: Iterable[WorkerView]) -> FootprintEstimate:
    """The mean KV that the sessions hold which live at these decode workers now: an estimate
    that a stateless coordinator has."""
    sessions = held_tokens = 0
    for view in workers:
        sessions += view.load.sessions
        held_tokens += view.load.kv_pinned_tokens + view.load.kv_running_tokens
    return FootprintEstimate(sessions, held_tokens / sessions if sessions else 0.0)


def blocks(tokens: int, block_tokens: int) -> int:
    """`tokens` rounded up to whole blocks, in tokens."""
    return -(-tokens // block_tokens) * block_tokens
