"""Streams equal a single engine's whatever the route; tokens and bytes are what it implies."""

from __future__ import annotations

import asyncio
import random

import pytest
from engine_harness import RemoteEngine
from rounds import RoundResult, Turn, reference, run_round, scripts

from ampd.client import AmpdClient
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.policy_pb2 import Policy
from ampd.v1.round_pb2 import ROUTE_LOCAL, ROUTE_REMOTE
from ampd.v1.worker_pb2 import WORKER_ROLE_DECODE, Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32


async def run_session(
    clients: list[AmpdClient], turns: list[Turn], rng: random.Random
) -> list[RoundResult]:
    """All rounds, the coordinators taking turns."""
    session = await clients[0].create_session()
    history, results = 0, []
    for index, turn in enumerate(turns):
        await asyncio.sleep(rng.random() * 0.1)
        keep = turn.keep(history)
        result = await run_round(
            clients[index % len(clients)],
            session.session_id,
            turn.increment,
            max_tokens=turn.max_tokens,
            keep=None if turn.keep_share is None else keep,
        )
        assert result.finished is not None
        history = keep + len(turn.increment) + len(result.token_ids)
        assert result.finished.history_tokens == history
        results.append(result)
    await clients[-1].close_session(session.session_id)
    return results


def check_usage(finished: pb.RoundFinished, where: pb.RoundPlaced, token_bytes: int) -> None:
    usage = finished.usage
    prompt = usage.history_tokens + usage.increment_tokens
    pulled = usage.increment_pulled_tokens
    assert not where.history_rebuilt
    assert usage.decode_computed_tokens + usage.decode_cached_tokens + pulled == prompt
    if where.route == ROUTE_LOCAL:
        assert where.prefill_worker == ""
        assert usage.decode_computed_tokens <= usage.increment_tokens + BLOCK
        moved = (pulled, usage.increment_pulled_bytes, usage.history_pulled_bytes)
        assert moved == (0, 0, 0)
        assert usage.prefill_computed_tokens == 0
        return
    assert where.prefill_worker == "prefill-0"
    # The prefill worker computes the increment, the token that had no KV yet, and of a rewind
    # the rest of the block that was cut.
    assert usage.prefill_computed_tokens <= usage.increment_tokens + BLOCK
    assert usage.history_pulled_tokens <= usage.history_tokens
    assert usage.history_pulled_bytes % (BLOCK * token_bytes) == 0
    blocks = -(-usage.history_pulled_tokens // BLOCK)
    assert usage.history_pulled_bytes <= (blocks + 1) * BLOCK * token_bytes
    # The home computes at most one token and pulls only the blocks that it lacks.
    assert usage.decode_computed_tokens <= 1
    assert usage.decode_cached_tokens >= (usage.history_tokens // BLOCK - 1) * BLOCK
    assert 0 < pulled <= usage.increment_tokens + 2 * BLOCK
    assert usage.increment_pulled_bytes % (BLOCK * token_bytes) == 0
    assert usage.increment_pulled_bytes <= (pulled // BLOCK + 2) * BLOCK * token_bytes


async def flip_policies(client: AmpdClient, rng: random.Random) -> None:
    while True:
        await client.set_policy(Policy(name=rng.choice(["always-local", "always-remote", "ampd"])))
        await asyncio.sleep(rng.random() * 0.3)


@pytest.mark.parametrize("policy", ["always-local", "always-remote", "ampd", "mixed"])
async def test_streams_equal_a_single_engine(
    policy: str, clients: list[AmpdClient], single_engine: RemoteEngine
) -> None:
    rng = random.Random(policy)
    turns = scripts(seed=rng.randrange(1 << 30), sessions=8, rounds=5, block_tokens=BLOCK)
    expected = await asyncio.gather(*(reference(single_engine, t) for t in turns))
    flipping = None
    if policy == "mixed":
        flipping = asyncio.create_task(flip_policies(clients[0], rng))
    else:
        await clients[0].set_policy(Policy(name=policy))
    try:
        results = await asyncio.gather(*(run_session(clients, t, rng) for t in turns))
    finally:
        if flipping:
            flipping.cancel()
    workers = await decode_workers(clients[0])
    token_bytes = workers[0].kv_bytes_per_token
    routes, homes = set(), set()
    for session, outputs in zip(results, expected, strict=True):
        assert len({r.where.decode_worker for r in session}) == 1
        homes.add(session[0].where.decode_worker)
        for result, output in zip(session, outputs, strict=True):
            assert result.finished is not None
            assert result.token_ids == output
            routes.add(result.where.route)
            check_usage(result.finished, result.where, token_bytes)
    wanted = {"always-local": {ROUTE_LOCAL}, "always-remote": {ROUTE_REMOTE}}
    if policy == "ampd":
        assert ROUTE_REMOTE in routes, "the home may have taken some"
    else:
        assert routes == wanted.get(policy, {ROUTE_LOCAL, ROUTE_REMOTE})
    assert homes == {"decode-0", "decode-1"}
    if policy == "always-remote":
        later = [r.finished for session in results for r in session[1:] if r.finished]
        assert sum(f.usage.history_pulled_bytes for f in later) > 0


async def test_sessions_leave_nothing_behind(clients: list[AmpdClient]) -> None:
    before = await held(clients[0])
    sessions = [await clients[0].create_session() for _ in range(3)]
    for session in sessions:
        await run_round(clients[0], session.session_id, list(range(200, 300)), max_tokens=4)
    during = await held(clients[0])
    assert during[0] - before[0] == 3
    assert during[1] - before[1] == 3 * 128
    for session in sessions:
        await clients[1].close_session(session.session_id)
    assert await held(clients[0]) == before


async def held(client: AmpdClient) -> tuple[int, int]:
    """Sessions and KV tokens at all homes: other tests' sessions may still be there."""
    loads = [worker.load for worker in await decode_workers(client)]
    return (
        sum(load.sessions for load in loads),
        sum(load.kv_pinned_tokens + load.kv_running_tokens for load in loads),
    )


async def decode_workers(client: AmpdClient) -> list[Worker]:
    await asyncio.sleep(0.5)  # a heartbeat and a half
    return [worker async for worker in client.list_workers(role=WORKER_ROLE_DECODE)]
