"""Decode workers and coordinators that die or come back: streams go on, histories are whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from bodies_routes import SOLE
from catalogue import scenario
from driver import LEASE_S, Ability
from scene import UNAVAILABLE, Scene, check_economy, refused, tight

from ampd.adapters.engine_emulated import expect
from ampd.core.errors import ErrorReason
from ampd.core.model import Role, SamplingParams
from ampd.v1.round_pb2 import FINISH_REASON_STOP, ROUTE_REMOTE


def other_home(scene: Scene, name: str) -> str:
    """Of two."""
    (other,) = set(scene.shape.names(Role.DECODE)) - {name}
    return other


@scenario(real=True)
async def a_home_dies_in_mid_round(scene: Scene) -> None:
    """While one round decodes and another one is prefilled remotely: both go on elsewhere, and
    neither repeats nor skips a token."""
    await scene.client().set_policy("always-remote")
    decoding = await scene.opened(300)
    home = (await decoding.get()).home_worker
    early = await scene.opened_at(home)
    ask = decoding.ask(60, 120)
    stream = scene.client().start(ask)
    await stream.streams(10)
    early_ask = early.ask(2500, 8)
    early_stream = scene.client().start(early_ask)
    await early_stream.placed()
    await asyncio.sleep(0.1)
    assert not stream.is_over
    await scene.driver.kill(home)
    seen = decoding.accept(ask, await stream.end())
    assert seen.where.decode_worker == other_home(scene, home)
    assert seen.where.history_rebuilt
    assert len(seen.token_ids) == 120
    seen = early.accept(early_ask, await early_stream.end())
    assert seen.where.decode_worker == other_home(scene, home)
    for dialogue in (decoding, early):
        assert (await dialogue.get()).home_worker == other_home(scene, home)
        check_economy(await dialogue.round())
    await scene.gone(home)


@scenario()
async def a_home_dies_with_a_stop_string_ahead(scene: Scene) -> None:
    """What ends a round is carried along: stop strings that span the death, and max_tokens."""
    await scene.client().set_policy("always-local")
    dialogue = await scene.opened(100)
    longest = scene.shape.max_model_tokens
    probe = dialogue.ask(40, 400)
    text = dialogue.expected(probe).text
    words = text.split(" ")
    # Two words of it that come in the middle.
    stop = f"{words[200][2:]} {words[201][:3]}"
    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, stop=(stop,))
    ask = dialogue.ask(probe.tokens, sampling=sampling)
    expected = expect([*dialogue.history, *ask.tokens], sampling, max_model_tokens=longest)
    assert 150 < len(expected.tokens) < 250
    stream = scene.client().start(ask)
    await stream.streams(20)
    await scene.driver.kill(stream.seen.where.decode_worker)
    seen = dialogue.accept(ask, await stream.end())
    assert seen.finished.finish_reason == FINISH_REASON_STOP
    assert seen.finished.stop_reason == stop
    # The cut-off tail of the stop string is no history.
    check_economy(await dialogue.round())


@scenario()
async def a_home_dies_under_sampled_rounds(scene: Scene) -> None:
    """With a seed it is the very stream; without, what the client saw stays the beginning of
    it, and so many tokens come as were asked for."""
    await scene.client().set_policy("always-local")
    seeded, free = await scene.opened(100), await scene.opened(100)
    hot = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True, seed=7)
    ask = seeded.ask(40, sampling=hot)
    other = free.ask(40, sampling=replace(hot, seed=None))
    stream, lucky = scene.client().start(ask), scene.client().start(other)
    await asyncio.gather(stream.streams(10), lucky.streams(10))
    before = lucky.seen.token_ids
    homes = {s.seen.where.decode_worker for s in (stream, lucky)}
    for home in homes:
        await scene.driver.kill(home)
        await scene.driver.restart(home)
    seeded.accept(ask, await stream.end())
    seen = await lucky.end()
    assert seen.token_ids[: len(before)] == before
    assert len(seen.token_ids) == 150
    free.history += [*other.tokens, *seen.token_ids]
    free.rounds += 1
    for dialogue in (seeded, free):
        await dialogue.check_as_before()
        await dialogue.round()


@scenario()
async def a_home_dies_between_rounds(scene: Scene) -> None:
    """Before its lease is gone and after: the session is rebuilt elsewhere, and says so."""
    await scene.client().set_policy("always-remote")
    first, second = await scene.opened(300), await scene.opened(300)
    homes = {d: (await d.get()).home_worker for d in (first, second)}
    victim = homes[first]
    await scene.driver.kill(victim)
    seen = await first.round()
    assert seen.where.decode_worker == other_home(scene, victim)
    assert seen.where.history_rebuilt
    # Its whole history is a prefill like any other.
    assert seen.where.route == ROUTE_REMOTE
    await scene.gone(victim)
    seen = await second.round()
    assert seen.where.history_rebuilt == (homes[second] == victim)
    for dialogue in (first, second):
        seen = await dialogue.round()
        assert not seen.where.history_rebuilt
        check_economy(seen)


@scenario(SOLE, cases=("sole-decode-worker-dies",), real=True)
async def the_only_decode_worker_dies_and_comes_back(scene: Scene) -> None:
    """UNAVAILABLE within a second while it is gone; then the session is rebuilt."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue, other = await scene.opened(200), await scene.opened(100)
    ask = dialogue.ask(40, 1000)
    stream = client.start(ask)
    await stream.streams(5)
    await scene.driver.kill("decode-0")
    killed_s = scene.now_s()
    assert (await stream.error()).reason in UNAVAILABLE
    dialogue.accept_prefix(ask, stream.seen)
    new = await scene.open()
    for _ in range(2):
        for asked in (dialogue.ask(10), other.ask(10), new.ask(10)):
            started_s = scene.now_s()
            assert (await client.start(asked).error()).reason in UNAVAILABLE
            assert scene.now_s() - started_s <= 1.0 + scene.driver.slack_s
        # Again when the store has forgotten the worker.
        await scene.gone("decode-0")
    assert scene.now_s() - killed_s <= LEASE_S + 1.0 + scene.driver.slack_s
    await dialogue.check_as_before()
    await scene.driver.restart("decode-0")
    for session in (dialogue, other):
        seen = await session.round()
        assert seen.where.history_rebuilt
        seen = await session.round()
        assert not seen.where.history_rebuilt
        check_economy(seen)
    assert not (await new.round()).where.history_rebuilt


@scenario(SOLE, real=True)
async def a_decode_worker_comes_back_as_a_new_one(scene: Scene) -> None:
    """At once, on the same address: no round is sent to the life before, none to its KV."""
    client = scene.client()
    await client.set_policy("always-remote")
    dialogue = await scene.opened(300)
    before = {w.worker_id: w.incarnation for w in await client.workers()}
    ask = dialogue.ask(2000, 8)
    stream = client.start(ask)
    await stream.placed()
    await asyncio.sleep(0.1)
    await scene.driver.kill("decode-0")
    await scene.driver.restart("decode-0")
    workers = {w.worker_id: w for w in await client.workers()}
    assert workers["decode-0"].incarnation > before["decode-0"]
    # The round in flight was told that its home is gone, or has found the new one.
    if (error := await _error_of(stream)) is not None:
        assert error in UNAVAILABLE
    else:
        dialogue.accept(ask, stream.seen)
    seen = await dialogue.round()
    check_economy(await dialogue.round())
    assert seen.where.decode_worker == "decode-0"


async def _error_of(stream: object) -> ErrorReason | None:
    from scenario_client import Stream

    assert isinstance(stream, Stream)
    try:
        await stream.end()
    except Exception as error:  # noqa: BLE001 - only AmpdErrors come
        return getattr(error, "reason")  # noqa: B009
    return None


@scenario(cases=("bind-before-open",))
async def a_home_that_cannot_open_the_session_is_not_bound(scene: Scene) -> None:
    """Binding would choose the worker that has just died: another one is bound. With nobody
    left no binding is written at all."""
    client = scene.client()
    await client.set_policy("always-local")
    # What binding looks at makes decode-1 the second choice.
    holder = await scene.opened_at("decode-1", 500)
    await asyncio.sleep(0.3)
    await scene.driver.kill("decode-0")
    dialogue = await scene.open()
    seen = await dialogue.round()
    assert seen.where.decode_worker == "decode-1"
    assert (await dialogue.get()).home_worker == "decode-1"
    assert not seen.where.history_rebuilt
    await scene.driver.kill("decode-1")
    lost = await scene.open()
    assert (await client.start(lost.ask(50)).error()).reason in UNAVAILABLE
    assert (await lost.get()).home_worker == ""
    await lost.check_as_before()
    for name in scene.shape.names(Role.DECODE):
        await scene.driver.restart(name)
    await lost.round()
    await holder.round()


@scenario(tight(decode=2, admission_wait_s=0.3), cases=("bind-before-open",))
async def a_home_that_refuses_the_session_is_not_bound(scene: Scene) -> None:
    """Both are full: refused with a hint, and no binding is left behind."""
    client = scene.client()
    await client.set_policy("always-local")
    running = []
    for _ in range(4):
        dialogue = await scene.open()
        ask = dialogue.ask(600, 200)
        running.append((dialogue, ask, client.start(ask)))
        await running[-1][2].streams(1)
    late = await scene.open()
    error = await client.start(late.ask(500, 500)).error()
    assert error.reason == ErrorReason.KV_EXHAUSTED
    assert error.retry_after_s is not None
    assert (await late.get()).home_worker == ""
    for dialogue, ask, stream in running:
        dialogue.accept(ask, await stream.end())
    assert not (await late.round(500, 100)).where.history_rebuilt


# --- coordinators --------------------------------------------------------------------------------


@scenario(real=True)
async def a_coordinator_dies_in_mid_stream(scene: Scene) -> None:
    """The same request_id at another one goes on with the round: what was seen, then the rest,
    and nothing is run twice."""
    first, second = scene.client(0), scene.client(1)
    await first.set_policy("always-remote")
    dialogue, between = await scene.opened(200), await scene.opened(100)
    ask = dialogue.ask(50, 120, request_id="the-one")
    stream = first.start(ask)
    await stream.streams(20)
    await scene.driver.kill("coordinator-0")
    assert (await stream.error()).reason in UNAVAILABLE
    saw = stream.seen.token_ids
    dialogue.accept_prefix(ask, stream.seen)
    again = second.start(ask)
    await again.streams(len(saw))
    assert again.seen.token_ids[: len(saw)] == saw
    seen = dialogue.accept(ask, await again.end())
    assert not seen.where.history_rebuilt
    # And once more: the same answer, at once.
    once_more = await second.start(ask).end()
    assert (once_more.token_ids, once_more.batches) == (seen.token_ids, 1)
    await between.round(client=second)
    await scene.free(client=second)
    session = await second.get(dialogue.session_id)
    assert (session.round_count, session.history_tokens) == (2, len(dialogue.history))
    await scene.driver.restart("coordinator-0")
    await scene.reconnect(0)
    await dialogue.round()


@scenario()
async def a_coordinator_dies_and_nobody_asks_again(scene: Scene) -> None:
    """Its round is void: another one begins when the dead coordinator's lease is gone, with the
    history as before."""
    second = scene.client(1)
    await second.set_policy("always-local")
    dialogue = await scene.opened(200)
    ask = dialogue.ask(50, 2000, request_id="lost")
    stream = scene.client(0).start(ask)
    await stream.streams(5)
    await scene.driver.kill("coordinator-0")
    await stream.error()
    # The home has given it up; the store knows when the lease is gone.
    await scene.until(
        lambda w: not any(x.load.kv_running_tokens for n, x in w.items() if "decode" in n),
        1.25,
        client=second,
    )
    await scene.until(lambda w: "coordinator-0" not in w, LEASE_S + 0.5, client=second)
    seen = await dialogue.round(client=second)
    assert not seen.where.history_rebuilt
    check_economy(seen)
    await scene.driver.restart("coordinator-0")
    await scene.reconnect(0)


@scenario(real=True)
async def all_coordinators_die(scene: Scene) -> None:
    """Whatever they knew is in the store: new ones go on with every session."""
    await scene.client().set_policy("always-remote")
    dialogues = [await scene.opened(100) for _ in range(4)]
    asks = [d.ask(40, 150, request_id=f"r{i}") for i, d in enumerate(dialogues)]
    streams = [scene.client(i % 2).start(ask) for i, ask in enumerate(asks)]
    for stream in streams:
        await stream.streams(5)
    for name in scene.shape.names(Role.COORDINATOR):
        await scene.driver.kill(name)
    for name in scene.shape.names(Role.COORDINATOR):
        await scene.driver.restart(name)
    clients = [await scene.reconnect(index) for index in range(2)]
    again = [clients[index % 2].start(ask) for index, ask in enumerate(asks)]
    for dialogue, ask, stream, other in zip(dialogues, asks, streams, again, strict=True):
        await stream.error()
        saw = stream.seen.token_ids
        seen = dialogue.accept(ask, await other.end())
        assert seen.token_ids[: len(saw)] == saw
        check_economy(await dialogue.round())


@scenario(SOLE, needs={Ability.FREEZE}, real=True)
async def a_frozen_home_is_given_up(scene: Scene) -> None:
    """It answers nobody: rounds do not hang, and are UNAVAILABLE; when it goes on the session
    does too."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.opened(200)
    ask = dialogue.ask(40, 2000)
    stream = client.start(ask)
    await stream.streams(5)
    await scene.driver.freeze("decode-0")
    frozen_s = scene.now_s()
    assert (await stream.error()).reason in UNAVAILABLE
    # Keepalive notices after 6 s at most.
    assert scene.now_s() - frozen_s <= 8.0 + scene.driver.slack_s
    assert (await refused(client.start(dialogue.ask(5)).end())).reason in UNAVAILABLE
    await scene.driver.thaw("decode-0")
    await scene.until(lambda w: "decode-0" in w, 3.0)
    await scene.free()
    await dialogue.check_as_before()
    check_economy(await dialogue.round())
