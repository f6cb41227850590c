"""Prefill workers that die, refuse, are silent or come back: a slower round, never an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from bodies_routes import SOLE
from catalogue import scenario
from driver import PREFILL_TOKEN_S, Ability, Shape
from scenario_client import Ask, Stream
from scene import BEAT_S, Dialogue, Scene, check_economy

from ampd.core.model import Role
from ampd.v1.round_pb2 import (
    ROUTE_LOCAL,
    ROUTE_REASON_FALLBACK_LOCAL,
    ROUTE_REASON_NO_PREFILL_WORKER,
    ROUTE_REASON_REROUTED,
    ROUTE_REMOTE,
)

LONG: Final = 2000
"""Tokens that a prefill worker computes for more than half a second."""


async def remote_rounds(scene: Scene, counts: list[int]) -> list[tuple[Dialogue, Ask, Stream]]:
    """Rounds on prefill workers that have begun, of sessions with a history."""
    dialogues = [await scene.opened() for _ in counts]
    running = []
    for dialogue, count in zip(dialogues, counts, strict=True):
        ask = dialogue.ask(count)
        stream = scene.client().start(ask)
        await stream.placed()
        assert stream.seen.where.route == ROUTE_REMOTE
        running.append((dialogue, ask, stream))
    return running


async def all_end_well(running: list[tuple[Dialogue, Ask, Stream]]) -> None:
    """And say what they have to."""
    for dialogue, ask, stream in running:
        dialogue.accept(ask, await stream.end())


@scenario(real=True)
async def a_prefill_worker_dies_and_another_takes_over(scene: Scene) -> None:
    """While it computes, reads and queues: its tasks are re-routed, once."""
    client = scene.client()
    await client.set_policy("always-remote")
    running = await remote_rounds(scene, [LONG, LONG, 2000, 2000, 500, 500])
    await asyncio.sleep(0.2)
    victims = [stream for *_, stream in running if stream.seen.where.prefill_worker == "prefill-0"]
    assert len(victims) >= 2
    await scene.driver.kill("prefill-0")
    await all_end_well(running)
    for stream in victims:
        assert [p.reason for p in stream.seen.placed[1:]] == [ROUTE_REASON_REROUTED]
        assert stream.seen.where.prefill_worker == "prefill-1"
        assert not stream.seen.where.history_rebuilt
    await scene.gone("prefill-0")
    for dialogue, *_ in running:
        seen = await dialogue.round()
        assert (len(seen.placed), seen.where.prefill_worker) == (1, "prefill-1")


@scenario()
async def all_prefill_workers_die(scene: Scene) -> None:
    """Re-routed once, then local."""
    client = scene.client()
    await client.set_policy("always-remote")
    running = await remote_rounds(scene, [LONG, LONG, 1000])
    await asyncio.sleep(0.1)
    for name in scene.shape.names(Role.PREFILL):
        await scene.driver.kill(name)
    await all_end_well(running)
    for *_, stream in running:
        assert stream.seen.where.reason == ROUTE_REASON_FALLBACK_LOCAL
        assert stream.seen.where.route == ROUTE_LOCAL
        assert 2 <= len(stream.seen.placed) <= 3
    for name in scene.shape.names(Role.PREFILL):
        await scene.gone(name)
    seen = await running[0][0].round()
    assert [p.reason for p in seen.placed] == [ROUTE_REASON_NO_PREFILL_WORKER]


@scenario(real=True)
async def a_prefill_worker_comes_back_as_a_new_one(scene: Scene) -> None:
    """On the same address: what it was asked before is void, what it held is read again."""
    client = scene.client()
    await client.set_policy("always-remote")
    dialogue = await scene.opened(400)
    await dialogue.round()
    before = {w.worker_id: w.incarnation for w in await client.workers()}
    for name in scene.shape.names(Role.PREFILL):
        await scene.driver.kill(name)
        await scene.driver.restart(name)
    workers = {w.worker_id: w for w in await client.workers()}
    for name in scene.shape.names(Role.PREFILL):
        assert workers[name].incarnation > before[name]
    seen = await dialogue.round()
    assert seen.where.route == ROUTE_REMOTE
    assert len(seen.placed) == 1
    check_economy(seen)
    # The new life has no cache of the old one's.
    assert seen.finished.usage.history_pulled_tokens >= 400


@scenario(replace(SOLE, max_queued_tasks=1))
async def a_full_queue_refuses_and_the_home_does_it(scene: Scene) -> None:
    """A refusal costs no time and no error."""
    await scene.client().set_policy("always-remote")
    dialogues = [await scene.opened() for _ in range(5)]
    asks = [dialogue.ask(1000) for dialogue in dialogues]
    streams = [scene.client().start(ask) for ask in asks]
    await all_end_well(list(zip(dialogues, asks, streams, strict=True)))
    reasons = [stream.seen.where.reason for stream in streams]
    # Two in the engine, one in the queue.
    assert reasons.count(ROUTE_REASON_FALLBACK_LOCAL) >= 1
    for stream in streams:
        assert not stream.seen.where.history_rebuilt


@scenario(
    replace(SOLE, claim_timeout_s=1.0),
    cases=("chosen-worker-never-answers",),
    needs={Ability.FREEZE},
    real=True,
)
async def a_silent_prefill_worker_times_out(scene: Scene) -> None:
    """It has accepted the task and never answers: a timeout, then local; all is free."""
    await scene.client().set_policy("always-remote")
    running = await remote_rounds(scene, [LONG, LONG, 200])
    await asyncio.sleep(0.1)
    await scene.driver.freeze("prefill-0")
    frozen_s = scene.now_s()
    queued = running[-1]
    await queued[2].placed(2)
    assert scene.now_s() - frozen_s <= 1.0 + scene.driver.slack_s
    assert queued[2].seen.where.reason == ROUTE_REASON_FALLBACK_LOCAL
    queued[0].accept(queued[1], await queued[2].end())
    # The others were claimed: their worker is given up when its connection is silent.
    await all_end_well(running[:-1])
    assert scene.now_s() - frozen_s <= 8.0 + scene.driver.slack_s
    await scene.driver.thaw("prefill-0")
    # It was told nothing while it stood still: it ends what it had claimed, and finds it gone.
    await scene.free(5.0)


@scenario(
    Shape(decode=1, claim_timeout_s=0.6),
    cases=("chosen-worker-never-answers",),
)
async def a_task_that_waits_too_long_goes_elsewhere(scene: Scene) -> None:
    """A worker that is stuck behind long work is as good as silent: another one gets it."""
    await scene.client().set_policy("always-remote", choice="round-robin")
    running = await remote_rounds(scene, [4000, 100, 4000, 100, 100])
    await all_end_well(running)
    late = [stream for *_, stream in running if len(stream.seen.placed) > 1]
    assert late
    for stream in late:
        assert stream.seen.placed[1].reason == ROUTE_REASON_REROUTED
        ttft_s = stream.seen.finished.timings.ttft.ToTimedelta().total_seconds()
        assert ttft_s < 4000 * PREFILL_TOKEN_S * 2 + 1.0 + scene.driver.slack_s
    await scene.free()


@scenario(
    SOLE,
    cases=("reject-before-admission",),
    needs={Ability.REFUSE, Ability.BOOKS},
)
async def a_home_that_refuses_what_was_computed_frees_it(scene: Scene) -> None:
    """The prefill is done, the home's engine refuses the round: the prefill worker's blocks are
    free within a second."""
    from ampd.core.errors import AmpdError, ErrorReason, invalid_field

    await scene.client().set_policy("always-remote")
    for refusal, told in (
        (invalid_field("sampling.top_k", "must be something else"), ErrorReason.INVALID_FIELD),
        (AmpdError(ErrorReason.QUEUE_FULL, "the engine has too many requests"), None),
        (AmpdError(ErrorReason.ENGINE_FAILED, "the engine is out of order"), None),
    ):
        dialogue = await scene.opened(200)
        scene.driver.refuse_next("decode-0", refusal)
        error = await scene.client().start(dialogue.ask(500)).error()
        assert error.reason == (told or refusal.reason)
        await scene.free()
        await dialogue.check_as_before()
        check_economy(await dialogue.round())


@scenario(
    replace(SOLE, kv_tokens=2048, max_model_tokens=2048, admission_wait_s=0.2),
    cases=("reject-before-admission",),
)
async def a_round_without_room_never_reaches_a_prefill_worker(scene: Scene) -> None:
    """Admission comes before the offer: refused is refused before anything was computed."""
    await scene.client().set_policy("always-remote")
    holder, other = await scene.opened(1000), await scene.open()
    running = scene.client().start(ask := holder.ask(300, 100))
    await running.streams(5)
    await asyncio.sleep(BEAT_S)
    before = (await scene.client().workers())[-1].load.ttft_window.ToTimedelta()
    error = await scene.client().start(other.ask(1500)).error()
    assert error.reason == "KV_EXHAUSTED"
    assert error.retry_after_s is not None
    workers = {w.worker_id: w for w in await scene.client().workers()}
    assert workers["prefill-0"].load.queued_tasks == 0
    assert workers["prefill-0"].load.ttft_window.ToTimedelta() == before
    assert (await other.get()).home_worker == ""
    holder.accept(ask, await running.end())
