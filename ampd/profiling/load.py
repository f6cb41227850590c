"""Work for an engine that is being measured, over the Engine port: random prompts, prefills, and
streams that decode. Whatever ends a piece of work leaves nothing of it in the engine."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import KvHandle, SamplingParams, Slo
from ampd.ports import (
    Engine,
    GenerateDone,
    GenerateRequest,
    PrefillRequest,
    PrefillResult,
    StepSample,
    Tokens,
    TokensOut,
)

KV_SHARE: Final = 0.5
"""Of the engine's KV that a measurement may hold at once."""
SETTLE_POLL_S: Final = 0.01
SETTLE_POLLS: Final = 100
"""An aborted request frees what it held within a second (see `Engine`)."""
PATIENT: Final = Slo(ttft_s=3600.0, itl_s=3600.0)
"""Chunks are not to be bounded by an SLO while they are measured."""


@dataclass(slots=True)
class Stream:
    """One decoding stream: how far it is."""

    tokens: int = 0
    ended: bool = False
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def reach(self, tokens: int) -> None:
        """Wait for so many tokens, or the end."""
        while self.tokens < tokens and not self.ended:
            self.progress.clear()
            await self.progress.wait()


class EngineLoad:
    """Gives an engine work. `numbers` draws the prompts."""

    def __init__(self, engine: Engine, numbers: random.Random) -> None:
        self.engine = engine
        self.kv_tokens = int(KV_SHARE * engine.info.kv_capacity_tokens)
        """That may be held at once."""
        self._numbers = numbers
        self._requests = 0

    def prompt(self, tokens: int) -> Tokens:
        """Random tokens: nothing of them is in any cache."""
        vocabulary = self.engine.info.vocab_size
        return array("I", (self._numbers.randrange(vocabulary) for _ in range(tokens)))

    async def prefill(self, tokens: Tokens, history: KvHandle | None = None) -> PrefillResult:
        """One prefill; the caller releases its KV."""
        return await self.engine.prefill(PrefillRequest(self._request_id(), tokens, history))

    async def pin(self, tokens: Tokens) -> KvHandle:
        """Compute the KV of the tokens and keep it, lent to nobody; the caller releases it."""
        async with aclosing(self.engine.generate(self.request(tokens, 1))) as events:
            async for event in events:
                if isinstance(event, GenerateDone):
                    return event.kv
        raise AmpdError(ErrorReason.ENGINE_FAILED, "a generation has ended without its KV")

    async def release(self, kv: KvHandle) -> None:
        """Drop a pin, also when the caller is cancelled just now."""
        await asyncio.shield(self.engine.release(kv))

    def request(self, tokens: Tokens, output_tokens: int) -> GenerateRequest:
        """A stream behind a prompt that decodes so many tokens, whatever it says."""
        return GenerateRequest(
            request_id=self._request_id(),
            tokens=tokens,
            kv=None,
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            slo=PATIENT,
        )

    async def follow(self, request: GenerateRequest, stream: Stream) -> None:
        """Read a generation to its end; leaving early aborts it."""
        try:
            async with aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TokensOut):
                        stream.tokens += len(event.token_ids)
                        stream.progress.set()
                    elif isinstance(event, GenerateDone):
                        await self.release(event.kv)
        finally:
            stream.ended = True
            stream.progress.set()

    async def settle(self) -> None:
        """Wait until what was cancelled has left the engine, for a bounded time."""
        for _ in range(SETTLE_POLLS):
            stats = self.engine.stats()
            if not stats.running_requests + stats.waiting_requests:
                return
            await asyncio.sleep(SETTLE_POLL_S)

    def _request_id(self) -> str:
        self._requests += 1
        return f"measure-{self._requests}"


def whole_prefill(steps: Sequence[StepSample]) -> StepSample | None:
    """The steps of one prefill on an otherwise idle engine as one; None if it was not alone, or
    nothing was computed."""
    if not steps or any(step.batch for step in steps):
        return None
    return StepSample(
        sum(step.chunk_tokens for step in steps),
        steps[0].chunk_history_tokens,
        0,
        0,
        sum(step.seconds for step in steps),
    )
