"""Running rounds against a cluster, and what one round came to."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_harness import RemoteEngine

from ampd.client import AmpdClient
from ampd.core.model import SamplingParams, Slo
from ampd.ports import GenerateDone, GenerateRequest, TokensOut
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.sampling_params_pb2 import SamplingParams as SamplingProto

LONG_SLO = Slo(60.0, 60.0)


@dataclass
class RoundResult:
    placed: list[pb.RoundPlaced] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.RoundFinished | None = None

    @property
    def where(self) -> pb.RoundPlaced:
        """Where it was prefilled in the end."""
        return self.placed[-1]


@dataclass(frozen=True)
class Turn:
    """One round of a scripted session; `keep_share` of the history is kept (None: all)."""

    increment: Sequence[int]
    max_tokens: int
    keep_share: float | None = None

    def keep(self, history_tokens: int) -> int:
        if self.keep_share is None:
            return history_tokens
        return int(history_tokens * self.keep_share)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


def scripts(seed: int, sessions: int, rounds: int, block_tokens: int) -> list[list[Turn]]:
    """Sessions of random lengths, block multiples and their neighbours, short increments and
    rewinds among them."""
    rng = random.Random(seed)
    edges = [block_tokens * k + d for k in (1, 2, 4) for d in (-1, 0, 1)] + [3]
    result = []
    for _ in range(sessions):
        turns = []
        for index in range(rounds):
            count = rng.choice(edges) if rng.random() < 0.5 else rng.randrange(40, 400)
            rewind = index > 0 and rng.random() < 0.25
            turns.append(
                Turn(
                    random_tokens(rng, count),
                    rng.randrange(5, 30),
                    rng.random() if rewind else None,
                )
            )
        result.append(turns)
    return result


async def run_round(
    client: AmpdClient,
    session_id: str,
    increment: Sequence[int] | str,
    *,
    max_tokens: int,
    keep: int | None = None,
    request_id: str = "",
) -> RoundResult:
    request = pb.GenerateRequest(
        session_id=session_id,
        request_id=request_id,
        keep_history_tokens=keep,
        sampling=SamplingProto(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )
    if isinstance(increment, str):
        request.text = increment
    else:
        request.token_ids.ids.extend(increment)
    result = RoundResult()
    async for event in client.generate(request):
        match event:
            case pb.RoundPlaced():
                result.placed.append(event)
            case pb.TokenBatch():
                result.token_ids.extend(event.token_ids)
                result.text += event.text
            case pb.RoundFinished():
                result.finished = event
    return result


async def reference(engine: RemoteEngine, turns: Sequence[Turn]) -> list[list[int]]:
    """What one engine, fed the same tokens, says in each round (greedy)."""
    history: list[int] = []
    outputs = []
    for index, turn in enumerate(turns):
        prompt = history[: turn.keep(len(history))] + list(turn.increment)
        request = GenerateRequest(
            request_id=f"reference-{id(turns)}-{index}",
            tokens=array("I", prompt),
            kv=None,
            sampling=SamplingParams(max_tokens=turn.max_tokens, temperature=0.0, ignore_eos=True),
            slo=LONG_SLO,
        )
        output: list[int] = []
        async for event in engine.generate(request):
            if isinstance(event, TokensOut):
                output.extend(event.token_ids)
            elif isinstance(event, GenerateDone):
                await engine.release(event.kv)
        history = prompt + output
        outputs.append(output)
    return outputs
