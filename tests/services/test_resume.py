"""Rounds that outlive their home, their stream, their coordinator, and outages of the store."""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import aclosing
from dataclasses import replace

import pytest
from inprocess import InProcess, Outcome, in_process, request, run

from ampd.adapters.state_memory import MemoryStateStore
from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionState
from ampd.core.model import Binding, TokensOut
from ampd.wire.replay import RoundPlaced
from services.coordinator import shared_state
from services.coordinator.coordinator import Coordinator, RoundStreamEvent
from services.decode import reconciling
from services.decode.reconciling import Reconciler


class Outage(MemoryStateStore):
    """A store that can be down, and can come back as another life without its last writes."""

    down = False
    lives = 1

    @property
    def life(self) -> str:
        return str(self.lives)


def _down(method: str) -> None:
    original = getattr(MemoryStateStore, method)

    async def call(self: Outage, *args: object, **kwargs: object) -> object:
        if self.down:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "the store is down")
        return await original(self, *args, **kwargs)

    setattr(Outage, method, call)


for name in ("load_round", "compare_and_set", "get_session", "list_workers", "read_history"):
    _down(name)


async def start(
    coordinator: Coordinator, session_id: str, tokens: int, **kwargs: object
) -> tuple[list[RoundStreamEvent], asyncio.Task[None]]:
    """A round in a task of its own, of which so many tokens have come."""
    events: list[RoundStreamEvent] = []
    come = asyncio.Event()

    async def follow() -> None:
        wanted = request(session_id, **kwargs)  # type: ignore[arg-type]
        async with aclosing(coordinator.run_round("t", wanted)) as stream:
            async for event in stream:
                events.append(event)
                if len(Outcome(events).token_ids) >= tokens:
                    come.set()

    task = asyncio.create_task(follow())
    await come.wait()
    return events, task


async def cut(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def check_books(cluster: InProcess) -> None:
    for local in cluster.homes.values():
        local.home._ledger.check()
        assert local.home._ledger.running_tokens == 0


async def test_a_home_that_dies_is_replaced_in_mid_round() -> None:
    async with in_process("d0", "d1") as cluster, asyncio.timeout(20):
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        home = (await cluster.record(session_id)).home
        assert home is not None
        events, task = await start(cluster.coordinators[0], session_id, 5, max_tokens=40)
        await cluster.lose_home(home.worker_id)
        await task
        outcome = Outcome(events)
        assert len(outcome.token_ids) == 40
        assert outcome.finished.usage.output_tokens == 40
        assert outcome.finished.history_tokens == 24 + 20 + 40
        assert outcome.placed.history_rebuilt
        record = await cluster.record(session_id)
        assert record.home is not None
        assert record.home.worker_id != home.worker_id
        assert record.history_tokens == 84
        assert not (await run(cluster.coordinators[0], request(session_id))).placed.history_rebuilt
        await check_books(cluster)


async def test_the_same_request_goes_on_after_a_lost_stream() -> None:
    async with in_process("d0", coordinators=2) as cluster, asyncio.timeout(20):
        session_id = await cluster.new_session()
        events, task = await start(
            cluster.coordinators[0], session_id, 5, max_tokens=40, request_id="r"
        )
        seen = len(Outcome(events).token_ids)
        await cut(task)
        record = await cluster.record(session_id)
        assert (record.state, record.resumable, record.rounds) == (SessionState.IDLE, "r", 0)
        outcome = await run(
            cluster.coordinators[1], request(session_id, max_tokens=40, request_id="r")
        )
        assert isinstance(outcome.events[0], RoundPlaced)
        replayed = outcome.events[1]
        assert isinstance(replayed, TokensOut)
        assert len(replayed.token_ids) >= seen
        assert len(outcome.token_ids) == 40
        assert outcome.finished.history_tokens == 60
        again = await run(
            cluster.coordinators[0], request(session_id, max_tokens=40, request_id="r")
        )
        assert again.token_ids == outcome.token_ids
        assert (await cluster.record(session_id)).rounds == 1
        await check_books(cluster)


async def test_another_round_discards_a_lost_one() -> None:
    async with in_process("d0") as cluster, asyncio.timeout(20):
        session_id = await cluster.new_session()
        _, task = await start(cluster.coordinators[0], session_id, 5, max_tokens=40, request_id="r")
        await cut(task)
        assert (
            await run(cluster.coordinators[0], request(session_id))
        ).finished.history_tokens == 24
        with pytest.raises(AmpdError) as error:
            await run(cluster.coordinators[0], request(session_id, max_tokens=40, request_id="r"))
        assert error.value.reason is ErrorReason.SESSION_CONFLICT


async def test_a_repeated_request_takes_over_the_round_that_still_runs() -> None:
    async with in_process("d0", coordinators=2) as cluster, asyncio.timeout(20):
        session_id = await cluster.new_session()
        _, task = await start(cluster.coordinators[0], session_id, 5, max_tokens=60, request_id="r")
        steps = len(cluster.homes["d0"].engine.samples)
        outcome = await run(
            cluster.coordinators[1], request(session_id, max_tokens=60, request_id="r")
        )
        assert len(outcome.token_ids) == 60
        # What was said before was not decoded again.
        assert len(cluster.homes["d0"].engine.samples) - steps < 60
        with pytest.raises(AmpdError) as error:
            await task
        assert error.value.reason is ErrorReason.SESSION_CONFLICT
        assert (await cluster.record(session_id)).history_tokens == 80
        await check_books(cluster)


async def test_a_round_that_settled_at_home_alone_is_told_again_not_run_again() -> None:
    """The coordinator died between the home's last word and the store's."""
    async with in_process("d0", coordinators=2) as cluster, asyncio.timeout(20):
        session_id = await cluster.new_session()
        before = await cluster.record(session_id)
        first = await run(cluster.coordinators[0], request(session_id, request_id="r"))
        steps = len(cluster.homes["d0"].engine.samples)
        # As if nothing had been written behind the binding.
        stored = cluster.store._open.get(session_id)
        assert stored is not None
        stored.record = replace(before, home=Binding("d0", 1))
        cluster.store._replays.pop((session_id, "r"))
        second = await run(cluster.coordinators[1], request(session_id, request_id="r"))
        assert second.token_ids == first.token_ids
        assert second.finished == first.finished
        assert len(cluster.homes["d0"].engine.samples) == steps
        assert (await cluster.record(session_id)).history_tokens == 24


async def outage_cluster(cluster: InProcess) -> Outage:
    cluster.store = store = Outage()
    await cluster.add_coordinator()
    await cluster.beat()
    return store


async def test_rounds_end_during_an_outage_and_are_written_back() -> None:
    async with in_process("d0", coordinators=0) as cluster, asyncio.timeout(20):
        store = await outage_cluster(cluster)
        session_id = await cluster.new_session()
        events, task = await start(
            cluster.coordinators[0], session_id, 5, max_tokens=30, request_id="r"
        )
        store.down = True
        await task
        assert Outcome(events).finished.history_tokens == 50
        # On the last known state, without a store:
        outcome = await run(cluster.coordinators[0], request(session_id, request_id="s"))
        assert outcome.finished.history_tokens == 74
        assert not outcome.placed.history_rebuilt
        again = await run(cluster.coordinators[0], request(session_id, request_id="s"))
        assert again.token_ids == outcome.token_ids
        store.down = False
        while (await cluster.record(session_id)).rounds < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await cluster.record(session_id)).history_tokens == 74
        assert len(await store.read_history(session_id, 0, 74)) == 74
        again = await run(
            cluster.coordinators[0], request(session_id, request_id="r", max_tokens=30)
        )
        assert again.finished == Outcome(events).finished


async def test_an_attempt_that_was_left_ends_behind_the_round_that_it_became(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an outage its end waits: meanwhile the same request has been answered, and the session
    has gone on. None of it is taken back, here or in the store, which has the attempt's mark."""
    monkeypatch.setattr(shared_state, "WRITE_RETRY_S", 0.5)
    async with in_process("d0", coordinators=0) as cluster, asyncio.timeout(20):
        store = await outage_cluster(cluster)
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        asked = {"max_tokens": 12, "request_id": "r"}
        _, left = await start(cluster.coordinators[0], session_id, 5, **asked)
        store.down = True
        left.cancel()
        outcome = await run(cluster.coordinators[0], request(session_id, **asked))
        assert outcome.finished.history_tokens == 24 + 20 + 12
        assert not left.done()
        await asyncio.wait([left])
        outcome = await run(cluster.coordinators[0], request(session_id, request_id="s"))
        assert outcome.placed.history_tokens == 56
        store.down = False
        while cluster.states[0].pending_writes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        record = await cluster.record(session_id)
        assert (record.rounds, record.history_tokens, record.running) == (3, 80, None)
        assert len(await store.read_history(session_id, 0, 80)) == 80


async def test_a_session_is_told_as_its_rounds_have_ended_after_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_state, "FLUSH_EVERY_S", 60.0)
    async with in_process("d0", coordinators=0) as cluster, asyncio.timeout(20):
        store = await outage_cluster(cluster)
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        store.down = True
        await run(cluster.coordinators[0], request(session_id))
        sessions = cluster.sessions()
        sessions._state = cluster.coordinators[0]._state
        with pytest.raises(AmpdError) as error:
            await sessions.get("t", session_id)
        assert error.value.reason is ErrorReason.STORE_UNAVAILABLE
        store.down = False
        assert (await sessions.get("t", session_id)).history_tokens == 48


async def test_nothing_is_bound_and_nothing_hangs_during_an_outage() -> None:
    async with in_process("d0", coordinators=0) as cluster, asyncio.timeout(20):
        store = await outage_cluster(cluster)
        known, unbound = await cluster.new_session(), await cluster.new_session()
        await run(cluster.coordinators[0], request(known))
        store.down = True
        started_s = time.monotonic()
        with pytest.raises(AmpdError) as error:
            await run(cluster.coordinators[0], request(unbound))
        assert error.value.reason is ErrorReason.STORE_UNAVAILABLE
        cluster.coordinators[0]._state._max_state_age_s = 0.0
        with pytest.raises(AmpdError) as error:
            await run(cluster.coordinators[0], request(known))
        assert error.value.reason is ErrorReason.STORE_UNAVAILABLE
        assert time.monotonic() - started_s < 1.0


async def test_a_home_publishes_what_the_store_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciling, "SETTLING_S", 0.0)
    async with in_process("d0", coordinators=0) as cluster, asyncio.timeout(20):
        store = await outage_cluster(cluster)
        home = cluster.homes["d0"].home
        home.heard("1")
        lost, behind = await cluster.new_session(), await cluster.new_session()
        await run(cluster.coordinators[0], request(lost))
        await run(cluster.coordinators[0], request(behind))
        stored = store._open.get(behind)
        assert stored is not None
        old = stored.record
        await run(cluster.coordinators[0], request(behind))
        store._open.pop(lost)
        stored.record = old
        reconciler = Reconciler(
            me=Binding("d0", 1),
            home=home,
            store=store,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        home.heard("2")
        await reconciler.reconcile()
        for session_id, tokens in ((lost, 24), (behind, 48)):
            record = await cluster.record(session_id)
            assert (record.history_tokens, record.home) == (tokens, Binding("d0", 1))
            history = await store.read_history(session_id, 0, tokens)
            assert history == home.session(session_id).tokens  # type: ignore[union-attr]
            assert isinstance(history, array)
            assert not home.is_unconfirmed(home.session(session_id))  # type: ignore[arg-type]
            outcome = await run(cluster.coordinators[0], request(session_id))
            assert not outcome.placed.history_rebuilt


async def test_a_home_forgets_what_is_closed_or_at_home_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciling, "SETTLING_S", 0.0)
    async with in_process("d0") as cluster, asyncio.timeout(20):
        local = cluster.homes["d0"]
        for _ in range(3):
            session_id = await cluster.new_session()
            await run(cluster.coordinators[0], request(session_id))
        stay, moved, closed = list(local.home._sessions)
        store = cluster.store
        record = await cluster.record(moved)
        elsewhere = replace(record, home=Binding("d1", 1), version=record.version + 1)
        assert await store.compare_and_set(elsewhere, record.version)
        record = await cluster.record(closed)
        over = lifecycle.close(record, request_id="", now_unix_s=time.time())
        assert await store.compare_and_set(over, record.version)
        reconciler = Reconciler(
            me=Binding("d0", 1),
            home=local.home,
            store=store,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        await reconciler.reconcile()
        await asyncio.sleep(0.02)
        assert list(local.home._sessions) == [stay]
        assert len(local.engine.pins) == 1
