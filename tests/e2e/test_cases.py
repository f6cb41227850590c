"""Cases of tests/scenarios/lifecycle.yaml whose fault was seen with the real engine: the same
bodies as over the emulated one would not show what it does with blocks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_harness import RemoteEngine
from raw_calls import RawClient, is_free, round_request, until
from rounds import RoundResult, Turn, random_tokens, reference

from ampd.cli.cluster import LocalCluster
from ampd.v1.round_pb2 import ROUTE_LOCAL, ROUTE_REMOTE
from ampd.v1.worker_pb2 import WORKER_ROLE_DECODE

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw(cluster: LocalCluster) -> AsyncIterator[RawClient]:
    async with RawClient(cluster.address) as client:
        yield client


async def play(client: RawClient, turns: list[Turn], engine: RemoteEngine) -> list[RoundResult]:
    """A session of these turns, whose tokens are the single engine's."""
    session_id = await client.create()
    results = []
    for turn, expected in zip(turns, await reference(engine, turns), strict=True):
        request = round_request(session_id, turn.increment, max_tokens=turn.max_tokens)
        results.append(await client.generate(request))
        assert results[-1].token_ids == expected
        assert not results[-1].where.history_rebuilt
    await client.close(session_id)
    return results


@pytest.mark.case("length-at-block-multiple")
@pytest.mark.parametrize("policy", ["always-local", "always-remote"])
async def test_lengths_at_block_multiples(
    policy: str, raw: RawClient, single_engine: RemoteEngine
) -> None:
    """Prompts and increments of k blocks, one more and one less, k = 1..4."""
    await raw.set_policy(policy)
    rng = random.Random(policy)
    route = {"always-local": ROUTE_LOCAL, "always-remote": ROUTE_REMOTE}[policy]
    for difference in (-1, 0, 1):
        counts = [k * BLOCK + difference for k in range(1, 5)]
        # One output token each: with one less the histories end at the border of a block.
        sessions = [[Turn(random_tokens(rng, count), 1) for count in counts]]
        sessions += [[Turn(random_tokens(rng, count), 2)] for count in counts]
        for turns in sessions:
            for result in await play(raw, turns, single_engine):
                assert [placed.route for placed in result.placed] == [route]
                assert result.finished is not None
                usage = result.finished.usage
                computed = usage.prefill_computed_tokens + usage.decode_computed_tokens
                assert computed <= usage.increment_tokens + BLOCK + 1


@pytest.mark.case("increment-shorter-than-a-block")
async def test_increments_shorter_than_a_block(raw: RawClient, single_engine: RemoteEngine) -> None:
    """Three tokens: the policy is obeyed, and a block or two move, not the history."""
    rng = random.Random(3)
    turns = [Turn(random_tokens(rng, 10 * BLOCK - 6), 4)]
    turns += [Turn(random_tokens(rng, 3), 4) for _ in range(3)]
    expected = await reference(single_engine, turns)
    session_id = await raw.create()
    workers = [w for w in await raw.workers() if w.role == WORKER_ROLE_DECODE]
    block_bytes = BLOCK * workers[0].kv_bytes_per_token
    usages = []
    policies = ("always-local", "always-remote", "always-remote", "always-local")
    for policy, turn, output in zip(policies, turns, expected, strict=True):
        await raw.set_policy(policy)
        request = round_request(session_id, turn.increment, max_tokens=turn.max_tokens)
        result = await raw.generate(request)
        assert result.token_ids == output
        route = {"always-local": ROUTE_LOCAL, "always-remote": ROUTE_REMOTE}[policy]
        assert [placed.route for placed in result.placed] == [route]
        assert result.finished is not None
        usages.append(result.finished.usage)
    _, first, again, local = usages
    # The prefill worker reads the history once; the home takes what the increment lies in.
    assert 9 * BLOCK <= first.history_pulled_tokens < first.history_tokens
    assert 0 < first.increment_pulled_bytes <= 2 * block_bytes
    assert again.history_pulled_bytes <= 2 * block_bytes
    assert 0 < again.increment_pulled_bytes <= 2 * block_bytes
    assert (local.history_pulled_bytes, local.increment_pulled_bytes) == (0, 0)
    assert local.decode_computed_tokens <= 3 + BLOCK
    await raw.close(session_id)
    await until(is_free, raw, 2.0)
