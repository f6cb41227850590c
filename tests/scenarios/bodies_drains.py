"""Workers that leave in order, sessions that move, and calls that come twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from bodies_decode import other_home
from bodies_prefill import LONG, all_end_well, remote_rounds
from bodies_routes import SOLE
from catalogue import scenario
from driver import KV_BYTES_PER_TOKEN, Shape
from scene import UNAVAILABLE, Scene, check_economy, refused

from ampd.core.errors import ErrorReason
from ampd.core.model import Role
from ampd.v1.round_pb2 import ROUTE_LOCAL
from ampd.v1.session_pb2 import SESSION_STATE_CLOSED

DRAINED_WITHIN_S = 15.0


@scenario(real=True)
async def a_prefill_worker_drains(scene: Scene) -> None:
    """It takes nothing new, finishes what it has, hands it over, and goes."""
    client = scene.client()
    await client.set_policy("always-remote")
    running = await remote_rounds(scene, [LONG, LONG, 1000, 1000])
    told = await client.drain("prefill-0")
    assert told.running >= 1
    assert told.estimated.ToTimedelta().total_seconds() > 0
    await scene.until(
        lambda w: "prefill-0" not in w or w["prefill-0"].load.draining, 0.5 + scene.driver.slack_s
    )
    dialogue = await scene.open()
    for _ in range(3):
        seen = await dialogue.round()
        assert (len(seen.placed), seen.where.prefill_worker) == (1, "prefill-1")
    await all_end_well(running)
    for *_, stream in running:
        # What it had accepted it has finished.
        assert len(stream.seen.placed) == 1
        check_economy(stream.seen)
    assert await scene.driver.ended("prefill-0", DRAINED_WITHIN_S)
    await scene.gone("prefill-0")
    assert (await refused(client.drain("prefill-0"))).reason == ErrorReason.WORKER_NOT_FOUND


@scenario(real=True)
async def a_decode_worker_drains(scene: Scene) -> None:
    """Rounds end where they run, idle sessions move, new ones go elsewhere; nothing is lost."""
    client = scene.client()
    await client.set_policy("always-remote")
    idle = [await scene.opened_at("decode-0", 300) for _ in range(2)]
    busy = await scene.opened_at("decode-0", 100)
    ask = busy.ask(50, 120)
    stream = client.start(ask)
    await stream.streams(3)
    first = await client.drain("decode-0", request_id="drain-once")
    assert first.running == 1
    assert first.sessions == 3
    assert first.estimated.ToTimedelta().total_seconds() > 0
    await asyncio.sleep(0.5)
    again = await client.drain("decode-0", request_id="drain-once")
    assert again.elapsed.ToTimedelta() > first.elapsed.ToTimedelta()
    new = await scene.open()
    assert (await new.round()).where.decode_worker == "decode-1"
    seen = busy.accept(ask, await stream.end())
    assert [p.decode_worker for p in seen.placed] == ["decode-0"]
    assert await scene.driver.ended("decode-0", DRAINED_WITHIN_S)
    for dialogue in (*idle, busy):
        assert (await dialogue.get()).home_worker == "decode-1"
        seen = await dialogue.round()
        assert (len(seen.placed), seen.where.decode_worker) == (1, "decode-1")
        check_economy(seen)


@scenario(real=True)
async def sigterm_drains_a_decode_worker(scene: Scene) -> None:
    """As an operator's drain does; a round that is prefilled remotely ends well."""
    client = scene.client()
    await client.set_policy("always-remote")
    idle, busy = await scene.opened_at("decode-0", 200), await scene.opened_at("decode-0", 100)
    ask = busy.ask(2000, 60)
    stream = client.start(ask)
    await stream.placed()
    assert await scene.driver.terminate("decode-0")
    busy.accept(ask, await stream.end())
    for dialogue in (idle, busy):
        seen = await dialogue.round()
        assert seen.where.decode_worker == "decode-1"
        check_economy(seen)


@scenario(real=True)
async def sigterm_drains_a_coordinator(scene: Scene) -> None:
    """Its rounds end, new ones are refused, and the other one knows all."""
    first, second = scene.client(0), scene.client(1)
    await first.set_policy("always-local")
    dialogue, other = await scene.opened(100), await scene.opened(100)
    ask = dialogue.ask(40, 100)
    stream = first.start(ask)
    await stream.streams(3)
    leaving = asyncio.create_task(scene.driver.terminate("coordinator-0"))
    await asyncio.sleep(0.2)
    assert (await first.start(other.ask(5)).error()).reason in UNAVAILABLE
    dialogue.accept(ask, await stream.end())
    assert await leaving
    for session in (dialogue, other):
        seen = await session.round(client=second)
        assert not seen.where.history_rebuilt
    await scene.driver.restart("coordinator-0")
    await scene.reconnect(0)


@scenario(SOLE, real=True)
async def the_only_decode_worker_drains(scene: Scene) -> None:
    """Nowhere to move: it goes when its rounds have ended; the store keeps the sessions, and the
    next worker rebuilds them."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue, busy = await scene.opened(200), await scene.opened(100)
    ask = busy.ask(40, 100)
    stream = client.start(ask)
    await stream.streams(3)
    await client.drain("decode-0")
    assert (await client.start(dialogue.ask(5)).error()).reason in UNAVAILABLE
    busy.accept(ask, await stream.end())
    assert await scene.driver.ended("decode-0", DRAINED_WITHIN_S)
    for session in (dialogue, busy):
        assert (await client.start(session.ask(5)).error()).reason in UNAVAILABLE
        await session.check_as_before()
    await scene.driver.restart("decode-0")
    for session in (dialogue, busy):
        assert (await session.round()).where.history_rebuilt
        assert not (await session.round()).where.history_rebuilt


@scenario(replace(SOLE, prefill=1))
async def the_only_prefill_worker_drains(scene: Scene) -> None:
    """Then all is local."""
    client = scene.client()
    await client.set_policy("always-remote")
    running = await remote_rounds(scene, [2000, 500])
    await client.drain("prefill-0")
    await asyncio.sleep(0.1)
    dialogue = await scene.open()
    assert (await dialogue.round()).where.route == ROUTE_LOCAL
    await all_end_well(running)
    assert await scene.driver.ended("prefill-0", DRAINED_WITHIN_S)
    await scene.gone("prefill-0")
    await scene.free()


@scenario(real=True)
async def a_session_moves(scene: Scene) -> None:
    """With its KV where that is worth it: the next round computes its increment alone."""
    client = scene.client()
    for policy in ("always-local", "always-remote"):
        await client.set_policy(policy)
        dialogue = await scene.opened(1500)
        home = (await dialogue.get()).home_worker
        target = other_home(scene, home)
        moved = await client.move(dialogue.session_id, target, request_id=f"move-{policy}")
        assert moved.worker_id == target
        assert moved.moved_tokens >= 1400
        assert moved.moved_bytes >= 1400 * KV_BYTES_PER_TOKEN
        again = await scene.client(1).move(dialogue.session_id, target, request_id=f"move-{policy}")
        assert (again.worker_id, again.moved_tokens) == (target, 0)
        seen = await dialogue.round()
        assert (len(seen.placed), seen.where.decode_worker) == (1, target)
        check_economy(seen)
        # And back, without a name.
        moved = await client.move(dialogue.session_id)
        assert moved.worker_id == home
        check_economy(await dialogue.round())
        await dialogue.close()


@scenario()
async def a_short_session_moves_by_its_tokens(scene: Scene) -> None:
    """Where computing costs no more than reading, no KV moves: the next round rebuilds it."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.opened(2)
    home = (await dialogue.get()).home_worker
    moved = await client.move(dialogue.session_id)
    assert moved.worker_id == other_home(scene, home)
    await dialogue.round()
    assert (await dialogue.get()).home_worker == moved.worker_id


@scenario()
async def what_cannot_move(scene: Scene) -> None:
    """A running round, an unknown session, an unknown target: told apart, nothing changed."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.opened(200)
    home = (await dialogue.get()).home_worker
    ask = dialogue.ask(40, 100)
    stream = client.start(ask)
    await stream.streams(2)
    running = await refused(client.move(dialogue.session_id, other_home(scene, home)))
    assert running.reason == ErrorReason.ROUND_RUNNING
    seen = dialogue.accept(ask, await stream.end())
    assert len(seen.placed) == 1
    unknown = await refused(client.move(dialogue.session_id, "decode-9"))
    assert unknown.reason == ErrorReason.WORKER_NOT_FOUND
    nobody = await refused(client.move("0" * 32))
    assert nobody.reason == ErrorReason.SESSION_NOT_FOUND
    wrong = await refused(client.move(dialogue.session_id, "prefill-0"))
    assert wrong.reason == ErrorReason.INVALID_FIELD
    assert (await dialogue.get()).home_worker == home


@scenario()
async def the_target_of_a_move_dies(scene: Scene) -> None:
    """The session stays where it was, or is found again; no token is lost."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.opened(1500)
    home = (await dialogue.get()).home_worker
    target = other_home(scene, home)
    moving = asyncio.create_task(client.move(dialogue.session_id, target))
    await asyncio.sleep(0.003)
    await scene.driver.kill(target)
    await asyncio.gather(moving, return_exceptions=True)
    await dialogue.round()
    check_economy(await dialogue.round())
    assert (await dialogue.get()).home_worker == home


# --- the same call twice -------------------------------------------------------------------------


@scenario()
async def calls_that_come_twice(scene: Scene) -> None:
    """Every call that changes something may be repeated under its request_id, at any
    coordinator: the same answer, nothing done twice."""
    first, second = scene.client(0), scene.client(1)
    await first.set_policy("always-remote")
    session = await first.create(request_id="create-once")
    assert await second.create(request_id="create-once") == session
    dialogue = scene.adopt(session.session_id)
    ask = dialogue.ask(80, 12, request_id="round-once")
    seen = dialogue.accept(ask, await first.start(ask).end())
    told = await first.explain(session.session_id)
    for client in (second, first):
        again = await client.start(ask).end()
        assert (again.token_ids, again.text) == (seen.token_ids, seen.text)
        assert again.finished == seen.finished
        assert again.batches == 1
    assert await first.explain(session.session_id) == told
    await dialogue.round()
    # It is the same answer when the session has gone on.
    assert (await second.start(ask).end()).token_ids == seen.token_ids
    policy = await first.set_policy("ampd-paper", request_id="policy-once", alpha=0.5)
    assert await second.set_policy("ampd-paper", request_id="policy-once", alpha=0.5) == policy
    moved = await first.move(session.session_id, request_id="move-once")
    again_moved = await second.move(session.session_id, moved.worker_id, request_id="move-once")
    assert (again_moved.worker_id, again_moved.moved_tokens) == (moved.worker_id, 0)
    closed = await first.close(session.session_id, request_id="close-once")
    dialogue.closed = True
    assert closed.state == SESSION_STATE_CLOSED
    assert await second.close(session.session_id, request_id="close-once") == closed
    gone = await refused(second.close(session.session_id, request_id="close-twice"))
    assert gone.reason == ErrorReason.SESSION_NOT_FOUND


@scenario()
async def a_lost_stream_is_taken_up_again(scene: Scene) -> None:
    """The same request_id replays what was said, and goes on; without a repetition the round is
    discarded by the next one."""
    first, second = scene.client(0), scene.client(1)
    for policy in ("always-local", "always-remote"):
        await first.set_policy(policy)
        dialogue = await scene.opened(100)
        ask = dialogue.ask(60, 80, request_id=f"lost-{policy}")
        stream = first.start(ask)
        await stream.streams(20)
        saw = (await stream.cancel()).token_ids
        again = second.start(ask)
        await again.streams(len(saw))
        await again.cancel()
        seen = dialogue.accept(ask, await first.start(ask).end())
        assert seen.token_ids[: len(saw)] == saw
        lost = dialogue.ask(60, 200, request_id=f"lost-for-good-{policy}")
        stream = second.start(lost)
        await stream.streams(5)
        await stream.cancel()
        await dialogue.check_as_before()
        await dialogue.round()
        told = await first.start(lost).error()
        assert told.reason == ErrorReason.SESSION_CONFLICT
        await dialogue.check_as_before()


@scenario(Shape(decode=1))
async def a_repetition_takes_over_the_round_that_runs(scene: Scene) -> None:
    """A client that has lost its stream need not wait until the cluster knows."""
    first, second = scene.client(0), scene.client(1)
    await first.set_policy("always-local")
    dialogue = await scene.opened(100)
    ask = dialogue.ask(40, 80, request_id="mine")
    stream = first.start(ask)
    await stream.streams(10)
    again = second.start(ask)
    try:
        seen = await again.end()
    finally:
        await stream.cancel()
    dialogue.accept(ask, seen)
    assert (await dialogue.get()).round_count == 2
    assert scene.shape.names(Role.DECODE) == [seen.where.decode_worker]
