"""Who prefills in a step (see `scheduler.py`): a pure function over the candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampd.core.fixed_chunks import fill_budget
from ampd.core.local_prefill import MIN_CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Prefill:
    """A request whose prompt is not computed, and whose KV pull (if any) is over."""

    request_id: str
    order: tuple[float, int]
    """Prefills that have not begun are computed in this order."""
    left_tokens: int
    """Prompt tokens to compute."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who may compute how much."""

    admitted: frozenset[str]
    """Waiting requests that may compute in this step."""
    held: frozenset[str]
    """Running prefills that get nothing in this step."""
    prefill_tokens: int
    """Prompt tokens of the step, all requests together."""
    cap_tokens: int
    """At most this many of one request."""


def plan_step(
    running: Sequence[Prefill],
    ready: Sequence[Prefill],
    *,
    entrant_tokens: int,
    chunk_tokens: Callable[[Prefill], int],
    budget_tokens: int | None = None,
) -> StepPlan:
    """Entrants (at most `entrant_tokens` left to compute) all go, and of the others the first
    by order: it gets `chunk_tokens(it)`, less what the entrants take; 0 of it holds it. With
    `budget_tokens`, prompt tokens that the step may compute, the first of the others share what
    the entrants leave of it instead.

    A prefill that has begun goes before one that waits. With `entrant_tokens` 0 there are no
    entrants: strictly one prefill at a time.
    """
    entrants = [p for p in ready if p.left_tokens <= entrant_tokens]
    ending = [p for p in running if p.left_tokens <= entrant_tokens]
    entrant_sum = sum(p.left_tokens for p in (*entrants, *ending))
    admitted = frozenset(p.request_id for p in entrants)
    long_running = sorted(
        (p for p in running if p.left_tokens > entrant_tokens), key=lambda p: p.order
    )
    long_ready = [p for p in ready if p.left_tokens > entrant_tokens]
    queue = [*long_running, *sorted(long_ready, key=lambda p: p.order)]
    if budget_tokens is not None:
        chunks = fill_budget((p.left_tokens for p in queue), budget_tokens - entrant_sum)
    elif queue:
        chunk = min(chunk_tokens(queue[0]), queue[0].left_tokens)
        # The entrants' tokens are part of the step's time.
        chunk = max(chunk - entrant_sum, min(chunk, MIN_CHUNK_TOKENS))
        chunks = [chunk] if chunk else []
    else:
        chunks = []
    going = {p.request_id for p in queue[: len(chunks)]}
    return StepPlan(
        admitted.union(p.request_id for p in long_ready if p.request_id in going),
        frozenset(p.request_id for p in long_running if p.request_id not in going),
        sum(chunks) + entrant_sum,
        max(*chunks, entrant_tokens, 1),
    )
