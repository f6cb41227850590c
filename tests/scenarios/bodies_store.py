"""The shared store is down, comes back, or comes back without its last second."""

from __future__ import annotations

import asyncio
from typing import Final

from catalogue import scenario
from driver import LEASE_S, Ability
from scene import Dialogue, Scene, all_live, check_economy, refused

from ampd.core.errors import AmpdError, ErrorReason
from ampd.v1.session_pb2 import SESSION_STATE_IDLE, Session

NOT_YET: Final = {ErrorReason.SESSION_NOT_FOUND, ErrorReason.STORE_UNAVAILABLE}
"""Of a store that has come back and lacks what homes have yet to publish."""
WRITTEN_WITHIN_S: Final = LEASE_S + 4.0
"""After the store is back: every process gets a lease's time to say what it knows, and a little."""
BACK_WITHIN_S: Final = 8.0


async def back_again(scene: Scene) -> None:
    """Every process has registered again."""
    started_s = scene.now_s()
    while True:
        try:
            workers = {w.worker_id: w for w in await scene.client().workers()}
        except AmpdError:  # a store that has just come back
            workers = {}
        if all_live(scene.shape)(workers):
            return
        assert scene.now_s() - started_s < BACK_WITHIN_S, workers
        await asyncio.sleep(0.05)


@scenario(real=True)
async def rounds_end_during_an_outage(scene: Scene) -> None:
    """And are written back; new ones of known sessions begin on the last known state, for a
    bounded time; then UNAVAILABLE. Nothing hangs."""
    client = scene.client()
    await client.set_policy("always-remote")
    running, idle = await scene.opened(200), await scene.opened(100)
    ask = running.ask(40, 150, request_id="through")
    stream = client.start(ask)
    await stream.streams(5)
    await scene.driver.stop_store()
    down_s = scene.now_s()
    seen = await idle.round()
    assert not seen.where.history_rebuilt
    assert scene.now_s() - down_s <= scene.shape.max_state_age_s
    assert (await refused(client.create())).reason == ErrorReason.STORE_UNAVAILABLE
    running.accept(ask, await stream.end())
    await asyncio.sleep(max(0.0, scene.shape.max_state_age_s - (scene.now_s() - down_s)) + 0.1)
    for dialogue in (running, idle):
        started_s = scene.now_s()
        error = await client.start(dialogue.ask(5)).error()
        assert error.reason == ErrorReason.STORE_UNAVAILABLE
        assert scene.now_s() - started_s <= 2.0 + scene.driver.slack_s
    await scene.driver.start_store()
    await back_again(scene)
    for dialogue in (running, idle):
        await written(scene, dialogue)
    # The answer is there as well.
    again = await scene.client(1).start(ask).end()
    assert (again.token_ids, again.batches) == (stream.seen.token_ids, 1)
    for dialogue in (running, idle):
        seen = await dialogue.round(client=scene.client(1))
        assert not seen.where.history_rebuilt
        check_economy(seen)


async def written(scene: Scene, dialogue: Dialogue) -> None:
    """The store has all rounds of the session."""
    started_s = scene.now_s()
    while True:
        try:
            session = await dialogue.get()
        except AmpdError as error:
            assert error.reason in NOT_YET  # noqa: PT017 - or what follows
            session = Session()
        if (session.round_count, session.history_tokens, session.state) == (
            dialogue.rounds,
            len(dialogue.history),
            SESSION_STATE_IDLE,
        ):
            return
        assert scene.now_s() - started_s < WRITTEN_WITHIN_S, session
        await asyncio.sleep(0.05)


@scenario(real=True)
async def a_home_dies_during_an_outage(scene: Scene) -> None:
    """What settled is written all the same, and rebuilt elsewhere when the store is back."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.opened(200)
    ask = dialogue.ask(40, 30)
    stream = client.start(ask)
    await stream.streams(3)
    await scene.driver.stop_store()
    seen = dialogue.accept(ask, await stream.end())
    await scene.driver.kill(seen.where.decode_worker)
    await scene.driver.start_store()
    await asyncio.sleep(0.5)
    await written(scene, dialogue)
    seen = await dialogue.round()
    assert seen.where.history_rebuilt


@scenario(needs={Ability.LOSE_STORE_WRITES})
async def a_store_that_forgets_its_last_second(scene: Scene) -> None:
    """Homes publish what it has lost, coordinators write their last rounds once more: no round
    that a client saw the end of is gone."""
    client = scene.client()
    await client.set_policy("always-remote")
    old = await scene.opened(200)
    await asyncio.sleep(2.5)
    new = await scene.opened(100)
    await old.round(60)
    await scene.driver.stop_store()
    await scene.driver.start_store(lose=True)
    await back_again(scene)
    for dialogue in (old, new):
        await written(scene, dialogue)
        seen = await dialogue.round(client=scene.client(1))
        assert not seen.where.history_rebuilt
        check_economy(seen)
