"""Lazy for real: the services' own Home and PrefillWorker over two real engines and NIXL.

The prefill worker's pump is started by the test, so "held queue" is exact.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
import pytest_asyncio
from engine_contract import Pair
from engine_harness import RemoteEngine

from ampd.adapters.peers_loopback import LoopbackNetwork, LoopbackPeers
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    Finished,
    PrefillTarget,
    Rerouted,
    RoundEvent,
    RoundOrder,
    RouteReason,
    SamplingParams,
    Slo,
)
from ampd.core.policies import DEFAULT_POLICY, resolve
from ampd.ports import ClaimedTask, PrefillReport, PrefillRequest, PrefillResult
from services.decode.home import Home
from services.decode.late_tasks import LateTasks
from services.decode.settings import HomeLimits
from services.decode.tasks import PrefillTasks
from services.prefill.worker import PrefillWorker

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

TARGET = PrefillTarget("p0", 1, "prefill")


class WatchedEngine:
    """The prefill engine, each result kept; everything else goes through as it is."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self.results: dict[str, PrefillResult] = {}
        self.started: list[str] = []

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        self.started.append(request.request_id)
        self.results[request.request_id] = await self._engine.prefill(request)
        return self.results[request.request_id]

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


@dataclass
class Setup:
    home: Home
    worker: PrefillWorker
    engine: WatchedEngine
    pair: Pair
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def tokens(self, count: int) -> array[int]:
        return array("I", (self.rng.randrange(100, 40_000) for _ in range(count)))

    @asynccontextmanager
    async def pumping(self) -> AsyncIterator[None]:
        pump = asyncio.create_task(self.worker.run())
        try:
            yield
        finally:
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def pulled_bytes(self) -> int:
        return (await self.pair.prefill.stats_now()).pulled_bytes_total

    def order(self, session_id: str, index: int, history: int, increment: int) -> RoundOrder:
        return RoundOrder(
            session_id=session_id,
            request_id=f"{session_id}-{index}",
            round_index=index,
            keep_history_tokens=history,
            increment=self.tokens(increment),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            slo=Slo(60.0, 60.0),
            created_s=time.monotonic(),
            reason=RouteReason.LEAST_LOADED,
            targets=(TARGET,),
        )

    async def with_history(self, session_id: str, tokens: int) -> int:
        """A session with one local round behind it; its history's length."""
        order = replace(self.order(session_id, 0, 0, tokens), targets=())
        return finished(await events_of(self.home, order)).history_tokens


async def events_of(home: Home, order: RoundOrder) -> list[RoundEvent]:
    async with aclosing(home.run_round(order)) as events:
        return [event async for event in events]


def finished(events: list[RoundEvent]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.002)


async def until_queued(worker: PrefillWorker, tasks: int) -> None:
    await until(lambda: worker.load().queued_tasks == tasks)


@pytest_asyncio.fixture(loop_scope="session")
async def setup(vllm_pair: Pair) -> AsyncIterator[Setup]:
    await vllm_pair.prefill.evict()
    network = LoopbackNetwork()
    peers = LoopbackPeers(network, home_address="home", home_incarnation=1)
    engine, store = WatchedEngine(vllm_pair.prefill), MemoryStateStore()
    async with asyncio.TaskGroup() as chores:
        tasks = PrefillTasks(
            worker_id="d0",
            engine=vllm_pair.decode,  # type: ignore[arg-type]
            peers=peers,
            late=LateTasks(
                worker_id="d0", store=store, cost=CostModel(), chores=chores, clock=time.monotonic
            ),
            limits=HomeLimits(),
            chores=chores,
        )
        home = Home(
            worker_id="d0",
            engine=vllm_pair.decode,  # type: ignore[arg-type]
            tasks=tasks,
            cost=CostModel(),
            limits=HomeLimits(),
            chores=chores,
            clock=time.monotonic,
        )
        worker = PrefillWorker(
            me=PrefillTarget("p0", 1, "prefill"),
            engine=engine,  # type: ignore[arg-type]
            store=store,
            peers=peers,
            cost=CostModel(),
            policy=resolve(DEFAULT_POLICY),
            max_queued_tasks=16,
            clock=time.monotonic,
        )
        network.add("home", 1, decode=home)
        network.add("prefill", 1, prefill=worker)
        yield Setup(home, worker, engine, vllm_pair)
        for session_id in [f"s{index}" for index in range(8)]:
            await home.release(session_id)


async def test_nothing_moves_before_a_task_is_taken(setup: Setup) -> None:
    history = await setup.with_history("s0", 300)
    before = await setup.pulled_bytes()
    round_ = asyncio.create_task(events_of(setup.home, setup.order("s0", 1, history, 50)))
    await until_queued(setup.worker, 1)
    await asyncio.sleep(0.5)
    assert await setup.pulled_bytes() == before
    assert setup.engine.started == []
    stats = await setup.pair.decode.stats_now()
    assert stats.kv_used_tokens == 0, "a queued round holds a number, no blocks"
    async with setup.pumping():
        end = finished(await round_)
    assert await setup.pulled_bytes() - before == end.usage.history_pulled_bytes > 0


async def test_a_task_cancelled_while_queued_moves_nothing(setup: Setup) -> None:
    history = await setup.with_history("s0", 300)
    before = await setup.pulled_bytes()
    round_ = asyncio.create_task(events_of(setup.home, setup.order("s0", 1, history, 50)))
    await until_queued(setup.worker, 1)
    round_.cancel()
    with suppress(asyncio.CancelledError):
        await round_
    await until_queued(setup.worker, 0)
    async with setup.pumping():
        await asyncio.sleep(0.3)
    assert setup.engine.started == []
    assert await setup.pulled_bytes() == before
    # The session is as it was: the same round again, with all its history.
    async with setup.pumping():
        end = finished(await events_of(setup.home, setup.order("s0", 1, history, 50)))
    assert end.usage.history_tokens == history


async def test_the_next_read_overlaps_the_computation(setup: Setup) -> None:
    history = await setup.with_history("s1", 700)
    long = asyncio.create_task(events_of(setup.home, setup.order("s0", 0, 0, 3500)))
    await until_queued(setup.worker, 1)
    short = asyncio.create_task(events_of(setup.home, setup.order("s1", 1, history, 40)))
    await until_queued(setup.worker, 2)
    async with setup.pumping():
        await asyncio.gather(long, short)
    first, second = (setup.engine.results[name].stats for name in setup.engine.started)
    assert second.pulled_tokens > 0
    assert first.compute_start_s < second.read_start_s < second.read_end_s < first.compute_end_s
    # One computes at a time: the read overlapped, the computation did not.
    assert second.compute_start_s >= first.compute_end_s


async def test_one_task_ahead_and_no_more(setup: Setup) -> None:
    histories = [await setup.with_history(f"s{index}", 200) for index in (1, 2, 3)]
    rounds = [asyncio.create_task(events_of(setup.home, setup.order("s0", 0, 0, 3500)))]
    await until_queued(setup.worker, 1)
    for index, history in zip((1, 2, 3), histories, strict=True):
        order = setup.order(f"s{index}", 1, history, 40)
        rounds.append(asyncio.create_task(events_of(setup.home, order)))
        await until_queued(setup.worker, index + 1)
    async with setup.pumping():
        await until(lambda: bool(setup.engine.started))
        await asyncio.sleep(0.02)
        assert not setup.engine.results, "the long one must still compute for this to mean much"
        assert len(setup.engine.started) == 2
        await asyncio.gather(*rounds)
    assert len(setup.engine.started) == 4


async def test_a_late_or_foreign_call_is_gone(setup: Setup) -> None:
    seen: list[ClaimedTask] = []
    round_ = asyncio.create_task(events_of(setup.home, setup.order("s0", 0, 0, 64)))
    await until_queued(setup.worker, 1)
    (task_id,) = setup.home._tasks._offered
    with pytest.raises(AmpdError) as foreign:
        await setup.home.claim(task_id, "somebody-else")
    assert foreign.value.reason is ErrorReason.TASK_GONE
    seen.append(await setup.home.claim(task_id, "p0"))
    with pytest.raises(AmpdError) as twice:
        await setup.home.claim(task_id, "p0")
    assert twice.value.reason is ErrorReason.TASK_GONE
    result = await setup.engine.prefill(PrefillRequest(task_id, seen[0].tokens, seen[0].history))
    report = PrefillReport(result.kv, result.stats, 0.0)
    await setup.home.complete(task_id, "p0", report)
    with pytest.raises(AmpdError) as again:
        await setup.home.complete(task_id, "p0", report)
    assert again.value.reason is ErrorReason.TASK_GONE
    assert finished(await round_).usage.decode_computed_tokens <= 1


async def test_a_claim_broken_off_moves_the_round_on(setup: Setup) -> None:
    """The worker gave up waiting for its claim: the home does not wait for it either."""
    history = await setup.with_history("s0", 300)
    round_ = asyncio.create_task(events_of(setup.home, setup.order("s0", 1, history, 50)))
    await until_queued(setup.worker, 1)
    (task_id,) = setup.home._tasks._offered
    claim = asyncio.create_task(setup.home.claim(task_id, "p0"))
    await asyncio.sleep(0)
    claim.cancel()
    with suppress(asyncio.CancelledError):
        await claim
    async with asyncio.timeout(5):
        events = await round_
    assert any(isinstance(e, Rerouted) and e.prefill_worker is None for e in events)
    assert finished(events).usage.prefill_computed_tokens == 0
