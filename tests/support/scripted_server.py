"""A real gRPC server whose answers are scripted, failures included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from ampd.core.errors import AmpdError
from ampd.v1 import session_service_pb2_grpc
from ampd.v1.session_pb2 import Session, SessionState
from ampd.v1.session_service_pb2 import (
    CloseSessionRequest,
    CloseSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    GenerateRequest,
    GenerateResponse,
    ListSessionsRequest,
    ListSessionsResponse,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
)
from ampd.wire.errors import DETAILS_KEY, status_code, to_status

PLACED = GenerateResponse(placed=RoundPlaced(decode_worker="decode-0"))
TOKENS = GenerateResponse(tokens=TokenBatch(token_ids=[1, 2], text="ab"))
FINISHED = GenerateResponse(finished=RoundFinished(history_tokens=9))

Step = GenerateResponse | AmpdError | float
"""What the server does next: answers, fails, or waits."""


class ScriptedServer(session_service_pb2_grpc.SessionServiceServicer):
    """Each call to Generate, CreateSession or CloseSession takes the next script."""

    def __init__(self) -> None:
        self.scripts: list[list[Step]] = []
        self.seen: list[Any] = []
        self.seen_at_s: list[float] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = asyncio.Event()

    async def Generate(  # noqa: N802
        self, request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[GenerateResponse]:
        for step in self._next(request, context):
            match step:
                case AmpdError():
                    await _abort(context, step)
                case float():
                    try:
                        await asyncio.sleep(step)
                    except asyncio.CancelledError:
                        self.cancelled.set()
                        raise
                case GenerateResponse():
                    yield step

    async def CreateSession(  # noqa: N802
        self, request: CreateSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> CreateSessionResponse:
        await self._unary(request, context)
        return CreateSessionResponse(session=Session(session_id="s"))

    async def CloseSession(  # noqa: N802
        self, request: CloseSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> CloseSessionResponse:
        await self._unary(request, context)
        closed = Session(session_id="s", state=SessionState.SESSION_STATE_CLOSED)
        return CloseSessionResponse(session=closed)

    async def _unary(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        for step in self._next(request, context):
            if isinstance(step, AmpdError):
                await _abort(context, step)
            if isinstance(step, float):
                await asyncio.sleep(step)

    async def ListSessions(  # noqa: N802
        self, request: ListSessionsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ListSessionsResponse:
        first = int(request.page_token or "0")
        last = min(first + request.page_size, 5)
        return ListSessionsResponse(
            sessions=[Session(session_id=str(i)) for i in range(first, last)],
            next_page_token=str(last) if last < 5 else "",
        )

    async def GetSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def _next(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> list[Step]:
        self.seen.append(request)
        self.seen_at_s.append(time.monotonic())
        self.metadata.append(dict(context.invocation_metadata() or ()))
        return self.scripts.pop(0)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: AmpdError) -> None:
    details = to_status(error).SerializeToString()
    context.set_trailing_metadata(((DETAILS_KEY, details),))
    await context.abort(status_code(error), error.message)


@asynccontextmanager
async def scripted_server(*scripts: list[Step]) -> AsyncIterator[tuple[str, ScriptedServer]]:
    """The server's address, and the server."""
    server, servicer = grpc.aio.server(), ScriptedServer()
    servicer.scripts = list(scripts)
    session_service_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)
