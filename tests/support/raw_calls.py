"""A client that checks nothing itself: raw stubs, and every part of a refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2
from rounds import RoundResult

from ampd.v1 import admin_service_pb2 as admin_pb
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.admin_service_pb2_grpc import AdminServiceStub
from ampd.v1.policy_pb2 import Policy
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_pb2 import Session
from ampd.v1.session_service_pb2_grpc import SessionServiceStub
from ampd.v1.worker_pb2 import Worker

CALL_TIMEOUT_S = 20.0
ROUND_TIMEOUT_S = 120.0
POLL_S = 0.02

# What a unary call is answered with depends on its stub; the tests read the message's fields.
Unary = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Refusal:
    """A failed call, as its trailers told it."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    domain: str = ""
    metadata: Mapping[str, str] | None = None
    fields: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()
    has_retry: bool = False

    @property
    def kind(self) -> tuple[grpc.StatusCode, str, str]:
        """What every refusal of AMPD has: status code, reason and domain."""
        return self.code, self.reason, self.domain


def refusal(error: grpc.aio.AioRpcError) -> Refusal:
    raw = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if not isinstance(raw, bytes):
        return Refusal(error.code(), error.details() or "")
    status = status_pb2.Status.FromString(raw)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    has_retry = False
    for detail in status.details:
        has_retry = has_retry or detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
    return Refusal(
        error.code(),
        status.message,
        info.reason,
        info.domain,
        dict(info.metadata),
        tuple(violation.field for violation in bad_request.field_violations),
        tuple(violation.description for violation in bad_request.field_violations),
        has_retry,
    )


async def refused(call: Awaitable[object]) -> Refusal:
    """The refusal that the call ends with; an error if it does not."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return refusal(error)
    raise AssertionError(f"the call was answered: {answer}")


class RawClient:
    """One coordinator over plain stubs. An async context manager."""

    def __init__(self, address: str, tenant: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.enable_retries", 0),
                ("grpc.max_send_message_length", 64 << 20),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self._metadata = None if tenant is None else (("ampd-tenant", tenant),)
        self.sessions = SessionServiceStub(self._channel)
        self.admin = AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def call(self, method: Unary, request: object) -> Any:
        return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)

    async def create(self) -> str:
        request = pb.CreateSessionRequest()
        return str((await self.call(self.sessions.CreateSession, request)).session.session_id)

    async def get(self, session_id: str) -> Session:
        request = pb.GetSessionRequest(session_id=session_id)
        session: Session = (await self.call(self.sessions.GetSession, request)).session
        return session

    async def close(self, session_id: str) -> None:
        await self.call(self.sessions.CloseSession, pb.CloseSessionRequest(session_id=session_id))

    async def set_policy(self, name: str) -> None:
        request = admin_pb.SetPolicyRequest(policy=Policy(name=name))
        await self.call(self.admin.SetPolicy, request)

    async def workers(self) -> list[Worker]:
        answer = await self.call(self.admin.ListWorkers, admin_pb.ListWorkersRequest())
        return list(answer.workers)

    def start(
        self, request: pb.GenerateRequest, timeout_s: float = ROUND_TIMEOUT_S
    ) -> RunningRound:
        return RunningRound(
            self.sessions.Generate(request, timeout=timeout_s, metadata=self._metadata)
        )

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float = ROUND_TIMEOUT_S
    ) -> RoundResult:
        """The whole round."""
        return await self.start(request, timeout_s).end()


class RunningRound:
    """A round whose stream is read in the background."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]) -> None:
        self._call = call
        self.result = RoundResult()
        self.batches = 0
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                match response.WhichOneof("event"):
                    case "placed":
                        self.result.placed.append(response.placed)
                    case "tokens":
                        self.batches += 1
                        self.result.token_ids.extend(response.tokens.token_ids)
                        self.result.text += response.tokens.text
                    case "finished":
                        self.result.finished = response.finished
                self._news.set()
        finally:
            self._news.set()

    async def end(self) -> RoundResult:
        """What it came to; raises what it failed with."""
        await self._reading
        return self.result

    async def placed(self, times: int = 1) -> None:
        """Returns when it has said so often where it is prefilled."""
        await self._until(lambda: len(self.result.placed) >= times)

    async def streams(self, tokens: int = 1) -> None:
        """Returns when it has given that many tokens."""
        await self._until(lambda: len(self.result.token_ids) >= tokens)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self._reading.done():
                await self._reading
                raise AssertionError(f"the round has ended: {self.result}")
            self._news.clear()
            await self._news.wait()

    async def cancel(self) -> None:
        """Give it up, as a client does that goes away."""
        self._call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self._reading


def round_request(
    session_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 4,
    keep: int | None = None,
    request_id: str = "",
) -> pb.GenerateRequest:
    """A good one: greedy, of an exact length."""
    return pb.GenerateRequest(
        session_id=session_id,
        request_id=request_id,
        token_ids=pb.TokenIds(ids=token_ids),
        keep_history_tokens=keep,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


@asynccontextmanager
async def nothing_lost(client: RawClient, session_id: str) -> AsyncIterator[Session]:
    """Whatever the body tried left the session as it was, and its next round works."""
    before = await client.get(session_id)
    yield before
    after = await client.get(session_id)
    after.last_used_time.CopyFrom(before.last_used_time)
    assert after == before
    result = await client.generate(round_request(session_id, [1234, 1235, 1236], max_tokens=2))
    assert result.finished is not None
    assert result.finished.history_tokens == before.history_tokens + 5
    assert not result.where.history_rebuilt
    # Nothing of the history had to be computed again.
    assert result.where.history_tokens == before.history_tokens


async def until(
    reached: Callable[[list[Worker]], bool], client: RawClient, timeout_s: float
) -> float:
    """Seconds until the workers' loads are like that; an error when they are not in time."""
    started_s = time.monotonic()
    while True:
        workers = await client.workers()
        if reached(workers):
            return time.monotonic() - started_s
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"not reached in {waited_s:.2f} s: {workers}"
        await asyncio.sleep(POLL_S)


def is_free(workers: Sequence[Worker]) -> bool:
    """Whether no round holds anything anywhere."""
    loads = [worker.load for worker in workers]
    return not any(w.kv_running_tokens or w.running_rounds or w.queued_tasks for w in loads)
