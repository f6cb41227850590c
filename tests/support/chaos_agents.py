"""Agents of a cluster of processes that is being broken: clients that keep to spec 7.

An agent retries UNAVAILABLE with backoff (a Generate with the same request_id, mostly at another
coordinator), RESOURCE_EXHAUSTED after its hint, ABORTED after reading its session again, and
nothing else. It leaves a stream that says nothing, gives rounds up, loses streams and takes them
up again. What it saw goes to the `Judge`.

What an agent knows of its session is a list of possible histories: a round that it gave up may
have settled or not, and the next round's placement tells which.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from chaos_judge import RETRIABLE, Ask, Judge, Seen
from google.protobuf.struct_pb2 import Struct

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import SamplingParams
from ampd.v1 import admin_service_pb2 as admin_pb
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.admin_service_pb2_grpc import AdminServiceStub
from ampd.v1.policy_pb2 import Policy
from ampd.v1.sampling_params_pb2 import SamplingParams as SamplingProto
from ampd.v1.session_service_pb2_grpc import SessionServiceStub
from ampd.wire.errors import STATUS_CODES, from_rpc_error

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0
CALL_TIMEOUT_S: Final = 8.0
"""A client's patience with a coordinator that says nothing; then it asks another one."""
ROUND_RUNNING_S: Final = 15.0
"""How long a round that its client has given up may still bar the next one: its coordinator may
be frozen, or cut off from the store, and not know yet that the client is gone. Longer than its
lease and an outage of the store together."""
MOVE_REFUSALS: Final = RETRIABLE | {
    ErrorReason.ROUND_RUNNING,
    ErrorReason.SESSION_NOT_FOUND,
    ErrorReason.WORKER_NOT_FOUND,
    ErrorReason.DEADLINE,
}
"""A move asks for what may not be possible now."""


@dataclass(frozen=True, slots=True)
class WorkShape:
    """What the agents do. Shares are of rounds unless said otherwise, times in seconds."""

    agents: int = 8
    rounds: tuple[int, int] = (1, 6)
    think_s: float = 0.3
    vocabulary: range = range(300, 60_000)
    block_tokens: int = 32
    max_model_tokens: int = 4096
    max_increment_tokens: int = 400
    output_tokens: tuple[int, int] = (4, 60)
    rewind_share: float = 0.2
    drop_share: float = 0.25
    """The client loses the stream, and takes it up again."""
    cancel_share: float = 0.1
    """The client gives the round up."""
    repeat_share: float = 0.1
    """Of finished rounds: asked for once more."""
    look_share: float = 0.2
    """The session is read behind the round."""
    move_share: float = 0.05
    """The session is moved behind the round."""
    sampled_share: float = 0.5
    """Sampled with a seed, penalties and stops; 0 where no oracle knows such rounds."""
    stall_s: tuple[float, float] = (4.0, 10.0)
    """Silence after which a client leaves a stream."""
    policy_every_s: float = 4.0
    """Between two changes of the policy."""


@dataclass(slots=True)
class Times:
    """What clients waited for, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    longest_stall_s: float = 0.0
    stalled_round: str = ""
    started_s: float = field(default_factory=time.monotonic)

    def stall(self, seconds: float, round_id: str) -> None:
        """A client waited so long between two tokens, or for the first one."""
        if seconds > self.longest_stall_s:
            elapsed_s = time.monotonic() - self.started_s
            self.longest_stall_s = seconds
            self.stalled_round = f"{round_id}, until {elapsed_s:.1f} s"


class Endpoints:
    """Stubs of every coordinator, over connections that are kept."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = {
            address: grpc.aio.insecure_channel(
                address,
                options=[
                    ("grpc.enable_retries", 0),
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.initial_reconnect_backoff_ms", 100),
                    ("grpc.min_reconnect_backoff_ms", 1000),
                    ("grpc.max_reconnect_backoff_ms", 1000),
                ],
            )
            for address in addresses
        }
        self.addresses = tuple(addresses)

    def sessions(self, address: str) -> SessionServiceStub:
        return SessionServiceStub(self._channels[address])

    def admin(self, address: str) -> AdminServiceStub:
        return AdminServiceStub(self._channels[address])

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


class GaveUp(Exception):  # noqa: N818
    """The agent cannot go on with its session; the judge knows why."""


class Retries:
    """When to try again; None: not at all."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._backoff_s = FIRST_BACKOFF_S

    def wait_s(self, error: AmpdError) -> float | None:
        code = STATUS_CODES[error.reason]
        if code is grpc.StatusCode.UNAVAILABLE:
            wait_s = error.retry_after_s or self._backoff_s * self._rng.uniform(0.5, 1.0)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            return wait_s
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return error.retry_after_s
        if code is grpc.StatusCode.ABORTED:
            return 0.05
        return None


class Agent:
    """One client with one session after the other, until it is told to stop."""

    def __init__(
        self,
        number: int,
        seed: int,
        shape: WorkShape,
        endpoints: Endpoints,
        judge: Judge,
        times: Times,
        stop: asyncio.Event,
    ) -> None:
        self.name = f"agent-{number}"
        self.doing = ""
        """For a report of what hangs."""
        self._rng = random.Random(f"agent {seed} {number}")
        self._shape = shape
        self._endpoints = endpoints
        self._judge = judge
        self._times = times
        self._stop = stop
        self._sessions = 0
        self._session = ""
        self._histories: list[list[int]] = [[]]
        self._gave_up = False
        """Whether the session's last round was given up."""
        self._address = self._rng.choice(endpoints.addresses)

    async def run(self) -> None:
        """Returns when the session that ran at the stop is closed."""
        await asyncio.sleep(self._rng.random() * self._shape.think_s)
        while not self._stop.is_set():
            self._sessions += 1
            self._histories, self._gave_up = [[]], False
            await self._create()
            try:
                for index in range(self._rng.randint(*self._shape.rounds)):
                    if self._stop.is_set():
                        break
                    await self._round(f"{self.name}-{self._sessions}-{index}")
                    await asyncio.sleep(self._rng.expovariate(1 / self._shape.think_s))
            except GaveUp:
                self._judge.counts["sessions_given_up"] += 1
            await self._close()
            self._judge.counts["sessions"] += 1
        self.doing = ""

    # --- calls that are not rounds -----------------------------------------------------------

    async def _create(self) -> None:
        request = pb.CreateSessionRequest(request_id=f"{self.name}-{self._sessions}-create")
        response = await self._call("CreateSession", request)
        self._session = response.session.session_id

    async def _look(self) -> None:
        """What the cluster says of the session, between two rounds."""
        request = pb.GetSessionRequest(session_id=self._session)
        response = await self._call("GetSession", request)
        self._judge.found(response.session, self._histories)

    async def _close(self) -> None:
        request = pb.CloseSessionRequest(
            session_id=self._session, request_id=f"{self.name}-{self._sessions}-close"
        )
        with suppress(GaveUp):
            await self._call("CloseSession", request)

    async def _move(self) -> None:
        """To the home that has the most room; a refusal changes nothing."""
        self.doing = f"MoveSession {self._session}"
        stub = self._endpoints.admin(self._elsewhere())
        request = admin_pb.MoveSessionRequest(
            session_id=self._session, request_id=f"{self.name}-{self._sessions}-move"
        )
        try:
            await stub.MoveSession(request, timeout=CALL_TIMEOUT_S)
            self._judge.counts["moves"] += 1
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            self._judge.told(f"move of {self._session}", error, allowed=MOVE_REFUSALS)

    async def _call(self, method: str, request: object) -> Any:
        """Try until it is answered, as spec 7 allows."""
        retries = Retries(self._rng)
        while True:
            self.doing = f"{method} {self._session} at {self._address}"
            stub = self._endpoints.sessions(self._address)
            try:
                return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            address, self._address = self._address, self._elsewhere()
            if error.reason is ErrorReason.DEADLINE:
                self._judge.counts["calls_left"] += 1
                continue
            self._judge.told(f"{method} of {self._session!r} at {address}", error)
            wait_s = retries.wait_s(error)
            if wait_s is None:
                raise GaveUp(method)
            await asyncio.sleep(wait_s)

    def _elsewhere(self) -> str:
        """Mostly another coordinator: a balancer does not know which of them live."""
        return self._rng.choice(self._endpoints.addresses)

    # --- rounds ------------------------------------------------------------------------------

    async def _round(self, request_id: str) -> None:
        rng, shape, judge = self._rng, self._shape, self._judge
        ask = self._ask(request_id)
        begun_s = time.monotonic()
        give_up_s = rng.expovariate(1.0) if rng.random() < shape.cancel_share else None
        retries, calls = Retries(rng), 0
        progress = _Progress(begun_s, self._times, f"{request_id} of {self._session}")
        judge.counts["rounds_begun"] += 1
        while True:
            drop_s = rng.expovariate(1 / 0.5) if rng.random() < shape.drop_share else None
            left_s = None if give_up_s is None else give_up_s - (time.monotonic() - begun_s)
            limits = [seconds for seconds in (drop_s, left_s) if seconds is not None]
            seen = await self._generate(ask, min(limits, default=None), progress)
            calls += 1
            barred = seen.error is not None and self._is_barred(seen.error, begun_s)
            if seen.error is not None and not barred:
                judge.told(f"Generate {ask.request_id} at {seen.at}", seen.error)
            self._histories = await judge.saw(ask, self._histories, seen)
            if seen.finished is not None:
                judge.counts["rounds_finished"] += 1
                self._gave_up = False
                judge.counts["rounds_taken_up_again"] += calls > 1
                before = self._histories[0]
                self._histories = [await judge.after(ask, before)]
                if rng.random() < shape.repeat_share:
                    await self._repeat(ask, before)
                break
            if give_up_s is not None and time.monotonic() - begun_s >= give_up_s:
                await self._abandon(ask)
                break
            if seen.error is not None:
                wait_s = 0.5 if barred else retries.wait_s(seen.error)
                if wait_s is None:
                    raise GaveUp(request_id)
                await asyncio.sleep(wait_s)
                if seen.error.reason is ErrorReason.SESSION_CONFLICT:
                    get = pb.GetSessionRequest(session_id=self._session)
                    await self._call("GetSession", get)
        judge.forget(ask)
        if rng.random() < shape.look_share:
            await self._look()
        if rng.random() < shape.move_share:
            await self._move()

    def _is_barred(self, error: AmpdError, begun_s: float) -> bool:
        """By the round that it has given up itself."""
        barred = (
            error.reason is ErrorReason.ROUND_RUNNING
            and self._gave_up
            and time.monotonic() - begun_s < ROUND_RUNNING_S
        )
        self._judge.counts["barred_by_a_given_up_round"] += barred
        return barred

    async def _abandon(self, ask: Ask) -> None:
        """Nobody knows whether it has settled, or will until the next round begins."""
        self._judge.counts["rounds_given_up"] += 1
        self._gave_up = True
        for history in list(self._histories):
            after = await self._judge.after(ask, history)
            if after not in self._histories:
                self._histories.append(after)

    async def _repeat(self, ask: Ask, before: list[int]) -> None:
        """A finished round once more: the same answer, nothing run twice."""
        retries = Retries(self._rng)
        while True:
            seen = await self._generate(ask, None, None)
            await self._judge.saw(ask, [before], seen)
            if seen.finished is not None:
                self._judge.counts["rounds_repeated"] += 1
                return
            if seen.error is not None:
                self._judge.told(f"repeated {ask.request_id} at {seen.at}", seen.error)
                wait_s = retries.wait_s(seen.error)
                if wait_s is None:
                    return
                await asyncio.sleep(wait_s)

    def _ask(self, request_id: str) -> Ask:
        rng, shape = self._rng, self._shape
        block = shape.block_tokens
        edges = [block * k + d for k in (1, 2, 4) for d in (-1, 0, 1)] + [1, 2, 3]
        count = (
            rng.choice(edges) if rng.random() < 0.5 else rng.randint(1, shape.max_increment_tokens)
        )
        least = min(map(len, self._histories))
        keep: int | None = None
        if least and rng.random() < shape.rewind_share:
            keep = rng.choice((0, least, rng.randint(0, least), least // block * block))
        room = shape.max_model_tokens - max(map(len, self._histories)) - count
        if room < 2 * shape.output_tokens[1]:
            keep = 0
        return Ask(
            session=self._session,
            request_id=request_id,
            increment=tuple(rng.choice(shape.vocabulary) for _ in range(count)),
            keep=keep,
            sampling=self._sampling(),
        )

    def _sampling(self) -> SamplingParams:
        rng, shape = self._rng, self._shape
        max_tokens = rng.randint(*shape.output_tokens)
        if rng.random() >= shape.sampled_share:
            return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        # Numbers that a float of the wire holds exactly.
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, max_tokens // 2)),
            temperature=rng.choice((0.0, 0.5, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.75)),
            top_k=rng.choice((0, 40)),
            presence_penalty=rng.choice((0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.25)),
            repetition_penalty=rng.choice((1.0, 1.25)),
            seed=rng.getrandbits(40),
            stop=rng.choice(((), ("ba",), ("do", "ku"))),
            include_stop_str_in_output=rng.random() < 0.5,
            ignore_eos=rng.random() < 0.5,
        )

    async def _generate(self, ask: Ask, limit_s: float | None, progress: _Progress | None) -> Seen:
        """One Generate call, broken off after `limit_s` or a long silence."""
        self._address = self._elsewhere()
        self.doing = f"Generate {ask.request_id} of {ask.session} at {self._address}"
        request = pb.GenerateRequest(
            session_id=ask.session,
            request_id=ask.request_id,
            keep_history_tokens=ask.keep,
            token_ids=pb.TokenIds(ids=ask.increment),
            sampling=_wire(ask.sampling),
        )
        seen = Seen(self._address)
        stall_s = self._rng.uniform(*self._shape.stall_s)
        call = self._endpoints.sessions(self._address).Generate(request)
        events = call.__aiter__()
        try:
            async with asyncio.timeout(limit_s) as limit:
                while True:
                    async with asyncio.timeout(stall_s):
                        response = await anext(events)
                    _record(seen, response)
                    if progress is not None:
                        progress.have(len(seen.tokens))
        except StopAsyncIteration:
            pass
        except TimeoutError:
            seen.dropped = "left" if limit.expired() else "stalled"
            self._judge.counts[f"streams_{seen.dropped}"] += 1
        except grpc.aio.AioRpcError as failure:
            seen.error = from_rpc_error(failure)
        finally:
            call.cancel()
        return seen


class _Progress:
    """Of one round over all its streams: when it last had a token that it had not had before."""

    def __init__(self, begun_s: float, times: Times, round_id: str) -> None:
        self._begun_s = self._last_s = begun_s
        self._tokens = 0
        self._times = times
        self._round_id = round_id

    def have(self, tokens: int) -> None:
        if tokens <= self._tokens:
            return
        now_s = time.monotonic()
        if not self._tokens:
            self._times.ttft_s.append(now_s - self._begun_s)
        self._times.stall(now_s - self._last_s, self._round_id)
        self._tokens, self._last_s = tokens, now_s


class PolicyFlipper:
    """Sets another policy all the time, as operators do."""

    POLICIES: Final = ("ampd", "ampd-paper", "always-remote", "always-local")

    def __init__(self, seed: int, shape: WorkShape, endpoints: Endpoints, judge: Judge) -> None:
        self._rng = random.Random(f"policy {seed}")
        self._every_s = shape.policy_every_s
        self._endpoints = endpoints
        self._judge = judge

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._every_s))
            policy = Policy(name=self._rng.choice(self.POLICIES), settings=Struct())
            stub = self._endpoints.admin(self._rng.choice(self._endpoints.addresses))
            try:
                await stub.SetPolicy(
                    admin_pb.SetPolicyRequest(policy=policy), timeout=CALL_TIMEOUT_S
                )
                self._judge.counts["policies_set"] += 1
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                allowed = RETRIABLE | {ErrorReason.POLICY_CONFLICT, ErrorReason.DEADLINE}
                self._judge.told("SetPolicy", error, allowed=allowed)


def _record(seen: Seen, response: pb.GenerateResponse) -> None:
    if seen.finished is not None:
        seen.after_end += 1
    match response.WhichOneof("event"):
        case "placed":
            seen.placed.append(response.placed)
            seen.placed_behind_tokens += bool(seen.tokens)
        case "tokens":
            seen.tokens.extend(response.tokens.token_ids)
            seen.text += response.tokens.text
        case "finished":
            seen.finished = response.finished


def _wire(sampling: SamplingParams) -> SamplingProto:
    return SamplingProto(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop=sampling.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
    )
