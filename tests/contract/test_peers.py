"""The contract of Peers and Homes, over gRPC and inside one process."""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace

import grpc
import pytest

from ampd.adapters.grpc_channels import ChannelCache
from ampd.adapters.homes_grpc import GrpcHomes
from ampd.adapters.homes_loopback import LoopbackHomes
from ampd.adapters.peers_grpc import GrpcPeers, PeerTimeouts, SelfAddress
from ampd.adapters.peers_loopback import LoopbackNetwork, LoopbackPeers
from ampd.core.errors import AmpdError, ErrorReason, FieldViolation
from ampd.core.model import (
    Accepted,
    Adopted,
    AdoptOrder,
    DrainStatus,
    Finished,
    FinishReason,
    KvHandle,
    Moved,
    PrefillStats,
    PrefillTarget,
    PrefillTask,
    Rerouted,
    Role,
    RoundEvent,
    RoundOrder,
    RoundTimings,
    RoundUsage,
    Route,
    RouteReason,
    SamplingParams,
    SessionFacts,
    Slo,
    TokensOut,
    ToolCall,
    ToolReturn,
    WorkerInfo,
)
from ampd.ports import ClaimedTask, HomePeer, Homes, Peers, PrefillReport, WorkerPeer
from ampd.runtime.server import INTERNAL_LIMITS, GrpcServer
from ampd.runtime.worker_service import WorkerServicer
from ampd.worker.v1 import (
    decode_service_pb2_grpc,
    prefill_service_pb2_grpc,
    worker_service_pb2_grpc,
)
from services.decode.servicer import DecodeServicer
from services.prefill.servicer import PrefillServicer

LIFE = 1_700_000_000_000_000_001
OTHER_LIFE = LIFE + 1
SOON_S = 5.0
"""Longest wait for what must happen at once; the machine is shared."""

TASK = PrefillTask("t1", "s1", 2, "d0", 100, 7, time.monotonic() - 1.5, Slo(3.0, 0.1))
KV = KvHandle("p0", LIFE, 107, 30.0, b"\x00where\xff")
REPORT = PrefillReport(KV, PrefillStats(8, 4, 95, 4096, 0.0, 0.25, 0.0, 0.5), queue_s=0.125)
ORDER = RoundOrder(
    session_id="s1",
    request_id="r1",
    round_index=2,
    keep_history_tokens=3,
    increment=array("I", [1, 2**32 - 1]),
    history=array("I", [7, 8, 9]),
    sampling=SamplingParams(max_tokens=5, temperature=0.0, stop=("x",)),
    slo=Slo(3.0, 0.1),
    created_s=time.monotonic() - 1.5,
    targets=(PrefillTarget("p0", LIFE, "h:1"),),
    reason=RouteReason.CHEAPEST_REMOTE,
    footprint_tokens=500,
)
TOOL_CALL = ToolCall("s1", "s1-2-0", "count", '{"text": "\u00e9"}')
TOOL_RETURN = ToolReturn("3 é", failed=True, truncated=True, seconds=0.25)
ADOPT = AdoptOrder(
    session_id="s1",
    rounds=3,
    tokens=array("I", [5, 0, 2**32 - 1]),
    facts=SessionFacts("tenant", "m", 1_700_000_000.25, {"a": "b"}),
    slo=Slo(3.0, 0.1),
    history=KvHandle("d1", OTHER_LIFE, 2, 30.0, b"\x00there\xff"),
)
EVENTS: list[RoundEvent] = [
    Accepted(history_rebuilt=True),
    Rerouted(Route.LOCAL, RouteReason.FALLBACK_LOCAL, None),
    TokensOut((5,), "a"),
    TokensOut((6, 7), ""),
    Finished(
        FinishReason.STOP,
        "x",
        RoundUsage(3, 2, 3, 2, 0, 5, 0, 0, 0, 0, 0),
        RoundTimings(0.5, 0.0, 0.25, 0.0, 0.75, 0.125, 0.125, 0.125, 1.0),
        True,
        7,
    ),
]


@dataclass
class Prefill:
    """Records what homes ask for."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    error: Exception | None = None
    hang: bool = False

    async def offer(self, task: PrefillTask, home_address: str, home_incarnation: int) -> None:
        self.calls.append(("offer", task, home_address, home_incarnation))
        if self.hang:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    async def withdraw(self, task_id: str) -> None:
        self.calls.append(("withdraw", task_id))


@dataclass
class Decode:
    """Records what coordinators and prefill workers ask for."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    claimed: ClaimedTask = ClaimedTask(array("I", range(5)), KV)
    error: Exception | None = None
    events: list[RoundEvent] = field(default_factory=lambda: list(EVENTS))
    hang_after: int | None = None
    """Events after which a round hangs."""
    round_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        self.calls.append(("claim", task_id, worker_id, claimer))
        if self.error is not None:
            raise self.error
        return self.claimed

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        self.calls.append(("complete", task_id, worker_id, report))
        if self.error is not None:
            raise self.error

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        self.calls.append(("fail", task_id, worker_id, error_message))

    async def release(self, session_id: str, *, paused_after: int | None = None) -> None:
        self.calls.append(("release", session_id, paused_after))

    async def move(self, session_id: str, target_worker_id: str) -> Moved:
        self.calls.append(("move", session_id, target_worker_id))
        if self.error is not None:
            raise self.error
        return Moved("d1", 2, 2048)

    async def adopt(self, order: AdoptOrder) -> Adopted:
        self.calls.append(("adopt", order))
        if self.error is not None:
            raise self.error
        return Adopted(2, 2048)

    def names(self) -> tuple[str, ...]:
        return ("count",)

    async def run(self, call: ToolCall) -> ToolReturn:
        self.calls.append(("run", call))
        try:
            if self.hang_after is not None:
                await asyncio.Event().wait()
        finally:
            self.round_ended.set()
        if self.error is not None:
            raise self.error
        return TOOL_RETURN

    async def close(self) -> None:
        raise NotImplementedError

    async def drain(self) -> DrainStatus:
        self.calls.append(("drain",))
        return DrainStatus(2, 3, 1.5, 0.25)

    async def run_round(self, order: RoundOrder) -> AsyncGenerator[RoundEvent, None]:
        self.calls.append(("run_round", order))
        try:
            for count, event in enumerate(self.events):
                if count == self.hang_after:
                    await asyncio.Event().wait()
                yield event
            if self.error is not None:
                raise self.error
        finally:
            self.round_ended.set()


@dataclass
class World:
    """Both sides of the protocols, however they are joined."""

    prefill: Prefill
    decode: Decode
    peers: Peers
    homes: Homes
    prefill_address: str
    decode_address: str

    def target(self, incarnation: int = LIFE) -> PrefillTarget:
        return PrefillTarget("p0", incarnation, self.prefill_address)

    def home(self, incarnation: int = LIFE) -> HomePeer:
        return self.homes.home(
            WorkerInfo("d0", Role.DECODE, incarnation, self.decode_address, host="h")
        )

    def worker(self, incarnation: int = LIFE) -> WorkerPeer:
        return self.homes.worker(
            WorkerInfo("d0", Role.DECODE, incarnation, self.decode_address, host="h")
        )

    async def lose_prefill(self) -> None:
        """The prefill worker dies."""
        raise NotImplementedError

    async def restart_prefill(self) -> None:
        """The prefill worker dies, and another life of it answers on its address."""
        raise NotImplementedError

    async def lose_decode(self) -> None:
        """The home dies."""
        raise NotImplementedError


class LoopbackWorld(World):
    network: LoopbackNetwork

    async def lose_prefill(self) -> None:
        self.network.lose(self.prefill_address)

    async def restart_prefill(self) -> None:
        self.network.add(self.prefill_address, OTHER_LIFE, prefill=self.prefill)

    async def lose_decode(self) -> None:
        self.network.lose(self.decode_address)


class GrpcWorld(World):
    servers: dict[str, AsyncExitStack]

    async def lose_prefill(self) -> None:
        await self.servers[self.prefill_address].aclose()

    async def restart_prefill(self) -> None:
        await self.lose_prefill()
        stack = self.servers[self.prefill_address]
        await stack.enter_async_context(
            prefill_server(self.prefill, address=self.prefill_address, incarnation=OTHER_LIFE)
        )

    async def lose_decode(self) -> None:
        await self.servers[self.decode_address].aclose()


def prefill_server(
    handler: Prefill, *, address: str = "127.0.0.1:0", incarnation: int = LIFE
) -> GrpcServer:
    server = GrpcServer(
        address=address, services=[], limits=INTERNAL_LIMITS, incarnation=incarnation
    )
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(
        PrefillServicer(handler, incarnation=incarnation, clock=time.monotonic), server.grpc
    )
    return server


@pytest.fixture(params=["loopback", "grpc"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    prefill, decode = Prefill(), Decode()
    if request.param == "loopback":
        network = LoopbackNetwork()
        network.add("p", LIFE, prefill=prefill)
        network.add("d", LIFE, decode=decode, mover=decode, worker=decode, tools=decode)
        loopback = LoopbackWorld(
            prefill,
            decode,
            LoopbackPeers(network, home_address="d", home_incarnation=LIFE),
            LoopbackHomes(network),
            "p",
            "d",
        )
        loopback.network = network
        yield loopback
        return
    async with AsyncExitStack() as servers:
        prefill_stack = await servers.enter_async_context(AsyncExitStack())
        decode_stack = await servers.enter_async_context(AsyncExitStack())
        prefill_side = await prefill_stack.enter_async_context(prefill_server(prefill))
        decode_side = GrpcServer(services=[], limits=INTERNAL_LIMITS, incarnation=LIFE)
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(
            DecodeServicer(decode, decode, decode, incarnation=LIFE, clock=time.monotonic),
            decode_side.grpc,
        )
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerServicer(decode, incarnation=LIFE), decode_side.grpc
        )
        await decode_stack.enter_async_context(decode_side)
        world = GrpcWorld(
            prefill,
            decode,
            GrpcPeers(
                home=SelfAddress(decode_side.address, LIFE),
                clock=time.monotonic,
                timeouts=PeerTimeouts(offer_s=0.5),
            ),
            GrpcHomes(clock=time.monotonic),
            prefill_side.address,
            decode_side.address,
        )
        world.servers = {
            prefill_side.address: prefill_stack,
            decode_side.address: decode_stack,
        }
        yield world
        await world.peers.close()
        await world.homes.close()


async def consume(home: HomePeer, seen: list[RoundEvent], timeout_s: float | None = None) -> None:
    async for event in home.run_round(ORDER, timeout_s):
        seen.append(event)  # noqa: PERF401 - kept when it raises


def refusal(reason: ErrorReason) -> AmpdError:
    return AmpdError(
        reason,
        "because",
        (FieldViolation("a.b", "wrong"),),
        retry_after_s=0.5,
        metadata={"history_tokens": "3"},
    )


def assert_is_refusal(error: AmpdError, reason: ErrorReason) -> None:
    assert (error.reason, error.message, error.retry_after_s) == (reason, "because", 0.5)
    assert error.violations == (FieldViolation("a.b", "wrong"),)
    assert error.metadata == {"history_tokens": "3"}


# --- PrefillPeer --------------------------------------------------------------------------


async def test_an_offer_arrives_whole(world: World) -> None:
    await world.peers.prefill(world.target()).offer(TASK)
    name, task, address, incarnation = world.prefill.calls[0]
    assert (name, address, incarnation) == ("offer", world.decode_address, LIFE)
    assert isinstance(task, PrefillTask)
    # Over a network the task gets older on its way.
    assert task.created_s == pytest.approx(TASK.created_s, abs=1.0)
    assert replace(task, created_s=TASK.created_s) == TASK


@pytest.mark.parametrize("reason", [ErrorReason.QUEUE_FULL, ErrorReason.DRAINING])
async def test_an_offer_may_be_refused(world: World, reason: ErrorReason) -> None:
    world.prefill.error = refusal(reason)
    with pytest.raises(AmpdError) as caught:
        await world.peers.prefill(world.target()).offer(TASK)
    assert_is_refusal(caught.value, reason)


async def test_a_withdrawal_arrives(world: World) -> None:
    await world.peers.prefill(world.target()).withdraw("t1")
    assert world.prefill.calls == [("withdraw", "t1")]


async def test_another_life_is_stale_and_hears_nothing(world: World) -> None:
    prefill = world.peers.prefill(world.target(OTHER_LIFE))
    decode = world.peers.decode(world.decode_address, OTHER_LIFE)
    home = world.home(OTHER_LIFE)
    for call in (
        prefill.offer(TASK),
        prefill.withdraw("t1"),
        decode.claim("t1", "p0"),
        decode.complete("t1", "p0", REPORT),
        decode.fail("t1", "p0", "x"),
        home.release("s1"),
        home.run_tool(TOOL_CALL, None),
        home.move("s1", ""),
        home.adopt(ADOPT),
        world.worker(OTHER_LIFE).drain(),
        anext(home.run_round(ORDER, None)),
    ):
        with pytest.raises(AmpdError) as caught:
            await call
        assert caught.value.reason is ErrorReason.STALE_INCARNATION
    assert world.prefill.calls == []
    assert world.decode.calls == []


async def test_nobody_there(world: World) -> None:
    await world.lose_prefill()
    await world.lose_decode()
    prefill = world.peers.prefill(world.target())
    decode = world.peers.decode(world.decode_address, LIFE)
    async with asyncio.timeout(SOON_S):
        for call in (
            prefill.offer(TASK),
            prefill.withdraw("t1"),
            decode.claim("t1", "p0"),
            decode.complete("t1", "p0", REPORT),
            world.home().release("s1"),
            world.home().run_tool(TOOL_CALL, 5.0),
            world.home().move("s1", ""),
            world.home().adopt(ADOPT),
            world.worker().drain(),
            anext(world.home().run_round(ORDER, 5.0)),
        ):
            with pytest.raises(AmpdError) as caught:
                await call
            assert caught.value.reason is ErrorReason.WORKER_UNAVAILABLE
        await prefill.lost()
        await decode.lost()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_lost_waits_for_the_worker_to_die(world: World, role: Role) -> None:
    prefill = world.peers.prefill(world.target())
    decode = world.peers.decode(world.decode_address, LIFE)
    peer, lose = {
        Role.PREFILL: (prefill, world.lose_prefill),
        Role.DECODE: (decode, world.lose_decode),
    }[role]
    lost = asyncio.ensure_future(peer.lost())
    await asyncio.sleep(0.2)
    assert not lost.done()
    await lose()
    async with asyncio.timeout(SOON_S):
        await lost


async def test_lost_notices_another_life(world: World) -> None:
    peer = world.peers.prefill(world.target())
    lost = asyncio.ensure_future(peer.lost())
    await asyncio.sleep(0.2)
    await world.restart_prefill()
    async with asyncio.timeout(SOON_S):
        await lost
        # Asked only now, of the life that answers.
        await peer.lost()


async def test_lost_can_be_cancelled(world: World) -> None:
    lost = asyncio.ensure_future(world.peers.prefill(world.target()).lost())
    await asyncio.sleep(0.1)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await world.peers.prefill(world.target()).withdraw("t1")


async def test_a_call_in_flight_fails_with_its_worker(world: World) -> None:
    world.prefill.hang = True
    offer = asyncio.ensure_future(world.peers.prefill(world.target()).offer(TASK))
    await asyncio.sleep(0.1)
    await world.lose_prefill()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(AmpdError) as caught:
            await offer
    assert caught.value.reason is ErrorReason.WORKER_UNAVAILABLE


# --- DecodePeer ---------------------------------------------------------------------------


@pytest.mark.parametrize("history", [KV, None])
async def test_a_claim_brings_tokens_and_history(world: World, history: KvHandle | None) -> None:
    world.decode.claimed = ClaimedTask(array("I", [0, 2**32 - 1]), history)
    claimed = await world.peers.decode(world.decode_address, LIFE).claim("t1", "p0")
    assert claimed == world.decode.claimed
    assert world.decode.calls == [("claim", "t1", "p0", None)]


@pytest.mark.parametrize("claimer", [PrefillTarget("p0", 2**64 - 1, "host:1"), None])
async def test_a_claim_says_who_it_is(world: World, claimer: PrefillTarget | None) -> None:
    await world.peers.decode(world.decode_address, LIFE).claim("t1", "p0", claimer)
    assert world.decode.calls == [("claim", "t1", "p0", claimer)]


@pytest.mark.parametrize("waits", [True, False])
async def test_an_offer_says_whether_the_task_waits_at_home(world: World, waits: bool) -> None:
    await world.peers.prefill(world.target()).offer(replace(TASK, waits_at_home=waits))
    ((_, task, *_),) = world.prefill.calls
    assert isinstance(task, PrefillTask)
    assert task.waits_at_home is waits


async def test_a_claim_of_a_very_long_history(world: World) -> None:
    world.decode.claimed = ClaimedTask(array("I", bytes(4 * 5_000_000)), None)
    claimed = await world.peers.decode(world.decode_address, LIFE).claim("t1", "p0")
    assert len(claimed.tokens) == 5_000_000


async def test_a_task_may_be_gone(world: World) -> None:
    world.decode.error = refusal(ErrorReason.TASK_GONE)
    peer = world.peers.decode(world.decode_address, LIFE)
    for call in (peer.claim("t1", "p0"), peer.complete("t1", "p0", REPORT)):
        with pytest.raises(AmpdError) as caught:
            await call
        assert_is_refusal(caught.value, ErrorReason.TASK_GONE)


async def test_a_result_arrives_whole(world: World) -> None:
    await world.peers.decode(world.decode_address, LIFE).complete("t1", "p0", REPORT)
    assert world.decode.calls == [("complete", "t1", "p0", REPORT)]


@pytest.mark.parametrize("message", ["engine failed", ""])
async def test_a_failure_arrives(world: World, message: str) -> None:
    await world.peers.decode(world.decode_address, LIFE).fail("t1", "p0", message)
    assert world.decode.calls == [("fail", "t1", "p0", message)]


# --- HomePeer -----------------------------------------------------------------------------


async def test_a_round_streams_its_events(world: World) -> None:
    events = [event async for event in world.home().run_round(ORDER, 10.0)]
    assert events == EVENTS
    name, order = world.decode.calls[0]
    assert name == "run_round"
    assert isinstance(order, RoundOrder)
    assert order.created_s == pytest.approx(ORDER.created_s, abs=1.0)
    assert replace(order, created_s=ORDER.created_s) == ORDER


@pytest.mark.parametrize("before", [0, 3])
async def test_a_round_may_be_refused_or_fail(world: World, before: int) -> None:
    world.decode.events = EVENTS[:before]
    world.decode.error = refusal(ErrorReason.KV_EXHAUSTED)
    seen: list[RoundEvent] = []
    with pytest.raises(AmpdError) as caught:
        await consume(world.home(), seen)
    assert_is_refusal(caught.value, ErrorReason.KV_EXHAUSTED)
    assert seen == EVENTS[:before]


async def test_a_round_closed_early_ends_at_the_home(world: World) -> None:
    world.decode.hang_after = 3
    async with aclosing(world.home().run_round(ORDER, None)) as events:
        async for event in events:
            if isinstance(event, TokensOut):
                break
    async with asyncio.timeout(1.0):
        await world.decode.round_ended.wait()


async def test_a_cancelled_round_ends_at_the_home(world: World) -> None:
    world.decode.hang_after = 0

    round_ = asyncio.ensure_future(consume(world.home(), []))
    async with asyncio.timeout(SOON_S):
        while not world.decode.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    round_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await round_
    async with asyncio.timeout(1.0):
        await world.decode.round_ended.wait()


async def test_a_round_has_a_deadline_at_both_ends(world: World) -> None:
    world.decode.hang_after = 1
    with pytest.raises(AmpdError) as caught:
        await consume(world.home(), [], 0.3)
    assert caught.value.reason is ErrorReason.DEADLINE
    async with asyncio.timeout(1.0):
        await world.decode.round_ended.wait()


async def test_a_round_fails_with_its_home(world: World) -> None:
    world.decode.hang_after = 1
    async with aclosing(world.home().run_round(ORDER, None)) as events:
        assert await anext(events) == EVENTS[0]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
        await world.lose_decode()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(AmpdError) as caught:
                await waiting
    assert caught.value.reason is ErrorReason.WORKER_UNAVAILABLE


async def test_a_round_without_an_end_is_a_defect(world: World) -> None:
    world.decode.events = EVENTS[:2]
    with pytest.raises(AmpdError) as caught:
        await consume(world.home(), [])
    assert caught.value.reason is ErrorReason.INTERNAL


@pytest.mark.parametrize("paused_after", [None, 0, 3])
async def test_a_release_arrives(world: World, paused_after: int | None) -> None:
    await world.home().release("s1", paused_after=paused_after)
    assert world.decode.calls == [("release", "s1", paused_after)]


@pytest.mark.parametrize("timeout_s", [None, 10.0])
async def test_a_tool_call_arrives_and_returns(world: World, timeout_s: float | None) -> None:
    assert await world.home().run_tool(TOOL_CALL, timeout_s) == TOOL_RETURN
    assert world.decode.calls == [("run", TOOL_CALL)]


@pytest.mark.parametrize("reason", [ErrorReason.TOOL_NOT_FOUND, ErrorReason.QUEUE_FULL])
async def test_a_tool_call_may_be_refused(world: World, reason: ErrorReason) -> None:
    world.decode.error = refusal(reason)
    with pytest.raises(AmpdError) as caught:
        await world.home().run_tool(TOOL_CALL, None)
    assert_is_refusal(caught.value, reason)


async def test_a_tool_call_has_a_deadline_at_both_ends(world: World) -> None:
    world.decode.hang_after = 0
    with pytest.raises(AmpdError) as caught:
        await world.home().run_tool(TOOL_CALL, 0.3)
    assert caught.value.reason is ErrorReason.DEADLINE
    async with asyncio.timeout(1.0):
        await world.decode.round_ended.wait()


async def test_a_cancelled_tool_call_ends_at_the_home(world: World) -> None:
    world.decode.hang_after = 0
    running = asyncio.ensure_future(world.home().run_tool(TOOL_CALL, None))
    async with asyncio.timeout(SOON_S):
        while not world.decode.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(1.0):
        await world.decode.round_ended.wait()


async def test_a_tool_call_fails_with_its_home(world: World) -> None:
    world.decode.hang_after = 0
    running = asyncio.ensure_future(world.home().run_tool(TOOL_CALL, None))
    await asyncio.sleep(0.1)
    await world.lose_decode()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(AmpdError) as caught:
            await running
    assert caught.value.reason is ErrorReason.WORKER_UNAVAILABLE


@pytest.mark.parametrize("target", ["", "d1"])
async def test_a_move_arrives_and_tells(world: World, target: str) -> None:
    assert await world.home().move("s1", target) == Moved("d1", 2, 2048)
    assert world.decode.calls == [("move", "s1", target)]


@pytest.mark.parametrize("history", [ADOPT.history, None])
async def test_an_adoption_arrives_whole(world: World, history: KvHandle | None) -> None:
    order = replace(ADOPT, history=history)
    assert await world.home().adopt(order) == Adopted(2, 2048)
    assert world.decode.calls == [("adopt", order)]


async def test_a_move_or_an_adoption_may_be_refused(world: World) -> None:
    world.decode.error = refusal(ErrorReason.KV_EXHAUSTED)
    for call in (world.home().move("s1", ""), world.home().adopt(ADOPT)):
        with pytest.raises(AmpdError) as caught:
            await call
        assert_is_refusal(caught.value, ErrorReason.KV_EXHAUSTED)


# --- WorkerPeer ---------------------------------------------------------------------------


async def test_a_drain_tells_how_far_it_is(world: World) -> None:
    assert await world.worker().drain() == DrainStatus(2, 3, 1.5, 0.25)
    assert world.decode.calls == [("drain",)]


# --- gRPC alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["grpc"], indirect=True)
async def test_a_silent_worker_is_unavailable(world: World) -> None:
    world.prefill.hang = True
    with pytest.raises(AmpdError) as caught:
        await world.peers.prefill(world.target()).offer(TASK)
    assert caught.value.reason is ErrorReason.WORKER_UNAVAILABLE


@pytest.mark.parametrize("world", ["grpc"], indirect=True)
async def test_an_adoption_is_checked(world: World) -> None:
    kv = KvHandle("d1", LIFE, 4, 30.0, b"")
    wrong = {
        "tokens": replace(ADOPT, tokens=array("I"), history=None),
        "history.tokens": replace(ADOPT, history=kv),
    }
    for field_name, order in wrong.items():
        with pytest.raises(AmpdError) as caught:
            await world.home().adopt(order)
        assert caught.value.reason is ErrorReason.INVALID_FIELD
        assert [violation.field for violation in caught.value.violations] == [field_name]
    assert world.decode.calls == []


@pytest.mark.parametrize("world", ["grpc"], indirect=True)
async def test_a_defect_of_the_handler_leaks_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.prefill.error = RuntimeError("secret internals")
    with pytest.raises(AmpdError) as caught:
        await world.peers.prefill(world.target()).offer(TASK)
    assert caught.value.reason is ErrorReason.INTERNAL
    assert "secret" not in caught.value.message
    logged = capsys.readouterr()
    assert caught.value.metadata["incident"] in logged.out + logged.err


@pytest.mark.parametrize("world", ["grpc"], indirect=True)
async def test_connections_are_bounded(world: World) -> None:
    channels = ChannelCache(max_channels=1)
    async with channels:
        peers = GrpcPeers(home=SelfAddress("h:1", LIFE), clock=time.monotonic, channels=channels)
        await peers.prefill(world.target()).withdraw("t1")
        # The first connection is idle: it makes room.
        await peers.decode(world.decode_address, LIFE).fail("t1", "p0", "x")
        lost = asyncio.ensure_future(peers.prefill(world.target()).lost())
        await asyncio.sleep(0.1)
        with pytest.raises(AmpdError) as caught:
            await peers.decode(world.decode_address, LIFE).fail("t1", "p0", "x")
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost


@pytest.mark.parametrize("world", ["grpc"], indirect=True)
async def test_a_new_life_gets_a_new_connection(world: World) -> None:
    """The one to the life before may be waiting to try again, or still be in use."""
    async with ChannelCache() as channels:
        address = world.decode_address
        async with channels.use(address, 1) as first:
            async with channels.use(address, 2) as second:
                assert second is not first
                async with channels.use(address, 1) as late:
                    assert late is second
            lost = asyncio.create_task(first.lost(1))
            await asyncio.wait([lost], timeout=5.0)
            assert lost.done()
        with pytest.raises(grpc.aio.UsageError):
            await first.lost(1)
        async with channels.use(address, 2) as still:
            assert still is second
