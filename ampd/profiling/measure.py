"""A short self-measurement of an engine: seconds of steps of every kind, over the Engine port.

It runs prefills of growing size, some over a history in the prefix cache; then streams that
join one after the other, each join being a mixed step, with plain decode steps between; then
prompts of growing size beside all of them. Each part takes what time it may, so a slow engine
is measured at small sizes and a fast one is done early. The engine is left as it was found.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Final, NamedTuple

from ampd.core.errors import AmpdError, ErrorReason
from ampd.ports import Engine, StepSample, Tokens
from ampd.profiling.load import EngineLoad, Stream, whole_prefill

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


class Measured(NamedTuple):
    """What the engine did, oldest first."""

    steps: list[StepSample]
    prefills: list[StepSample]
    """Prefills that were alone in the engine, each whole, in however many steps."""


async def measure(engine: Engine, *, budget_s: float) -> Measured:
    """The steps of an otherwise idle engine, measured in about `budget_s` seconds at most.

    Raises what the engine raises, and ENGINE_FAILED when not one step could be measured in
    that time.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    run = _Run(engine)
    await run.prefill(run.load.prompt(SMALLEST_PREFILL_TOKENS))  # the first of all is not typical
    run.measured.steps.clear()
    run.measured.prefills.clear()
    # The warm-up may have taken some of the share; at least half of it stays.
    share_s = PREFILL_SHARE * budget_s
    prefill_s = max(share_s - (loop.time() - start_s), share_s / 2)
    with suppress(TimeoutError):
        async with asyncio.timeout(prefill_s):
            await run.prefills(loop.time() + prefill_s)
    await run.load.settle()
    run.take_steps()
    with suppress(TimeoutError):
        async with asyncio.timeout(budget_s - share_s):
            await run.streams()
    await run.load.settle()
    run.take_steps()
    if not run.measured.steps:
        raise AmpdError(
            ErrorReason.ENGINE_FAILED, f"no engine step could be measured in {budget_s:g} s"
        )
    return run.measured


class _Run:
    """The parts of one measurement."""

    def __init__(self, engine: Engine) -> None:
        # Prompts that no cache knows, not secrets.
        self.load = EngineLoad(engine, random.Random())  # noqa: S311
        self.measured = Measured([], [])
        self._longest_tokens = min(
            engine.info.max_model_tokens - 1, self.load.kv_tokens - 1, LARGEST_PREFILL_TOKENS
        )

    def take_steps(self) -> list[StepSample]:
        """The steps since the last call; they are measured."""
        steps = list(self.load.engine.take_step_samples())
        self.measured.steps.extend(steps)
        return steps

    async def prefill(self, tokens: Tokens) -> None:
        """One prefill, nothing of which stays pinned."""
        result = await self.load.prefill(tokens)
        await self.load.release(result.kv)
        self._note_prefill()

    async def prefills(self, until_s: float) -> None:
        """Prefills of growing size while the next one fits into the time left."""
        loop = asyncio.get_running_loop()
        size = SMALLEST_PREFILL_TOKENS
        while size + INCREMENT_TOKENS <= self._longest_tokens:
            begun_s = loop.time()
            tokens = self.load.prompt(size)
            result = await self.load.prefill(tokens)
            self._note_prefill()
            try:
                if size >= HISTORY_FROM_TOKENS:
                    await self.prefill(tokens + self.load.prompt(INCREMENT_TOKENS))
            finally:
                await self.load.release(result.kv)
            ended_s = loop.time()
            if ended_s + COST_GROWTH * (ended_s - begun_s) > until_s:
                return
            size *= GROWTH

    async def streams(self) -> None:
        """Streams that join one after the other, then prompts beside all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                streams: list[Stream] = []
                held_tokens = 0
                try:
                    for prompt_tokens in STREAM_PROMPT_TOKENS:
                        output_tokens = self._output_tokens(prompt_tokens)
                        held_tokens += prompt_tokens + output_tokens
                        if output_tokens <= 0 or (streams and held_tokens > self.load.kv_tokens):
                            break
                        stream = Stream()
                        streams.append(stream)
                        prompt = self.load.prompt(prompt_tokens)
                        request = self.load.request(prompt, output_tokens)
                        tasks.append(group.create_task(self.load.follow(request, stream)))
                        await stream.reach(1 + STEPS_PER_BATCH)
                    for prompt_tokens in PROBE_PROMPT_TOKENS:
                        if held_tokens + prompt_tokens <= self.load.kv_tokens and (
                            prompt_tokens < self._longest_tokens
                        ):
                            request = self.load.request(self.load.prompt(prompt_tokens), 1)
                            await self.load.follow(request, Stream())
                finally:
                    for task in tasks:
                        task.cancel()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    def _output_tokens(self, prompt_tokens: int) -> int:
        return min(STREAM_OUTPUT_TOKENS, self._longest_tokens - prompt_tokens)

    def _note_prefill(self) -> None:
        """The prefill that has just ended was the only work."""
        whole = whole_prefill(self.take_steps())
        if whole is not None:
            self.measured.prefills.append(whole)
