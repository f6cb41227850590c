"""Moving sessions between homes and draining homes, in one process: races, refusals, losses."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from inprocess import InProcess, LocalHome, in_process, request, run

from ampd.adapters.homes_loopback import LoopbackHomes
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel, KvCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import (
    AdoptOrder,
    Binding,
    Moved,
    RoundOrder,
    RouteReason,
    SamplingParams,
    SessionFacts,
    Slo,
)
from ampd.ports import PrefillRequest, PrefillResult, SessionWrites
from services.coordinator.coordinator import Coordinator
from services.coordinator.operations import Operations
from services.decode import draining
from services.decode.draining import HomeDrain
from services.decode.reconciling import Reconciler
from services.decode.settings import HomeLimits

SOON_S = 10.0
READS_ARE_CHEAP = CostModel(prefill=PrefillCost(token_s=1.0))
READS_ARE_DEAR = CostModel(kv=KvCost(token_s=1.0))
HISTORY = 20 + 4
"""What one round of `request` leaves."""


class HookedStore(MemoryStateStore):
    """Lets a test come between a reader and its compare-and-set, or fail it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[SessionRecord], Awaitable[None]] | None = None
        self.after: Callable[[SessionRecord], Awaitable[None]] | None = None

    async def compare_and_set(
        self, record: SessionRecord, expected_version: int, writes: SessionWrites | None = None
    ) -> bool:
        if self.before is not None:
            before, self.before = self.before, None
            await before(record)
        done = await super().compare_and_set(record, expected_version, writes)
        if self.after is not None:
            after, self.after = self.after, None
            await after(record)
        return done


@dataclass
class Moves:
    """A cluster with one session that has had one round, at home "a"."""

    cluster: InProcess
    store: HookedStore
    coordinator: Coordinator
    session_id: str

    def home(self, name: str) -> LocalHome:
        return self.cluster.homes[name]

    def move(self, target: str = "", source: str = "a") -> Awaitable[Moved]:
        return self.home(source).mover.move(self.session_id, target)

    async def bound_to(self) -> str | None:
        home = (await self.cluster.record(self.session_id)).home
        return home.worker_id if home is not None else None

    async def next_round(self) -> tuple[str, bool]:
        """Where the next round runs, and whether its history was rebuilt; all of it is there."""
        history = (await self.cluster.record(self.session_id)).history_tokens
        await self.cluster.beat()
        outcome = await run(self.coordinator, request(self.session_id))
        assert outcome.finished.history_tokens == history + HISTORY
        return outcome.placed.decode_worker, outcome.placed.history_rebuilt

    def resident(self, name: str) -> bool:
        return self.home(name).home.session(self.session_id) is not None

    async def until_state(self, state: SessionState) -> None:
        while (await self.cluster.record(self.session_id)).state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def gate(self, name: str) -> "Gate":
        """The home's prefills wait."""
        return Gate(self.home(name))

    async def settled(self) -> None:
        """Everything that goes on by itself has ended; the books balance, nothing is lent, and
        each engine pins what its home's sessions hold."""
        await until(lambda: all(map(_at_rest, self.cluster.homes.values())))
        for local in self.cluster.homes.values():
            ledger = local.home._ledger
            ledger.check()
            assert ledger.running_tokens == 0
            pinned = {s.session_id for s in local.home.sessions() if s.kv is not None}
            assert {s for s in pinned if ledger.resident_tokens(s) == 0} == set()
            assert ledger.sessions == len(pinned)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - the other side has no event for it
            await asyncio.sleep(0.001)


def _at_rest(local: LocalHome) -> bool:
    sessions = local.home.sessions()
    pins = {s.kv.payload.decode() for s in sessions if s.kv is not None}
    return (
        all(s.paused for s in sessions)
        and not local.engine.jobs
        and not local.engine.lent
        and set(local.engine.pins) == pins
    )


class Gate:
    """Holds an engine's prefills, so that a test comes while a session is being adopted."""

    def __init__(self, local: LocalHome) -> None:
        self.open = asyncio.Event()
        self.reached = asyncio.Event()
        prefill = local.engine.prefill

        async def held(request: PrefillRequest) -> PrefillResult:
            self.reached.set()
            await self.open.wait()
            return await prefill(request)

        local.engine.prefill = held  # type: ignore[method-assign]


@asynccontextmanager
async def moves(*others: str, cost: CostModel | None = READS_ARE_CHEAP) -> AsyncIterator[Moves]:
    async with in_process(coordinators=0) as cluster:
        store = HookedStore()
        cluster.store = store
        coordinator = await cluster.add_coordinator()
        await cluster.add_home("a")
        session_id = await cluster.new_session()
        assert (await run(coordinator, request(session_id))).placed.decode_worker == "a"
        for name in others:
            local = await cluster.add_home(name)
            local.info = replace(local.info, cost=cost)
        await cluster.beat()
        yield Moves(cluster, store, coordinator, session_id)


async def refused(call: Awaitable[object]) -> ErrorReason:
    with pytest.raises(AmpdError) as caught:
        async with asyncio.timeout(SOON_S):
            await call
    return caught.value.reason


# --- a move -------------------------------------------------------------------------------


async def test_a_session_moves_with_its_kv() -> None:
    async with moves("b") as m:
        before = await m.cluster.record(m.session_id)
        moved = await m.move()
        kv_tokens = 20  # what the stepping engine pins of a round: its prompt
        assert moved == Moved("b", kv_tokens, 4 * kv_tokens)
        assert await m.cluster.record(m.session_id) == replace(
            before, version=before.version + 1, home=Binding("b", 1)
        )
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (False, True)
        adopted = m.home("b").home.session(m.session_id)
        assert adopted is not None
        assert adopted.tokens == await m.store.read_history(m.session_id, 0, HISTORY)
        assert (adopted.facts, adopted.slo) == (
            SessionFacts("t", "m", before.created_unix_s),
            before.slo,
        )
        assert await m.next_round() == ("b", False)
        await m.settled()


async def test_a_session_moves_without_kv_where_that_costs_less() -> None:
    async with moves("b", cost=READS_ARE_DEAR) as m:
        assert await m.move() == Moved("b")
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (False, True)
        assert m.home("b").home.load().kv_pinned_tokens == 0
        assert await m.next_round() == ("b", True)
        await m.settled()


async def test_a_pin_that_is_gone_does_not_stop_a_move() -> None:
    async with moves("b") as m:
        session = m.home("a").home.session(m.session_id)
        assert session is not None
        assert session.kv is not None
        await m.home("a").engine.release(session.kv)
        assert await m.move() == Moved("b")
        await m.settled()
        assert await m.next_round() == ("b", True)


async def test_a_session_moves_to_the_home_with_most_room_or_to_the_named_one() -> None:
    async with moves("b", "c") as m:
        await m.cluster.add_home("d", capacity=8192)
        assert (await m.move()).worker_id == "d"
        assert (await m.move("c", source="d")).worker_id == "c"
        assert (await m.move("a", source="c")).worker_id == "a"
        await m.settled()
        assert await m.next_round() == ("a", False)


async def test_moves_that_come_together_are_spread() -> None:
    async with moves("b", "c") as m:
        sessions = [m.session_id]
        for _ in range(3):
            sessions.append(await m.cluster.new_session())
            order = round_order(sessions[-1])
            async for _event in m.home("a").home.run_round(order):
                pass
            record = await m.cluster.record(sessions[-1])
            bound = replace(record, version=2, home=Binding("a", 1), rounds=1)
            assert await m.store.compare_and_set(bound, 1)
        await m.cluster.beat()
        moved = await asyncio.gather(*(m.home("a").mover.move(s, "") for s in sessions))
        assert sorted(move.worker_id for move in moved) == ["b", "b", "c", "c"]
        await m.settled()


async def test_what_cannot_move() -> None:
    async with moves("b") as m:
        assert await m.move("a") == Moved("a")
        assert await refused(m.move("z")) is ErrorReason.WORKER_NOT_FOUND
        assert await refused(m.home("a").mover.move("nobody", "")) is ErrorReason.SESSION_NOT_FOUND
        assert await refused(m.move(source="b")) is ErrorReason.SESSION_NOT_FOUND
        m.home("b").home.draining = True
        await m.cluster.beat()
        assert await refused(m.move()) is ErrorReason.NO_DECODE_WORKER
        await m.settled()
        assert await m.next_round() == ("a", False)


async def test_a_session_without_a_settled_round_has_nothing_to_move() -> None:
    async with moves() as m:
        session_id = await m.cluster.new_session()
        running = asyncio.create_task(run(m.coordinator, request(session_id, max_tokens=200)))

        def has_said_something() -> bool:
            session = m.home("a").home.session(session_id)
            return session is not None and bool(session.round and session.round.output.token_ids)

        await until(has_said_something)
        running.cancel()
        await asyncio.wait([running])
        # Its output is kept for the same request.
        assert m.home("a").home.session(session_id) is not None
        await m.cluster.add_home("b")
        await m.cluster.beat()
        refusal = await refused(m.home("a").mover.move(session_id, "b"))
        assert refusal is ErrorReason.SESSION_NOT_FOUND


async def test_a_running_round_does_not_move() -> None:
    async with moves("b") as m:
        running = asyncio.ensure_future(run(m.coordinator, request(m.session_id, max_tokens=200)))
        await until(lambda: m.home("a").home.running_rounds > 0)
        assert await refused(m.move()) is ErrorReason.ROUND_RUNNING
        await running
        assert (await m.move()).worker_id == "b"
        await m.settled()


async def test_a_second_move_waits_for_the_first() -> None:
    async with moves("b", "c") as m:
        gate = m.gate("b")
        first = asyncio.ensure_future(m.move("b"))
        await gate.reached.wait()
        second = asyncio.ensure_future(m.move("c"))
        await asyncio.sleep(0.02)
        assert not second.done()
        gate.open.set()
        assert (await first).worker_id == "b"
        assert await refused(second) is ErrorReason.SESSION_NOT_FOUND
        await m.settled()


async def test_a_cancelled_move_leaves_nothing() -> None:
    async with moves("b") as m:
        gate = m.gate("b")
        move = asyncio.ensure_future(m.move())
        await gate.reached.wait()
        move.cancel()
        with pytest.raises(asyncio.CancelledError):
            await move
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (True, False)
        assert await m.next_round() == ("a", False)


# --- races --------------------------------------------------------------------------------


async def test_a_round_that_comes_meanwhile_wins() -> None:
    async with moves("b") as m:
        gate = m.gate("b")
        move = asyncio.ensure_future(m.move())
        await gate.reached.wait()
        assert await m.next_round() == ("a", False)
        assert await refused(move) is ErrorReason.SESSION_CONFLICT
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (True, False)
        assert await m.next_round() == ("a", False)


async def test_a_round_that_begins_behind_the_move_follows_it() -> None:
    async with moves("b") as m:

        async def move_first(record: SessionRecord) -> None:
            assert record.state is SessionState.RUNNING
            assert (await m.move()).worker_id == "b"

        m.store.before = move_first
        assert await m.next_round() == ("b", False)
        await m.settled()
        assert not m.resident("a")


async def test_a_round_that_begins_before_the_binding_is_written_wins() -> None:
    async with moves("b") as m:
        rounds: list[asyncio.Future[tuple[str, bool]]] = []

        async def round_first(record: SessionRecord) -> None:
            assert record.home == Binding("b", 1)
            # The round cancels the move, which waits for this very write.
            rounds.append(asyncio.ensure_future(m.next_round()))
            await m.until_state(SessionState.RUNNING)

        m.store.before = round_first
        assert await refused(m.move()) is ErrorReason.SESSION_CONFLICT
        assert await rounds[0] == ("a", False)
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (True, False)


async def test_a_cancellation_comes_too_late_for_a_written_binding() -> None:
    async with moves("b") as m:
        written, go_on = asyncio.Event(), asyncio.Event()

        async def answer_late(record: SessionRecord) -> None:
            written.set()
            await go_on.wait()

        m.store.after = answer_late
        move = asyncio.ensure_future(m.move())
        await written.wait()
        release = asyncio.ensure_future(m.home("a").home.release(m.session_id))
        await asyncio.sleep(0.01)
        go_on.set()
        await release
        assert (await move).worker_id == "b"
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (False, True)
        assert await m.next_round() == ("b", False)


async def test_a_close_that_comes_meanwhile_wins() -> None:
    async with moves("b") as m:
        gate = m.gate("b")
        move = asyncio.ensure_future(m.move())
        await gate.reached.wait()
        await m.cluster.sessions().close("t", m.session_id, "")
        assert await refused(move) is ErrorReason.SESSION_CONFLICT
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (False, False)


async def test_a_close_between_adoption_and_binding_wins() -> None:
    async with moves("b") as m:
        closes: list[asyncio.Future[SessionRecord]] = []

        async def close_first(record: SessionRecord) -> None:
            closes.append(asyncio.ensure_future(m.cluster.sessions().close("t", m.session_id, "")))
            await m.until_state(SessionState.CLOSED)

        m.store.before = close_first
        assert await refused(m.move()) is ErrorReason.SESSION_CONFLICT
        await closes[0]
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (False, False)


async def test_a_lost_compare_and_set_frees_the_target() -> None:
    async with moves("b") as m:

        async def write_first(record: SessionRecord) -> None:
            stored = await m.cluster.record(m.session_id)
            other = replace(stored, version=stored.version + 1, labels={"a": "b"})
            assert await m.store.compare_and_set(other, stored.version)

        m.store.before = write_first
        assert await refused(m.move()) is ErrorReason.SESSION_CONFLICT
        await m.settled()
        assert (m.resident("a"), m.resident("b")) == (True, False)
        assert await m.next_round() == ("a", False)


async def test_a_copy_that_is_not_the_sessions_does_not_move() -> None:
    async with moves("b") as m:
        stored = await m.cluster.record(m.session_id)
        elsewhere = replace(stored, version=stored.version + 1, home=Binding("b", 1))
        assert await m.store.compare_and_set(elsewhere, stored.version)
        assert await refused(m.move()) is ErrorReason.SESSION_CONFLICT
        assert (await m.cluster.record(m.session_id)).home == Binding("b", 1)
        await m.settled()


@pytest.mark.parametrize("written", [True, False])
async def test_a_store_that_does_not_answer_is_asked_again(written: bool) -> None:
    async with moves("b") as m:

        async def fail(record: SessionRecord) -> None:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "no answer")

        m.store.before, m.store.after = (None, fail) if written else (fail, None)
        assert await refused(m.move()) is ErrorReason.STORE_UNAVAILABLE
        home, other = ("b", "a") if written else ("a", "b")
        for name in ("a", "b"):
            local = m.home(name)
            await Reconciler(
                me=Binding(name, 1),
                home=local.home,
                store=m.store,
                clock=lambda: time.monotonic() + SOON_S,
                wall_clock=time.time,
            ).reconcile()
        await m.settled()
        assert (m.resident(home), m.resident(other)) == (True, False)
        assert await m.bound_to() == home
        assert await m.next_round() == (home, False)


async def test_a_round_at_the_target_wins_over_its_adoption() -> None:
    """The home died in the middle of the move, and the next round was bound to the target."""
    async with moves("b") as m:
        gate = m.gate("b")
        move = asyncio.ensure_future(m.move())
        await gate.reached.wait()
        await m.cluster.lose_home("a")
        assert await m.next_round() == ("b", True)
        assert await refused(move) is ErrorReason.SESSION_CONFLICT
        await m.settled()
        assert await m.next_round() == ("b", False)


async def test_taking_back_spares_what_a_round_has_used() -> None:
    async with moves("b") as m:
        await m.move()
        await m.home("b").home.release(m.session_id, paused_after=0)
        assert m.resident("b")
        await m.next_round()
        await m.home("b").home.release(m.session_id, paused_after=1)
        assert m.resident("b")
        await m.home("b").home.release(m.session_id, paused_after=2)
        assert not m.resident("b")
        await m.settled()


# --- targets that refuse or die -----------------------------------------------------------


async def test_a_target_that_dies_leaves_the_session_where_it_was() -> None:
    async with moves("b") as m:
        gate = m.gate("b")
        move = asyncio.ensure_future(m.move())
        await gate.reached.wait()
        await m.cluster.lose_home("b")
        assert await refused(move) is ErrorReason.WORKER_UNAVAILABLE
        await m.settled()
        assert await m.next_round() == ("a", False)


async def test_another_target_is_tried() -> None:
    async with moves("b", "c") as m:
        m.cluster.network.lose("b")
        assert (await m.move()).worker_id == "c"
        await m.settled()
        assert await m.next_round() == ("c", False)


async def test_a_target_that_dies_before_the_binding_costs_a_rebuild() -> None:
    async with moves("b") as m:

        async def die(record: SessionRecord) -> None:
            m.cluster.network.lose("b")

        m.store.before = die
        assert (await m.move()).worker_id == "b"
        await m.cluster.lose_home("b")
        await m.settled()
        assert await m.next_round() == ("a", True)


async def test_no_session_loses_kv_for_another_that_moves_in() -> None:
    async with moves() as m:
        small = await m.cluster.add_home("b", capacity=2 * HISTORY)
        small.info = replace(small.info, cost=READS_ARE_CHEAP)
        await m.cluster.beat()
        other = round_order("other")
        async for _ in small.home.run_round(other):
            pass
        # Its lease has run out: a round could evict it, a move must not.
        assert small.home._ledger.evictable(time.monotonic()) == ["other"]
        assert await refused(m.move("b")) is ErrorReason.KV_EXHAUSTED
        await m.settled()
        assert await m.home("a").mover.move(m.session_id, "b", with_kv=False) == Moved("b")
        await m.settled()
        assert small.home._ledger.resident_tokens("other") > 0


async def test_a_full_table_refuses() -> None:
    async with moves() as m:
        full = await m.cluster.add_home("b", limits=HomeLimits(max_sessions=1))
        async for _ in full.home.run_round(round_order("other")):
            pass
        assert await refused(m.move("b")) is ErrorReason.QUEUE_FULL
        await m.settled()
        assert full.home.session("other") is not None


async def test_adopting_again_changes_nothing() -> None:
    async with moves("b") as m:
        await m.move()
        session = m.home("b").home.session(m.session_id)
        assert session is not None
        order = adopt_order(m.session_id, session.tokens, rounds=1)
        await m.home("b").mover.adopt(order)
        assert m.home("b").home.session(m.session_id) is session
        await m.next_round()
        assert await refused(m.home("b").mover.adopt(order)) is ErrorReason.SESSION_CONFLICT
        await m.settled()


# --- operators ----------------------------------------------------------------------------


async def test_an_operator_moves_a_session_once() -> None:
    async with moves("b", "c") as m:
        operations = Operations(store=m.store, homes=LoopbackHomes(m.cluster.network))
        moved = await operations.move_session("t", m.session_id, "b")
        assert moved.worker_id == "b"
        assert moved.moved_tokens > 0
        assert await operations.move_session("t", m.session_id, "b") == Moved("b")
        assert await refused(operations.move_session("u", m.session_id, "c")) is (
            ErrorReason.SESSION_NOT_FOUND
        )
        assert await refused(operations.move_session("t", m.session_id, "z")) is (
            ErrorReason.WORKER_NOT_FOUND
        )
        assert await refused(operations.move_session("t", m.session_id, "c0")) is (
            ErrorReason.INVALID_FIELD
        )
        fresh = await m.cluster.new_session()
        assert await refused(operations.move_session("t", fresh, "b")) is (
            ErrorReason.WORKER_NOT_FOUND
        )


async def test_two_operators_at_once() -> None:
    async with moves("b") as m:
        operations = Operations(store=m.store, homes=LoopbackHomes(m.cluster.network))
        gate = m.gate("b")
        calls = [
            asyncio.ensure_future(operations.move_session("t", m.session_id, target))
            for target in ("b", "b", "")
        ]
        await gate.reached.wait()
        gate.open.set()
        assert [moved.worker_id for moved in await asyncio.gather(*calls)] == ["b", "b", "b"]
        await m.settled()


# --- drain --------------------------------------------------------------------------------


async def drained(m: Moves, name: str = "a") -> HomeDrain:
    """Drain that home to its end."""
    local = m.home(name)
    drain = HomeDrain(
        home=local.home, mover=local.mover, cost=READS_ARE_CHEAP, clock=time.monotonic
    )
    drain.start()
    await m.cluster.beat()
    async with asyncio.timeout(SOON_S):
        await drain.run()
    return drain


@pytest.mark.parametrize("others", [("b",), ("b", "c")])
async def test_a_drained_home_is_empty(others: tuple[str, ...]) -> None:
    async with moves(*others) as m:
        drain = await drained(m)
        assert drain.status().sessions == 0
        await m.settled()
        await m.cluster.lose_home("a")
        home, rebuilt = await m.next_round()
        assert home in others
        assert not rebuilt


async def test_the_only_home_drains_too() -> None:
    async with moves() as m:
        drain = await drained(m)
        assert (drain.status().running, drain.status().estimated_s) == (0, 0.0)
        await m.settled()
        await m.cluster.lose_home("a")
        await m.cluster.add_home("b")
        assert await m.next_round() == ("b", True)


async def test_a_drain_lets_rounds_finish_and_moves_their_sessions() -> None:
    async with moves("b") as m:
        running = asyncio.ensure_future(run(m.coordinator, request(m.session_id, max_tokens=100)))
        await until(lambda: m.home("a").home.load().running_rounds > 0)
        drain = await drained(m)
        outcome = await running
        assert outcome.finished.usage.output_tokens == 100
        assert outcome.placed.decode_worker == "a"
        assert drain.status().sessions == 0
        assert await m.bound_to() == "b"
        await m.settled()


async def test_a_drain_counts_what_it_has_to_do() -> None:
    async with moves("b") as m:
        local = m.home("a")
        drain = HomeDrain(
            home=local.home, mover=local.mover, cost=READS_ARE_DEAR, clock=time.monotonic
        )
        status = drain.status()
        assert (status.running, status.sessions) == (0, 1)
        assert status.estimated_s == HISTORY / 4


async def test_a_drain_moves_without_kv_where_there_is_no_room() -> None:
    async with moves() as m:
        small = await m.cluster.add_home("b", capacity=2 * HISTORY)
        small.info = replace(small.info, cost=READS_ARE_CHEAP)
        async for _ in small.home.run_round(round_order("other")):
            pass
        await m.cluster.beat()
        drain = await drained(m)
        assert drain.status().sessions == 0
        assert await m.bound_to() == "b"
        await m.settled()


async def test_a_drain_waits_for_a_store_that_is_down_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "STORE_WAIT_S", 0.5)
    async with moves("b") as m:

        async def down(session_id: str) -> SessionRecord | None:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "down")

        m.store.get_session = down  # type: ignore[method-assign]
        begun_s = time.monotonic()
        drain = await drained(m)
        assert time.monotonic() - begun_s >= draining.STORE_WAIT_S
        assert drain.status().sessions == 1
        assert m.resident("a")


async def test_the_session_used_last_moves_first() -> None:
    async with moves("b") as m:
        newer = await m.cluster.new_session()
        m.home("b").home.draining = True
        await m.cluster.beat()
        await run(m.coordinator, request(newer))
        m.home("b").home.draining = False
        order: list[str] = []
        move = m.home("a").mover.move

        async def noted(session_id: str, target: str, **how: bool) -> Moved:
            order.append(session_id)
            return await move(session_id, target, **how)

        m.home("a").mover.move = noted  # type: ignore[method-assign]
        await drained(m)
        assert order == [newer, m.session_id]


def round_order(session_id: str) -> RoundOrder:
    """A first round as a coordinator orders it."""
    return RoundOrder(
        session_id=session_id,
        request_id="r",
        round_index=0,
        keep_history_tokens=0,
        increment=array("I", range(1, 21)),
        sampling=SamplingParams(max_tokens=4),
        slo=Slo(10.0, 1.0),
        created_s=time.monotonic(),
        reason=RouteReason.ALWAYS_LOCAL,
    )


def adopt_order(session_id: str, tokens: "array[int]", rounds: int) -> AdoptOrder:
    """As another home would hand the session over, without KV."""
    return AdoptOrder(session_id, rounds, tokens, SessionFacts("t", "m", 1.0), Slo(10.0, 1.0))
