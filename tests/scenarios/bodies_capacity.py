"""KV and queues that are full: bounded waits, refusals with a hint, evictions in their order;
what runs keeps running."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from catalogue import Body, scenario
from driver import BLOCK, Ability, Shape
from scene import BEAT_S, Dialogue, Scene, check_economy, tight

from ampd.core.errors import AmpdError, ErrorReason
from ampd.v1.session_pb2 import Slo
from ampd.wire.times import duration_to_proto

FULL = {ErrorReason.KV_EXHAUSTED, ErrorReason.QUEUE_FULL}


@scenario(tight(admission_wait_s=0.5), cases=("over-commit",))
async def more_sessions_than_kv(scene: Scene) -> None:
    """A round waits, or is refused with a hint; a running one is never preempted; a paused one
    may lose its KV, and says so."""
    client = scene.client()
    await client.set_policy("always-local")
    paused = await scene.opened(300)
    running = []
    for _ in range(2):
        dialogue = await scene.open()
        ask = dialogue.ask(600, 200)
        running.append((dialogue, ask, client.start(ask)))
        await running[-1][2].streams(1)
    # 2 x 800 of 2048 are promised, and 300 of the paused one had to make room.
    late = await scene.open()
    started_s = scene.now_s()
    error = await client.start(late.ask(400, 100)).error()
    waited_s = scene.now_s() - started_s
    assert error.reason == ErrorReason.KV_EXHAUSTED
    assert error.retry_after_s is not None
    assert 0.5 <= waited_s <= 0.7 + scene.driver.slack_s
    small = await scene.open()
    await small.round(100, 20)
    for dialogue, ask, stream in running:
        seen = dialogue.accept(ask, await stream.end())
        # Not preempted: no token was computed twice.
        check_economy(seen)
        assert len(seen.placed) == 1
    assert not (await late.round(400, 100)).where.history_rebuilt
    seen = await paused.round(10)
    usage = seen.finished.usage
    assert seen.where.history_rebuilt == (usage.decode_computed_tokens > 10 + BLOCK)


@scenario(tight(kv_tokens=1536, admission_wait_s=5.0), cases=("over-commit",))
async def a_round_waits_for_kv_and_gets_it(scene: Scene) -> None:
    """Within the bound: the client sees a later first token, no error; in the order of arrival."""
    client = scene.client()
    await client.set_policy("always-local")
    holder = await scene.open()
    ask = holder.ask(400, 100)
    running = client.start(ask)
    other = await scene.open()
    other_ask = other.ask(500, 200)
    second = client.start(other_ask)
    await asyncio.gather(running.streams(1), second.streams(1))
    waiting = [await scene.open() for _ in range(2)]
    asks = [dialogue.ask(500, 8) for dialogue in waiting]
    streams = []
    for asked in asks:
        streams.append(client.start(asked))
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    assert not any(stream.seen.placed for stream in streams)
    holder.accept(ask, await running.end())
    first_s = []
    for dialogue, asked, stream in zip(waiting, asks, streams, strict=True):
        dialogue.accept(asked, await stream.end())
        first_s.append(scene.now_s())
    assert first_s == sorted(first_s)
    other.accept(other_ask, await second.end())


@scenario(tight(kv_tokens=1536))
async def eviction_takes_the_least_recently_used(scene: Scene) -> None:
    """Of the paused ones, and no more than it takes; never one with a running round."""
    client = scene.client()
    await client.set_policy("always-local")
    oldest, middle, newest = [await scene.opened(230) for _ in range(3)]
    runner = await scene.opened(100)
    ask = runner.ask(10, 120)
    running = client.start(ask)
    await running.streams(1)
    # 3 x 256 are pinned, 256 run: 512 are free. Using the oldest makes it the newest.
    await oldest.round(5, 5)
    entrant = await scene.open()
    await entrant.round(600, 8)
    assert not running.is_over
    assert len(runner.accept(ask, await running.end()).placed) == 1
    rebuilt = [(await d.round(4, 2)).where.history_rebuilt for d in (oldest, newest, runner)]
    assert rebuilt == [False, False, False]
    assert (await middle.round(4, 2)).where.history_rebuilt


def paused_agent(lease_s: float) -> Body:
    """A waits for its tool while others fill the KV; then it goes on: within its lease, and
    after it."""

    async def body(scene: Scene) -> None:
        client = scene.client()
        await client.set_policy("always-local")
        agent = await scene.opened(300)
        for think_s, rebuilt in ((5 / 6 * lease_s, False), (4 / 3 * lease_s, True)):
            until_s = scene.now_s() + think_s
            filling = asyncio.create_task(fill(scene, until_s))
            await asyncio.sleep(think_s)
            await filling
            seen = await agent.round(40)
            assert seen.where.history_rebuilt == rebuilt
            computed = seen.finished.usage.decode_computed_tokens
            if rebuilt:
                assert computed > len(agent.history) / 2
            else:
                assert computed <= 40 + BLOCK

    return body


async def fill(scene: Scene, until_s: float) -> None:
    """Two large rounds at a time, of ever new sessions: only one of them fits beside the agent."""

    async def one_after_another() -> None:
        while scene.now_s() < until_s:
            dialogue = await scene.open()
            try:
                await dialogue.round(900, 100)
            except AmpdError as error:
                assert error.reason in FULL  # noqa: PT017 - or it went well
                assert error.retry_after_s is not None  # noqa: PT017
                await asyncio.sleep(min(error.retry_after_s, max(0.0, until_s - scene.now_s())))
            await dialogue.close()

    await asyncio.gather(one_after_another(), one_after_another())


_SHORT = tight(kv_lease_s=1.5, admission_wait_s=0.2)


@scenario(_SHORT, cases=("paused-agent-evicted",))
async def a_paused_agent_within_and_after_its_lease(scene: Scene) -> None:
    """The lease is 1.5 s, so that real clusters need not wait long."""
    await paused_agent(1.5)(scene)


@scenario(replace(_SHORT, kv_lease_s=6.0), cases=("paused-agent-evicted",), needs={Ability.EXACT})
async def an_agent_whose_tool_takes_five_seconds(scene: Scene) -> None:
    """The same with a lease of 6 s."""
    await paused_agent(6.0)(scene)


FLOOD_VISITORS = 12
FLOOD_PAUSE_S = 0.1
REFUSED_WITHIN_S = 0.5


@scenario(Shape(prefill=1, decode=1, max_running_rounds=6, max_sessions=12), real=True)
async def a_flood_of_new_sessions(scene: Scene) -> None:
    """Refused at once with a hint, sessions and rounds alike, as long as it lasts; the rounds
    that run keep their SLO, and when it is over there is room for everybody."""
    client = scene.client()
    await client.set_policy("always-local")
    slo = Slo(ttft=duration_to_proto(5.0), itl=duration_to_proto(0.2))
    running = [await scene.open(slo=slo) for _ in range(4)]
    asks = [dialogue.ask(50, 150) for dialogue in running]
    streams = [client.start(ask) for ask in asks]
    for stream in streams:
        await stream.streams(5)
    refused: list[AmpdError] = []
    served = 0

    async def visitor() -> None:
        nonlocal served
        while not all(stream.is_over for stream in streams):
            started_s = scene.now_s()
            dialogue: Dialogue | None = None
            try:
                dialogue = await scene.open()
                await dialogue.round(50, 20)
                served += 1
            except AmpdError as error:
                refused.append(error)
                assert scene.now_s() - started_s <= REFUSED_WITHIN_S + scene.driver.slack_s
            if dialogue is not None:
                await dialogue.close()
            await asyncio.sleep(FLOOD_PAUSE_S)

    await asyncio.gather(*(visitor() for _ in range(FLOOD_VISITORS)))
    assert served
    assert len(refused) > FLOOD_VISITORS
    for error in refused:
        assert error.reason == ErrorReason.QUEUE_FULL
        assert error.retry_after_s is not None
    for dialogue, ask, stream in zip(running, asks, streams, strict=True):
        seen = dialogue.accept(ask, await stream.end())
        assert seen.finished.attained
        check_economy(seen)
    for dialogue in running:
        await dialogue.round()


@scenario(Shape(coordinators=1, prefill=1, decode=1, max_sessions=5))
async def a_tenant_has_so_many_sessions(scene: Scene) -> None:
    """One more is refused with a hint; another tenant is not concerned."""
    dialogues = [await scene.open() for _ in range(5)]
    error = await _refused(scene)
    assert error.reason == ErrorReason.QUEUE_FULL
    assert error.retry_after_s is not None
    stranger = scene.client(tenant="somebody-else")
    await stranger.close((await stranger.create()).session_id)
    await dialogues.pop().close()
    await (await scene.open()).round()


async def _refused(scene: Scene) -> AmpdError:
    try:
        await scene.client().create()
    except AmpdError as error:
        return error
    raise AssertionError("one more session was opened")


@scenario(tight(kv_tokens=1024, max_model_tokens=4096))
async def a_session_that_no_worker_can_hold(scene: Scene) -> None:
    """Refused before anything is queued or bound, without a hint: it would never work."""
    client = scene.client()
    for policy in ("always-local", "always-remote"):
        await client.set_policy(policy)
        dialogue: Dialogue = await scene.open()
        stream = client.start(dialogue.ask(900, 200))
        error = await stream.error()
        assert error.reason == ErrorReason.KV_TOO_SMALL
        assert error.retry_after_s is None
        assert not stream.seen.placed
        assert (await dialogue.get()).home_worker == ""
        await dialogue.round(1000, 10)
        await dialogue.close()
        await asyncio.sleep(BEAT_S)
