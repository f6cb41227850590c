"""A session as its home holds it, and a round while it runs: tokens, times, what it came to."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ampd.core import slo
from ampd.core.errors import AmpdError
from ampd.core.model import (
    Finished,
    KvHandle,
    PrefillStats,
    RoundEvent,
    RoundOrder,
    RoundTimings,
    RoundUsage,
)
from ampd.ports import GenerateDone, Tokens
from services.decode.tasks import ComputedPrefill


@dataclass(slots=True)
class ResidentSession:
    """A session that lives here: the truth of its tokens, and the pin on its KV."""

    session_id: str
    tokens: Tokens
    rounds: int
    """Rounds settled: an order for another round means that this copy is not the session's."""
    last_used_s: float
    kv: KvHandle | None = None
    """None: no KV is pinned (new, or evicted)."""
    round: RunningRound | None = None


@dataclass(slots=True)
class RunningRound:
    """A round in the making; `task` carries it out. `events` holds at most what a round has:
    its tokens, bounded by max_tokens, and a few more."""

    order: RoundOrder
    prompt: Tokens
    started_s: float
    task: asyncio.Task[None] | None = None
    events: asyncio.Queue[RoundEvent | Exception] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: AmpdError | None = None
    """Why another call ended this round; the task is cancelled with it."""
    output: Tokens = field(default_factory=lambda: array("I"))
    gaps_s: list[float] = field(default_factory=list)
    first_token_s: float | None = None
    last_token_s: float | None = None
    computed: ComputedPrefill | None = None
    """What a prefill worker computed; None: nothing (yet)."""
    taken: bool = False
    """Whether the engine here has the prompt's KV."""

    prefills_here: bool = False
    """Whether the home itself computes the prompt now: as ordered, or for want of others."""

    def count_tokens(self, token_ids: Sequence[int], now_s: float) -> float | None:
        """New output at `now_s`; the gap to the token before, if there was one.

        Tokens of one step arrive at once: no time lies between them.
        """
        gap_s = None
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            gap_s = now_s - self.last_token_s
            self.gaps_s.append(gap_s)
        self.gaps_s.extend([0.0] * (len(token_ids) - 1))
        self.last_token_s = now_s
        self.output.extend(token_ids)
        return gap_s

    def finished(self, stats: PrefillStats, done: GenerateDone) -> Finished:
        """The round's last event. `stats`: what the engine here did for the prompt."""
        timings = self._timings(stats)
        return Finished(
            finish_reason=done.finish_reason,
            stop_reason=done.stop_reason,
            usage=self._usage(stats, done),
            timings=timings,
            attained=slo.round_attains(self.order.slo, timings),
            history_tokens=len(self.prompt) + done.kept_output_tokens,
        )

    def _timings(self, stats: PrefillStats) -> RoundTimings:
        created_s = self.order.created_s
        first_s = self.first_token_s if self.first_token_s is not None else created_s
        last_s = self.last_token_s if self.last_token_s is not None else created_s
        common = RoundTimings(
            ttft_s=first_s - created_s,
            itl_mean_s=slo.mean_s(self.gaps_s),
            itl_p95_s=slo.p95_s(self.gaps_s),
            itl_max_s=slo.max_s(self.gaps_s),
            total_s=last_s - created_s,
        )
        if self.computed is None:
            waited_s = max(0.0, first_s - created_s - stats.compute_s)
            return replace(common, queue_s=waited_s, compute_s=stats.compute_s)
        report = self.computed.report
        return replace(
            common,
            queue_s=report.queue_s,
            read_s=report.stats.read_s,
            compute_s=report.stats.compute_s,
            return_s=stats.read_s,
        )

    def _usage(self, stats: PrefillStats, done: GenerateDone) -> RoundUsage:
        remote = self.computed.report.stats if self.computed is not None else PrefillStats()
        return RoundUsage(
            history_tokens=self.order.keep_history_tokens,
            increment_tokens=len(self.order.increment),
            output_tokens=done.output_tokens,
            kept_output_tokens=done.kept_output_tokens,
            prefill_computed_tokens=remote.computed_tokens,
            decode_computed_tokens=stats.computed_tokens,
            decode_cached_tokens=stats.cached_tokens,
            history_pulled_tokens=remote.pulled_tokens,
            history_pulled_bytes=remote.pulled_bytes,
            increment_pulled_tokens=stats.pulled_tokens,
            increment_pulled_bytes=stats.pulled_bytes,
        )
