"""A short self-measurement of an engine: seconds of steps of every kind, over the Engine port.

It runs prefills of growing size, some over a history in the prefix cache; then streams that
join one after the other, each join being a mixed step, with plain decode steps between; then
prompts of growing size beside all of them. Each part takes what time it may, so a slow engine
is measured at small sizes and a fast one is done early. The engine is left as it was found.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from contextlib import aclosing, suppress
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

PREFILL_SHARE: Final = 0.4
"""Share of the budget for prefills alone; the rest is for decode and mixed steps."""
SMALLEST_PREFILL_TOKENS: Final = 16
LARGEST_PREFILL_TOKENS: Final = 8192
GROWTH: Final = 2
"""From one prefill size to the next."""
COST_GROWTH: Final = 2.5
"""How much longer the next size may take: it is not begun with less time left."""
HISTORY_FROM_TOKENS: Final = 128
"""Prefills of at least this size also serve as history for an increment ..."""
INCREMENT_TOKENS: Final = 32
"""... of this size."""
STREAM_PROMPT_TOKENS: Final = (64, 16, 32, 64, 16, 128, 32, 256)
"""Prompts of the decoding streams, in the order in which they join."""
STEPS_PER_BATCH: Final = 3
"""Decode steps between two joins."""
PROBE_PROMPT_TOKENS: Final = (16, 64, 32, 128, 256, 512, 16, 64, 32, 128, 256, 512)
"""Prompts that are prefilled beside all streams."""
STREAM_OUTPUT_TOKENS: Final = 512
"""A stream ends after so many tokens at the latest."""
KV_SHARE: Final = 0.5
"""Of the engine's KV that the measurement may hold at once."""
SETTLE_POLL_S: Final = 0.01
SETTLE_POLLS: Final = 100
"""An aborted request frees what it held within a second (see `Engine`)."""
PATIENT: Final = Slo(ttft_s=3600.0, itl_s=3600.0)
"""Chunks are not to be bounded by an SLO while they are measured."""


async def measure(engine: Engine, *, budget_s: float) -> list[StepSample]:
    """The steps of an otherwise idle engine, measured in about `budget_s` seconds at most.

    Raises what the engine raises, and ENGINE_FAILED when not one step could be measured in
    that time.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    run = _Run(engine)
    await run.prefill(run.prompt(SMALLEST_PREFILL_TOKENS))  # the first step of all is not typical
    engine.take_step_samples()
    # The warm-up may have taken some of the share; at least half of it stays.
    share_s = PREFILL_SHARE * budget_s
    prefill_s = max(share_s - (loop.time() - start_s), share_s / 2)
    with suppress(TimeoutError):
        async with asyncio.timeout(prefill_s):
            await run.prefills(loop.time() + prefill_s)
    await run.settle()
    samples = list(engine.take_step_samples())
    with suppress(TimeoutError):
        async with asyncio.timeout(budget_s - share_s):
            await run.streams()
    await run.settle()
    samples += engine.take_step_samples()
    if not samples:
        raise AmpdError(
            ErrorReason.ENGINE_FAILED, f"no engine step could be measured in {budget_s:g} s"
        )
    return samples


@dataclass(slots=True)
class _Stream:
    """One decoding stream: how far it is."""

    tokens: int = 0
    ended: bool = False
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def reach(self, tokens: int) -> None:
        """Wait for so many tokens, or the end."""
        while self.tokens < tokens and not self.ended:
            self.progress.clear()
            await self.progress.wait()


class _Run:
    """The parts of one measurement, and the random prompts they share."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random()  # noqa: S311 - prompts that no cache knows, not secrets
        self._requests = 0
        info = engine.info
        self._kv_tokens = int(KV_SHARE * info.kv_capacity_tokens)
        self._longest_tokens = min(
            info.max_model_tokens - 1, self._kv_tokens - 1, LARGEST_PREFILL_TOKENS
        )

    def prompt(self, tokens: int) -> Tokens:
        """Random tokens: nothing of them is in any cache."""
        vocabulary = self._engine.info.vocab_size
        return array("I", (self._random.randrange(vocabulary) for _ in range(tokens)))

    async def prefill(self, tokens: Tokens) -> None:
        """One prefill, nothing of which stays pinned."""
        result = await self._prefill(tokens)
        await self._release(result.kv)

    async def prefills(self, until_s: float) -> None:
        """Prefills of growing size while the next one fits into the time left."""
        loop = asyncio.get_running_loop()
        size = SMALLEST_PREFILL_TOKENS
        while size + INCREMENT_TOKENS <= self._longest_tokens:
            begun_s = loop.time()
            tokens = self.prompt(size)
            result = await self._prefill(tokens)
            try:
                if size >= HISTORY_FROM_TOKENS:
                    await self.prefill(tokens + self.prompt(INCREMENT_TOKENS))
            finally:
                await self._release(result.kv)
            ended_s = loop.time()
            if ended_s + COST_GROWTH * (ended_s - begun_s) > until_s:
                return
            size *= GROWTH

    async def streams(self) -> None:
        """Streams that join one after the other, then prompts beside all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                streams: list[_Stream] = []
                held_tokens = 0
                try:
                    for prompt_tokens in STREAM_PROMPT_TOKENS:
                        output_tokens = self._output_tokens(prompt_tokens)
                        held_tokens += prompt_tokens + output_tokens
                        if output_tokens <= 0 or (streams and held_tokens > self._kv_tokens):
                            break
                        stream = _Stream()
                        streams.append(stream)
                        request = self._generate(prompt_tokens, output_tokens)
                        tasks.append(group.create_task(self._follow(request, stream)))
                        await stream.reach(1 + STEPS_PER_BATCH)
                    for prompt_tokens in PROBE_PROMPT_TOKENS:
                        if held_tokens + prompt_tokens <= self._kv_tokens and (
                            prompt_tokens < self._longest_tokens
                        ):
                            await self._follow(self._generate(prompt_tokens, 1), _Stream())
                finally:
                    for task in tasks:
                        task.cancel()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def settle(self) -> None:
        """Wait until what was cancelled has left the engine, for a bounded time."""
        for _ in range(SETTLE_POLLS):
            stats = self._engine.stats()
            if not stats.running_requests + stats.waiting_requests:
                return
            await asyncio.sleep(SETTLE_POLL_S)

    def _output_tokens(self, prompt_tokens: int) -> int:
        return min(STREAM_OUTPUT_TOKENS, self._longest_tokens - prompt_tokens)

    def _generate(self, prompt_tokens: int, output_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=self._request_id(),
            tokens=self.prompt(prompt_tokens),
            kv=None,
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            slo=PATIENT,
        )

    async def _follow(self, request: GenerateRequest, stream: _Stream) -> None:
        """Read a generation to its end; leaving early aborts it."""
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TokensOut):
                        stream.tokens += len(event.token_ids)
                        stream.progress.set()
                    elif isinstance(event, GenerateDone):
                        await self._release(event.kv)
        finally:
            stream.ended = True
            stream.progress.set()

    async def _prefill(self, tokens: Tokens) -> PrefillResult:
        request = PrefillRequest(self._request_id(), tokens, history=None)
        return await self._engine.prefill(request)

    async def _release(self, kv: KvHandle) -> None:
        await asyncio.shield(self._engine.release(kv))  # also when the time is up just now

    def _request_id(self) -> str:
        self._requests += 1
        return f"measure-{self._requests}"
