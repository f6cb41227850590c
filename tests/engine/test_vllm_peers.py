"""A third engine that is stopped, killed and replaced while the others read from it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
import pytest_asyncio
from conftest import tiny_settings
from engine_contract import GREEDY, Pair, generate, oracle, settled, token_ids
from engine_harness import RemoteEngine, free_port

from ampd.adapters.engine_vllm import handles
from ampd.core.cost_model import CostModel, MixedCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import KvHandle, PrefillStats, Role, Slo
from ampd.ports import GenerateRequest, PrefillRequest

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

LEASE_S = 1.5
BOUND_S = 7.0
"""No read takes longer, whatever happens to the peer (5 s, and the computation)."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def spare(model_path: Path) -> AsyncIterator[RemoteEngine]:
    settings = tiny_settings(model_path, Role.DECODE, kv_lease_s=LEASE_S, result_lease_s=LEASE_S)
    engine = RemoteEngine(settings, "d1", 7)
    try:
        await engine.connect()
        yield engine
    finally:
        await engine.kill()


async def lent_history(spare: RemoteEngine, prompt: array[int]) -> KvHandle:
    done = await generate(spare, prompt)
    return await spare.lend(done.done.kv, len(prompt))


def redirected(handle: KvHandle, port: int, engine_id: str | None = None) -> KvHandle:
    """The handle as if its engine listened at `port`."""
    payload = handles.decode(handle, "kv")
    assert payload.loan is not None
    loan = msgspec.structs.replace(payload.loan, port=port)
    if engine_id is not None:
        loan = msgspec.structs.replace(loan, engine_id=engine_id)
    return replace(handle, payload=handles.encode(handles.Payload(payload.pin_id, loan)))


class Reader:
    """Reads histories on the prefill engine, and checks that the tokens come out right."""

    def __init__(self, pair: Pair, prompt: array[int]) -> None:
        self._pair = pair
        self._tokens = prompt + token_ids(Random(31), 40)
        self._expected: list[int] = []

    async def read(self, history: KvHandle) -> tuple[PrefillStats, float]:
        if not self._expected:
            self._expected = await oracle(self._pair.decode, self._tokens)
        await self._pair.clean()
        started_s = time.monotonic()
        async with asyncio.timeout(BOUND_S):
            result = await self._pair.prefill.prefill(PrefillRequest("p", self._tokens, history))
        took_s = time.monotonic() - started_s
        done = await generate(self._pair.decode, self._tokens, result.kv)
        assert done.tokens == self._expected
        await self._pair.decode.release(done.done.kv)
        return result.stats, took_s


async def test_local_chunks_follow_the_cost_model(spare: RemoteEngine) -> None:
    rng = Random(30)
    token_s, slo = 0.001, Slo(ttft_s=1.0, itl_s=0.05)
    endless = replace(GREEDY, max_tokens=3000)
    stream = spare.generate(GenerateRequest("stream", token_ids(rng, 20), None, endless, slo))
    for _ in range(5):
        await anext(stream)

    async def mixed_chunks() -> list[int]:
        await spare.take_step_samples()
        done = await generate(spare, token_ids(rng, 1000), sampling=replace(GREEDY, max_tokens=1))
        await spare.release(done.done.kv)
        return [s.chunk_tokens for s in await spare.take_step_samples() if s.batch]

    before = await mixed_chunks()
    assert max(before) == 256
    base = CostModel()
    await spare.use_cost_model(
        replace(base, mixed=MixedCost(base_s=0.001, token_s=token_s, sequence_s=0.0001))
    )
    after = await mixed_chunks()
    assert sum(after) == 1000
    assert 0 < max(after) < 256
    await stream.aclose()
    await settled(spare)


async def test_leases_run_out(pair: Pair, spare: RemoteEngine) -> None:
    prompt = token_ids(Random(32), 150)
    done = await generate(spare, prompt)
    lent = await spare.lend(done.done.kv, len(prompt))
    await asyncio.sleep(LEASE_S * 0.7)
    renewed = await spare.lend(done.done.kv, len(prompt))
    await asyncio.sleep(LEASE_S * 0.7)
    reader = Reader(pair, prompt)
    assert (await spare.stats_now()).kv_pinned_tokens > 0
    await asyncio.sleep(LEASE_S)
    await settled(spare)
    with pytest.raises(AmpdError) as gone:
        await spare.lend(done.done.kv, len(prompt))
    assert gone.value.reason is ErrorReason.TASK_GONE
    for handle in (lent, renewed):
        stats, _ = await reader.read(handle)
        assert stats.pulled_tokens == 0


async def test_peers_that_stop_die_and_are_replaced(pair: Pair, spare: RemoteEngine) -> None:
    prompt = token_ids(Random(33), 150)
    reader = Reader(pair, prompt)
    stats, _ = await reader.read(await lent_history(spare, prompt))
    assert stats.pulled_tokens == len(prompt)

    # Another engine answers at the address (a restart), also to one that never met it.
    other = await generate(pair.decode, prompt)
    loan = handles.decode(await pair.decode.lend(other.done.kv, 50), "kv").loan
    assert loan is not None
    decode_port = loan.port
    await pair.decode.release(other.done.kv)
    for engine_id in (None, "d1-an-earlier-life"):
        handle = redirected(await lent_history(spare, prompt), decode_port, engine_id)
        stats, took_s = await reader.read(handle)
        assert stats.pulled_tokens == 0
        assert took_s < 2.0
    # Nobody listens there.
    handle = redirected(await lent_history(spare, prompt), free_port(), "d1-nobody")
    stats, took_s = await reader.read(handle)
    assert stats.pulled_tokens == 0
    assert took_s < 2.0

    # The peer stands still: exact, and within the bound.
    handle = await lent_history(spare, prompt)
    os.kill(spare.process.pid, signal.SIGSTOP)
    try:
        stats, took_s = await reader.read(handle)
        print(f"read from a stopped peer: {took_s:.1f} s")  # noqa: T201
        assert stats.pulled_tokens == 0
    finally:
        os.kill(spare.process.pid, signal.SIGCONT)

    # The peer is dead: history and result are recomputed.
    handle = await lent_history(spare, prompt)
    result = await spare.prefill(PrefillRequest("p", prompt, None))
    expected = await oracle(pair.decode, prompt)
    await spare.kill()
    stats, took_s = await reader.read(handle)
    print(f"read from a dead peer: {took_s:.2f} s")  # noqa: T201
    assert stats.pulled_tokens == 0
    async with asyncio.timeout(BOUND_S):
        done = await generate(pair.decode, prompt, result.kv)
    assert done.tokens == expected
    await pair.decode.release(done.done.kv)
    await pair.clean()
