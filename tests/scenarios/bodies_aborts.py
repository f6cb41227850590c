"""Rounds given up at every stage: what they took is free in time, on both sides, and the session
is as before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from bodies_prefill import LONG
from bodies_routes import SOLE
from catalogue import scenario
from driver import BLOCK, Ability, KvTrouble
from scenario_client import Stream
from scene import (
    FREE_WITHIN_S,
    TRANSFER_FAILS_WITHIN_S,
    Dialogue,
    Scene,
    check_economy,
    tight,
)

from ampd.core.errors import ErrorReason


async def given_up(
    scene: Scene,
    dialogues: Sequence[Dialogue],
    streams: Sequence[Stream],
    within_s: float = FREE_WITHIN_S,
) -> None:
    """Cancel them: all is free in time, and every session goes on where it was."""
    await asyncio.gather(*(stream.cancel() for stream in streams))
    await scene.free(within_s)
    scene.driver.check_books()
    for dialogue in dialogues:
        await dialogue.check_as_before()
        seen = await dialogue.round()
        assert not seen.where.history_rebuilt
        check_economy(seen)


@scenario(SOLE, real=True)
async def given_up_while_queued_and_computing(scene: Scene) -> None:
    """One computes, one reads its history, the others wait in the prefill worker's queue."""
    await scene.client().set_policy("always-remote")
    dialogues = [await scene.opened(4 * BLOCK) for _ in range(5)]
    streams = [scene.client().start(dialogue.ask(LONG)) for dialogue in dialogues]
    await scene.until(lambda w: w["prefill-0"].load.queued_tasks == 5, 1.0)
    assert not any(stream.seen.token_ids for stream in streams)
    await given_up(scene, dialogues, streams)


@scenario(SOLE)
async def given_up_while_queued_moves_nothing(scene: Scene) -> None:
    """The others go on as if it had never come."""
    await scene.client().set_policy("always-remote")
    ahead, doomed, behind = [await scene.opened(100) for _ in range(3)]
    ask = ahead.ask(LONG)
    running = scene.client().start(ask)
    second = scene.client().start(second_ask := behind.ask(LONG))
    await second.placed()
    stream = scene.client().start(doomed.ask(LONG))
    await stream.placed()
    await scene.until(lambda w: w["prefill-0"].load.queued_tasks == 3, 1.0)
    await stream.cancel()
    await scene.until(lambda w: w["prefill-0"].load.queued_tasks == 2, FREE_WITHIN_S)
    assert not running.is_over
    ahead.accept(ask, await running.end())
    behind.accept(second_ask, await second.end())
    await doomed.check_as_before()
    check_economy(await doomed.round())


@scenario(SOLE)
async def given_up_while_prefilled_locally(scene: Scene) -> None:
    """In the middle of its chunks."""
    await scene.client().set_policy("always-local")
    dialogues = [await scene.opened(100) for _ in range(3)]
    streams = [scene.client().start(dialogue.ask(LONG)) for dialogue in dialogues]
    for stream in streams:
        await stream.placed()
    await asyncio.sleep(0.2)
    assert not any(stream.seen.token_ids for stream in streams)
    await given_up(scene, dialogues, streams)


@scenario(SOLE)
async def given_up_while_decoding(scene: Scene) -> None:
    """On either route."""
    for policy in ("always-local", "always-remote"):
        await scene.client().set_policy(policy)
        dialogues = [await scene.opened(100) for _ in range(3)]
        asks = [dialogue.ask(40, 2000) for dialogue in dialogues]
        streams = [scene.client().start(ask) for ask in asks]
        for stream in streams:
            await stream.streams(5)
        await given_up(scene, dialogues, streams)


@scenario(tight(kv_tokens=1536, admission_wait_s=5.0))
async def given_up_while_it_waits_for_admission(scene: Scene) -> None:
    """It leaves the line: the one behind it is next."""
    await scene.client().set_policy("always-local")
    holder, doomed, behind = [await scene.open() for _ in range(3)]
    ask = holder.ask(800, 200)
    running = scene.client().start(ask)
    await running.streams(1)
    waiting = scene.client().start(doomed.ask(900, 100))
    await asyncio.sleep(0.1)
    small = scene.client().start(small_ask := behind.ask(200, 8))
    await asyncio.sleep(0.3)
    # Not passed over: the one in front has not enough room yet.
    assert not small.seen.placed
    await waiting.cancel()
    await small.placed()
    behind.accept(small_ask, await small.end())
    assert not running.is_over
    holder.accept(ask, await running.end())
    await doomed.check_as_before()
    assert (await doomed.get()).home_worker == ""


@scenario(SOLE, cases=("abort-while-waiting-for-remote-kv",), real=True)
async def given_up_while_the_prefill_worker_dies(scene: Scene) -> None:
    """A remote prefill is in flight; the round is cancelled and its worker killed: nothing waits
    for a lease, and the next round is prefilled at home."""
    await scene.client().set_policy("always-remote")
    dialogue = await scene.opened(4 * BLOCK)
    for delay_s in (0.0, 0.3):
        stream = scene.client().start(dialogue.ask(LONG))
        await stream.placed()
        await asyncio.sleep(delay_s)
        await stream.cancel()
        await scene.driver.kill("prefill-0")
        await scene.until(
            lambda w: not (w["decode-0"].load.kv_running_tokens or w["decode-0"].load.queued_tasks),
            FREE_WITHIN_S + 0.25,
        )
        await dialogue.check_as_before()
        seen = await dialogue.round()
        assert not seen.where.history_rebuilt
        await scene.driver.restart("prefill-0")


@scenario(
    SOLE,
    cases=("abort-while-waiting-for-remote-kv", "reject-before-admission"),
    needs={Ability.BREAK_KV, Ability.BOOKS},
)
async def given_up_while_a_transfer_is_stuck(scene: Scene) -> None:
    """A read that does not end, at the home and at the prefill worker: all is free when it
    fails, and late bytes harm nobody."""
    await scene.client().set_policy("always-remote")
    other = await scene.opened(100)
    for dialogue in (await scene.open(), await scene.opened(4 * BLOCK)):
        scene.driver.trouble_kv(KvTrouble.STUCK)
        # Without a history there is nothing to read before the home takes the result.
        home_reads = not dialogue.history
        stream = scene.client().start(dialogue.ask(500))
        await _computed(scene) if home_reads else await asyncio.sleep(0.5)
        assert not stream.seen.token_ids
        started_s = scene.now_s()
        await stream.cancel()
        scene.driver.trouble_kv(KvTrouble.NONE)
        ask = other.ask(1000)
        running = scene.client().start(ask)
        await dialogue.check_as_before()
        other.accept(ask, await running.end())
        await scene.free(TRANSFER_FAILS_WITHIN_S - (scene.now_s() - started_s))
        scene.driver.check_books()
        check_economy(await dialogue.round())


async def _computed(scene: Scene) -> None:
    """The prefill worker's engine holds a result, and nothing runs there."""
    async with asyncio.timeout(3.0):
        while True:
            stats = scene.driver.engine("prefill-0")
            if stats.kv_pinned_tokens and not stats.running_requests:
                return
            await asyncio.sleep(0.02)


@scenario(SOLE, needs={Ability.BREAK_KV})
async def a_transfer_that_fails_costs_time_and_no_token(scene: Scene) -> None:
    """The home computes what it could not read."""
    await scene.client().set_policy("always-remote")
    dialogue = await scene.opened(4 * BLOCK)
    scene.driver.trouble_kv(KvTrouble.FAILED)
    ask = dialogue.ask(300)
    stream = scene.client().start(ask)
    started_s = scene.now_s()
    dialogue.accept(ask, await stream.end())
    assert scene.now_s() - started_s <= 2 * TRANSFER_FAILS_WITHIN_S
    scene.driver.trouble_kv(KvTrouble.NONE)
    await scene.free()
    check_economy(await dialogue.round())


@scenario(real=True)
async def given_up_at_any_moment(scene: Scene) -> None:
    """Every round after one that was cancelled at random, coordinators and routes taking turns."""
    rng = scene.rng

    async def live(dialogue: Dialogue) -> None:
        for _ in range(3):
            client = scene.client(rng.randrange(2))
            await client.set_policy(rng.choice(["always-local", "always-remote"]))
            stream = client.start(dialogue.ask(rng.choice([5, 400]), 300))
            await asyncio.sleep(rng.random() ** 2 * 0.6)
            await stream.cancel()
            await dialogue.check_as_before()
            await dialogue.round(60, 6, client=scene.client(rng.randrange(2)))

    dialogues = [await scene.open() for _ in range(6)]
    await asyncio.gather(*(live(dialogue) for dialogue in dialogues))
    await scene.free()


@scenario(SOLE)
async def a_deadline_ends_a_round_at_every_stage(scene: Scene) -> None:
    """As a cancellation does, by the cluster's own clocks."""
    for policy in ("always-remote", "always-local"):
        await scene.client().set_policy(policy)
        dialogues = [await scene.opened(100) for _ in range(3)]
        asks = [d.ask(LONG, 4) for d in dialogues[:2]] + [dialogues[2].ask(40, 2000)]
        started_s = scene.now_s()
        streams = [scene.client().start(ask, timeout_s=0.4) for ask in asks]
        for stream in streams:
            assert (await stream.error()).reason == ErrorReason.DEADLINE
        assert scene.now_s() - started_s <= 1.0 + scene.driver.slack_s
        await scene.free()
        for dialogue in dialogues:
            await dialogue.check_as_before()
            check_economy(await dialogue.round())


@scenario(replace(SOLE, max_model_tokens=1024), cases=("increment-too-long",))
async def an_increment_longer_than_the_context(scene: Scene) -> None:
    """One error that names the limit, nothing queued, and a shorter one works."""
    client = scene.client()
    for policy in ("always-remote", "always-local"):
        await client.set_policy(policy)
        dialogue = await scene.opened(400)
        for count in (1024 - 408, 1024, 5000):
            stream = client.start(dialogue.ask(count, 1))
            error = await stream.error()
            assert error.reason == ErrorReason.CONTEXT_TOO_LONG
            assert "1024" in error.message
            assert not stream.seen.placed
            assert not stream.seen.token_ids
        await scene.free(0.0)
        await dialogue.check_as_before()
        # What is left is used to the last token.
        seen = await dialogue.round(1024 - 408 - 10, 10)
        assert seen.finished.history_tokens == 1024
        check_economy(seen)


@scenario(SOLE)
async def a_session_closed_in_mid_round(scene: Scene) -> None:
    """By another call, at another coordinator: the round ends, and all of it is free."""
    await scene.client().set_policy("always-remote")
    for wait in ("placed", "streams"):
        dialogue = await scene.opened(100)
        tokens, most = (LONG, 4) if wait == "placed" else (40, 2000)
        stream = scene.client().start(dialogue.ask(tokens, most))
        await (stream.placed() if wait == "placed" else stream.streams(3))
        await dialogue.close(scene.client(1))
        error = await stream.error()
        assert error.reason in {ErrorReason.SESSION_NOT_FOUND, ErrorReason.SESSION_CONFLICT}
        gone = await scene.client().start(dialogue.ask(5)).error()
        assert gone.reason == ErrorReason.SESSION_NOT_FOUND
        await scene.free()
