"""The client against a real gRPC server whose answers are scripted, failures included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from scripted_server import FINISHED, PLACED, TOKENS, ScriptedServer, scripted_server

from ampd.client import AmpdClient, RoundEvent
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.v1.session_pb2 import SessionState
from ampd.v1.session_service_pb2 import GenerateRequest, GenerateResponse


@pytest.fixture
async def address_of_server() -> AsyncIterator[tuple[str, ScriptedServer]]:
    async with scripted_server() as started:
        yield started


@pytest.fixture
def server(address_of_server: tuple[str, ScriptedServer]) -> ScriptedServer:
    return address_of_server[1]


@pytest.fixture
async def client(address_of_server: tuple[str, ScriptedServer]) -> AsyncIterator[AmpdClient]:
    async with AmpdClient(address_of_server[0], tenant="acme") as client:
        yield client


def unavailable() -> AmpdError:
    return AmpdError(ErrorReason.NO_DECODE_WORKER, "none")


async def _events(client: AmpdClient, **kwargs: Any) -> list[RoundEvent]:
    request = GenerateRequest(session_id="s", text="hi", **kwargs)
    return [event async for event in client.generate(request)]


async def test_a_round_gives_its_events_in_order(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[PLACED, TOKENS, GenerateResponse(), FINISHED]]
    events = await _events(client)
    assert events == [PLACED.placed, TOKENS.tokens, FINISHED.finished]
    assert server.metadata[0]["ampd-tenant"] == "acme"
    assert server.seen[0].request_id


async def test_unavailable_is_tried_again_under_the_same_request_id(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[unavailable()], [PLACED, unavailable()], [PLACED, TOKENS, FINISHED]]
    events = await _events(client, request_id="mine")
    assert events[-2:] == [TOKENS.tokens, FINISHED.finished]
    assert [request.request_id for request in server.seen] == ["mine"] * 3


async def test_without_further_attempts_a_lost_stream_is_an_error(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[PLACED, TOKENS, unavailable()]]
    events = client.generate(GenerateRequest(session_id="s", text="hi"), max_attempts=1)
    assert [await anext(events), await anext(events)] == [PLACED.placed, TOKENS.tokens]
    with pytest.raises(AmpdError) as failed:
        await anext(events)
    assert failed.value.reason is ErrorReason.NO_DECODE_WORKER
    assert len(server.seen) == 1


async def test_a_full_server_is_tried_again_after_the_time_it_names(
    client: AmpdClient, server: ScriptedServer
) -> None:
    full = AmpdError(ErrorReason.QUEUE_FULL, "full", retry_after_s=0.3)
    server.scripts = [[full], []]
    assert (await client.create_session()).session_id == "s"
    assert server.seen_at_s[1] - server.seen_at_s[0] >= 0.3
    assert server.seen[0].request_id == server.seen[1].request_id != ""


@pytest.mark.parametrize(
    "error",
    [
        invalid_field("increment", "empty"),
        AmpdError(ErrorReason.SESSION_NOT_FOUND, "no"),
        AmpdError(ErrorReason.ROUND_RUNNING, "busy"),
        AmpdError(ErrorReason.SESSION_CONFLICT, "read again"),
        AmpdError(ErrorReason.QUEUE_FULL, "full, and no time named"),
        AmpdError(ErrorReason.INTERNAL, "defect"),
    ],
    ids=lambda error: error.reason.value,
)
async def test_nothing_else_is_tried_again(
    client: AmpdClient, server: ScriptedServer, error: AmpdError
) -> None:
    server.scripts = [[error]]
    with pytest.raises(AmpdError) as failed:
        await _events(client)
    assert failed.value.reason is error.reason
    assert failed.value.violations == error.violations
    assert len(server.seen) == 1


async def test_attempts_are_bounded(
    address_of_server: tuple[str, ScriptedServer], server: ScriptedServer
) -> None:
    server.scripts = [[unavailable()] for _ in range(9)]
    async with AmpdClient(address_of_server[0], max_attempts=3, max_round_attempts=2) as client:
        with pytest.raises(AmpdError):
            await client.create_session()
        assert len(server.seen) == 3
        with pytest.raises(AmpdError):
            await _events(client)
        assert len(server.seen) == 5


async def test_an_outage_is_bounded_in_time(
    address_of_server: tuple[str, ScriptedServer], server: ScriptedServer
) -> None:
    server.scripts = [[PLACED, unavailable()] for _ in range(99)]
    async with AmpdClient(address_of_server[0], max_round_attempts=99, max_outage_s=0.3) as client:
        async with asyncio.timeout(2):
            with pytest.raises(AmpdError):
                await _events(client)
    assert 1 < len(server.seen) < 9


async def test_a_close_is_tried_again_under_the_same_request_id(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[unavailable()], [], []]
    closed = await client.close_session("s")
    assert closed.state == SessionState.SESSION_STATE_CLOSED
    assert server.seen[0].request_id == server.seen[1].request_id != ""
    await client.close_session("s", request_id="mine")
    assert server.seen[2].request_id == "mine"


async def test_a_wait_beyond_the_deadline_is_not_waited_for(
    client: AmpdClient, server: ScriptedServer
) -> None:
    server.scripts = [[AmpdError(ErrorReason.KV_EXHAUSTED, "full", retry_after_s=60.0)]]
    started_s = time.monotonic()
    with pytest.raises(AmpdError, match="full"):
        await client.create_session()
    assert time.monotonic() - started_s < 5


async def test_deadlines_hold(
    address_of_server: tuple[str, ScriptedServer], server: ScriptedServer
) -> None:
    server.scripts = [[5.0], [PLACED, 5.0]]
    async with AmpdClient(address_of_server[0], call_timeout_s=0.2) as client:
        with pytest.raises(AmpdError) as failed:
            await client.create_session()
        assert failed.value.reason is ErrorReason.DEADLINE
        request = GenerateRequest(session_id="s", text="hi")
        with pytest.raises(AmpdError) as failed:
            [event async for event in client.generate(request, timeout_s=0.2)]
        assert failed.value.reason is ErrorReason.DEADLINE


async def _cancel_by_closing(client: AmpdClient) -> None:
    events = client.generate(GenerateRequest(session_id="s", text="hi"))
    await anext(events)
    await events.aclose()


async def _cancel_by_task(client: AmpdClient) -> None:
    task = asyncio.create_task(_events(client))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("cancel", [_cancel_by_closing, _cancel_by_task])
async def test_leaving_a_round_cancels_it_at_the_server(
    client: AmpdClient, server: ScriptedServer, cancel: Callable[[AmpdClient], Awaitable[None]]
) -> None:
    server.scripts = [[PLACED, 30.0]]
    await cancel(client)
    async with asyncio.timeout(2):
        await server.cancelled.wait()


async def test_lists_run_over_all_pages(client: AmpdClient) -> None:
    sessions = [session.session_id async for session in client.list_sessions(page_size=2)]
    assert sessions == ["0", "1", "2", "3", "4"]


async def test_nobody_there_is_unavailable_soon() -> None:
    async with AmpdClient("127.0.0.1:1") as client:
        async with asyncio.timeout(8):
            with pytest.raises(AmpdError) as failed:
                await client.get_session("s")
    assert failed.value.reason is ErrorReason.WORKER_UNAVAILABLE
