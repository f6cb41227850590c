"""Rounds under faults and races: the real coordinator and home, without a model."""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import suppress
from dataclasses import replace

import pytest
from inprocess import InProcess, in_process, request, run

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import ITL_SAFE_RULE
from ampd.core.lifecycle import SessionState
from ampd.core.model import Binding, PolicySpec, Route, RouteReason
from ampd.core.policies import local_rule, resolve
from ampd.ports import GenerateRequest
from services.coordinator.coordinator import Coordinator
from services.decode.reconciling import Reconciler
from services.decode.settings import HomeLimits


async def refused(coordinator: Coordinator, wanted: object, reason: ErrorReason) -> AmpdError:
    with pytest.raises(AmpdError) as error:
        await run(coordinator, wanted)  # type: ignore[arg-type]
    assert error.value.reason is reason
    return error.value


async def check_books(cluster: InProcess) -> None:
    """Nothing runs, every pin belongs to a resident session, the ledger balances."""
    for local in cluster.homes.values():
        ledger = local.home._ledger
        ledger.check()
        assert ledger.running_tokens == 0
        sessions = local.home._sessions.values()
        assert len(local.engine.pins) == sum(session.kv is not None for session in sessions)
        assert not local.engine.jobs


async def test_rounds_grow_the_history() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        history = 0
        for index in range(4):
            outcome = await run(cluster.coordinators[0], request(session_id, 10 + index))
            history += 10 + index + 4
            assert outcome.placed.round_index == index
            assert outcome.placed.route is Route.LOCAL
            assert outcome.finished.history_tokens == history
            assert not outcome.placed.history_rebuilt
        record = await cluster.record(session_id)
        assert (record.state, record.history_tokens) == (SessionState.IDLE, history)
        stored = await cluster.store.read_history(session_id, 0, history)
        assert stored == cluster.homes["d0"].home._sessions[session_id].tokens
        await check_books(cluster)


async def test_a_rewind_cuts_home_and_store_alike() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id, range(100, 150)))
        await run(cluster.coordinators[0], request(session_id, [7, 8], keep=31))
        expected = array("I", [*range(100, 131), 7, 8, 1, 1, 1, 1])
        assert await cluster.store.read_history(session_id, 0, 37) == expected
        assert cluster.homes["d0"].home._sessions[session_id].tokens == expected
        await check_books(cluster)


async def test_a_refused_session_leaves_no_binding_and_goes_elsewhere() -> None:
    async with in_process("d0", "d1") as cluster:
        cluster.homes["d0"].home.draining = True  # and its load does not say so yet
        session_id = await cluster.new_session()
        outcome = await run(cluster.coordinators[0], request(session_id))
        assert outcome.placed.decode_worker == "d1"
        home = (await cluster.record(session_id)).home
        assert home is not None
        assert home.worker_id == "d1"


async def test_a_dead_worker_leaves_no_binding() -> None:
    async with in_process("d0") as cluster:
        cluster.network.lose("d0")
        session_id = await cluster.new_session()
        await refused(cluster.coordinators[0], request(session_id), ErrorReason.WORKER_UNAVAILABLE)
        record = await cluster.record(session_id)
        assert (record.home, record.state) == (None, SessionState.IDLE)
        await cluster.add_home("d1")
        assert (await run(cluster.coordinators[0], request(session_id))).finished


async def test_a_home_lost_in_mid_round_ends_it_with_the_history_as_before() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        before = await cluster.record(session_id)
        round_ = asyncio.create_task(
            run(cluster.coordinators[0], request(session_id, max_tokens=1000))
        )
        await asyncio.sleep(0.05)
        await cluster.lose_home("d0")
        with pytest.raises(AmpdError) as error:
            await round_
        assert error.value.reason is ErrorReason.WORKER_UNAVAILABLE
        after = await cluster.record(session_id)
        assert after.state is SessionState.IDLE
        assert after.history_tokens == before.history_tokens
        # Elsewhere the session is rebuilt from its tokens, and says so.
        await cluster.add_home("d1")
        outcome = await run(cluster.coordinators[0], request(session_id))
        assert outcome.placed.history_rebuilt
        assert outcome.placed.decode_worker == "d1"
        assert outcome.finished.history_tokens == before.history_tokens + 24


async def test_a_restarted_worker_is_a_new_one() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        await cluster.add_home("d0", incarnation=2)
        outcome = await run(cluster.coordinators[0], request(session_id))
        assert outcome.placed.history_rebuilt
        home = (await cluster.record(session_id)).home
        assert home is not None
        assert home.incarnation == 2


async def test_a_home_that_forgot_the_session_gets_its_tokens_again() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        await cluster.homes["d0"].home.release(session_id)
        outcome = await run(cluster.coordinators[0], request(session_id))
        assert outcome.placed.history_rebuilt
        assert outcome.finished.history_tokens == 48
        await check_books(cluster)


async def test_what_settled_at_home_alone_is_refused_to_nobody_and_published() -> None:
    """The coordinator died between the home's last word and the store's: the round counts."""
    async with in_process("d0") as cluster, asyncio.timeout(10):
        coordinator = cluster.coordinators[0]
        session_id = await cluster.new_session()
        await run(coordinator, request(session_id, range(100, 120)))
        stored = cluster.store._open.get(session_id)
        assert stored is not None
        before = stored.record
        await run(coordinator, request(session_id, [7], request_id="r"))
        stored.record = replace(before, version=before.version + 1)
        cluster.store._replays.pop((session_id, "r"))
        await refused(coordinator, request(session_id, [8]), ErrorReason.SESSION_CONFLICT)
        home = cluster.homes["d0"]
        reconciler = Reconciler(
            me=Binding("d0", 1),
            home=home.home,
            store=cluster.store,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        await reconciler.reconcile()
        expected = array("I", [*range(100, 120), 1, 1, 1, 1, 7, 1, 1, 1, 1])
        assert await cluster.store.read_history(session_id, 0, 29) == expected
        steps = len(home.engine.samples)
        again = await run(coordinator, request(session_id, [7], request_id="r"))
        assert again.finished.history_tokens == 29
        assert again.placed.decode_worker == "d0"
        assert len(home.engine.samples) == steps
        assert (await run(coordinator, request(session_id, [8]))).finished.history_tokens == 34


async def test_a_repeated_request_id_gets_the_same_answer_and_runs_nothing() -> None:
    async with in_process("d0", coordinators=2) as cluster:
        session_id = await cluster.new_session()
        wanted = request(session_id, request_id="again")
        first = await run(cluster.coordinators[0], wanted)
        steps = len(cluster.homes["d0"].engine.samples)
        second = await run(cluster.coordinators[1], wanted)
        assert second.finished == first.finished
        assert second.token_ids == first.token_ids
        assert second.placed == first.placed
        assert len(cluster.homes["d0"].engine.samples) == steps
        assert (await cluster.record(session_id)).rounds == 1


async def test_a_second_round_is_refused_and_the_first_untouched() -> None:
    async with in_process("d0", coordinators=2) as cluster:
        session_id = await cluster.new_session()
        first = asyncio.create_task(
            run(cluster.coordinators[0], request(session_id, max_tokens=30))
        )
        await asyncio.sleep(0.02)
        for coordinator in cluster.coordinators:
            await refused(coordinator, request(session_id), ErrorReason.ROUND_RUNNING)
        assert (await first).finished.usage.output_tokens == 30


async def test_of_two_coordinators_one_wins() -> None:
    async with in_process("d0", "d1", coordinators=2) as cluster:
        for _ in range(20):
            session_id = await cluster.new_session()
            results = await asyncio.gather(
                *(run(c, request(session_id)) for c in cluster.coordinators),
                return_exceptions=True,
            )
            errors = [r for r in results if isinstance(r, AmpdError)]
            assert len(errors) <= 1
            for error in errors:
                assert error.reason in {ErrorReason.SESSION_CONFLICT, ErrorReason.ROUND_RUNNING}
            assert (await cluster.record(session_id)).rounds == 2 - len(errors)
        await check_books(cluster)


async def test_a_dead_coordinators_round_is_void_when_its_lease_is_gone() -> None:
    async with in_process("d0", coordinators=2) as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        dead = asyncio.create_task(
            run(cluster.coordinators[0], request(session_id, max_tokens=1000))
        )
        await asyncio.sleep(0.02)
        await refused(cluster.coordinators[1], request(session_id), ErrorReason.ROUND_RUNNING)
        await cluster.store.deregister("c0", 1)
        # Its home still runs the old round: the newer one ends it.
        outcome = await run(cluster.coordinators[1], request(session_id))
        assert outcome.finished.history_tokens == 48
        with pytest.raises(AmpdError) as error:
            await dead
        assert error.value.reason is ErrorReason.SESSION_CONFLICT
        assert (await cluster.record(session_id)).history_tokens == 48
        await check_books(cluster)


async def test_cancelling_discards_the_round_and_frees_all_of_it() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        pinned = cluster.homes["d0"].home.load().kv_pinned_tokens
        round_ = asyncio.create_task(
            run(cluster.coordinators[0], request(session_id, max_tokens=1000))
        )
        await asyncio.sleep(0.02)
        assert cluster.homes["d0"].home.load().kv_running_tokens > 0
        round_.cancel()
        with suppress(asyncio.CancelledError):
            await round_
        await check_books(cluster)
        assert cluster.homes["d0"].home.load().kv_pinned_tokens == pinned
        record = await cluster.record(session_id)
        assert (record.state, record.history_tokens) == (SessionState.IDLE, 24)
        outcome = await run(cluster.coordinators[0], request(session_id))
        assert not outcome.placed.history_rebuilt


async def test_a_deadline_ends_the_round_everywhere() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        with pytest.raises(AmpdError) as error:
            await run(cluster.coordinators[0], request(session_id, max_tokens=1000), 0.05)
        assert error.value.reason is ErrorReason.DEADLINE
        assert (await cluster.record(session_id)).state is SessionState.IDLE
        await check_books(cluster)


async def test_closing_ends_a_running_round_and_frees_the_session() -> None:
    async with in_process("d0", coordinators=2) as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        round_ = asyncio.create_task(
            run(cluster.coordinators[0], request(session_id, max_tokens=1000))
        )
        await asyncio.sleep(0.02)
        closed = await cluster.sessions().close("t", session_id, "bye")
        assert await cluster.sessions().close("t", session_id, "bye") == closed
        with pytest.raises(AmpdError) as again:
            await cluster.sessions().close("t", session_id, "other")
        assert again.value.reason is ErrorReason.SESSION_NOT_FOUND
        with pytest.raises(AmpdError) as ended:
            await round_
        assert ended.value.reason is ErrorReason.SESSION_NOT_FOUND
        await refused(cluster.coordinators[1], request(session_id), ErrorReason.SESSION_NOT_FOUND)
        assert not cluster.homes["d0"].engine.pins
        await check_books(cluster)


async def test_a_paused_session_is_evicted_for_a_running_one_and_says_so() -> None:
    async with in_process() as cluster:
        await cluster.add_home("d0", capacity=256)
        first, second = await cluster.new_session(), await cluster.new_session()
        (coordinator,) = cluster.coordinators
        await run(coordinator, request(first, 100))
        await run(coordinator, request(second, 200))
        assert first in cluster.homes["d0"].home._sessions
        outcome = await run(coordinator, request(first, 10))
        assert outcome.placed.history_rebuilt
        assert outcome.finished.history_tokens == 118
        await check_books(cluster)


async def test_a_session_within_its_lease_is_not_evicted() -> None:
    async with in_process() as cluster:
        await cluster.add_home("d0", capacity=256, limits=HomeLimits(kv_lease_s=60.0))
        (coordinator,) = cluster.coordinators
        first, second = await cluster.new_session(), await cluster.new_session()
        await run(coordinator, request(first, 100))
        error = await refused(coordinator, request(second, 200), ErrorReason.KV_EXHAUSTED)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        record = await cluster.record(second)
        assert (record.home, record.state) == (None, SessionState.IDLE)
        outcome = await run(coordinator, request(first, 10))
        assert not outcome.placed.history_rebuilt
        await check_books(cluster)


async def test_the_policy_says_how_long_paused_kv_is_safe_and_how_the_engine_prefills() -> None:
    async with in_process() as cluster:
        limits = HomeLimits(kv_lease_s=60.0)
        local = await cluster.add_home("d0", capacity=256, limits=limits)
        (coordinator,) = cluster.coordinators
        first, second = await cluster.new_session(), await cluster.new_session()
        colocated = resolve(PolicySpec("colocated", {"chunk_tokens": 512}))
        local.home.apply_policy(colocated)
        assert local.engine.rule == local_rule(colocated)
        await run(coordinator, request(first, 100))
        await run(coordinator, request(second, 200))
        assert (await run(coordinator, request(first, 10))).placed.history_rebuilt
        local.home.apply_policy(resolve(PolicySpec("ampd")))
        assert local.engine.rule == ITL_SAFE_RULE
        await run(coordinator, request(first, 10))
        await refused(coordinator, request(second, 10), ErrorReason.KV_EXHAUSTED)
        await check_books(cluster)


async def test_a_session_too_large_for_any_worker_is_refused_before_anything() -> None:
    async with in_process() as cluster:
        await cluster.add_home("d0", capacity=256)
        session_id = await cluster.new_session()
        (coordinator,) = cluster.coordinators
        await refused(coordinator, request(session_id, 300), ErrorReason.KV_TOO_SMALL)
        assert (await cluster.record(session_id)).version == 1
        assert not cluster.homes["d0"].engine.samples


async def test_without_a_prefill_worker_that_answers_the_home_does_it() -> None:
    async with in_process("d0") as cluster:
        ghost = replace(cluster.homes["d0"].info, worker_id="p0", address="nowhere")
        from ampd.core.model import PolicySpec, Role, WorkerLoad
        from ampd.core.policies import resolve

        ghost = replace(ghost, role=Role.PREFILL)
        await cluster.store.heartbeat(ghost, WorkerLoad(), 60.0)
        policy = replace(resolve(PolicySpec("always-remote")), version=1)
        assert await cluster.store.set_policy(policy, 0)
        session_id = await cluster.new_session()
        outcome = await run(cluster.coordinators[0], request(session_id))
        assert outcome.placed.reason is RouteReason.FALLBACK_LOCAL
        assert outcome.placed.route is Route.LOCAL
        (record,) = await cluster.store.read_rounds(session_id)
        assert record.decision.route is Route.REMOTE
        assert record.route is Route.LOCAL


async def test_a_burst_between_two_heartbeats_spreads_over_the_homes() -> None:
    async with in_process("d0", "d1") as cluster:
        sessions = [await cluster.new_session() for _ in range(8)]
        outcomes = await asyncio.gather(
            *(run(cluster.coordinators[0], request(s)) for s in sessions)
        )
        homes = [outcome.placed.decode_worker for outcome in outcomes]
        assert sorted(homes) == ["d0"] * 4 + ["d1"] * 4


async def test_an_engine_that_fails_ends_the_round_cleanly() -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        await run(cluster.coordinators[0], request(session_id))
        engine = cluster.homes["d0"].engine
        working = engine.generate

        async def broken(wanted: GenerateRequest):  # type: ignore[no-untyped-def]
            async for event in working(wanted):
                yield event
                raise AmpdError(ErrorReason.ENGINE_FAILED, "out of order")

        engine.generate = broken  # type: ignore[method-assign]
        await refused(cluster.coordinators[0], request(session_id), ErrorReason.ENGINE_FAILED)
        engine.generate = working  # type: ignore[method-assign]
        assert (await run(cluster.coordinators[0], request(session_id))).finished
        await check_books(cluster)


async def test_a_round_that_follows_a_cancelled_one_never_loses_to_its_end() -> None:
    """Until the cancelled round has ended it is still running; then the next one begins."""
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        (coordinator,) = cluster.coordinators
        for _ in range(20):
            round_ = asyncio.create_task(run(coordinator, request(session_id, max_tokens=1000)))
            await asyncio.sleep(0.01)
            round_.cancel()
            outcome = None
            while outcome is None:
                try:
                    outcome = await run(coordinator, request(session_id, keep=0))
                except AmpdError as error:
                    if error.reason is not ErrorReason.ROUND_RUNNING:
                        raise
                    await asyncio.sleep(0)
            assert outcome.finished.history_tokens == 24
            with suppress(asyncio.CancelledError):
                await round_
        await check_books(cluster)
