"""SessionService and AdminService: from proto to use case and back, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc

from ampd.core.errors import invalid_field
from ampd.core.model import Finished, Role, TokensOut
from ampd.ports import Tokenizer
from ampd.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)
from ampd.wire import enums, moving, names
from ampd.wire.generate import (
    finished_response,
    placed_response,
    round_request_from_proto,
    tokens_response,
    tool_called_response,
    tool_returned_response,
)
from ampd.wire.policy import policy_from_proto, policy_to_proto
from ampd.wire.round import record_to_proto
from ampd.wire.session import new_session_from_proto, session_to_proto
from ampd.wire.worker import worker_to_proto
from services.coordinator.operations import Operations
from services.coordinator.sessions import Admin, Sessions
from services.coordinator.tool_loop import (
    Continues,
    ToolCalled,
    ToolLoop,
    ToolLoopEvent,
    ToolReturned,
)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_SESSION_PAGE: Final = 100
DEFAULT_WORKER_PAGE: Final = 1000


class SessionServicer(session_service_pb2_grpc.SessionServiceServicer):
    """ampd.v1.SessionService."""

    def __init__(self, *, rounds: ToolLoop, sessions: Sessions, tokenizer: Tokenizer) -> None:
        self._rounds = rounds
        self._sessions = sessions
        self._tokenizer = tokenizer

    async def CreateSession(  # noqa: N802
        self,
        request: session_service_pb2.CreateSessionRequest,
        context: Context,
    ) -> session_service_pb2.CreateSessionResponse:
        """See the proto."""
        new = new_session_from_proto(
            request, model=self._sessions.model, default_slo=self._sessions.default_slo
        )
        record = await self._sessions.create(
            tenant(context),
            request_id=new.request_id,
            slo=new.slo,
            labels=new.labels,
        )
        return session_service_pb2.CreateSessionResponse(session=session_to_proto(record))

    async def Generate(  # noqa: N802
        self, request: session_service_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[session_service_pb2.GenerateResponse]:
        """See the proto."""
        wanted = round_request_from_proto(request, vocab_size=self._tokenizer.vocab_size)
        events = self._rounds.run(tenant(context), wanted, context.time_remaining())
        async with aclosing(events):
            async for event in events:
                yield _response(event)

    async def GetSession(  # noqa: N802
        self, request: session_service_pb2.GetSessionRequest, context: Context
    ) -> session_service_pb2.GetSessionResponse:
        """See the proto."""
        session_id = names.required_id(request.session_id, "session_id")
        record = await self._sessions.get(tenant(context), session_id)
        return session_service_pb2.GetSessionResponse(session=session_to_proto(record))

    async def ListSessions(  # noqa: N802
        self, request: session_service_pb2.ListSessionsRequest, context: Context
    ) -> session_service_pb2.ListSessionsResponse:
        """See the proto."""
        size = names.page_size(request.page_size, default=DEFAULT_SESSION_PAGE)
        page = await self._sessions.list(tenant(context), size, request.page_token)
        return session_service_pb2.ListSessionsResponse(
            sessions=map(session_to_proto, page.sessions), next_page_token=page.next_page_token
        )

    async def CloseSession(  # noqa: N802
        self, request: session_service_pb2.CloseSessionRequest, context: Context
    ) -> session_service_pb2.CloseSessionResponse:
        """See the proto."""
        session_id = names.required_id(request.session_id, "session_id")
        request_id = names.optional_id(request.request_id, "request_id")
        record = await self._sessions.close(tenant(context), session_id, request_id)
        return session_service_pb2.CloseSessionResponse(session=session_to_proto(record))


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """ampd.v1.AdminService."""

    def __init__(self, admin: Admin, operations: Operations) -> None:
        self._admin = admin
        self._operations = operations

    async def ListWorkers(  # noqa: N802
        self, request: admin_service_pb2.ListWorkersRequest, context: Context
    ) -> admin_service_pb2.ListWorkersResponse:
        """See the proto. A page token is the worker_id that the last page ended with."""
        role: Role | None = None
        if request.role:
            role = enums.ROLE.from_proto(request.role, "role")
        size = names.page_size(request.page_size, default=DEFAULT_WORKER_PAGE)
        after = names.optional_id(request.page_token, "page_token")
        views = [
            view for view in await self._admin.list_workers(role) if view.info.worker_id > after
        ]
        page = views[:size]
        return admin_service_pb2.ListWorkersResponse(
            workers=map(worker_to_proto, page),
            next_page_token=page[-1].info.worker_id if len(views) > size else "",
        )

    async def GetPolicy(  # noqa: N802
        self, request: admin_service_pb2.GetPolicyRequest, context: Context
    ) -> admin_service_pb2.GetPolicyResponse:
        """See the proto."""
        policy = await self._admin.get_policy()
        return admin_service_pb2.GetPolicyResponse(policy=policy_to_proto(policy))

    async def SetPolicy(  # noqa: N802
        self, request: admin_service_pb2.SetPolicyRequest, context: Context
    ) -> admin_service_pb2.SetPolicyResponse:
        """See the proto."""
        names.optional_id(request.request_id, "request_id")
        if not request.HasField("policy"):
            raise invalid_field("policy", "required")
        expected = request.expected_version if request.HasField("expected_version") else None
        policy = await self._admin.set_policy(policy_from_proto(request.policy), expected)
        return admin_service_pb2.SetPolicyResponse(policy=policy_to_proto(policy))

    async def ExplainRound(  # noqa: N802
        self, request: admin_service_pb2.ExplainRoundRequest, context: Context
    ) -> admin_service_pb2.ExplainRoundResponse:
        """See the proto."""
        session_id = names.required_id(request.session_id, "session_id")
        index = request.round_index if request.HasField("round_index") else None
        rounds = await self._admin.explain(tenant(context), session_id, index)
        return admin_service_pb2.ExplainRoundResponse(rounds=map(record_to_proto, rounds))

    async def DrainWorker(  # noqa: N802
        self, request: admin_service_pb2.DrainWorkerRequest, context: Context
    ) -> admin_service_pb2.DrainWorkerResponse:
        """See the proto."""
        names.optional_id(request.request_id, "request_id")
        worker_id = names.required_id(request.worker_id, "worker_id")
        return moving.drain_worker_response(await self._operations.drain_worker(worker_id))

    async def MoveSession(  # noqa: N802
        self, request: admin_service_pb2.MoveSessionRequest, context: Context
    ) -> admin_service_pb2.MoveSessionResponse:
        """See the proto."""
        names.optional_id(request.request_id, "request_id")
        moved = await self._operations.move_session(
            tenant(context),
            names.required_id(request.session_id, "session_id"),
            names.optional_id(request.target_worker_id, "target_worker_id"),
        )
        return moving.move_session_response(moved)


def tenant(context: Context) -> str:
    """The caller's tenant. INVALID_FIELD when the metadata is malformed."""
    return names.tenant_from_metadata(context.invocation_metadata() or ())


def _response(event: ToolLoopEvent) -> session_service_pb2.GenerateResponse:
    match event:
        case TokensOut():
            return tokens_response(event)
        case Finished():
            return finished_response(event)
        case Continues():
            return finished_response(event.finished, continues=True)
        case ToolCalled():
            return tool_called_response(event.call)
        case ToolReturned():
            return tool_returned_response(event.call, event.returned)
        case _:
            return placed_response(event)
