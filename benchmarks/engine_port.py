"""Rounds per second at the `Engine` port: emulated engines in one process, computing for nothing.

Sessions run on one prefill and one decode engine, as the services drive them: half of the rounds
are prefilled by the prefill engine (history lent, pulled, increment pulled back), the others at
home. Prints one JSON object; `make bench-engine` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.core.model import KvHandle, SamplingParams, Slo
from ampd.ports import GenerateDone, GenerateRequest, PrefillRequest, TokensOut

SLO = Slo(ttft_s=1.0, itl_s=0.1)


@dataclass(frozen=True)
class Load:
    """Sizes in tokens. A session grows from `first_tokens` to its last round's context."""

    sessions: int = 256
    concurrency: int = 16
    rounds: int = 8
    first_tokens: int = 250
    increment_tokens: int = 60
    output_tokens: int = 8
    remote_share: float = 0.5


@dataclass(frozen=True)
class Result:
    """What came of a load; `context_tokens_mean` is of a round's end."""

    rounds: int
    seconds: float
    rounds_per_s: float
    cpu_seconds: float
    remote_rounds: int
    context_tokens_mean: float
    output_tokens: int


def _increments(load: Load, seed: int) -> list[tuple[array[int], bool]]:
    """What each round of a session adds, and whether it is remote."""
    rng = random.Random(seed)
    counts = [load.first_tokens] + [load.increment_tokens] * (load.rounds - 1)
    return [
        (array("I", rng.choices(range(256, 65_536), k=count)), rng.random() < load.remote_share)
        for count in counts
    ]


async def measure(load: Load) -> Result:
    """Run the load once."""
    network = InprocKvNetwork()
    settings = EmulatedSettings(kv_capacity_tokens=131_072, max_model_tokens=4096)
    prefill, decode = (
        EmulatedEngine(
            settings,
            worker_id=name,
            incarnation=1,
            transport=InprocKvTransport(network, name, 1),
        )
        for name in ("p0", "d0")
    )
    sampling = SamplingParams(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True)
    left = [_increments(load, number) for number in range(load.sessions)]
    remote_rounds = contexts = outputs = 0

    async def session(increments: Sequence[tuple[array[int], bool]]) -> None:
        nonlocal remote_rounds, contexts, outputs
        history: array[int] = array("I")
        pin: KvHandle | None = None
        for increment, remote in increments:
            tokens = history + increment
            kv = None
            if remote:
                remote_rounds += 1
                lent = await decode.lend(pin, pin.tokens) if pin is not None else None
                kv = (await prefill.prefill(PrefillRequest("p", tokens, lent))).kv
            said: array[int] = array("I")
            request = GenerateRequest("g", tokens, kv, sampling, SLO)
            async with aclosing(decode.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TokensOut):
                        said.extend(event.token_ids)
                    elif isinstance(event, GenerateDone):
                        if pin is not None:
                            await decode.release(pin)
                        pin = event.kv
            outputs += len(said)
            history = tokens + said
            contexts += len(history)
        assert pin is not None
        await decode.release(pin)

    async def agent() -> None:
        while left:
            await session(left.pop())

    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(agent() for _ in range(load.concurrency)))
    seconds, cpu_seconds = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    for engine in (prefill, decode):
        engine.check()
        await engine.close()
    rounds = load.sessions * load.rounds
    return Result(
        rounds,
        round(seconds, 3),
        round(rounds / seconds, 1),
        round(cpu_seconds, 3),
        remote_rounds,
        round(contexts / rounds, 1),
        outputs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=Load.sessions)
    parser.add_argument("--concurrency", type=int, default=Load.concurrency)
    arguments = parser.parse_args()
    load = Load(sessions=arguments.sessions, concurrency=arguments.concurrency)
    result = asyncio.run(measure(load))
    print(json.dumps({"benchmark": "engine_port", **asdict(load), **asdict(result)}, indent=2))


if __name__ == "__main__":
    main()
