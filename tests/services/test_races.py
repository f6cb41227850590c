"""Calls that meet in one step of the event loop: nothing hangs, nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace

import pytest
from inprocess import InProcess, LocalHome, in_process, request, run
from stepping_engine import SteppingEngine

from ampd.adapters.homes_loopback import LoopbackHomePeer, LoopbackHomes
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    Finished,
    KvHandle,
    PrefillTarget,
    PrefillTask,
    RoundEvent,
    RoundOrder,
    RouteReason,
    SamplingParams,
    Slo,
    WorkerInfo,
)
from ampd.wire import names
from services.coordinator.sessions import Sessions
from services.decode.home import Home
from services.decode.late_tasks import LateTasks
from services.decode.settings import HomeLimits
from services.decode.tasks import PrefillTasks


def order(max_tokens: int = 4) -> RoundOrder:
    return RoundOrder(
        session_id="s",
        request_id="r",
        round_index=0,
        keep_history_tokens=0,
        increment=array("I", range(1, 21)),
        sampling=SamplingParams(max_tokens=max_tokens),
        slo=Slo(10.0, 1.0),
        created_s=time.monotonic(),
        reason=RouteReason.ALWAYS_LOCAL,
    )


async def events_of(home: Home, wanted: RoundOrder) -> list[RoundEvent]:
    async with aclosing(home.run_round(wanted)) as events:
        return [event async for event in events]


def assert_empty(local: LocalHome) -> None:
    assert not local.home._sessions
    assert not local.engine.pins
    assert not local.home._ledger.sessions
    assert not local.home._ledger.running_tokens


async def test_of_two_orders_at_once_the_second_is_the_newer() -> None:
    async with in_process("d0") as cluster, asyncio.timeout(5):
        home = cluster.homes["d0"].home
        first, second = await asyncio.gather(
            events_of(home, order()), events_of(home, order()), return_exceptions=True
        )
        assert isinstance(first, AmpdError)
        assert first.reason is ErrorReason.SESSION_CONFLICT
        assert isinstance(second, list)
        assert isinstance(second[-1], Finished)
        home._ledger.check()
        assert home._ledger.running_tokens == 0


@pytest.mark.parametrize("keep", [0, 15])
async def test_a_copy_of_as_many_rounds_is_not_the_session(keep: int) -> None:
    """The home settled a round that its coordinator took for lost; another one became the
    session's, elsewhere. Whether the order that binds it here again ends well or not, its history
    is the order's."""
    async with in_process("d0") as cluster, asyncio.timeout(5):
        local = cluster.homes["d0"]
        await events_of(local.home, order())
        history = array("I", range(500, 500 + keep))
        wanted = replace(
            order(400), request_id="s", round_index=1, keep_history_tokens=keep, history=history
        )
        async with aclosing(local.home.run_round(wanted)) as events:
            await anext(events)
        session = local.home.session("s")
        assert session is None or session.tokens == history
        await events_of(local.home, replace(wanted, sampling=SamplingParams(max_tokens=4)))
        session = local.home.session("s")
        assert session is not None
        assert session.tokens[: keep + 20] == history + wanted.increment
        local.home._ledger.check()


async def test_a_release_beside_its_order_frees_all() -> None:
    async with in_process("d0") as cluster, asyncio.timeout(5):
        local = cluster.homes["d0"]
        ended, _ = await asyncio.gather(
            events_of(local.home, order()), local.home.release("s"), return_exceptions=True
        )
        assert isinstance(ended, AmpdError)
        assert ended.reason is ErrorReason.SESSION_NOT_FOUND
        assert_empty(local)


async def test_a_release_ends_the_order_that_waits_for_the_round_before() -> None:
    async with in_process("d0") as cluster, asyncio.timeout(5):
        local = cluster.homes["d0"]
        running = asyncio.create_task(events_of(local.home, order(max_tokens=500)))
        await asyncio.sleep(0.02)
        *ended, released = await asyncio.gather(
            running,
            events_of(local.home, order()),
            local.home.release("s"),
            return_exceptions=True,
        )
        assert released is None
        assert all(isinstance(end, AmpdError) for end in ended)
        assert_empty(local)


class CloseFirst(LoopbackHomes):
    """Every order is overtaken by a close of its session."""

    def __init__(self, cluster: InProcess, sessions: Sessions) -> None:
        super().__init__(cluster.network)
        self._sessions = sessions

    def home(self, info: WorkerInfo) -> LoopbackHomePeer:
        peer = super().home(info)
        peer.run_round = self._overtaken(peer)  # type: ignore[method-assign]
        return peer

    def _overtaken(self, peer: LoopbackHomePeer):  # type: ignore[no-untyped-def]
        run_round = peer.run_round

        async def overtaken(
            wanted: RoundOrder, timeout_s: float | None
        ) -> AsyncGenerator[RoundEvent, None]:
            with suppress(AmpdError):
                await self._sessions.close("t", wanted.session_id, "")
            async with aclosing(run_round(wanted, timeout_s)) as events:
                async for event in events:
                    yield event

        return overtaken


@pytest.mark.parametrize("keep", [None, 0, 5])
async def test_a_close_that_overtakes_the_order_leaves_no_kv(keep: int | None) -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        (coordinator,) = cluster.coordinators
        await run(coordinator, request(session_id))
        coordinator._homes = CloseFirst(cluster, cluster.sessions())
        with pytest.raises(AmpdError):
            await run(coordinator, request(session_id, keep=keep))
        assert_empty(cluster.homes["d0"])


class LendingEngine(SteppingEngine):
    """Lends at once and answers late."""

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.lent = asyncio.Event()

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        self.lent.set()
        await asyncio.sleep(10)
        return kv

    async def reclaim(self, kv: KvHandle) -> None:
        self.lent.clear()


class SilentPrefill:
    """A prefill worker that takes everything."""

    def prefill(self, target: PrefillTarget) -> SilentPrefill:
        return self

    async def offer(self, task: PrefillTask) -> None:
        self.task_id = names.required_id(task.task_id, "task_id")

    async def withdraw(self, task_id: str) -> None:
        pass

    async def lost(self) -> None:
        await asyncio.Event().wait()


def late_tasks(chores: asyncio.TaskGroup) -> LateTasks:
    """Where nothing waits."""
    return LateTasks(
        worker_id="d0",
        store=MemoryStateStore(),
        cost=CostModel(),
        chores=chores,
        clock=time.monotonic,
    )


@asynccontextmanager
async def offered_prefill(
    keep: int,
) -> AsyncIterator[tuple[asyncio.Task[object], PrefillTasks, str, LendingEngine]]:
    """A task that a silent prefill worker has, of a session with 16 pinned tokens."""
    async with asyncio.TaskGroup() as chores:
        engine, peer = LendingEngine(), SilentPrefill()
        tasks = PrefillTasks(
            worker_id="w" * names.MAX_NAME_CHARS,
            engine=engine,
            peers=peer,  # type: ignore[arg-type]
            late=late_tasks(chores),
            limits=HomeLimits(),
            chores=chores,
        )
        target = PrefillTarget("p0", 1, "p0")
        history = KvHandle("d0", 1, 16, 60.0, b"1")
        wanted = replace(
            order(), session_id=uuid.uuid4().hex, round_index=1000, keep_history_tokens=keep
        )
        prompt = array("I", range(keep)) + wanted.increment
        prefill = asyncio.create_task(tasks._prefill_at(target, wanted, prompt, history))
        await asyncio.sleep(0.01)
        yield prefill, tasks, peer.task_id, engine
        prefill.cancel()
        await asyncio.wait([prefill])


async def test_a_claim_broken_off_while_it_lends_leaves_no_loan() -> None:
    async with offered_prefill(keep=16) as (prefill, tasks, task_id, engine):
        claim = asyncio.create_task(tasks.claim(task_id, "p0"))
        await engine.lent.wait()
        claim.cancel()
        with pytest.raises(AmpdError):
            await prefill
    assert not engine.lent.is_set()


async def test_a_rewind_to_the_beginning_lends_nothing() -> None:
    async with offered_prefill(keep=0) as (_, tasks, task_id, engine):
        claimed = await tasks.claim(task_id, "p0")
        assert claimed.history is None
        assert not engine.lent.is_set()


class LateAnswer(SilentPrefill):
    """It fails the task before its answer to the offer is lost."""

    tasks: PrefillTasks

    async def offer(self, task: PrefillTask) -> None:
        await self.tasks.fail(task.task_id, "p0", "broken")
        raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, "connection broken")


async def test_a_task_that_failed_before_its_offer_was_answered_is_no_surprise() -> None:
    surprises: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: surprises.append(what))
    async with asyncio.TaskGroup() as chores:
        peer = LateAnswer()
        peer.tasks = PrefillTasks(
            worker_id="d0",
            engine=LendingEngine(),
            peers=peer,  # type: ignore[arg-type]
            late=late_tasks(chores),
            limits=HomeLimits(),
            chores=chores,
        )
        wanted = order()
        with pytest.raises(AmpdError):
            await peer.tasks._prefill_at(
                PrefillTarget("p0", 1, "p0"), wanted, wanted.increment, None
            )
    gc.collect()
    assert not surprises
