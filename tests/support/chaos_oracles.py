"""What a round must say, known without the cluster: by the emulated engine's oracle, or by one
real engine that nothing is done to.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_harness import RemoteEngine

from ampd.adapters.engine_emulated import expect
from ampd.core.model import FinishReason, SamplingParams, Slo
from ampd.ports import GenerateDone, GenerateRequest, TokensOut


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole output of a round; `text` is None where nobody knows it."""

    tokens: list[int]
    kept_output_tokens: int
    finish_reason: FinishReason
    text: str | None


class Oracle(Protocol):
    """One of the two."""

    async def expect(self, prompt: Sequence[int], sampling: SamplingParams) -> Expected:
        """What follows `prompt`."""
        ...


class EmulatedOracle:
    """Nothing runs."""

    def __init__(self, max_model_tokens: int) -> None:
        self._max_model_tokens = max_model_tokens

    async def expect(self, prompt: Sequence[int], sampling: SamplingParams) -> Expected:
        said = expect(array("I", prompt), sampling, max_model_tokens=self._max_model_tokens)
        return Expected(said.tokens, said.kept_output_tokens, said.finish_reason, said.text)


class EngineOracle:
    """A real engine on its own, one round at a time; greedy rounds only."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()

    async def expect(self, prompt: Sequence[int], sampling: SamplingParams) -> Expected:
        request = GenerateRequest(
            request_id=f"reference-{next(self._numbers)}",
            tokens=array("I", prompt),
            kv=None,
            sampling=sampling,
            slo=Slo(60.0, 60.0),
        )
        tokens: list[int] = []
        done: GenerateDone | None = None
        async with self._turn:
            async for event in self._engine.generate(request):
                match event:
                    case TokensOut():
                        tokens.extend(event.token_ids)
                    case GenerateDone():
                        done = event
                        await self._engine.release(event.kv)
        assert done is not None
        return Expected(tokens, done.kept_output_tokens, done.finish_reason, None)
