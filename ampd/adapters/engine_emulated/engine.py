"""The front of an emulated engine: the `Engine` port."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Final, cast

import numpy as np

from ampd.adapters.engine_emulated import handles, sampling
from ampd.adapters.engine_emulated.blocks import BlockStore, extend_hashes
from ampd.adapters.engine_emulated.handles import Loan, Payload
from ampd.adapters.engine_emulated.output import Output
from ampd.adapters.engine_emulated.pins import MAX_PINS, Pin, PinTable
from ampd.adapters.engine_emulated.pulls import Puller
from ampd.adapters.engine_emulated.requests import Decoding, Request
from ampd.adapters.engine_emulated.settings import EmulatedSettings
from ampd.adapters.engine_emulated.steps import Steps
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import KvHandle
from ampd.ports import (
    Clock,
    EngineEvent,
    EngineInfo,
    EngineStats,
    GenerateDone,
    GenerateRequest,
    KvTransport,
    PrefillRequest,
    PrefillResult,
    StepSample,
    Tokens,
)

ENGINE: Final = "emulated 1"
MAX_REQUESTS: Final = 4096
"""Requests of one engine that have not ended; more are refused (QUEUE_FULL)."""
STUCK_S: Final = 1.0
"""How long the only requests may wait for memory that nobody is about to free."""


class EmulatedEngine:
    """`ampd.ports.Engine` without a model. It lives on the event loop of its callers, has no
    thread, and does nothing while there is nothing to do.

    The transport is its own: `close` closes it.
    """

    def __init__(
        self,
        settings: EmulatedSettings,
        *,
        worker_id: str,
        incarnation: int,
        transport: KvTransport,
        clock: Clock = time.monotonic,
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._transport = transport
        self._clock = clock
        self._store = BlockStore(
            blocks=settings.kv_capacity_tokens // settings.block_tokens,
            block_tokens=settings.block_tokens,
            token_bytes=settings.stored_bytes_per_token,
            positions=settings.max_model_tokens,
        )
        self._info = EngineInfo(
            engine=ENGINE,
            model=settings.model,
            block_tokens=settings.block_tokens,
            kv_capacity_tokens=settings.kv_capacity_tokens,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            max_model_tokens=settings.max_model_tokens,
            vocab_size=settings.vocab_size,
        )
        transport.register(self._store.memory)
        transport.listen(self._hear)
        self._locator = transport.locator
        self._pins = PinTable(self._store, clock, self._serve)
        self._steps = Steps(settings, self._store, clock, self._finish, self._fail)
        self._puller = Puller(settings, self._store, transport, clock)
        self._requests: dict[Request, None] = {}
        """All that have not ended."""
        self._admitted = 0
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._arrivals = 0
        self._failure: AmpdError | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._tail_timer: asyncio.TimerHandle | None = None

    @property
    def info(self) -> EngineInfo:
        """Fixed facts of the engine."""
        return self._info

    # --- requests -------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """See the port."""
        self._check_tokens(request.tokens, len(request.tokens))
        loan = self._loan(request.tokens, request.history, "history")
        job = self._request(array("I", request.tokens), 0, None)
        try:
            await self._bring_in(job, loan, request.history)
            return cast("PrefillResult", await job.mailbox.next())
        finally:
            self._leave(job)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        """See the port."""
        tokens = array("I", request.tokens)
        self._check_tokens(tokens, len(tokens) + len(request.output))
        sampling.check(request.sampling, self._settings.vocab_size)
        output = Output(
            request.sampling,
            context_left_tokens=self._settings.max_model_tokens - len(tokens),
            text_chars=request.text_chars,
        )
        if request.output and max(request.output) >= self._settings.vocab_size:
            raise invalid_field("output", f"token ids must be below {self._settings.vocab_size}")
        for token_id in request.output:
            output.add(token_id)
        tokens.extend(request.output)
        loan = self._loan(tokens, request.kv, "kv")
        own_seed = (self._settings.sampling_salt << 32) + self._arrivals
        chooser = sampling.Chooser(request.sampling, self._settings.vocab_size, own_seed)
        job = self._request(
            tokens,
            request.sampling.max_tokens - len(request.output),
            Decoding(output, chooser, request.slo),
        )
        job.own_output_tokens = len(request.output)
        job.session_began_s = request.session_began_s
        try:
            await self._bring_in(job, loan, request.kv)
            while not job.mailbox.ended:
                yield cast("EngineEvent", await job.mailbox.next())
        finally:
            self._leave(job)

    def _check_tokens(self, tokens: Tokens, length: int) -> None:
        """The prompt, and its length with the output that came along."""
        info = self._info
        if not tokens:
            raise invalid_field("tokens", "must not be empty")
        if len(tokens) >= info.max_model_tokens or length > info.max_model_tokens:
            raise AmpdError(
                ErrorReason.CONTEXT_TOO_LONG,
                f"{length} tokens leave no room in a context of {info.max_model_tokens}",
            )
        if np.frombuffer(tokens, np.uint32).max() >= info.vocab_size:
            raise invalid_field("tokens", f"token ids must be below {info.vocab_size}")
        if length + 1 > info.kv_capacity_tokens:
            raise AmpdError(
                ErrorReason.KV_TOO_SMALL,
                f"{length} tokens do not fit a KV memory of {info.kv_capacity_tokens}",
            )

    def _loan(self, tokens: Tokens, handle: KvHandle | None, field: str) -> Loan | None:
        if handle is None:
            return None
        return handles.loan_of(
            handle,
            tokens,
            field,
            block_tokens=self._settings.block_tokens,
            token_bytes=self._settings.stored_bytes_per_token,
        )

    def _request(self, tokens: Tokens, more_tokens: int, decoding: Decoding | None) -> Request:
        if self._failure is not None:
            raise self._failure
        if len(self._requests) >= MAX_REQUESTS:
            raise AmpdError(ErrorReason.QUEUE_FULL, "the engine has too many requests")
        if len(self._pins) >= MAX_PINS:
            raise AmpdError(ErrorReason.QUEUE_FULL, "the engine holds too many pins")
        self._arrivals += 1
        block = self._settings.block_tokens
        most_tokens = min(len(tokens) + max(0, more_tokens), self._settings.max_model_tokens)
        job = Request(
            turn=self._arrivals,
            tokens=tokens,
            most_blocks=min(-(-most_tokens // block), self._store.blocks),
            decoding=decoding,
            hashes=[],
            prompt_tokens=len(tokens),
        )
        extend_hashes(job.hashes, tokens, block)
        self._requests[job] = None
        return job

    async def _bring_in(self, job: Request, loan: Loan | None, handle: KvHandle | None) -> None:
        """Memory, the KV of peers, and a place in the steps."""
        try:
            await self._admit(job)
            if loan is not None and handle is not None:
                await self._puller.pull(job, loan, handle.tokens)
        finally:
            if loan is not None:
                # Read, not needed, or given up: its owner need not keep it for us.
                await self._transport.tell(loan.locator, _told(loan.loan_id))
        if self._failure is not None:
            raise self._failure
        self._steps.add(job)

    # --- memory ---------------------------------------------------------------------------

    async def _admit(self, job: Request) -> None:
        """Wait for memory, in order of arrival. AmpdError KV_EXHAUSTED when none comes."""
        self._expire()
        if not self._waiting and self._take_memory(job):
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting[job] = place
        while True:
            await asyncio.wait((place,), timeout=STUCK_S)
            if not place.done():
                self._expire()
                self._admit_waiting()
            if place.done():
                place.result()
                return
            if not self._admitted:
                raise AmpdError(ErrorReason.KV_EXHAUSTED, "no KV memory is free", retry_after_s=1.0)

    def _take_memory(self, job: Request) -> bool:
        """Give it its cached blocks and new ones, if there are enough."""
        if self._admitted >= self._settings.max_running_requests:
            return False
        store, block = self._store, self._settings.block_tokens
        # The last token is computed in any case.
        found = store.find(job.hashes[: (job.prompt_tokens - 1) // block])
        prompt_blocks = -(-job.prompt_tokens // block)
        # Alone it may try with less than it may need: nobody else would make room.
        wanted = job.most_blocks if self._admitted else prompt_blocks
        free = store.free_blocks - self._steps.promised_blocks - store.count_free(found)
        if wanted - len(found) > free:
            return False
        store.hold(found)
        job.blocks = found + store.take(prompt_blocks - len(found))
        job.places = np.zeros(max(job.most_blocks, prompt_blocks), np.intp)
        job.places[:prompt_blocks] = job.blocks
        job.promised_blocks = max(0, job.most_blocks - prompt_blocks)
        job.cached_blocks = len(found)
        job.kv_tokens = job.cached_tokens = len(found) * block
        job.admitted = True
        self._steps.promised_blocks += job.promised_blocks
        self._admitted += 1
        return True

    def _give_memory_back(self, job: Request) -> None:
        if not job.admitted:
            return
        job.admitted = False
        self._steps.promised_blocks -= job.promised_blocks
        self._admitted -= 1
        self._store.drop(job.blocks)

    def _admit_waiting(self) -> None:
        """Memory may have become free: those who wait are next."""
        while self._waiting:
            job, place = next(iter(self._waiting.items()))
            if not self._take_memory(job):
                return
            del self._waiting[job]
            place.set_result(None)

    def _expire(self) -> None:
        if self._pins.expire():
            self._admit_waiting()

    # --- ends -----------------------------------------------------------------------------

    def _finish(self, job: Request) -> None:
        """The request has come to its end: its KV becomes a pin."""
        settings, decoding = self._settings, job.decoding
        if decoding is None:
            pin = self._pin(job, job.kv_tokens, settings.result_lease_s, release_on_read=True)
            try:
                job.mailbox.put(
                    PrefillResult(self._lend(pin, len(pin.tokens)), job.prefill_stats())
                )
            except AmpdError as error:
                self._pins.release(pin)
                job.mailbox.put(error)
        else:
            output = decoding.output
            kept = job.prompt_tokens - job.own_output_tokens + output.kept_tokens
            # The last token has no KV.
            kv_tokens = min(kept, len(job.tokens) - 1)
            pin = self._pin(job, kv_tokens, settings.kv_lease_s, release_on_read=False)
            assert output.finish_reason is not None  # noqa: S101 - that is why it ends
            job.mailbox.put(
                GenerateDone(
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    output_tokens=len(job.tokens) - job.prompt_tokens + job.own_output_tokens,
                    kept_output_tokens=output.kept_tokens,
                    kv=self._handle(pin, kv_tokens, None),
                )
            )
        self._give_memory_back(job)
        self._admit_waiting()

    def _pin(self, job: Request, tokens: int, lease_s: float, *, release_on_read: bool) -> Pin:
        blocks = job.blocks[: -(-tokens // self._settings.block_tokens)]
        job.pin = self._pins.add(
            job.tokens[:tokens], blocks, lease_s, release_on_read=release_on_read
        )
        return job.pin

    def _leave(self, job: Request) -> None:
        """Nobody waits for the request any more: free what it holds, but for a result that its
        reader has taken."""
        del self._requests[job]
        self._waiting.pop(job, None)
        self._steps.remove(job)
        self._give_memory_back(job)
        if job.pin is not None and not job.mailbox.ended:
            self._pins.release(job.pin)
        self._admit_waiting()

    def _fail(self, failure: AmpdError) -> None:
        """The engine is no more: all requests end."""
        self._failure = failure
        for job in self._requests:
            job.mailbox.put(failure)
        for place in self._waiting.values():
            place.set_exception(failure)
        self._waiting.clear()

    # --- handles --------------------------------------------------------------------------

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        """See the port. One loan per pin: lending again ends the loan before."""
        if not 0 < tokens <= kv.tokens:
            raise invalid_field("tokens", f"must be in 1..{kv.tokens}")
        self._expire()
        pin = self._own_pin(kv)
        if pin is None or tokens > len(pin.tokens):
            raise AmpdError(ErrorReason.TASK_GONE, "the handle is not pinned on this engine")
        return self._lend(pin, tokens)

    async def reclaim(self, kv: KvHandle) -> None:
        """See the port."""
        pin = self._own_pin(kv)
        if pin is not None:
            self._pins.reclaim(pin)

    async def release(self, kv: KvHandle) -> None:
        """See the port."""
        pin = self._own_pin(kv)
        if pin is not None:
            self._pins.release(pin)
            self._admit_waiting()

    def _own_pin(self, kv: KvHandle) -> Pin | None:
        """None for a handle of another engine, of an earlier life, or of no engine at all."""
        if (kv.owner, kv.incarnation) != (self._worker_id, self._incarnation):
            return None
        try:
            return self._pins.get(handles.decode(kv, "kv").pin_id)
        except AmpdError:
            return None

    def _lend(self, pin: Pin, tokens: int) -> KvHandle:
        settings, store = self._settings, self._store
        self._pins.lend(pin)
        blocks = np.array(pin.blocks[: -(-tokens // settings.block_tokens)], "<u4")
        loan = Loan(
            loan_id=pin.loan_id,
            locator=self._locator,
            loan_offset=store.loans_offset + pin.slot * store.loans.itemsize,
            generations_offset=0,
            data_offset=store.data_offset,
            block_tokens=settings.block_tokens,
            token_bytes=settings.stored_bytes_per_token,
            blocks=blocks.tobytes(),
            generations=store.generations[blocks].tobytes(),
            tokens_digest=handles.tokens_digest(pin.tokens, tokens),
            host=settings.host,
        )
        return self._handle(pin, tokens, loan)

    def _handle(self, pin: Pin, tokens: int, loan: Loan | None) -> KvHandle:
        payload = handles.encode(Payload(pin.pin_id, loan))
        return KvHandle(self._worker_id, self._incarnation, tokens, pin.lease_s, payload)

    def _hear(self, message: bytes) -> None:
        """A peer has read what was lent to it, or does not want it."""
        if self._pins.read_done(int.from_bytes(message, "little")):
            self._admit_waiting()

    def _serve(self, lent: bool) -> None:
        """The first loan begins, or the last one has ended."""
        self._stop_timers()
        if lent:
            self._transport.serve(lent=True)
            self._watch_leases()
            return
        left_s = self._pins.readers_until_s - self._clock()
        if left_s > 0:
            loop = asyncio.get_running_loop()
            self._tail_timer = loop.call_later(left_s, partial(self._transport.serve, lent=False))
        else:
            self._transport.serve(lent=False)

    def _stop_timers(self) -> None:
        for timer in (self._lease_timer, self._tail_timer):
            if timer is not None:
                timer.cancel()
        self._lease_timer = self._tail_timer = None

    def _watch_leases(self) -> None:
        """While anything is lent its lease ends on time, though nobody asks."""
        left_s = max(0.0, self._pins.next_loan_expiry_s() - self._clock())
        self._lease_timer = asyncio.get_running_loop().call_later(left_s, self._end_leases)

    def _end_leases(self) -> None:
        self._lease_timer = None
        self._expire()
        if self._pins.loans and self._lease_timer is None:
            self._watch_leases()

    # --- the rest -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """See the port."""
        self._expire()
        store, block = self._store, self._settings.block_tokens
        return EngineStats(
            kv_free_tokens=store.free_blocks * block,
            kv_used_tokens=store.used_blocks * block,
            kv_pinned_tokens=store.pinned_blocks * block,
            running_requests=self._admitted,
            waiting_requests=len(self._waiting),
            pulled_bytes_total=self._puller.pulled_bytes_total,
            prefill_tokens_left=self._steps.prefill_tokens_left,
            calibration=self._steps.calibration,
        )

    def take_step_samples(self) -> Sequence[StepSample]:
        """See the port; the newest 4096 are kept."""
        return self._steps.take_samples()

    def use_cost_model(self, cost: CostModel) -> None:
        """See the port. What steps take does not change."""
        self._steps.cost = cost

    def use_local_rule(self, rule: LocalRule) -> None:
        """See the port. A fixed budget is kept whatever `max_step_tokens` says."""
        self._steps.rule = rule

    def evict(self) -> None:
        """Forget all cached KV that nobody holds, as memory pressure does."""
        self._store.evict()

    def check(self) -> None:
        """AssertionError unless the books balance: every block is held by exactly the requests
        and pins that say so, and free + used + pinned is all there is."""
        held = [job.blocks for job in self._requests if job.admitted]
        self._store.check(held, self._pins.blocks())
        self._pins.check()
        promised = sum(job.promised_blocks for job in self._requests if job.admitted)
        if (len(held), promised) != (self._admitted, self._steps.promised_blocks):
            raise AssertionError("requests: the numbers of admitted ones and promises are wrong")

    async def close(self) -> None:
        """End all requests (ENGINE_FAILED), and free all KV and the transport."""
        if self._failure is None:
            self._fail(AmpdError(ErrorReason.ENGINE_FAILED, "the engine is closed"))
        await self._steps.close()
        self._pins.release_all()
        self._stop_timers()
        await self._transport.close()


def _told(loan_id: int) -> bytes:
    return loan_id.to_bytes(8, "little")
