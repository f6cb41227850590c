"""Spec 7: what is cancelled, late, killed or drained leaves nothing behind and loses nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio
from cluster_keeper import ClusterKeeper
from engine_harness import RemoteEngine
from raw_calls import POLL_S, RawClient, RunningRound, is_free, refused, round_request, until
from rounds import RoundResult, Turn, random_tokens, reference

from ampd.cli.cluster import LocalCluster, ServiceProcess
from ampd.core.model import Role
from ampd.v1.round_pb2 import (
    ROUTE_LOCAL,
    ROUTE_REASON_FALLBACK_LOCAL,
    ROUTE_REASON_NO_PREFILL_WORKER,
    ROUTE_REMOTE,
)
from ampd.v1.session_pb2 import SESSION_STATE_IDLE, SESSION_STATE_RUNNING
from ampd.v1.worker_pb2 import WORKER_ROLE_PREFILL, Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32
LONG_PROMPT = 3500
FREE_WITHIN_S = 1.0
SEEN_WITHIN_S = FREE_WITHIN_S + 0.25
"""Loads are published by heartbeats, 0.22 s apart at most."""
LEASE_S = 3.0
DOMAIN = "ampd.dev"
KEPT_KV_TOKENS = 8192
"""Of each worker of the keeper's cluster."""


@dataclass
class Driven:
    """A session and the turns that it has really had, for the reference."""

    session_id: str
    turns: list[Turn] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def history_tokens(self) -> int:
        return sum(len(turn.increment) + turn.max_tokens for turn in self.turns)

    async def round(self, client: RawClient, tokens: Sequence[int], max_tokens: int) -> RoundResult:
        """One round that ends well."""
        request = round_request(self.session_id, tokens, max_tokens=max_tokens)
        result = await client.generate(request)
        self.note(tokens, result)
        return result

    def note(self, tokens: Sequence[int], result: RoundResult) -> None:
        assert result.finished is not None
        self.turns.append(Turn(tokens, len(result.token_ids)))
        self.outputs.append(result.token_ids)
        assert result.finished.history_tokens == self.history_tokens
        assert not result.where.history_rebuilt

    async def check_as_before(self, client: RawClient) -> None:
        """No trace of a round that was given up."""
        session = await client.get(self.session_id)
        assert session.state == SESSION_STATE_IDLE
        assert session.history_tokens == self.history_tokens
        assert session.round_count == len(self.turns)

    async def check_tokens(self, engine: RemoteEngine) -> None:
        """What the client saw is what one engine says."""
        assert self.outputs == await reference(engine, self.turns)


async def new_session(client: RawClient, rng: random.Random, tokens: int = 100) -> Driven:
    """One with a history."""
    driven = Driven(await client.create())
    await driven.round(client, random_tokens(rng, tokens), 4)
    return driven


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw(cluster: LocalCluster) -> AsyncIterator[RawClient]:
    async with RawClient(cluster.address) as client:
        yield client


# --- given up ------------------------------------------------------------------------------------


async def check_given_up(
    client: RawClient, sessions: Sequence[Driven], engine: RemoteEngine, rng: random.Random
) -> None:
    """All is free in time, and every session goes on from where it was."""
    await until(is_free, client, SEEN_WITHIN_S)
    for driven in sessions:
        await idle_again(client, driven.session_id)
        await driven.check_as_before(client)
    await asyncio.gather(*(d.round(client, random_tokens(rng, 50), 8) for d in sessions))
    for driven in sessions:
        await driven.check_tokens(engine)
        await client.close(driven.session_id)


def queued_remotely(workers: Sequence[Worker]) -> int:
    return sum(w.load.queued_tasks for w in workers if w.role == WORKER_ROLE_PREFILL)


async def test_cancelled_while_prefilling_remotely(
    raw: RawClient, single_engine: RemoteEngine
) -> None:
    """One computes, one reads its history, the others wait in the queue."""
    rng = random.Random(1)
    await raw.set_policy("always-remote")
    sessions = [await new_session(raw, rng) for _ in range(5)]
    running = [
        raw.start(round_request(d.session_id, random_tokens(rng, LONG_PROMPT))) for d in sessions
    ]
    for round_ in running:
        await round_.placed()
    await until(lambda workers: queued_remotely(workers) >= 4, raw, 2.0)
    assert all(round_.result.where.route == ROUTE_REMOTE for round_ in running)
    assert not all(round_.result.token_ids for round_ in running)
    await asyncio.gather(*(round_.cancel() for round_ in running))
    await check_given_up(raw, sessions, single_engine, rng)


async def test_cancelled_while_prefilling_locally(
    raw: RawClient, single_engine: RemoteEngine
) -> None:
    rng = random.Random(2)
    await raw.set_policy("always-local")
    sessions = [await new_session(raw, rng) for _ in range(4)]
    running = [
        raw.start(round_request(d.session_id, random_tokens(rng, LONG_PROMPT))) for d in sessions
    ]
    for round_ in running:
        await round_.placed()
    await asyncio.gather(*(round_.cancel() for round_ in running))
    await check_given_up(raw, sessions, single_engine, rng)


@pytest.mark.parametrize("policy", ["always-local", "always-remote"])
async def test_cancelled_while_decoding(
    policy: str, raw: RawClient, single_engine: RemoteEngine
) -> None:
    rng = random.Random(policy)
    await raw.set_policy(policy)
    sessions = [await new_session(raw, rng) for _ in range(4)]
    running = [
        raw.start(round_request(d.session_id, random_tokens(rng, 40), max_tokens=3000))
        for d in sessions
    ]
    for round_ in running:
        await round_.streams(5)
    await asyncio.gather(*(round_.cancel() for round_ in running))
    await check_given_up(raw, sessions, single_engine, rng)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(LONG_PROMPT, 4), (40, 3000)], ids=["prefilling", "decoding"]
)
@pytest.mark.parametrize("policy", ["always-local", "always-remote"])
async def test_deadline(
    policy: str,
    prompt_tokens: int,
    max_tokens: int,
    raw: RawClient,
    single_engine: RemoteEngine,
) -> None:
    rng = random.Random(f"{policy} {prompt_tokens}")
    await raw.set_policy(policy)
    sessions = [await new_session(raw, rng) for _ in range(4)]
    requests = [
        round_request(d.session_id, random_tokens(rng, prompt_tokens), max_tokens=max_tokens)
        for d in sessions
    ]
    started_s = time.monotonic()
    told = await asyncio.gather(*(refused(raw.generate(r, timeout_s=0.3)) for r in requests))
    assert time.monotonic() - started_s < 1.0
    assert {refusal.code for refusal in told} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await check_given_up(raw, sessions, single_engine, rng)


async def test_given_up_at_any_moment(cluster: LocalCluster, single_engine: RemoteEngine) -> None:
    """Every round after one or two that were cancelled at random, the coordinators and the
    policies taking turns: a mark that stays behind would shut out the other coordinator."""
    rng = random.Random(10)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(RawClient(address)) for address in cluster.addresses
        ]

        async def live(driven: Driven) -> None:
            for _ in range(4):
                client = rng.choice(clients)
                await client.set_policy(rng.choice(["always-local", "always-remote"]))
                for _ in range(rng.randrange(1, 3)):
                    prompt = random_tokens(rng, rng.choice([5, 400]))
                    running = client.start(round_request(driven.session_id, prompt, max_tokens=500))
                    await asyncio.sleep(rng.random() ** 2 * 0.5)
                    await running.cancel()
                    await idle_again(client, driven.session_id)
                await driven.round(rng.choice(clients), random_tokens(rng, 60), 10)

        sessions = [Driven(await clients[0].create()) for _ in range(6)]
        await asyncio.gather(*(live(driven) for driven in sessions))
        await check_given_up(clients[0], sessions, single_engine, rng)


async def idle_again(client: RawClient, session_id: str) -> None:
    """Returns when the store says that the session's round is over."""
    async with asyncio.timeout(2 * FREE_WITHIN_S):
        while (await client.get(session_id)).state != SESSION_STATE_IDLE:  # noqa: ASYNC110 - remote
            await asyncio.sleep(POLL_S)


async def test_giving_up_frees_the_memory_itself(keeper: ClusterKeeper) -> None:
    """Not only in the books: again and again, and then a round that needs nearly all of it, on
    the prefill worker as well as at home."""
    rng = random.Random(9)
    cluster = await keeper.having(coordinators=1, prefill=1, decode=1)
    async with living_client(cluster) as client:
        for policy in ("always-remote", "always-local"):
            await client.set_policy(policy)
            sessions = [await new_session(client, rng) for _ in range(2)]
            for _ in range(4):
                running = [
                    client.start(round_request(d.session_id, random_tokens(rng, LONG_PROMPT)))
                    for d in sessions
                ]
                for round_ in running:
                    await round_.placed()
                await asyncio.sleep(rng.random() * 0.5)
                await asyncio.gather(*(round_.cancel() for round_ in running))
                # Who comes earlier may be told that the round still runs, or lose a race.
                await asyncio.gather(*(idle_again(client, d.session_id) for d in sessions))
            await until(is_free, client, SEEN_WITHIN_S)
            for driven in sessions:
                await client.close(driven.session_id)
            session_id = await client.create()
            prompt = random_tokens(rng, KEPT_KV_TOKENS - BLOCK)
            result = await client.generate(round_request(session_id, prompt))
            assert result.finished is not None
            assert len(result.placed) == 1
            assert result.finished.usage.decode_computed_tokens in {1, len(prompt)}
            await client.close(session_id)
            # A new session is bound by what the worker has published.
            await until(is_free, client, SEEN_WITHIN_S)


# --- two coordinators ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always-local", "always-remote"])
async def test_a_session_alternates_between_coordinators(
    policy: str, cluster: LocalCluster, single_engine: RemoteEngine
) -> None:
    rng = random.Random(policy)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(RawClient(address)) for address in cluster.addresses
        ]
        await clients[0].set_policy(policy)
        driven = Driven(await clients[1].create())
        homes = set()
        for index in range(12):
            increment = random_tokens(rng, 60)
            result = await driven.round(clients[index % len(clients)], increment, 7)
            assert result.finished is not None
            usage = result.finished.usage
            homes.add(result.where.decode_worker)
            assert result.where.round_index == index
            assert usage.decode_computed_tokens + usage.prefill_computed_tokens <= 60 + BLOCK + 1
        assert len(homes) == 1
        await driven.check_tokens(single_engine)
        await clients[0].close(driven.session_id)


# --- killed --------------------------------------------------------------------------------------


def living(cluster: LocalCluster, role: Role) -> list[ServiceProcess]:
    return [service for service in cluster.services if service.role is role and service.is_running]


async def kill(service: ServiceProcess) -> None:
    service.send(signal.SIGKILL)
    await service.process.wait()


@asynccontextmanager
async def living_client(cluster: LocalCluster) -> AsyncIterator[RawClient]:
    async with RawClient(living(cluster, Role.COORDINATOR)[0].address) as client:
        yield client


async def test_a_coordinator_is_killed(keeper: ClusterKeeper, single_engine: RemoteEngine) -> None:
    """Between two rounds of one session and in the middle of a round of another one."""
    rng = random.Random(5)
    cluster = await keeper.having(coordinators=2, decode=1)
    survivor, victim = living(cluster, Role.COORDINATOR)
    async with RawClient(survivor.address) as client:
        async with RawClient(victim.address) as doomed:
            await doomed.set_policy("always-local")
            between, amid = [await new_session(doomed, rng) for _ in range(2)]
            running = doomed.start(
                round_request(amid.session_id, random_tokens(rng, 40), max_tokens=5000)
            )
            await running.streams(5)
            await kill(victim)
            killed_s = time.monotonic()
            told = await refused(running.end())
            assert told.code is grpc.StatusCode.UNAVAILABLE
        await between.round(client, random_tokens(rng, 50), 8)
        # The home has given the round up at once; the store forgets its coordinator, and what
        # that said of itself last, with its lease.
        await until(lambda workers: is_free(without(victim, workers)), client, SEEN_WITHIN_S)
        assert (await client.get(amid.session_id)).state == SESSION_STATE_RUNNING
        told = await refused(client.generate(round_request(amid.session_id, [7])))
        assert told.kind == (grpc.StatusCode.FAILED_PRECONDITION, "ROUND_RUNNING", DOMAIN)
        await until(lambda workers: workers == without(victim, workers), client, LEASE_S + 1)
        assert time.monotonic() - killed_s < LEASE_S + 1.5
        await amid.round(client, random_tokens(rng, 50), 8)
        for driven in (between, amid):
            await driven.check_as_before(client)
            await driven.check_tokens(single_engine)
            await client.close(driven.session_id)


def without(service: ServiceProcess, workers: Sequence[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.worker_id != service.name]


async def test_the_prefill_worker_is_killed(
    keeper: ClusterKeeper, single_engine: RemoteEngine
) -> None:
    """While it computes, reads and queues: the home does it all, and no round fails."""
    rng = random.Random(6)
    cluster = await keeper.having(coordinators=1, prefill=1, decode=1)
    (victim,) = living(cluster, Role.PREFILL)
    async with living_client(cluster) as client:
        await client.set_policy("always-remote")
        sessions = [await new_session(client, rng) for _ in range(5)]
        prompts = [random_tokens(rng, 1200) for _ in sessions]
        running = [
            client.start(round_request(driven.session_id, prompt, max_tokens=8))
            for driven, prompt in zip(sessions, prompts, strict=True)
        ]
        for round_ in running:
            await round_.placed()
            assert round_.result.where.route == ROUTE_REMOTE
            assert round_.result.where.prefill_worker == victim.name
        await until(lambda workers: queued_remotely(workers) >= 3, client, 2.0)
        await kill(victim)
        results = await asyncio.gather(*(round_.end() for round_ in running))
        for driven, prompt, result in zip(sessions, prompts, results, strict=True):
            driven.note(prompt, result)
        moved = [result for result in results if len(result.placed) > 1]
        assert len(moved) >= 3
        for result in moved:
            assert len(result.placed) == 2
            assert result.where.route == ROUTE_LOCAL
            assert result.where.reason == ROUTE_REASON_FALLBACK_LOCAL
            assert result.where.prefill_worker == ""
        await until(lambda workers: workers == without(victim, workers), client, LEASE_S + 1)
        for driven in sessions:
            result = await driven.round(client, random_tokens(rng, 50), 8)
            assert len(result.placed) == 1
            assert result.where.route == ROUTE_LOCAL
            assert result.where.reason == ROUTE_REASON_NO_PREFILL_WORKER
            await driven.check_tokens(single_engine)
            await client.close(driven.session_id)
        await until(is_free, client, SEEN_WITHIN_S)


async def test_the_only_decode_worker_is_killed(keeper: ClusterKeeper) -> None:
    """Whoever waits for it is told at once, and so is whoever comes later."""
    rng = random.Random(7)
    cluster = await keeper.having(coordinators=1, decode=1)
    (victim,) = living(cluster, Role.DECODE)
    async with living_client(cluster) as client:
        await client.set_policy("always-local")
        sessions = [await new_session(client, rng) for _ in range(3)]
        running = [
            client.start(round_request(driven.session_id, [7, 8], max_tokens=2000))
            for driven in sessions[:2]
        ]
        for round_ in running:
            await round_.streams(3)
        await kill(victim)
        await unavailable_at_once(round_.end() for round_ in running)
        # Before its lease is gone ...
        await unavailable_at_once([client.generate(round_request(sessions[2].session_id, [7]))])
        await unavailable_at_once([client.generate(round_request(await client.create(), [7]))])
        await until(lambda workers: workers == without(victim, workers), client, LEASE_S + 1)
        # ... and after.
        for driven in sessions:
            await unavailable_at_once([client.generate(round_request(driven.session_id, [7]))])
            await driven.check_as_before(client)
            await client.close(driven.session_id)


async def unavailable_at_once(calls: Iterable[Awaitable[object]]) -> None:
    started_s = time.monotonic()
    told = await asyncio.gather(*(refused(call) for call in calls))
    assert time.monotonic() - started_s < 1.0
    for refusal in told:
        assert refusal.code is grpc.StatusCode.UNAVAILABLE
        assert refusal.domain == DOMAIN
        assert refusal.reason in {"WORKER_UNAVAILABLE", "NO_DECODE_WORKER"}


# --- drained -------------------------------------------------------------------------------------


async def test_sigterm_drains_every_service(
    keeper: ClusterKeeper, single_engine: RemoteEngine
) -> None:
    """All are told to stop while rounds are being prefilled remotely and decoded: these end
    well, new ones are refused, and every process ends by itself with exit code 0."""
    rng = random.Random(8)
    cluster = await keeper.having(coordinators=2, prefill=1, decode=1)
    first = living(cluster, Role.COORDINATOR)[0]
    async with RawClient(first.address) as client:
        await client.set_policy("always-remote")
        sessions = [await new_session(client, rng) for _ in range(3)]
        prompts = [random_tokens(rng, count) for count in (40, 1500, 1500)]
        lengths = (300, 8, 8)
        running: list[RunningRound] = []
        for driven, prompt, length in zip(sessions, prompts, lengths, strict=True):
            request = round_request(driven.session_id, prompt, max_tokens=length)
            running.append(client.start(request))
            await running[-1].placed()
        await running[0].streams(3)
        for service in cluster.services:
            service.send(signal.SIGTERM)
        told_s = time.monotonic()
        await asyncio.sleep(0.1)
        told = await refused(client.generate(round_request(await client.create(), [7])))
        assert told.kind == (grpc.StatusCode.UNAVAILABLE, "DRAINING", DOMAIN)
        results = await asyncio.gather(*(round_.end() for round_ in running))
        for driven, prompt, result in zip(sessions, prompts, results, strict=True):
            driven.note(prompt, result)
            await driven.check_tokens(single_engine)
        # What the prefill worker had accepted it has finished, and handed over.
        for result in results:
            assert result.finished is not None
            assert result.where.route == ROUTE_REMOTE
            assert result.finished.usage.decode_computed_tokens <= 1
        async with asyncio.timeout(20):
            codes = [await service.process.wait() for service in cluster.services]
        assert codes == [0] * len(cluster.services)
        assert time.monotonic() - told_s < 20
