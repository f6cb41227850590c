"""The contract of StateStore, over every adapter."""

import asyncio
import math
import secrets
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from ampd.adapters.state_limits import MAX_PAGE_SIZE, MAX_ROUNDS_KEPT
from ampd.adapters.state_memory import MemoryStateStore
from ampd.adapters.state_redis import RedisStateStore
from ampd.core import lifecycle
from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import RunningRound, SessionRecord, SessionState
from ampd.core.model import (
    BindDecision,
    Binding,
    BindReason,
    FinishReason,
    ItlStatistic,
    PolicySpec,
    Role,
    RoundRecord,
    RoundTimings,
    RoundUsage,
    Route,
    RouteCandidate,
    RouteDecision,
    RouteReason,
    Slo,
    WorkerInfo,
    WorkerLoad,
)
from ampd.ports import RoundContext, SessionWrites, StateStore

LEASE_S = 30.0

Open = Callable[..., StateStore]


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Of the server; None: the adapter has none."""
    return request.getfixturevalue("valkey_url") if request.param == "redis" else None


@pytest.fixture
async def open_store(url: str | None) -> AsyncIterator[Open]:
    """Opens stores over one and the same state: what two coordinators would hold."""
    prefix = f"test-{secrets.token_hex(6)}"
    opened: list[StateStore] = []

    def open_(idle_ttl_s: float = 3600.0) -> StateStore:
        if url is not None:
            store: StateStore = RedisStateStore(url, prefix=prefix, idle_ttl_s=idle_ttl_s)
        else:
            store = opened[0] if opened else MemoryStateStore(idle_ttl_s=idle_ttl_s)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        await store.close()


@pytest.fixture
def store(open_store: Open) -> StateStore:
    return open_store()


def worker(worker_id: str = "decode-0", incarnation: int = 1, **fields: Any) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=worker_id,
        role=Role.DECODE,
        incarnation=incarnation,
        address="10.0.0.1:7000",
        host="node-1",
        model="tiny",
        engine="emulated 1",
        kv_block_tokens=16,
        kv_capacity_tokens=1 << 33,
        kv_bytes_per_token=46_080,
        max_model_tokens=8192,
        cost=CostModel(
            PrefillCost(0.01, 1e-3, 1e-6, 1e-9, hinges=((64.0, 1e-5), (512.0, 2.5e-5))),
            DecodeCost(0.05, 2e-3, 1e-8, hinges=((8.0, 1e-4),)),
            MixedCost(0.05, 3e-3, 2e-3, 1e-8, 1e-9),
            KvCost(1e-3, 1e-6),
        ),
    )
    return replace(info, **fields)


def session(session_id: str = "s-1", tenant: str = "acme", **fields: Any) -> SessionRecord:
    record = SessionRecord(
        session_id=session_id,
        tenant=tenant,
        model="tiny",
        slo=Slo(2.0, 0.1, ItlStatistic.P95),
        created_unix_s=1_800_000_000.25,
        last_used_unix_s=1_800_000_000.5,
    )
    return replace(record, **fields)


def full_session() -> SessionRecord:
    return session(
        version=7,
        state=SessionState.RUNNING,
        home=Binding("decode-0", 1 << 62),
        history_tokens=4096,
        last_token_id=2**32 - 1,
        rounds=3,
        running=RunningRound("r-4", "attempt-4", "coordinator-0", 99, 4000, 20, 64),
        prefix_holders=(("prefill-1", 4000), ("prefill-0", 128)),
        labels={"team": "süd"},
    )


def round_record(round_index: int = 0, request_id: str = "r-0") -> RoundRecord:
    return RoundRecord(
        round_index=round_index,
        request_id=request_id,
        history_tokens=100,
        increment_tokens=20,
        history_rebuilt=True,
        decode_worker="decode-0",
        prefill_worker="prefill-0",
        reason=RouteReason.PREFILL_WITHIN_TTFT,
        decision=RouteDecision(
            route=Route.REMOTE,
            prefill_worker="prefill-0",
            reason=RouteReason.PREFILL_WITHIN_TTFT,
            policy="ampd",
            predicted_ttft_s=0.25,
            candidates=(
                RouteCandidate("prefill-0", Route.REMOTE, 0.1, 0.02, 0.1, 0.03, 0.2),
                RouteCandidate("decode-0", Route.LOCAL, math.inf, 0.0, 0.1, 0.0, 1.0),
            ),
            fallbacks=("prefill-1",),
            state_age_s=0.5,
        ),
        bind=BindDecision("decode-0", BindReason.MOST_FREE_KV, 1000, 500),
        finish_reason=FinishReason.STOP,
        usage=RoundUsage(history_tokens=100, output_tokens=7, increment_pulled_bytes=1 << 40),
        timings=RoundTimings(ttft_s=0.3, itl_mean_s=0.01),
        attained=True,
        created_unix_s=1_800_000_000.75,
    )


def tokens(*ids: int) -> "array[int]":
    return array("I", ids)


def next_version(record: SessionRecord, **fields: Any) -> SessionRecord:
    return replace(record, version=record.version + 1, **fields)


# --- workers


async def test_a_worker_is_seen_by_all_as_it_described_itself(open_store: Open) -> None:
    first, second = open_store(), open_store()
    load = WorkerLoad(queued_tasks=2, queued_prefill_s=math.inf, draining=True, sessions=4)
    coordinator = worker("coordinator-0", 5, role=Role.COORDINATOR, cost=None)
    await first.heartbeat(worker(), load, LEASE_S)
    await first.heartbeat(coordinator, WorkerLoad(), LEASE_S)

    views = await second.list_workers()

    assert [view.info for view in views] == [coordinator, worker()]
    assert views[1].load == load
    assert 0.0 <= views[1].age_s < 5.0


async def test_a_heartbeat_replaces_the_load_and_makes_it_young(store: StateStore) -> None:
    await store.heartbeat(worker(), WorkerLoad(sessions=1), LEASE_S)
    await asyncio.sleep(0.06)
    (old,) = await store.list_workers()
    await store.heartbeat(worker(), WorkerLoad(sessions=2), LEASE_S)
    (young,) = await store.list_workers()

    assert old.age_s >= 0.05
    assert young.age_s < old.age_s
    assert young.load.sessions == 2


async def test_a_lease_that_is_not_renewed_ends(store: StateStore) -> None:
    await store.heartbeat(worker("short"), WorkerLoad(), 0.15)
    await store.heartbeat(worker("long"), WorkerLoad(), LEASE_S)
    await asyncio.sleep(0.2)

    assert [view.info.worker_id for view in await store.list_workers()] == ["long"]
    context = await store.load_round("s", "r")
    assert [view.info.worker_id for view in context.workers] == ["long"]


async def test_renewing_keeps_a_lease(store: StateStore) -> None:
    for _ in range(4):
        await store.heartbeat(worker(), WorkerLoad(), 0.3)
        await asyncio.sleep(0.1)
    assert len(await store.list_workers()) == 1


@pytest.mark.parametrize("newer", [2, 10, 2**63 - 1])
async def test_an_older_incarnation_never_replaces_a_newer_one(
    store: StateStore, newer: int
) -> None:
    older = worker(incarnation=newer - 1)
    await store.heartbeat(older, WorkerLoad(), LEASE_S)
    await store.heartbeat(worker(incarnation=newer), WorkerLoad(), LEASE_S)

    with pytest.raises(AmpdError) as caught:
        await store.heartbeat(older, WorkerLoad(), LEASE_S)
    await store.deregister("decode-0", newer - 1)

    assert caught.value.reason is ErrorReason.STALE_INCARNATION
    assert [view.info.incarnation for view in await store.list_workers()] == [newer]


async def test_deregistering_removes_at_once_and_twice_is_once(store: StateStore) -> None:
    await store.heartbeat(worker(), WorkerLoad(), LEASE_S)
    await store.deregister("decode-0", 1)
    await store.deregister("decode-0", 1)
    assert await store.list_workers() == ()


async def test_a_tenant_has_so_many_sessions_and_no_more(store: StateStore) -> None:
    first = session("one")
    assert await store.create_session(first, "r", 2) == first
    await store.create_session(session("two"), "", 2)
    await store.create_session(session("other", tenant="x"), "", 2)
    with pytest.raises(AmpdError) as error:
        await store.create_session(session("three"), "", 2)
    assert error.value.reason is ErrorReason.QUEUE_FULL
    assert error.value.retry_after_s is not None
    assert await store.get_session("three") is None
    # Repeating a request is no new session.
    assert await store.create_session(session("again"), "r", 2) == first
    closed = lifecycle.close(first, request_id="", now_unix_s=9.0)
    assert await store.compare_and_set(closed, first.version)
    await store.create_session(session("three"), "", 2)


# --- policy


async def test_the_policy_reaches_every_reader(store: StateStore) -> None:
    policy = PolicySpec("ampd", {"alpha": 0.9, "window": 3, "late": True, "order": "edf"}, 1)
    assert await store.get_policy() is None
    assert await store.heartbeat(worker(), WorkerLoad(), LEASE_S) is None

    assert await store.set_policy(policy, 0)

    assert await store.get_policy() == policy
    assert await store.heartbeat(worker(), WorkerLoad(), LEASE_S) == policy
    assert (await store.load_round("s", "r")).policy == policy


async def test_of_two_policies_one_wins(open_store: Open) -> None:
    first, second = open_store(), open_store()
    won = await asyncio.gather(
        first.set_policy(PolicySpec("ampd", version=1), 0),
        second.set_policy(PolicySpec("always-local", version=1), 0),
    )
    assert sorted(won) == [False, True]
    assert not await first.set_policy(PolicySpec("cheapest", version=1), 0)
    assert await first.set_policy(PolicySpec("cheapest", version=2), 1)
    policy = await second.get_policy()
    assert policy is not None
    assert policy.name == "cheapest"


# --- sessions


async def test_an_unknown_session_is_nothing(store: StateStore) -> None:
    assert await store.get_session("nobody") is None
    assert await store.load_round("nobody", "r") == RoundContext(None, (), None, None)
    assert not await store.compare_and_set(session("nobody", version=2), 1)
    assert await store.read_rounds("nobody") == ()
    assert await store.get_session("nobody") is None


async def test_a_record_comes_back_as_it_was(store: StateStore) -> None:
    assert await store.create_session(full_session(), "c-1") == full_session()
    assert await store.get_session("s-1") == full_session()
    assert (await store.load_round("s-1", "r")).session == full_session()


async def test_a_repeated_create_gives_the_first_session(open_store: Open) -> None:
    stores = [open_store() for _ in range(2)]
    answers = await asyncio.gather(
        *(stores[i % 2].create_session(session(f"s-{i}"), "same") for i in range(10))
    )
    assert len({answer.session_id for answer in answers}) == 1
    page = await stores[0].list_sessions("acme", 100, "")
    assert [record.session_id for record in page.sessions] == [answers[0].session_id]


async def test_create_requests_of_two_tenants_are_two(store: StateStore) -> None:
    one = await store.create_session(session("s-1", "a:b"), "c")
    two = await store.create_session(session("s-2", "a"), "b:c")
    three = await store.create_session(session("s-3", "a%3Ab"), "c")
    assert [one.session_id, two.session_id, three.session_id] == ["s-1", "s-2", "s-3"]


async def test_creating_without_a_request_id_never_joins(store: StateStore) -> None:
    await store.create_session(session("s-1"), "")
    second = await store.create_session(session("s-2"), "")
    assert second.session_id == "s-2"


async def test_a_taken_session_id_is_refused(store: StateStore) -> None:
    await store.create_session(session(), "c-1")
    with pytest.raises(AmpdError) as caught:
        await store.create_session(session(tenant="other"), "c-2")
    assert caught.value.reason is ErrorReason.SESSION_CONFLICT
    assert await store.get_session("s-1") == session()


async def test_of_many_writers_exactly_one_wins_with_all_it_wrote(open_store: Open) -> None:
    stores = [open_store() for _ in range(4)]
    await stores[0].create_session(session(), "")

    async def write(i: int) -> bool:
        record = next_version(session(), labels={"writer": str(i)}, history_tokens=3)
        writes = SessionWrites(0, tokens(i, i, i), round_record(0, f"r-{i}"), f"r-{i}", b"%d" % i)
        return await stores[i % 4].compare_and_set(record, 1, writes)

    won = await asyncio.gather(*(write(i) for i in range(32)))

    assert won.count(True) == 1
    winner = won.index(True)
    record = await stores[0].get_session("s-1")
    assert record is not None
    assert record.labels == {"writer": str(winner)}
    assert await stores[1].read_history("s-1", 0, 3) == tokens(winner, winner, winner)
    assert [r.request_id for r in await stores[2].read_rounds("s-1")] == [f"r-{winner}"]
    replays = [(await stores[3].load_round("s-1", f"r-{i}")).replay for i in range(32)]
    assert [i for i in range(32) if replays[i] is not None] == [winner]


async def test_replay_belongs_to_its_session_and_request(store: StateStore) -> None:
    await store.create_session(session("a"), "")
    await store.create_session(session("a:b"), "")
    written = SessionWrites(replay_request_id="b:c", replay=b"")
    assert await store.compare_and_set(next_version(session("a")), 1, written)

    assert (await store.load_round("a", "b:c")).replay == b""
    assert (await store.load_round("a:b", "c")).replay is None
    assert (await store.load_round("a", "b")).replay is None


# --- tokens


async def test_a_rewind_cuts_the_history(store: StateStore) -> None:
    first = session()
    await store.create_session(first, "")
    second = next_version(first, history_tokens=5)
    third = next_version(second, history_tokens=3)
    assert await store.compare_and_set(second, 1, SessionWrites(0, tokens(1, 2, 2**32 - 1, 4, 5)))
    assert await store.compare_and_set(third, 2, SessionWrites(2, tokens(30)))

    assert await store.read_history("s-1", 0, 3) == tokens(1, 2, 30)
    assert await store.read_history("s-1", 2, 3) == tokens(30)
    assert await store.read_history("s-1", 2, 2) == tokens()


async def test_tokens_that_would_leave_a_hole_are_refused_whole(store: StateStore) -> None:
    await store.create_session(session(), "")
    with pytest.raises(AmpdError) as caught:
        await store.compare_and_set(
            next_version(session()), 1, SessionWrites(1, tokens(7), round_record())
        )
    assert caught.value.reason is ErrorReason.INTERNAL
    assert await store.get_session("s-1") == session()
    assert await store.read_rounds("s-1") == ()


@pytest.mark.parametrize("session_id", ["s-1", "nobody"])
async def test_a_history_that_is_not_there_is_no_zeros(store: StateStore, session_id: str) -> None:
    await store.create_session(session(), "")
    await store.compare_and_set(next_version(session()), 1, SessionWrites(0, tokens(1)))
    with pytest.raises(AmpdError) as caught:
        await store.read_history(session_id, 0, 2)
    assert caught.value.reason is ErrorReason.SESSION_NOT_FOUND


async def test_a_long_history_comes_back_whole(store: StateStore) -> None:
    ids = array("I", range(100_000))
    await store.create_session(session(), "")
    await store.compare_and_set(next_version(session()), 1, SessionWrites(0, ids))
    assert await store.read_history("s-1", 0, 100_000) == ids
    assert await store.read_history("s-1", 99_999, 100_000) == tokens(99_999)


# --- rounds


async def test_the_newest_rounds_are_kept_in_order(store: StateStore) -> None:
    record = session()
    await store.create_session(record, "")
    for index in range(MAX_ROUNDS_KEPT + 5):
        record = next_version(record)
        writes = SessionWrites(round=round_record(index))
        assert await store.compare_and_set(record, record.version - 1, writes)

    rounds = await store.read_rounds("s-1")
    assert [r.round_index for r in rounds] == list(range(5, MAX_ROUNDS_KEPT + 5))
    assert rounds[0] == round_record(5)


async def test_a_round_is_replaced_by_its_later_state(store: StateStore) -> None:
    second, third = session(version=2), session(version=3)
    await store.create_session(session(), "")
    begun = replace(round_record(), finish_reason=None, timings=RoundTimings())
    await store.compare_and_set(second, 1, SessionWrites(round=begun))
    assert await store.read_rounds("s-1") == (begun,)
    await store.compare_and_set(third, 2, SessionWrites(round=round_record()))
    assert await store.read_rounds("s-1") == (round_record(),)


# --- the end of a session


async def test_closing_leaves_the_record_alone(store: StateStore) -> None:
    await store.create_session(session(), "c-1")
    open_ = next_version(session(), history_tokens=1)
    closed = next_version(open_, state=SessionState.CLOSED)
    await store.compare_and_set(
        open_, 1, SessionWrites(0, tokens(1), round_record(), "r-0", b"said")
    )
    assert await store.compare_and_set(closed, 2)

    assert await store.get_session("s-1") == closed
    assert await store.create_session(session("s-2"), "c-1") == closed
    assert await store.read_rounds("s-1") == ()
    assert (await store.list_sessions("acme", 10, "")).sessions == ()
    with pytest.raises(AmpdError):
        await store.read_history("s-1", 0, 1)
    # A writer that counts on another record of that version: a store may lose its last ones.
    assert not await store.compare_and_set(next_version(closed, state=SessionState.IDLE), 3)
    assert await store.get_session("s-1") == closed


async def test_an_idle_session_expires_with_all_it_had(open_store: Open) -> None:
    store = open_store(idle_ttl_s=0.15)
    await store.create_session(session(), "c-1")
    await store.compare_and_set(
        next_version(session()), 1, SessionWrites(0, tokens(1), round_record())
    )
    await asyncio.sleep(0.2)

    assert await store.get_session("s-1") is None
    assert (await store.load_round("s-1", "r")).session is None
    assert (await store.list_sessions("acme", 10, "")).sessions == ()
    assert await store.read_rounds("s-1") == ()
    assert not await store.compare_and_set(session(version=3), 2)
    assert (await store.create_session(session("s-2"), "c-1")).session_id == "s-2"


async def test_every_write_renews_a_session(open_store: Open) -> None:
    store = open_store(idle_ttl_s=0.4)
    record = session()
    await store.create_session(record, "")
    await store.compare_and_set(
        next_version(record), 1, SessionWrites(0, tokens(9), round_record())
    )
    for version in range(3, 7):
        await asyncio.sleep(0.15)
        assert await store.compare_and_set(session(version=version), version - 1)

    assert await store.read_history("s-1", 0, 1) == tokens(9)
    assert len(await store.read_rounds("s-1")) == 1
    assert len((await store.list_sessions("acme", 10, "")).sessions) == 1


# --- listing


async def test_pages_hold_every_session_of_the_tenant_once(store: StateStore) -> None:
    names = [f"s-{i:02}" for i in range(25)]
    for name in reversed(names):
        await store.create_session(session(name), "")
        await store.create_session(session(f"other-{name}", "other"), "")

    seen: list[list[str]] = []
    page_token = ""
    while True:
        page = await store.list_sessions("acme", 10, page_token)
        seen.append([record.session_id for record in page.sessions])
        page_token = page.next_page_token
        if not page_token:
            break

    assert seen == [names[:10], names[10:20], names[20:]]


async def test_a_full_last_page_has_no_successor(store: StateStore) -> None:
    for name in ("a", "b"):
        await store.create_session(session(name), "")
    assert (await store.list_sessions("acme", 2, "")).next_page_token == ""
    assert await store.list_sessions("nobody", 2, "") == await store.list_sessions("", 2, "")


async def test_a_page_goes_on_behind_a_session_that_is_gone(store: StateStore) -> None:
    for name in ("a", "b", "c"):
        await store.create_session(session(name), "")
    page = await store.list_sessions("acme", 2, "")
    await store.compare_and_set(session("b", version=2, state=SessionState.CLOSED), 1)
    rest = await store.list_sessions("acme", 2, page.next_page_token)
    assert [record.session_id for record in rest.sessions] == ["c"]


async def test_a_page_is_bounded(store: StateStore) -> None:
    await asyncio.gather(
        *(store.create_session(session(f"s-{i:05}"), "") for i in range(MAX_PAGE_SIZE + 1))
    )
    page = await store.list_sessions("acme", 10**9, "")
    assert len(page.sessions) == MAX_PAGE_SIZE
    assert page.next_page_token
    assert len((await store.list_sessions("acme", 0, "")).sessions) == 1


@pytest.mark.parametrize("page_token", ["%%%", "abc", "czAx", "ü", "MTr_/w==", "MTr_"])
async def test_a_foreign_page_token_is_refused(store: StateStore, page_token: str) -> None:
    with pytest.raises(AmpdError) as caught:
        await store.list_sessions("acme", 10, page_token)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert caught.value.violations[0].field == "page_token"


async def test_the_store_answers_a_ping(store: StateStore) -> None:
    await store.ping()
