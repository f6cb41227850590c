"""The Python client: sessions and their rounds, and a look into the cluster.

    async with AmpdClient("127.0.0.1:7070") as client:
        session = await client.create_session()
        request = GenerateRequest(session_id=session.session_id, text="Once upon a time")
        async for event in client.generate(request):
            if isinstance(event, TokenBatch):
                print(event.text, end="")
        await client.close_session(session.session_id)

Requests and answers are the messages of `ampd.v1`; every failure is an `AmpdError`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc

from ampd.core.errors import AmpdError
from ampd.v1.admin_service_pb2 import (
    DrainWorkerRequest,
    DrainWorkerResponse,
    ExplainRoundRequest,
    GetPolicyRequest,
    ListWorkersRequest,
    MoveSessionRequest,
    MoveSessionResponse,
    SetPolicyRequest,
)
from ampd.v1.admin_service_pb2_grpc import AdminServiceStub
from ampd.v1.policy_pb2 import Policy
from ampd.v1.round_pb2 import RoundRecord
from ampd.v1.session_pb2 import Session, Slo
from ampd.v1.session_service_pb2 import (
    CloseSessionRequest,
    CreateSessionRequest,
    GenerateRequest,
    GenerateResponse,
    GetSessionRequest,
    ListSessionsRequest,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    ToolCalled,
    ToolReturned,
)
from ampd.v1.session_service_pb2_grpc import SessionServiceStub
from ampd.v1.worker_pb2 import Worker, WorkerRole
from ampd.wire.errors import STATUS_CODES, from_rpc_error
from ampd.wire.names import DEFAULT_TENANT, TENANT_KEY

RoundEvent = RoundPlaced | TokenBatch | RoundFinished | ToolCalled | ToolReturned
"""RoundPlaced (again when the prefill moves), TokenBatch ..., RoundFinished. Where that has
`continues`: ToolCalled ..., ToolReturned ..., and the events of a further round."""

CALL_TIMEOUT_S: Final = 10.0
ROUND_TIMEOUT_S: Final = 600.0
MOVE_TIMEOUT_S: Final = 120.0
"""Moving a session: KV of a whole history may have to be read."""
MAX_ATTEMPTS: Final = 5
_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MAX_S: Final = 2.0
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Room for an increment of several messages at their largest (4 MiB each)."""

T = TypeVar("T")


class AmpdClient:
    """One coordinator seen by one tenant. An async context manager; safe for concurrent use.

    UNAVAILABLE is tried again with backoff and RESOURCE_EXHAUSTED after the time that the
    server names, both within the call's deadline and at most `max_attempts` times; nothing
    else is (ABORTED wants a new look at the session or policy first). Every call that changes
    something carries a request_id, so trying again never does it twice. A round is not tried
    again once it has given tokens: its caller has seen them.
    """

    def __init__(
        self,
        address: str,
        *,
        tenant: str = DEFAULT_TENANT,
        call_timeout_s: float = CALL_TIMEOUT_S,
        round_timeout_s: float = ROUND_TIMEOUT_S,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self._metadata = ((TENANT_KEY, tenant),)
        self._call_timeout_s = call_timeout_s
        self._round_timeout_s = round_timeout_s
        self._max_attempts = max_attempts
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                # Retries are made here, where the rules of the contract are known.
                ("grpc.enable_retries", 0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 2000),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ],
        )
        self._sessions = SessionServiceStub(self._channel)
        self._admin = AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; rounds still running are cancelled."""
        await self._channel.close()

    # --- sessions -------------------------------------------------------------------------

    async def create_session(
        self,
        *,
        slo: Slo | None = None,
        model: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> Session:
        """A new session; the unset parts of `slo` are the cluster's."""
        request = CreateSessionRequest(
            request_id=request_id or _new_request_id(), model=model, slo=slo, labels=labels
        )
        return (await self._call(self._sessions.CreateSession, request)).session

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[RoundEvent, None]:
        """Run one round, and with `server_tools` those that its tool calls lead to. Closing the
        generator early cancels it: the history stays as the last finished round left it.

        Without a `request_id` the request gets one of its own. `timeout_s`: deadline of the
        whole round; the client's `round_timeout_s` by default.
        """
        sent = GenerateRequest()
        sent.CopyFrom(request)
        sent.request_id = request.request_id or _new_request_id()
        retries = _Retries(self._max_attempts, timeout_s or self._round_timeout_s)
        while True:
            has_tokens = False
            try:
                async with aclosing(self._attempt(sent, retries.remaining_s())) as events:
                    async for event in events:
                        has_tokens = has_tokens or isinstance(event, TokenBatch)
                        yield event
                    return
            except AmpdError as error:
                if has_tokens:
                    raise
                await retries.wait_or_raise(error)

    async def _attempt(
        self, request: GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[RoundEvent, None]:
        call = self._sessions.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                event = _event(response)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def get_session(self, session_id: str) -> Session:
        """A session of this tenant."""
        request = GetSessionRequest(session_id=session_id)
        return (await self._call(self._sessions.GetSession, request)).session

    async def list_sessions(self, *, page_size: int = 0) -> AsyncIterator[Session]:
        """All open sessions of this tenant by session_id, a page at a time."""
        page_token = ""
        while True:
            request = ListSessionsRequest(page_size=page_size, page_token=page_token)
            page = await self._call(self._sessions.ListSessions, request)
            for session in page.sessions:
                yield session
            page_token = page.next_page_token
            if not page_token:
                return

    async def close_session(self, session_id: str) -> Session:
        """End a session and free all it holds."""
        request = CloseSessionRequest(session_id=session_id, request_id=_new_request_id())
        return (await self._call(self._sessions.CloseSession, request)).session

    # --- the cluster ----------------------------------------------------------------------

    async def list_workers(
        self, role: WorkerRole.ValueType = WorkerRole.WORKER_ROLE_UNSPECIFIED
    ) -> AsyncIterator[Worker]:
        """The live processes of the cluster by worker_id, a page at a time."""
        page_token = ""
        while True:
            request = ListWorkersRequest(role=role, page_token=page_token)
            page = await self._call(self._admin.ListWorkers, request)
            for worker in page.workers:
                yield worker
            page_token = page.next_page_token
            if not page_token:
                return

    async def get_policy(self) -> Policy:
        """The policy in force."""
        return (await self._call(self._admin.GetPolicy, GetPolicyRequest())).policy

    async def set_policy(self, policy: Policy, *, expected_version: int | None = None) -> Policy:
        """Replace the policy. With `expected_version`: only if that is the one in force."""
        request = SetPolicyRequest(
            policy=policy, expected_version=expected_version, request_id=_new_request_id()
        )
        return (await self._call(self._admin.SetPolicy, request)).policy

    async def explain(self, session_id: str, round_index: int | None = None) -> list[RoundRecord]:
        """How the kept rounds of a session (or one of them) were placed and why, oldest first."""
        request = ExplainRoundRequest(session_id=session_id, round_index=round_index)
        return list((await self._call(self._admin.ExplainRound, request)).rounds)

    async def drain_worker(self, worker_id: str) -> DrainWorkerResponse:
        """Let a worker finish what it has, hand its sessions over, and end; called again, how
        far it is, and WORKER_NOT_FOUND when it has ended."""
        request = DrainWorkerRequest(worker_id=worker_id, request_id=_new_request_id())
        return await self._call(self._admin.DrainWorker, request)

    async def move_session(
        self, session_id: str, target_worker_id: str = ""
    ) -> MoveSessionResponse:
        """Hand an idle session over to another decode worker; by default to the one with the
        most free KV."""
        request = MoveSessionRequest(
            session_id=session_id,
            target_worker_id=target_worker_id,
            request_id=_new_request_id(),
        )
        return await self._call(self._admin.MoveSession, request, timeout_s=MOVE_TIMEOUT_S)

    # --- calls ----------------------------------------------------------------------------

    async def _call(
        self,
        method: Callable[..., Awaitable[T]],
        request: object,
        *,
        timeout_s: float | None = None,
    ) -> T:
        retries = _Retries(self._max_attempts, timeout_s or self._call_timeout_s)
        while True:
            try:
                return await method(request, timeout=retries.remaining_s(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await retries.wait_or_raise(from_rpc_error(error))


class _Retries:
    """Which failures of one call are tried again, and when: bounded in count and time."""

    def __init__(self, max_attempts: int, timeout_s: float) -> None:
        self._left = max_attempts - 1
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._backoff_s = _BACKOFF_FIRST_S

    def remaining_s(self) -> float:
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    async def wait_or_raise(self, error: AmpdError) -> None:
        """Return when it is time to try again; raise `error` if it is not to be."""
        code = STATUS_CODES[error.reason]
        if code is grpc.StatusCode.UNAVAILABLE:
            # Half of it random, so that clients who failed together do not come together.
            wait_s = error.retry_after_s or self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
            wait_s = error.retry_after_s
        else:
            raise error
        if self._left <= 0 or wait_s >= self.remaining_s():
            raise error
        self._left -= 1
        await asyncio.sleep(wait_s)


def _event(response: GenerateResponse) -> RoundEvent | None:
    match response.WhichOneof("event"):
        case "placed":
            return response.placed
        case "tokens":
            return response.tokens
        case "finished":
            return response.finished
        case "tool_called":
            return response.tool_called
        case "tool_returned":
            return response.tool_returned
        case None:  # a kind that a newer server knows
            return None


def _new_request_id() -> str:
    return uuid.uuid4().hex
