"""Streams that are lost half way: one continuous stream is what the caller sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import in_process
from scripted_server import FINISHED, PLACED, TOKENS, ScriptedServer, Step, scripted_server

from ampd.adapters.homes_loopback import LoopbackHomes
from ampd.client import AmpdClient, RoundEvent
from ampd.client.resuming import Delivered
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.tool_calls import hermes
from ampd.runtime.server import PUBLIC_LIMITS, GrpcServer
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_service_pb2 import (
    GenerateRequest,
    GenerateResponse,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    TokenIds,
    ToolCalled,
    ToolReturned,
)
from ampd.v1.session_service_pb2_grpc import add_SessionServiceServicer_to_server
from services.coordinator.servicer import SessionServicer
from services.coordinator.tool_loop import ToolLoop

LOST = AmpdError(ErrorReason.WORKER_UNAVAILABLE, "lost")
ELSEWHERE = GenerateResponse(placed=RoundPlaced(decode_worker="decode-1"))
CONTINUES = GenerateResponse(finished=RoundFinished(history_tokens=5, continues=True))
SECOND = GenerateResponse(placed=RoundPlaced(round_index=1, decode_worker="decode-0"))


def tokens(text: str, *token_ids: int) -> GenerateResponse:
    return GenerateResponse(tokens=TokenBatch(token_ids=token_ids, text=text))


def called(call_id: str, arguments: str = "{}") -> GenerateResponse:
    return GenerateResponse(tool_called=ToolCalled(call_id=call_id, name="t", arguments=arguments))


def returned(call_id: str, content: str, nanos: int = 0) -> GenerateResponse:
    result = ToolReturned(call_id=call_id, name="t", content=content)
    result.duration.nanos = nanos
    return GenerateResponse(tool_returned=result)


@pytest.fixture
async def address_of_server() -> AsyncIterator[tuple[str, ScriptedServer]]:
    async with scripted_server() as started:
        yield started


@pytest.fixture
async def client(address_of_server: tuple[str, ScriptedServer]) -> AsyncIterator[AmpdClient]:
    async with AmpdClient(address_of_server[0]) as client:
        yield client


@pytest.fixture
def server(address_of_server: tuple[str, ScriptedServer]) -> ScriptedServer:
    return address_of_server[1]


async def _collect(client: AmpdClient, events: list[RoundEvent], **kwargs: Any) -> None:
    """All events, also of a stream that fails."""
    request = GenerateRequest(session_id="s", text="hi")
    async with asyncio.timeout(10):
        async for event in client.generate(request, **kwargs):
            events.append(event)  # noqa: PERF401 - a comprehension keeps none when it fails


async def _events(client: AmpdClient, **kwargs: Any) -> list[RoundEvent]:
    events: list[RoundEvent] = []
    await _collect(client, events, **kwargs)
    return events


def said(*responses: GenerateResponse) -> list[RoundEvent]:
    return [getattr(r, str(r.WhichOneof("event"))) for r in responses]


CASES: dict[str, tuple[list[list[Step]], list[RoundEvent]]] = {
    "before any token": (
        [[PLACED, LOST], [PLACED, TOKENS, FINISHED]],
        said(PLACED, TOKENS, FINISHED),
    ),
    "the replay is one batch, and has more": (
        [
            [PLACED, TOKENS, tokens("c", 3), LOST],
            [PLACED, tokens("abcde", 1, 2, 3, 4, 5), FINISHED],
        ],
        said(PLACED, TOKENS, tokens("c", 3), tokens("de", 4, 5), FINISHED),
    ),
    "the replay is shorter than what was delivered": (
        [
            [PLACED, tokens("abc", 1, 2, 3), LOST],
            [PLACED, tokens("a", 1), tokens("bcd", 2, 3, 4), FINISHED],
        ],
        said(PLACED, tokens("abc", 1, 2, 3), tokens("d", 4), FINISHED),
    ),
    "text that lags behind the tokens": (
        [[PLACED, tokens("", 1, 2), LOST], [PLACED, tokens("ab", 1, 2), tokens("c", 3), FINISHED]],
        said(PLACED, tokens("", 1, 2), tokens("ab"), tokens("c", 3), FINISHED),
    ),
    "another home": (
        [[PLACED, TOKENS, LOST], [ELSEWHERE, TOKENS, tokens("c", 3), FINISHED]],
        said(PLACED, TOKENS, ELSEWHERE, tokens("c", 3), FINISHED),
    ),
    "lost again and again": (
        [
            [PLACED, TOKENS, LOST],
            [LOST],
            [PLACED, TOKENS, LOST],
            [PLACED, tokens("abc", 1, 2, 3), LOST],
            [PLACED, tokens("abc", 1, 2, 3), FINISHED],
        ],
        said(PLACED, TOKENS, tokens("c", 3), FINISHED),
    ),
    "lost behind its end": ([[PLACED, TOKENS, FINISHED, LOST]], said(PLACED, TOKENS, FINISHED)),
    "full": (
        [
            [PLACED, TOKENS, AmpdError(ErrorReason.QUEUE_FULL, "full", retry_after_s=0.05)],
            [PLACED, TOKENS, FINISHED],
        ],
        said(PLACED, TOKENS, FINISHED),
    ),
    "in a round behind tools": (
        [
            [
                PLACED,
                TOKENS,
                CONTINUES,
                called("1"),
                returned("1", "x", 7),
                SECOND,
                tokens("c", 3),
                LOST,
            ],
            [
                PLACED,
                TOKENS,
                CONTINUES,
                called("1"),
                returned("1", "x", 8),
                SECOND,
                tokens("cd", 3, 4),
                FINISHED,
            ],
        ],
        said(
            PLACED,
            TOKENS,
            CONTINUES,
            called("1"),
            returned("1", "x", 7),
            SECOND,
            tokens("c", 3),
            tokens("d", 4),
            FINISHED,
        ),
    ),
    "while tools run, and one returns something else": (
        [
            [PLACED, TOKENS, CONTINUES, called("1"), called("2"), returned("2", "x"), LOST],
            [
                PLACED,
                TOKENS,
                CONTINUES,
                called("1"),
                called("2"),
                returned("2", "y"),
                returned("1", "z"),
                SECOND,
                FINISHED,
            ],
        ],
        said(
            PLACED,
            TOKENS,
            CONTINUES,
            called("1"),
            called("2"),
            returned("2", "x"),
            returned("2", "y"),
            returned("1", "z"),
            SECOND,
            FINISHED,
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_lost_stream_goes_on(client: AmpdClient, server: ScriptedServer, case: str) -> None:
    scripts, expected = CASES[case]
    server.scripts = [list(script) for script in scripts]
    assert await _events(client) == expected
    assert not server.scripts
    assert len({request.request_id for request in server.seen}) == 1


ONCE: list[Step] = [PLACED, TOKENS, LOST]
FOREIGN: dict[str, tuple[list[Step], list[Step], ErrorReason]] = {
    "token": (ONCE, [PLACED, tokens("ab", 1, 7)], ErrorReason.INTERNAL),
    "text": (ONCE, [PLACED, tokens("aX", 1, 2)], ErrorReason.INTERNAL),
    "shorter": (ONCE, [PLACED, tokens("a", 1), FINISHED], ErrorReason.INTERNAL),
    "round": (ONCE, [SECOND, 30.0], ErrorReason.SESSION_CONFLICT),
    "longer": (
        [PLACED, TOKENS, CONTINUES, LOST],
        [PLACED, TOKENS, tokens("c", 3)],
        ErrorReason.INTERNAL,
    ),
    "end": ([PLACED, TOKENS, CONTINUES, LOST], [PLACED, TOKENS, FINISHED], ErrorReason.INTERNAL),
    "call": (
        [CONTINUES, called("1"), LOST],
        [CONTINUES, called("1", '{"a": 1}')],
        ErrorReason.INTERNAL,
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
async def test_another_stream_is_never_mixed_in(
    client: AmpdClient, server: ScriptedServer, case: str
) -> None:
    first, second, reason = FOREIGN[case]
    server.scripts = [list(first), list(second)]
    events: list[RoundEvent] = []
    with pytest.raises(AmpdError) as failed:
        await _collect(client, events)
    assert failed.value.reason is reason
    assert events == said(*(step for step in first if isinstance(step, GenerateResponse)))
    if 30.0 in second:
        async with asyncio.timeout(2):
            await server.cancelled.wait()


async def test_a_round_whose_session_went_on_is_the_callers_to_judge(
    client: AmpdClient, server: ScriptedServer
) -> None:
    gone = AmpdError(ErrorReason.SESSION_CONFLICT, "another round has begun since")
    server.scripts = [[PLACED, TOKENS, LOST], [gone]]
    with pytest.raises(AmpdError, match="another round") as failed:
        await _events(client)
    assert failed.value.reason is ErrorReason.SESSION_CONFLICT
    assert len(server.seen) == 2


async def test_a_stream_without_an_end_is_an_error(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[PLACED, TOKENS]]
    with pytest.raises(AmpdError, match="before the round did"):
        await _events(client)


async def test_the_deadline_holds_over_all_attempts(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[PLACED, TOKENS, LOST], [PLACED, TOKENS, 30.0]]
    with pytest.raises(AmpdError) as failed:
        await _events(client, timeout_s=0.5)
    assert failed.value.reason is ErrorReason.DEADLINE


async def test_leaving_a_resumed_round_cancels_it(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[PLACED, LOST], [PLACED, TOKENS, 30.0]]
    async with aclosing(client.generate(GenerateRequest(session_id="s", text="hi"))) as events:
        assert [await anext(events), await anext(events)] == said(PLACED, TOKENS)
    async with asyncio.timeout(2):
        await server.cancelled.wait()


async def test_the_next_coordinator_goes_on() -> None:
    async with (
        scripted_server([PLACED, TOKENS, LOST]) as (first, broken),
        scripted_server([PLACED, tokens("abc", 1, 2, 3), FINISHED], []) as (second, healthy),
        AmpdClient([first, second]) as client,
    ):
        assert await _events(client) == said(PLACED, TOKENS, tokens("c", 3), FINISHED)
        # One that works is kept.
        await client.create_session()
        assert (len(broken.seen), len(healthy.seen)) == (1, 2)
        assert broken.seen[0] == healthy.seen[0]


async def test_a_coordinator_that_is_not_there_is_passed_over() -> None:
    async with scripted_server([]) as (address, server), AmpdClient(["127.0.0.1:1", address]) as c:
        assert (await c.create_session()).session_id == "s"
        assert len(server.seen) == 1


@asynccontextmanager
async def wire_to(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address behind which `address` is, until the event is set: then connections stay, and
    carry nothing any more, as those of a process that stands still."""
    still = asyncio.Event()
    host, port = address.split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not still.is_set():
                writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            await asyncio.gather(carry(reader, forth), carry(back, writer))

    wire = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with wire:
        yield f"127.0.0.1:{wire.sockets[0].getsockname()[1]}", still


async def test_a_coordinator_that_stands_still_is_left() -> None:
    async with (
        scripted_server([PLACED, TOKENS, 30.0]) as (first, _),
        scripted_server([PLACED, tokens("abc", 1, 2, 3), FINISHED]) as (second, _),
        wire_to(first) as (address, still),
        AmpdClient([address, second]) as client,
    ):
        events: list[RoundEvent] = []
        round_ = asyncio.create_task(_collect(client, events))
        while len(events) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        still.set()
        # Within its deadline, another call finds the other one as well.
        assert [session.session_id async for session in client.list_sessions(page_size=5)]
        await round_
        assert events == said(PLACED, TOKENS, tokens("c", 3), FINISHED)


async def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="addresses"):
        AmpdClient([])


# --- whatever is lost, and however it is repeated ----------------------------------------------


@st.composite
def batches(draw: st.DrawFn, token_ids: list[int], text: str) -> list[TokenBatch]:
    """The same output in batches of any size, the text at most as far as the tokens."""
    result, ids_at, text_at = [], 0, 0
    while ids_at < len(token_ids):
        ids_to = draw(st.integers(ids_at + 1, len(token_ids)))
        text_to = (
            len(text)
            if ids_to == len(token_ids)
            else draw(st.integers(text_at, max(text_at, min(ids_to, len(text)))))
        )
        result.append(TokenBatch(token_ids=token_ids[ids_at:ids_to], text=text[text_at:text_to]))
        ids_at, text_at = ids_to, text_to
    return result


@given(st.data())
def test_every_token_and_character_once(data: st.DataObject) -> None:
    rounds = data.draw(
        st.lists(
            st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), min_size=1, max_size=3
        )
    )
    attempts = data.draw(st.lists(st.integers(0, 12), max_size=4))
    delivered, seen = Delivered(), []
    for events_before_loss in (*attempts, None):
        stream: list[RoundEvent] = []
        for index, ids in enumerate(rounds):
            stream.append(RoundPlaced(round_index=index))
            stream.extend(data.draw(batches(ids, "".join(chr(97 + i % 26) for i in ids))))
            stream.append(RoundFinished(continues=index + 1 < len(rounds)))
        delivered.begin_attempt()
        for event in stream[:events_before_loss]:
            new = delivered.new_of(event)
            if new is not None:
                seen.append(new)
        if delivered.ended:
            break
    assert delivered.ended
    assert [e.round_index for e in seen if isinstance(e, RoundPlaced)] == list(range(len(rounds)))
    assert len([e for e in seen if isinstance(e, RoundFinished)]) == len(rounds)
    batches_seen = [e for e in seen if isinstance(e, TokenBatch)]
    all_ids = [i for ids in rounds for i in ids]
    assert [i for batch in batches_seen for i in batch.token_ids] == all_ids
    assert "".join(b.text for b in batches_seen) == "".join(chr(97 + i % 26) for i in all_ids)


# --- real coordinators ---------------------------------------------------------------------------


async def test_a_round_outlives_its_coordinator() -> None:
    async with in_process("d0", coordinators=2) as cluster, AsyncExitStack() as stack:
        servers = []
        for number, coordinator in enumerate(cluster.coordinators):
            server = GrpcServer(services=[], limits=PUBLIC_LIMITS)
            loop = ToolLoop(
                coordinator=coordinator,
                state=cluster.states[number],
                store=cluster.store,
                homes=LoopbackHomes(cluster.network),
                parser=hermes,
                tool_timeout_s=30.0,
                clock=asyncio.get_running_loop().time,
                wall_clock=asyncio.get_running_loop().time,
            )
            servicer = SessionServicer(
                rounds=loop, sessions=cluster.sessions(), tokenizer=cluster.tokenizer
            )
            add_SessionServiceServicer_to_server(servicer, server.grpc)
            servers.append(await stack.enter_async_context(server))
        addresses = [server.address for server in servers]
        client = await stack.enter_async_context(AmpdClient(addresses))
        session = await client.create_session()
        request = GenerateRequest(
            session_id=session.session_id,
            token_ids=TokenIds(ids=range(1, 21)),
            sampling=SamplingParams(max_tokens=100),
        )
        events: list[RoundEvent] = []
        async with asyncio.timeout(20):
            async for event in client.generate(request):
                events.append(event)
                if len(events) == 10:
                    await servers[0].grpc.stop(None)
        finished = events[-1]
        assert isinstance(finished, RoundFinished)
        token_ids = [i for e in events if isinstance(e, TokenBatch) for i in e.token_ids]
        assert len(token_ids) == 100
        assert finished.history_tokens == 120
        history = await cluster.store.read_history(session.session_id, 0, 120)
        assert list(history) == [*range(1, 21), *token_ids]
        assert (await client.get_session(session.session_id)).round_count == 1
