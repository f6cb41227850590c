"""A session as its home holds it, and a round while it runs: tokens, times, what it came to."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from ampd.core import slo
from ampd.core.errors import AmpdError
from ampd.core.model import (
    Finished,
    KvHandle,
    PrefillStats,
    Rerouted,
    ResumedOutput,
    RoundEvent,
    RoundOrder,
    RoundTimings,
    RoundUsage,
    Route,
    SessionFacts,
    Slo,
    TokensOut,
)
from ampd.core.output import RoundOutput
from ampd.ports import GenerateDone, Tokens
from ampd.wire.replay import RoundPlaced
from services.decode.tasks import ComputedPrefill

SETTLED_REQUESTS: Final = 64
"""Requests remembered per session: clients repeat their last ones."""


@dataclass(frozen=True, slots=True)
class KeptRound:
    """What a round has said, kept for the request that ran it: it ended early (`finished` is
    None), or its coordinator may have died before it could settle it."""

    order: RoundOrder
    output: ResumedOutput
    placed: RoundPlaced
    finished: Finished | None
    until_s: float

    def is_of(self, order: RoundOrder) -> bool:
        """Whether `order` is for this round again."""
        mine = self.order
        return (
            mine.request_id == order.request_id
            and mine.round_index == order.round_index
            and mine.keep_history_tokens == order.keep_history_tokens
            and mine.increment == order.increment
        )


@dataclass(slots=True)
class ResidentSession:
    """A session that lives here: the truth of its tokens, and the pin on its KV."""

    session_id: str
    tokens: Tokens
    rounds: int
    """Rounds settled: an order for another round means that this copy is not the session's."""
    last_used_s: float
    facts: SessionFacts | None = None
    """As the last order told; with `slo` what it takes to publish the session again."""
    slo: Slo | None = None
    kv: KvHandle | None = None
    """None: no KV is pinned (new, or evicted)."""
    round: RunningRound | None = None
    kept: KeptRound | None = None
    """The last round, for the same request to go on with or to hear again."""
    settled: deque[str] = field(default_factory=lambda: deque(maxlen=SETTLED_REQUESTS))
    """The requests of the last rounds: none of them is run again."""
    accepted: bool = False
    """Whether a round was ever admitted here: before that the session is not at home here."""
    confirmed_rounds: int = 0
    """Rounds that the shared store is known to have."""
    doubtful: bool = False
    """Whether the store is likely to lack rounds that settled here: it was down, or an order
    came that did not know them."""
    store_life: str = ""
    """Which life of the store was there when the last round settled."""
    ttft_spare_s: float = 0.0
    """By how much the rounds that settled here have stayed within their TTFT SLO in all; negative:
    missed it."""
    moving: asyncio.Task[object] | None = None
    """What hands the session over, or takes it over; a round or a release cancels it."""

    @property
    def paused(self) -> bool:
        """Between two rounds, and at rest."""
        return self.round is None and self.moving is None


class RoundEvents:
    """What a round has to tell one listener, in order. Tokens that wait for it become one event:
    where this process is busy, a message costs more than the tokens in it."""

    def __init__(self) -> None:
        self._waiting: deque[RoundEvent | Exception] = deque()
        self._some = asyncio.Event()

    def put(self, event: RoundEvent | Exception) -> None:
        """An exception ends the round."""
        self._waiting.append(event)
        self._some.set()

    async def get(self) -> RoundEvent | Exception:
        """The next one, all tokens up to the next other event being one."""
        waiting = self._waiting
        while not waiting:
            self._some.clear()
            await self._some.wait()
        event = waiting.popleft()
        if not isinstance(event, TokensOut) or not waiting:
            return event
        token_ids, pieces = [*event.token_ids], [event.text]
        while waiting and isinstance(more := waiting[0], TokensOut):
            token_ids += more.token_ids
            pieces.append(more.text)
            waiting.popleft()
        return TokensOut(token_ids, "".join(pieces))


@dataclass(slots=True)
class RunningRound:
    """A round in the making; `task` carries it out. `events` holds at most what a round has:
    its tokens, bounded by max_tokens, and a few more."""

    order: RoundOrder
    prompt: Tokens
    """History and increment."""
    started_s: float
    output: RoundOutput
    """What an earlier attempt has said included."""
    from_kept: bool = False
    """Whether the output to go on with was kept here, not brought by the order."""
    task: asyncio.Task[None] | None = None
    events: RoundEvents = field(default_factory=RoundEvents)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: AmpdError | None = None
    """Why another call ended this round; the task is cancelled with it."""
    rerouted: Rerouted | None = None
    """Where the prefill has moved; None: as ordered."""
    history_rebuilt: bool = False
    decoding: bool = False
    """Whether it has said something new."""
    computed: ComputedPrefill | None = None
    """What a prefill worker computed; None: nothing (yet)."""
    taken: bool = False
    """Whether the engine here has the prompt's KV."""

    prefills_here: bool = False
    """Whether the home itself computes the prompt now: as ordered, because it was the first that
    could, or for want of others."""
    in_engine: bool = False
    """Whether the engine here has been asked for it."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before it decodes."""
        rebuilt = self.order.keep_history_tokens if self.history_rebuilt else 0
        return rebuilt + len(self.order.increment) + len(self.output.token_ids)

    def begin_here(self) -> None:
        """The home computes the prompt itself."""
        self.prefills_here = True

    @property
    def context(self) -> Tokens:
        """All tokens so far: history, increment, output."""
        return self.prompt + self.output.token_ids

    def placed(self, worker_id: str) -> RoundPlaced:
        """Where it was prefilled, for its own repetition; `worker_id`: this home."""
        order, moved = self.order, self.rerouted
        ordered = order.targets[0].worker_id if order.targets else None
        prefill_worker = ordered if moved is None else moved.prefill_worker
        return RoundPlaced(
            round_index=order.round_index,
            route=Route.LOCAL if prefill_worker is None else Route.REMOTE,
            reason=order.reason if moved is None else moved.reason,
            prefill_worker=prefill_worker,
            decode_worker=worker_id,
            history_tokens=order.keep_history_tokens,
            increment_tokens=len(order.increment),
            history_rebuilt=self.history_rebuilt,
        )

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
        created_s, output = self.order.created_s, self.output
        first_s = output.first_token_s if output.first_token_s is not None else created_s
        last_s = output.last_token_s if output.last_token_s is not None else created_s
        common = RoundTimings(
            ttft_s=first_s - created_s,
            itl_mean_s=slo.mean_s(output.gaps_s),
            itl_p95_s=slo.p95_s(output.gaps_s),
            itl_max_s=slo.max_s(output.gaps_s),
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
