"""The calls of a client, with what is tried again of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc

from ampd.client.connections import Connection, Connections
from ampd.client.resuming import Delivered, RoundEvent
from ampd.client.retries import Retries
from ampd.core.errors import AmpdError, ErrorReason
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
)
from ampd.v1.worker_pb2 import Worker, WorkerRole
from ampd.wire.errors import STATUS_CODES, from_rpc_error
from ampd.wire.names import DEFAULT_TENANT, TENANT_KEY

CALL_TIMEOUT_S: Final = 10.0
ROUND_TIMEOUT_S: Final = 600.0
MOVE_TIMEOUT_S: Final = 120.0
"""Moving a session: KV of a whole history may have to be read."""
MAX_ATTEMPTS: Final = 5
"""Of one call other than Generate."""
MAX_ROUND_ATTEMPTS: Final = 12
"""Of one Generate: a coordinator is back, or another one found, within some 15 s."""
MAX_OUTAGE_S: Final = 30.0
"""Below the time for which the output of a lost round is kept (docs/store.md)."""

T = TypeVar("T")


class AmpdClient:
    """A cluster seen by one tenant, through one of its coordinators. An async context manager;
    safe for concurrent use.

    UNAVAILABLE is tried again with backoff, at the next coordinator where there are several,
    and RESOURCE_EXHAUSTED after the time that the server names; both within the call's
    deadline, at most `max_attempts` times (a Generate: `max_round_attempts`) and for at most
    `max_outage_s` without an answer. Nothing else is: ABORTED wants a new look at the session
    or policy first, and only the caller knows what its request means after that.

    Every call that changes something carries a request_id, so trying again never does it twice,
    and a round that was lost half way goes on: see `generate`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tenant: str = DEFAULT_TENANT,
        call_timeout_s: float = CALL_TIMEOUT_S,
        round_timeout_s: float = ROUND_TIMEOUT_S,
        max_attempts: int = MAX_ATTEMPTS,
        max_round_attempts: int = MAX_ROUND_ATTEMPTS,
        max_outage_s: float = MAX_OUTAGE_S,
    ) -> None:
        """`address`: host:port of a coordinator, or of several of one cluster. Attempts include
        the first: 1 turns retries off. ValueError: no address, or too many."""
        addresses = [address] if isinstance(address, str) else address
        self._metadata = ((TENANT_KEY, tenant),)
        self._call_timeout_s = call_timeout_s
        self._round_timeout_s = round_timeout_s
        self._max_attempts = max_attempts
        self._max_round_attempts = max_round_attempts
        self._max_outage_s = max_outage_s
        self._connections = Connections(addresses)

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
        """Close the connections; rounds still running are cancelled."""
        await self._connections.close()

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
        return (await self._call(lambda to: to.sessions.CreateSession, request)).session

    async def generate(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float | None = None,
        max_attempts: int | None = None,
    ) -> AsyncGenerator[RoundEvent, None]:
        """Run one round, and with `server_tools` those that its tool calls lead to. Closing the
        generator early cancels it: the history stays as the last finished round left it.

        Without a `request_id` the request gets one of its own. A stream that is lost is asked
        for again by it, and goes on where it was: nothing is delivered twice, except that a
        placement may come between tokens, and a ToolReturned again where the tool had to run
        again and returned something else: the last one is what the model was told.

        Raises, besides what the server answers, INTERNAL when the repeated stream is not the
        one that was delivered, and SESSION_CONFLICT (ABORTED) when another round of the session
        has begun since: what was delivered behind the last RoundFinished is then no part of the
        history. ABORTED is not tried again here: the round would begin behind a history that
        its caller has not seen. Read the session, then decide.

        `timeout_s`: deadline of it all; the client's `round_timeout_s` by default.
        `max_attempts`: in place of the client's `max_round_attempts`; 1: a lost stream is an
        error at once.
        """
        sent = GenerateRequest()
        sent.CopyFrom(request)
        sent.request_id = request.request_id or _new_request_id()
        retries = Retries(
            max_attempts=self._max_round_attempts if max_attempts is None else max_attempts,
            max_outage_s=self._max_outage_s,
            timeout_s=self._round_timeout_s if timeout_s is None else timeout_s,
        )
        delivered = Delivered()
        while True:
            delivered.begin_attempt()
            try:
                async with aclosing(self._attempt(sent, retries.remaining_s())) as events:
                    async for event in events:
                        new = delivered.new_of(event)
                        if new is not None:
                            retries.progressed()
                            yield new
                if not delivered.ended:
                    raise AmpdError(ErrorReason.INTERNAL, "the stream ended before the round did")
                return
            except AmpdError as error:
                if delivered.ended:
                    return
                await retries.wait_or_raise(error)

    async def _attempt(
        self, request: GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[RoundEvent, None]:
        connection = self._connections.current
        call = connection.sessions.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                event = _event(response)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise self._failed(connection, error) from error
        finally:
            call.cancel()

    async def get_session(self, session_id: str) -> Session:
        """A session of this tenant."""
        request = GetSessionRequest(session_id=session_id)
        return (await self._call(lambda to: to.sessions.GetSession, request)).session

    async def list_sessions(self, *, page_size: int = 0) -> AsyncIterator[Session]:
        """All open sessions of this tenant by session_id, a page at a time."""
        page_token = ""
        while True:
            request = ListSessionsRequest(page_size=page_size, page_token=page_token)
            page = await self._call(lambda to: to.sessions.ListSessions, request)
            for session in page.sessions:
                yield session
            page_token = page.next_page_token
            if not page_token:
                return

    async def close_session(self, session_id: str, *, request_id: str = "") -> Session:
        """End a session and free all it holds; again with the same request_id: the same answer."""
        request = CloseSessionRequest(
            session_id=session_id, request_id=request_id or _new_request_id()
        )
        return (await self._call(lambda to: to.sessions.CloseSession, request)).session

    # --- the cluster ----------------------------------------------------------------------

    async def list_workers(
        self, role: WorkerRole.ValueType = WorkerRole.WORKER_ROLE_UNSPECIFIED
    ) -> AsyncIterator[Worker]:
        """The live processes of the cluster by worker_id, a page at a time."""
        page_token = ""
        while True:
            request = ListWorkersRequest(role=role, page_token=page_token)
            page = await self._call(lambda to: to.admin.ListWorkers, request)
            for worker in page.workers:
                yield worker
            page_token = page.next_page_token
            if not page_token:
                return

    async def get_policy(self) -> Policy:
        """The policy in force."""
        return (await self._call(lambda to: to.admin.GetPolicy, GetPolicyRequest())).policy

    async def set_policy(self, policy: Policy, *, expected_version: int | None = None) -> Policy:
        """Replace the policy. With `expected_version`: only if that is the one in force."""
        request = SetPolicyRequest(
            policy=policy, expected_version=expected_version, request_id=_new_request_id()
        )
        return (await self._call(lambda to: to.admin.SetPolicy, request)).policy

    async def explain(self, session_id: str, round_index: int | None = None) -> list[RoundRecord]:
        """How the kept rounds of a session (or one of them) were placed and why, oldest first."""
        request = ExplainRoundRequest(session_id=session_id, round_index=round_index)
        return list((await self._call(lambda to: to.admin.ExplainRound, request)).rounds)

    async def drain_worker(self, worker_id: str) -> DrainWorkerResponse:
        """Let a worker finish what it has, hand its sessions over, and end; called again, how
        far it is, and WORKER_NOT_FOUND when it has ended."""
        request = DrainWorkerRequest(worker_id=worker_id, request_id=_new_request_id())
        return await self._call(lambda to: to.admin.DrainWorker, request)

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
        return await self._call(lambda to: to.admin.MoveSession, request, timeout_s=MOVE_TIMEOUT_S)

    # --- calls ----------------------------------------------------------------------------

    async def _call(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[T]]],
        request: object,
        *,
        timeout_s: float | None = None,
    ) -> T:
        retries = Retries(
            max_attempts=self._max_attempts,
            max_outage_s=self._max_outage_s,
            timeout_s=self._call_timeout_s if timeout_s is None else timeout_s,
        )
        while True:
            connection = self._connections.current
            call = method(connection)
            try:
                return await call(request, timeout=retries.remaining_s(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await retries.wait_or_raise(self._failed(connection, error))

    def _failed(self, connection: Connection, error: grpc.aio.AioRpcError) -> AmpdError:
        failure = from_rpc_error(error)
        if STATUS_CODES[failure.reason] is grpc.StatusCode.UNAVAILABLE:
            self._connections.leave(connection)
        return failure


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
