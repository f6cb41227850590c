"""The server that all processes run, with a real client."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import SamplingParams
from ampd.runtime.server import PUBLIC_LIMITS, GrpcServer, ServerLimits
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.session_service_pb2_grpc import (
    SessionServiceServicer,
    SessionServiceStub,
    add_SessionServiceServicer_to_server,
)
from ampd.wire.errors import from_rpc_error
from ampd.wire.sampling import sampling_to_proto
from ampd.wire.worker_protocol import life_name

SERVICE = "ampd.v1.SessionService"
LIFE = 42


class Sessions(SessionServiceServicer):
    """Does what the test says."""

    def __init__(self) -> None:
        self.get: Callable[[], Any] = lambda: None
        self.events: Callable[[], AsyncGenerator[Any, None]] | None = None

    async def GetSession(self, request: Any, context: Any) -> pb.GetSessionResponse:  # noqa: N802
        result = self.get()
        if asyncio.iscoroutine(result):
            await result
        return pb.GetSessionResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:  # noqa: N802
        assert self.events is not None
        async for event in self.events():
            yield event

    def CreateSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def ListSessions(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def serving(
    sessions: Sessions, limits: ServerLimits = PUBLIC_LIMITS
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer(services=[SERVICE], limits=limits, incarnation=LIFE)
    add_SessionServiceServicer_to_server(sessions, server.grpc)
    async with server, grpc.aio.insecure_channel(server.address) as channel:
        yield server, channel


@pytest.fixture
async def sessions() -> Sessions:
    return Sessions()


def raise_(error: BaseException) -> Any:
    raise error


async def failed_call(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, AmpdError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await SessionServiceStub(channel).GetSession(pb.GetSessionRequest(), timeout=5)
    return caught.value.code(), from_rpc_error(caught.value)


async def test_an_error_reaches_the_client_with_its_details(sessions: Sessions) -> None:
    async with serving(sessions) as (_, channel):
        sessions.get = lambda: raise_(
            AmpdError(ErrorReason.KV_EXHAUSTED, "no room", retry_after_s=0.5)
        )
        code, error = await failed_call(channel)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.reason, error.retry_after_s) == (ErrorReason.KV_EXHAUSTED, 0.5)


async def test_a_defect_is_told_by_incident_alone(sessions: Sessions) -> None:
    async with serving(sessions) as (_, channel):
        sessions.get = lambda: raise_(RuntimeError("internals"))
        with capture_logs() as logs:
            code, error = await failed_call(channel)
    assert code is grpc.StatusCode.INTERNAL
    assert error.reason is ErrorReason.INTERNAL
    assert "internals" not in str(error)
    line = next(line for line in logs if line["event"] == "call_failed")
    assert line["incident"] == error.metadata["incident"]
    assert isinstance(line["exc_info"], RuntimeError)


async def test_a_handler_cancelled_by_the_server_does_not_leave_its_client_waiting(
    sessions: Sessions,
) -> None:
    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async with serving(sessions) as (_, channel):
        sessions.get = cancelled
        started_s = time.monotonic()
        code, _ = await failed_call(channel)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started_s < 3


@pytest.mark.parametrize("consumed", [1, 3])
async def test_a_cancelled_stream_closes_its_generator_at_once(
    sessions: Sessions, consumed: int
) -> None:
    """Also when the client reads slower than the server writes."""
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[pb.GenerateResponse, None]:
        try:
            while True:
                yield pb.GenerateResponse(tokens=pb.TokenBatch(text="x" * 100_000))
        finally:
            closed.set()

    sessions.events = events
    with capture_logs() as logs:
        async with serving(sessions) as (_, channel):
            call = SessionServiceStub(channel).Generate(pb.GenerateRequest())
            for _ in range(consumed):
                await call.read()
            await asyncio.sleep(0.1)
            call.cancel()
            async with asyncio.timeout(1):
                await closed.wait()
    # Whether the cancellation meets the generator, a blocked write or one that fails.
    assert [line["code"] for line in logs if line["event"] == "call"] == ["CANCELLED"]
    assert "call_failed" not in {line["event"] for line in logs}


async def test_calls_are_logged_without_what_was_said(sessions: Sessions) -> None:
    async def events() -> AsyncGenerator[pb.GenerateResponse, None]:
        yield pb.GenerateResponse(tokens=pb.TokenBatch(token_ids=[1], text="answer"))

    sessions.events = events
    request = pb.GenerateRequest(
        session_id="s", text="prompt", sampling=sampling_to_proto(SamplingParams())
    )
    with capture_logs() as logs:
        async with serving(sessions) as (_, channel):
            async for _ in SessionServiceStub(channel).Generate(request):
                pass
    line = next(line for line in logs if line["event"] == "call")
    assert (line["method"], line["code"]) == ("/ampd.v1.SessionService/Generate", "OK")
    assert 0 <= line["seconds"] < 5
    assert "prompt" not in str(logs)
    assert "answer" not in str(logs)


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_a_draining_server_says_so_but_its_life_goes_on(sessions: Sessions) -> None:
    serving_, not_serving = 1, 2
    async with serving(sessions) as (server, channel):
        for name in ("", SERVICE, life_name(LIFE)):
            assert await health(channel, name) == serving_
        await server.drain()
        assert await health(channel, "") == not_serving
        assert await health(channel, SERVICE) == not_serving
        assert await health(channel, life_name(LIFE)) == serving_
        await SessionServiceStub(channel).GetSession(pb.GetSessionRequest(), timeout=5)


async def test_reflection_lists_the_services(sessions: Sessions) -> None:
    async with serving(sessions) as (_, channel):
        untyped: Any = channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(untyped)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
        names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= names


async def test_two_servers_cannot_share_a_port(sessions: Sessions) -> None:
    async with serving(sessions) as (server, _):
        second = GrpcServer(address=server.address, services=[], limits=PUBLIC_LIMITS)
        with pytest.raises(OSError, match="cannot listen"):
            await second.__aenter__()


async def test_a_message_over_the_limit_is_refused(sessions: Sessions) -> None:
    async with serving(sessions, ServerLimits(max_message_bytes=1000)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await SessionServiceStub(channel).GetSession(
                pb.GetSessionRequest(session_id="x" * 2000), timeout=5
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).reason is ErrorReason.INVALID_FIELD


async def test_calls_over_the_limit_are_refused_at_once(sessions: Sessions) -> None:
    hold = asyncio.Event()
    entered = asyncio.Event()

    async def wait() -> None:
        entered.set()
        await hold.wait()

    limits = ServerLimits(max_message_bytes=1000, max_calls=1)
    async with serving(sessions, limits) as (_, channel):
        sessions.get = wait
        first = asyncio.ensure_future(
            SessionServiceStub(channel).GetSession(pb.GetSessionRequest(), timeout=5)
        )
        await entered.wait()
        code, error = await failed_call(channel)
        hold.set()
        await first
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.reason is ErrorReason.QUEUE_FULL


async def test_leaving_the_server_ends_calls_within_its_grace(sessions: Sessions) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    sessions.get = hang
    server = GrpcServer(services=[SERVICE], limits=PUBLIC_LIMITS)
    add_SessionServiceServicer_to_server(sessions, server.grpc)
    await server.__aenter__()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = asyncio.ensure_future(failed_call(channel))
        await asyncio.sleep(0.2)
        started_s = time.monotonic()
        await server.__aexit__(None, None, None)
        code, error = await call
    assert time.monotonic() - started_s < 3
    assert code is grpc.StatusCode.UNAVAILABLE
    assert error.reason is ErrorReason.WORKER_UNAVAILABLE
