"""A client of one coordinator: plain stubs, no retries; what it sees as frozen values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc

from ampd.core.errors import AmpdError
from ampd.core.model import SamplingParams
from ampd.v1 import admin_service_pb2 as admin_pb
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.admin_service_pb2_grpc import AdminServiceStub
from ampd.v1.policy_pb2 import Policy
from ampd.v1.round_pb2 import RoundRecord
from ampd.v1.sampling_params_pb2 import SamplingParams as SamplingProto
from ampd.v1.session_pb2 import Session, Slo
from ampd.v1.session_service_pb2_grpc import SessionServiceStub
from ampd.v1.worker_pb2 import Worker
from ampd.wire.errors import from_rpc_error
from ampd.wire.names import TENANT_KEY

CALL_TIMEOUT_S: Final = 10.0
ROUND_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One round as its client wants it: greedy and of an exact length, unless `sampling` says
    otherwise."""

    session_id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    keep: int | None = None
    request_id: str = ""

    def message(self) -> pb.GenerateRequest:
        """As it is sent."""
        wanted = self.sampling
        return pb.GenerateRequest(
            session_id=self.session_id,
            request_id=self.request_id,
            token_ids=pb.TokenIds(ids=self.tokens),
            keep_history_tokens=self.keep,
            sampling=SamplingProto(
                max_tokens=wanted.max_tokens,
                temperature=wanted.temperature,
                seed=wanted.seed,
                stop=wanted.stop,
                ignore_eos=wanted.ignore_eos,
            ),
        )


@dataclass(frozen=True, slots=True, repr=False)
class Seen:
    """What a stream has told so far."""

    placed: tuple[pb.RoundPlaced, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    batches: int = 0
    end: pb.RoundFinished | None = None

    def __repr__(self) -> str:
        placed = [f"{p.decode_worker}<-{p.prefill_worker} {p.reason}" for p in self.placed]
        return f"<{placed} {len(self.token_ids)} tokens, ended: {self.end is not None}>"

    @property
    def where(self) -> pb.RoundPlaced:
        """Where the round was prefilled in the end."""
        return self.placed[-1]

    @property
    def finished(self) -> pb.RoundFinished:
        """Its end."""
        assert self.end is not None, self
        return self.end


class Stream:
    """A round whose stream is read in the background."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seen = Seen()
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self.seen = _with(self.seen, response)
                self._news.set()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self._news.set()

    async def end(self) -> Seen:
        """The whole round, or the AmpdError that it ended with."""
        await self._reading
        return self.seen

    async def error(self) -> AmpdError:
        """What it fails with; an assertion fails when it does not."""
        try:
            seen = await self.end()
        except AmpdError as error:
            return error
        raise AssertionError(f"the round has ended well: {seen}")

    async def placed(self, times: int = 1) -> None:
        """Returns when it has said so often where it is prefilled."""
        await self.until(lambda seen: len(seen.placed) >= times)

    async def streams(self, tokens: int = 1) -> None:
        """Returns when it has given that many tokens."""
        await self.until(lambda seen: len(seen.token_ids) >= tokens)

    async def until(self, reached: Callable[[Seen], bool]) -> None:
        """Returns when what was seen is like that; an error when the round ends before."""
        while not reached(self.seen):
            if self._reading.done():
                await self._reading
                raise AssertionError(f"the round has ended: {self.seen}")
            self._news.clear()
            await self._news.wait()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._reading.done()

    async def cancel(self) -> Seen:
        """Give it up, as a client does that goes away; what it had seen."""
        self._call.cancel()
        with suppress(asyncio.CancelledError, AmpdError):
            await self._reading
        return self.seen


class Client:
    """One coordinator seen by one tenant. Every failure is an AmpdError."""

    def __init__(self, address: str, tenant: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.enable_retries", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 200),
            ],
        )
        self._metadata = ((TENANT_KEY, tenant),)
        self._sessions = SessionServiceStub(self._channel)
        self._admin = AdminServiceStub(self._channel)

    async def leave(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def create(self, *, request_id: str = "", slo: Slo | None = None) -> Session:
        """A new session."""
        request = pb.CreateSessionRequest(request_id=request_id, slo=slo)
        session: Session = (await self._call(self._sessions.CreateSession, request)).session
        return session

    def start(self, ask: Ask, timeout_s: float = ROUND_TIMEOUT_S) -> Stream:
        """Begin a round."""
        return Stream(
            self._sessions.Generate(ask.message(), timeout=timeout_s, metadata=self._metadata)
        )

    async def get(self, session_id: str) -> Session:
        """The session as the cluster tells it."""
        request = pb.GetSessionRequest(session_id=session_id)
        session: Session = (await self._call(self._sessions.GetSession, request)).session
        return session

    async def close(self, session_id: str, *, request_id: str = "") -> Session:
        """End the session."""
        request = pb.CloseSessionRequest(session_id=session_id, request_id=request_id)
        session: Session = (await self._call(self._sessions.CloseSession, request)).session
        return session

    async def workers(self) -> list[Worker]:
        """All live processes."""
        answer = await self._call(self._admin.ListWorkers, admin_pb.ListWorkersRequest())
        return list(answer.workers)

    async def policy(self) -> Policy:
        """The one in force."""
        answer = await self._call(self._admin.GetPolicy, admin_pb.GetPolicyRequest())
        policy: Policy = answer.policy
        return policy

    async def set_policy(
        self, name: str, *, request_id: str = "", **settings: float | str
    ) -> Policy:
        """Replace the policy."""
        policy = Policy(name=name)
        for key, value in settings.items():
            policy.settings[key] = value
        request = admin_pb.SetPolicyRequest(policy=policy, request_id=request_id)
        answer = await self._call(self._admin.SetPolicy, request)
        in_force: Policy = answer.policy
        return in_force

    async def explain(self, session_id: str) -> Sequence[RoundRecord]:
        """How its rounds were placed."""
        request = admin_pb.ExplainRoundRequest(session_id=session_id)
        answer = await self._call(self._admin.ExplainRound, request)
        return list(answer.rounds)

    async def drain(self, worker_id: str, *, request_id: str = "") -> admin_pb.DrainWorkerResponse:
        """Have a worker drain; how far it is."""
        request = admin_pb.DrainWorkerRequest(worker_id=worker_id, request_id=request_id)
        answer: admin_pb.DrainWorkerResponse = await self._call(self._admin.DrainWorker, request)
        return answer

    async def move(
        self, session_id: str, target: str = "", *, request_id: str = ""
    ) -> admin_pb.MoveSessionResponse:
        """Have a session move."""
        request = admin_pb.MoveSessionRequest(
            session_id=session_id, target_worker_id=target, request_id=request_id
        )
        answer: admin_pb.MoveSessionResponse = await self._call(self._admin.MoveSession, request)
        return answer

    async def _call(self, method: Any, request: object) -> Any:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


def _with(seen: Seen, response: pb.GenerateResponse) -> Seen:
    match response.WhichOneof("event"):
        case "placed":
            placed = (*seen.placed, response.placed)
            return Seen(placed, seen.token_ids, seen.text, seen.batches, seen.end)
        case "tokens":
            token_ids = (*seen.token_ids, *response.tokens.token_ids)
            text = seen.text + response.tokens.text
            return Seen(seen.placed, token_ids, text, seen.batches + 1, seen.end)
        case "finished":
            assert seen.end is None, "two ends"
            return Seen(seen.placed, seen.token_ids, seen.text, seen.batches, response.finished)
    return seen
