"""Tasks that wait at their home: the real home, real prefill workers, and who gets what."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from inprocess import LEASE_S, InProcess, LocalHome, in_process
from stepping_engine import SteppingEngine

from ampd.adapters.peers_loopback import LoopbackPeers
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel, DecodeCost, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    Finished,
    KvHandle,
    PolicySpec,
    PrefillStats,
    PrefillTarget,
    PrefillTask,
    Rerouted,
    Role,
    RoundEvent,
    RoundOrder,
    Route,
    RouteReason,
    SamplingParams,
    Slo,
    WaitingPrefill,
    WorkerInfo,
    WorkerLoad,
    WorkerView,
)
from ampd.core.policies import resolve
from ampd.ports import PrefillReport, PrefillRequest, PrefillResult
from services.decode import late_tasks as home_tasks
from services.decode.settings import HomeLimits
from services.prefill import late_tasks as worker_tasks
from services.prefill.worker import PrefillWorker

SLOW = CostModel(prefill=PrefillCost(token_s=1.0))
"""A home of this cost begins nothing itself: it would be too late."""
FAST = CostModel(prefill=PrefillCost(token_s=1e-3))
P0, P1 = PrefillTarget("p0", 1, "p0"), PrefillTarget("p1", 1, "p1")
REPORT = PrefillReport(KvHandle("p0", 1, 20, 60.0, b"x"), PrefillStats(), 0.0)


def order(number: int = 0, *targets: PrefillTarget, max_tokens: int = 4) -> RoundOrder:
    reason = RouteReason.IDLE_PREFILL_WORKER if targets else RouteReason.LATE_BINDING
    return RoundOrder(
        session_id=f"s{number}",
        request_id="r",
        round_index=0,
        keep_history_tokens=0,
        increment=array("I", range(1, 21)),
        sampling=SamplingParams(max_tokens=max_tokens),
        slo=Slo(10.0, 1.0),
        created_s=time.monotonic(),
        targets=targets,
        reason=reason,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


class IdlePrefill:
    """A prefill worker that takes note of what it is told, and of what is void."""

    def __init__(self) -> None:
        self.told: list[PrefillTask] = []
        self.withdrawn: list[str] = []
        self.error: AmpdError | None = None

    async def offer(self, task: PrefillTask, home_address: str, home_incarnation: int) -> None:
        self.told.append(task)
        if self.error is not None:
            raise self.error

    async def withdraw(self, task_id: str) -> None:
        self.withdrawn.append(task_id)


@dataclass
class Waiting:
    """A home, two prefill workers that do nothing by themselves, and rounds that wait."""

    cluster: InProcess
    local: LocalHome
    prefill: dict[str, IdlePrefill] = field(default_factory=dict)
    rounds: list[asyncio.Task[list[RoundEvent]]] = field(default_factory=list)

    def begin(self, wanted: RoundOrder) -> asyncio.Task[list[RoundEvent]]:
        """Run the round."""
        self.rounds.append(asyncio.create_task(self._events(wanted)))
        return self.rounds[-1]

    async def _events(self, wanted: RoundOrder) -> list[RoundEvent]:
        async with aclosing(self.local.home.run_round(wanted)) as events:
            return [event async for event in events]

    async def shown(self, tasks: int = 1) -> list[str]:
        """The tasks that wait, once there are so many."""
        await until(lambda: len(self.local.load().waiting) == tasks)
        return [waiting.task_id for waiting in self.local.load().waiting]

    async def claim_and_complete(self, task_id: str, target: PrefillTarget) -> None:
        """As a prefill worker does."""
        home = self.local.home
        await home.claim(task_id, target.worker_id, target)
        await home.complete(task_id, target.worker_id, REPORT)

    def assert_free(self) -> None:
        """Nothing waits, and no task is out."""
        tasks = self.local.home._tasks
        assert not tasks._offered
        assert not len(tasks.late)
        assert not self.local.load().waiting


async def register_prefill(cluster: InProcess, worker_id: str) -> None:
    info = WorkerInfo(worker_id, Role.PREFILL, 1, worker_id, "here", cost=FAST)
    await cluster.store.heartbeat(info, WorkerLoad(), LEASE_S)


@asynccontextmanager
async def waiting(
    *,
    cost: CostModel = SLOW,
    workers: tuple[str, ...] = ("p0", "p1"),
    limits: HomeLimits | None = None,
) -> AsyncIterator[Waiting]:
    async with in_process(coordinators=0) as cluster, asyncio.timeout(10):
        local = await cluster.add_home("d0", cost=cost, limits=limits)
        setup = Waiting(cluster, local)
        for worker_id in workers:
            setup.prefill[worker_id] = IdlePrefill()
            cluster.network.add(worker_id, 1, prefill=setup.prefill[worker_id])
            await register_prefill(cluster, worker_id)
        yield setup
        local.home._tasks.closing = True  # workers that were lost need not be told
        for round_ in setup.rounds:
            round_.cancel()
        await asyncio.gather(*setup.rounds, return_exceptions=True)
        setup.assert_free()


def rerouted(events: list[RoundEvent]) -> list[Rerouted]:
    assert isinstance(events[-1], Finished)
    return [event for event in events if isinstance(event, Rerouted)]


async def refused(call: Awaitable[object]) -> ErrorReason:
    with pytest.raises(AmpdError) as caught:
        await call
    return caught.value.reason


# --- the home ------------------------------------------------------------------------------


async def test_a_task_waits_for_whoever_claims_it_and_the_record_says_who() -> None:
    async with waiting() as setup:
        round_ = setup.begin(order())
        (task_id,) = await setup.shown()
        await setup.claim_and_complete(task_id, P1)
        assert rerouted(await round_) == [Rerouted(Route.REMOTE, RouteReason.PULLED, "p1")]


async def test_of_two_claims_the_first_has_the_task() -> None:
    async with waiting() as setup:
        round_ = setup.begin(order())
        (task_id,) = await setup.shown()
        home = setup.local.home
        claims = await asyncio.gather(
            home.claim(task_id, "p0", P0),
            home.claim(task_id, "p1", P1),
            home.claim(task_id, "p0", P0),
            return_exceptions=True,
        )
        assert not isinstance(claims[0], BaseException)
        assert [getattr(claim, "reason", None) for claim in claims[1:]] == [
            ErrorReason.TASK_GONE
        ] * 2
        assert not setup.local.load().waiting
        assert await refused(home.complete(task_id, "p1", REPORT)) is ErrorReason.TASK_GONE
        await home.complete(task_id, "p0", REPORT)
        await round_


@pytest.mark.parametrize("claimer", [None, P1])
async def test_a_claim_that_does_not_say_whose_it_is_gets_nothing(
    claimer: PrefillTarget | None,
) -> None:
    async with waiting() as setup:
        setup.begin(order())
        (task_id,) = await setup.shown()
        assert await refused(setup.local.home.claim(task_id, "p0", claimer)) is (
            ErrorReason.TASK_GONE
        )
        assert await setup.shown() == [task_id]


@pytest.mark.parametrize("steps", range(1, 12))
async def test_a_claim_while_the_home_takes_the_task(steps: int) -> None:
    """Whatever step of the event loop it comes in, one of them has the task."""
    async with waiting(cost=CostModel()) as setup:
        round_ = setup.begin(order(max_tokens=200))
        for _ in range(steps):
            await asyncio.sleep(0)
        tasks = setup.local.home._tasks
        waits, offered = len(tasks.late) == 1, list(tasks._offered)
        if waits:
            await setup.claim_and_complete(offered[0], P0)
            assert rerouted(await round_) == [Rerouted(Route.REMOTE, RouteReason.PULLED, "p0")]
            return
        for task_id in offered:
            claim = setup.local.home.claim(task_id, "p0", P0)
            assert await refused(claim) is ErrorReason.TASK_GONE
        assert rerouted(await round_) == []


async def test_without_prefill_workers_the_home_takes_all() -> None:
    async with waiting(workers=()) as setup:
        rounds = [setup.begin(order(number)) for number in range(8)]
        for events in await asyncio.gather(*rounds):
            assert rerouted(events) == []


async def test_a_claimer_that_dies_gives_the_task_back_once() -> None:
    async with waiting() as setup:
        round_ = setup.begin(order())
        (first,) = await setup.shown()
        await setup.local.home.claim(first, "p0", P0)
        setup.cluster.network.lose("p0")
        (second,) = await setup.shown()
        assert second != first
        assert await refused(setup.local.home.claim(first, "p1", P1)) is ErrorReason.TASK_GONE
        await setup.local.home.claim(second, "p1", P1)
        await setup.local.home.fail(second, "p1", "broken")
        assert rerouted(await round_) == [
            Rerouted(Route.REMOTE, RouteReason.PULLED, "p0"),
            Rerouted(Route.REMOTE, RouteReason.PULLED, "p1"),
            Rerouted(Route.LOCAL, RouteReason.FALLBACK_LOCAL, None),
        ]
        await until(lambda: setup.prefill["p1"].withdrawn == [second])


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_cancelled_round_leaves_no_task(claimed: bool) -> None:
    async with waiting() as setup:
        round_ = setup.begin(order())
        (task_id,) = await setup.shown()
        if claimed:
            await setup.local.home.claim(task_id, "p0", P0)
        round_.cancel()
        with suppress(asyncio.CancelledError):
            await round_
        setup.assert_free()
        assert await refused(setup.local.home.claim(task_id, "p1", P1)) is ErrorReason.TASK_GONE
        if claimed:
            await until(lambda: setup.prefill["p0"].withdrawn == [task_id])


async def test_a_newer_order_ends_the_one_that_waits() -> None:
    async with waiting() as setup:
        older = setup.begin(order())
        (first,) = await setup.shown()
        newer = setup.begin(replace(order(), request_id="r2"))
        assert await refused(older) is ErrorReason.SESSION_CONFLICT
        await until(lambda: setup.local.load().waiting[0].task_id != first)
        (second,) = await setup.shown()
        await setup.claim_and_complete(second, P0)
        await newer


async def test_nobody_comes_and_the_home_does_not_wait_for_ever() -> None:
    limits = HomeLimits(kv_lease_s=0.0, claim_timeout_s=0.1)
    async with waiting(limits=limits) as setup:
        events = await setup.begin(order())
        assert rerouted(events) == [Rerouted(Route.LOCAL, RouteReason.FALLBACK_LOCAL, None)]


async def test_a_worker_that_is_told_takes_the_task_as_ordered() -> None:
    async with waiting() as setup:
        round_ = setup.begin(order(0, P0))
        await until(lambda: bool(setup.prefill["p0"].told))
        (told,) = setup.prefill["p0"].told
        assert told.waits_at_home
        await setup.claim_and_complete(told.task_id, P0)
        assert rerouted(await round_) == []


@pytest.mark.parametrize("lost", [True, False])
async def test_a_hint_that_is_lost_or_refused_loses_no_task(lost: bool) -> None:
    async with waiting() as setup:
        if lost:
            setup.cluster.network.lose("p0")
        setup.prefill["p0"].error = AmpdError(ErrorReason.QUEUE_FULL, "busy", retry_after_s=1.0)
        published = asyncio.Event()
        setup.local.home._tasks.late.publish = published.set
        round_ = setup.begin(order(0, P0))
        await published.wait()
        (task_id,) = await setup.shown()
        await setup.claim_and_complete(task_id, P1)
        assert rerouted(await round_) == [Rerouted(Route.REMOTE, RouteReason.PULLED, "p1")]


async def test_a_home_that_takes_a_task_promised_to_another_says_so() -> None:
    async with waiting(cost=CostModel()) as setup:
        events = await setup.begin(order(0, P0))
        assert setup.prefill["p0"].told
        assert rerouted(events) == [Rerouted(Route.LOCAL, RouteReason.LATE_BINDING, None)]


async def test_without_the_store_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_tasks, "BLIND_S", 0.2)
    async with waiting() as setup:

        async def down() -> tuple[WorkerView, ...]:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "down")

        round_ = setup.begin(order())
        await setup.shown()
        await asyncio.sleep(0)
        monkeypatch.setattr(setup.cluster.store, "list_workers", down)
        # For a while it goes by the workers it knows, then by itself.
        assert await setup.shown()
        assert rerouted(await round_) == []


async def test_what_would_cost_others_their_itl_is_not_shown() -> None:
    cost = replace(SLOW, decode=DecodeCost(sequence_s=0.6))
    async with waiting(cost=cost) as setup:
        steps: Any = SteppingEngine(CostModel(mixed=MixedCost(base_s=0.001)))
        setup.local.home._engine = steps
        first = setup.begin(order(0, max_tokens=300))
        (task_id,) = await setup.shown()
        await setup.claim_and_complete(task_id, P0)
        second = setup.begin(order(1))
        await until(lambda: len(setup.local.home._tasks.late) == 1)
        assert not setup.local.load().waiting
        await first
        (task_id,) = await setup.shown()
        await setup.claim_and_complete(task_id, P0)
        await second
        await steps.close()


# --- the prefill worker --------------------------------------------------------------------


class TimedEngine(SteppingEngine):
    """Prefills take as long as it says, and it says so."""

    def __init__(self, seconds: float) -> None:
        super().__init__(CostModel())
        self.seconds = seconds
        self.prefills: list[str] = []

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        self.prefills.append(request.request_id)
        result = await super().prefill(request)
        begun_s = time.monotonic()
        await asyncio.sleep(self.seconds)
        stats = PrefillStats(
            computed_tokens=len(request.tokens),
            compute_start_s=begun_s,
            compute_end_s=begun_s + self.seconds,
        )
        return PrefillResult(result.kv, stats)


class CountingStore(MemoryStateStore):
    """Counts how often it is asked for the workers."""

    asked = 0
    down = False

    async def list_workers(self) -> tuple[WorkerView, ...]:
        self.asked += 1
        if self.down:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "down")
        return await super().list_workers()


@dataclass
class Pulling:
    setup: Waiting
    workers: list[PrefillWorker]
    engines: list[TimedEngine]


@asynccontextmanager
async def pulling(
    count: int = 1, *, policy: str = "ampd", seconds: float = 0.02
) -> AsyncIterator[Pulling]:
    """Real prefill workers; the home's load is in the store whenever it changes."""
    async with waiting(workers=()) as setup:
        store = CountingStore()
        store._workers = setup.cluster.store._workers
        engines = [TimedEngine(seconds) for _ in range(count)]
        workers = []
        for index, engine in enumerate(engines):
            target = PrefillTarget(f"p{index}", 1, f"p{index}")
            worker = PrefillWorker(
                me=target,
                engine=engine,
                peers=LoopbackPeers(
                    setup.cluster.network, home_address=target.address, home_incarnation=1
                ),
                store=store,
                cost=FAST,
                policy=resolve(PolicySpec(policy)),
                max_queued_tasks=8,
                clock=time.monotonic,
            )
            workers.append(worker)
            setup.cluster.network.add(target.address, 1, prefill=worker)
            await register_prefill(setup.cluster, target.worker_id)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(worker.run()) for worker in workers]
            running.append(group.create_task(_beat(setup.cluster)))
            yield Pulling(setup, workers, engines)
            for task in running:
                task.cancel()
        for engine in engines:
            await engine.close()


async def _beat(cluster: InProcess) -> None:
    while True:
        await cluster.beat()
        await asyncio.sleep(0.01)


def store_of(worker: PrefillWorker) -> CountingStore:
    store = worker._late._known._store
    assert isinstance(store, CountingStore)
    return store


async def test_workers_pull_what_waits_and_nothing_twice() -> None:
    async with pulling(3) as cluster:
        rounds = [cluster.setup.begin(order(number)) for number in range(12)]
        for events in await asyncio.gather(*rounds):
            (moved,) = rerouted(events)
            assert moved.reason is RouteReason.PULLED
        assert sum(len(engine.prefills) for engine in cluster.engines) == 12
        assert all(engine.prefills for engine in cluster.engines)


async def test_a_busy_worker_leaves_a_task_that_it_is_told_of_at_home() -> None:
    async with pulling(seconds=0.3) as cluster:
        (worker,) = cluster.workers
        first = cluster.setup.begin(order(0, P0))
        await until(lambda: bool(cluster.engines[0].prefills))
        hint = PrefillTask("t", "s9", 0, "d0", 0, 20, time.monotonic(), Slo(10.0, 1.0), True)
        assert await refused(worker.offer(hint, "d0", 1)) is ErrorReason.QUEUE_FULL
        second = cluster.setup.begin(order(1, P0))
        assert rerouted(await first) == rerouted(await second) == []


async def test_a_task_that_is_told_and_seen_is_taken_once() -> None:
    surprises: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: surprises.append(what))
    async with pulling(seconds=0.1) as cluster:
        (worker,) = cluster.workers
        first = cluster.setup.begin(order(0, P0))
        await until(lambda: bool(cluster.engines[0].prefills))
        (task_id,) = worker._taken
        shown = WaitingPrefill(task_id, "s0", 0, 20, 0.01, 10.0)
        old = WorkerInfo("d8", Role.DECODE, 1, "d0", "here")
        await cluster.setup.cluster.store.heartbeat(old, WorkerLoad(waiting=(shown,)), LEASE_S)
        worker._late.look_soon()
        worker._wake.set()
        assert rerouted(await first) == []
        assert rerouted(await cluster.setup.begin(order(1, P0))) == []
        assert len(cluster.engines[0].prefills) == 2
    assert not surprises


async def test_hints_need_no_store() -> None:
    async with pulling() as cluster:
        (worker,) = cluster.workers
        store_of(worker).down = True
        for number in range(3):
            assert rerouted(await cluster.setup.begin(order(number, P0))) == []


async def test_an_idle_worker_hardly_asks_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tasks, "QUIET_S", 0.0)
    async with pulling() as cluster:
        store = store_of(cluster.workers[0])
        await until(lambda: store.asked > 0)
        before = store.asked
        await asyncio.sleep(0.3)
        assert store.asked - before <= 1


@pytest.mark.parametrize("policy", ["ampd-paper", "always-local", "always-remote"])
async def test_what_waits_is_pulled_under_the_next_policy_too(policy: str) -> None:
    async with pulling(seconds=0.05) as cluster:
        (worker,) = cluster.workers
        rounds = [cluster.setup.begin(order(number)) for number in range(4)]
        await until(lambda: bool(cluster.engines[0].prefills))
        worker.apply_policy(resolve(PolicySpec(policy)))
        for events in await asyncio.gather(*rounds):
            assert [moved.reason for moved in rerouted(events)] == [RouteReason.PULLED]
        before = store_of(worker).asked
        await asyncio.sleep(0.3)
        # Then there is nothing more to look for.
        assert store_of(worker).asked - before <= 1


async def test_what_a_worker_cannot_hold_is_left_to_others() -> None:
    async with pulling(2) as cluster:
        small = cluster.workers[0]
        small._late._capacity_tokens = 19
        events = await cluster.setup.begin(order())
        assert [moved.prefill_worker for moved in rerouted(events)] == ["p1"]
        assert not cluster.engines[0].prefills


async def test_a_draining_worker_pulls_nothing() -> None:
    async with pulling(2) as cluster:
        cluster.workers[0].start_drain()
        rounds = [cluster.setup.begin(order(number)) for number in range(4)]
        for events in await asyncio.gather(*rounds):
            assert [moved.prefill_worker for moved in rerouted(events)] == ["p1"]


async def test_a_home_that_is_gone_is_left_alone() -> None:
    async with pulling() as cluster:
        gone = WorkerInfo("d9", Role.DECODE, 1, "d9", "here")
        waiting_there = tuple(
            WaitingPrefill(f"lost{number}", "s9", 0, 10, 1.0, 10.0) for number in range(8)
        )
        await cluster.setup.cluster.store.heartbeat(
            gone, WorkerLoad(waiting=waiting_there), LEASE_S
        )
        started_s = time.monotonic()
        assert len(rerouted(await cluster.setup.begin(order()))) == 1
        assert time.monotonic() - started_s < worker_tasks.SHUN_S


async def test_what_waits_behind_another_task_keeps_its_time() -> None:
    async with pulling(policy="always-remote", seconds=0.3) as cluster:
        (worker,) = cluster.workers
        pushed = [
            cluster.setup.begin(replace(order(n, P0), reason=RouteReason.LEAST_LOADED))
            for n in range(2)
        ]
        await until(lambda: len(cluster.engines[0].prefills) == 2)
        await asyncio.sleep(0.1)
        # The first is overdue by its prediction (20 ms); the second has not begun.
        assert worker.load().queued_prefill_s == pytest.approx(0.02)
        await asyncio.gather(*pushed)


async def test_a_worker_learns_how_slow_it_is_and_says_so() -> None:
    async with pulling(seconds=0.04) as cluster:
        (worker,) = cluster.workers
        assert worker.load().calibration == 1.0
        for number in range(5):
            await cluster.setup.begin(order(number))
        assert 1.1 < worker.load().calibration < 2.0
