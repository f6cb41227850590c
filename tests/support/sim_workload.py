"""Seeded agents of a simulated cluster: sessions of rounds, as clients that keep to spec 7.

An agent retries UNAVAILABLE with backoff and RESOURCE_EXHAUSTED after its hint, reads again
after ABORTED, and nothing else. A lost stream is taken up with the same request_id, mostly at
another coordinator. What it knows of its session is a set of possible histories: a round that
was given up may have settled or not, and the next round's placement tells which.

What it saw goes to a `Witness`, which judges; this module only acts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import grpc
from cluster_sim import SimCluster
from sim_tools import MAX_CALLS, MAX_MESSAGE_TOKENS, TOOL_ROUNDS, TOOLS, increment, server_calls

from ampd.adapters.engine_emulated import Expected
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import Role, SamplingParams
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.session_pb2 import Session as SessionProto
from ampd.v1.session_service_pb2_grpc import SessionServiceStub
from ampd.wire.errors import STATUS_CODES, from_rpc_error
from ampd.wire.sampling import sampling_to_proto

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0
CALL_TIMEOUT_S: Final = 10.0
ROUND_RUNNING_S: Final = 0.5
"""Between two attempts while a round that the client has left has not ended."""
FLOOD_WITHIN_S: Final = 0.2
LOOKS: Final = 4
"""A look at a session may meet a store that has not heard of its last round yet."""
VOCABULARY: Final = range(300, 60_000)


@dataclass(frozen=True, slots=True)
class WorkShape:
    """What the agents do. Shares are of rounds, times in seconds."""

    sessions: int = 8
    rounds: tuple[int, int] = (1, 6)
    start_within_s: float = 5.0
    think_s: float = 0.5
    max_increment_tokens: int = 200
    max_output_tokens: int = 24
    rewind_share: float = 0.2
    cancel_share: float = 0.0
    """Rounds that the client gives up at some moment."""
    drop_share: float = 0.0
    """Rounds whose stream the client loses, and takes up again."""
    deadline_share: float = 0.0
    """Rounds with a deadline that may be too short."""
    repeat_share: float = 0.0
    """Finished rounds that are asked for once more."""
    twice_share: float = 0.0
    """Rounds that are sent to two coordinators at once, with one request_id."""
    close_early_share: float = 0.0
    """Sessions that are closed while a round runs."""
    tools_share: float = 0.0
    """Rounds that may be followed by rounds behind what the server's tools returned."""
    patience_s: float = 120.0
    """How long a call is tried again."""


@dataclass(eq=False)
class Seen:
    """What one Generate call told: of its last round, if tools have led to several."""

    session: str
    request_id: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    placed: list[pb.RoundPlaced] = field(default_factory=list)
    finished: pb.RoundFinished | None = None
    error: AmpdError | None = None
    dropped: bool = False
    """The client broke it off."""
    replays: bool = False
    """The round had finished for this client before."""
    after_end: int = 0
    """Events behind the end."""
    called: list[tuple[str, str]] = field(default_factory=list)
    """Tools and their arguments, behind this round."""
    returned: list[tuple[str, str, bool]] = field(default_factory=list)
    """Tools, what came of them and whether they failed, in any order."""
    earlier: list[Seen] = field(default_factory=list)
    """The rounds of the stream before this one; each has finished."""


@dataclass(eq=False)
class Ask:
    """One round as its client wants it."""

    session: str
    request_id: str
    increment: list[int]
    keep: int | None
    sampling: SamplingParams
    deadline_s: float | None = None
    own_close: bool = False
    """The client itself closes the session meanwhile."""
    tool_rounds: int = 0
    """Rounds that may follow, behind the results of the server's tools."""

    def rounds(
        self, history: list[int], expected: Callable[[list[int], Ask], Expected]
    ) -> list[tuple[list[int], Ask]]:
        """All rounds of the stream: each over its history, and asked for in these words."""
        rounds = [(history, self)]
        for number in range(1, self.tool_rounds + 1):
            before, ask = rounds[-1]
            calls = server_calls(expected(before, ask).text)
            if not calls:
                break
            after = ask.after(before, expected)
            following = replace(
                self,
                request_id=f"{self.request_id}#{number}",
                increment=increment(calls),
                keep=None,
                tool_rounds=0,
            )
            rounds.append((after, following))
        return rounds

    def after(
        self, history: list[int], expected: Callable[[list[int], Ask], Expected]
    ) -> list[int]:
        """The history behind this one round."""
        kept = history if self.keep is None else history[: self.keep]
        output = expected(history, self)
        return kept + self.increment + output.tokens[: output.kept_output_tokens]


class Witness(Protocol):
    """Who judges what the clients see."""

    def begins(self, ask: Ask, histories: list[list[int]]) -> None:
        """A round is asked for, over one of these histories."""
        ...

    def saw(self, ask: Ask, histories: list[list[int]], seen: Seen) -> list[list[int]]:
        """One call has ended. Those of the histories that what it told agrees with."""
        ...

    def expected(self, history: list[int], ask: Ask) -> Expected:
        """The round's output over that history."""
        ...

    def refused(self, session: str, what: str, error: AmpdError) -> None:
        """A call other than Generate has failed for good."""
        ...

    def turned_away(self, error: AmpdError) -> None:
        """A new session is refused, to a client that does not try again."""
        ...

    def found(self, histories: list[list[int]], session: SessionProto) -> None:
        """The session as it is told between two rounds."""
        ...

    def done(self, session: str, rounds: int) -> None:
        """The agent has finished."""
        ...


class GaveUp(Exception):  # noqa: N818
    """The cluster has lost the session, or the client its patience: the witness knows why."""


class Agent:
    """One session from its creation to its close."""

    def __init__(
        self, cluster: SimCluster, number: int, seed: int, shape: WorkShape, witness: Witness
    ) -> None:
        self.name = f"agent-{number}"
        self._cluster = cluster
        self._rng = random.Random(f"agent {seed} {number}")
        self._rng_tools = random.Random(f"agent with tools {seed} {number}")
        self._shape = shape
        self._witness = witness
        self._histories: list[list[int]] = [[]]
        self._last: tuple[Ask, list[int]] | None = None
        self._closed = False
        self._has_left = False
        self.session = ""
        self.rounds = 0

    async def run(self) -> None:
        """The whole life of the session."""
        shape, rng = self._shape, self._rng
        await asyncio.sleep(rng.random() * shape.start_within_s)
        try:
            await self._create()
            for index in range(rng.randint(*shape.rounds)):
                if index:
                    await asyncio.sleep(rng.expovariate(1 / shape.think_s))
                await self._round(index)
                self.rounds += 1
                if self._last is not None and rng.random() < shape.repeat_share:
                    await self._repeat()
        except GaveUp as error:
            self._cluster.note(self.name, "gave up", error)
        if self.session and not self._closed:
            await self._look()
            await self._close()
        self._witness.done(self.session, self.rounds)

    # --- calls that are not rounds -----------------------------------------------------------

    def _stub(self) -> SessionServiceStub:
        """Any coordinator: a load balancer does not know which of them live."""
        names = [life.address for life in self._cluster.of(Role.COORDINATOR)]
        return SessionServiceStub(grpc.aio.insecure_channel(self._rng.choice(names)))

    async def _create(self) -> None:
        request = pb.CreateSessionRequest(request_id=f"{self.name}-create")
        response = await self._call("CreateSession", request)
        self.session = response.session.session_id
        self._cluster.sessions.append(self.session)
        self._cluster.note(self.name, "session", self.session)

    async def _look(self, looks: int = LOOKS) -> None:
        """What the cluster says that the session is."""
        request = pb.GetSessionRequest(session_id=self.session)
        try:
            response = await self._call("GetSession", request)
        except GaveUp as error:
            self._cluster.note(self.name, "not found", error)
            return
        lengths = {len(history) for history in self._histories}
        if response.session.history_tokens in lengths or looks == 1:
            self._witness.found(self._histories, response.session)
        else:
            await asyncio.sleep(1.0)
            await self._look(looks - 1)

    async def _close(self) -> None:
        request = pb.CloseSessionRequest(session_id=self.session, request_id=f"{self.name}-close")
        self._closed = True
        try:
            await self._call("CloseSession", request)
        except GaveUp as error:
            self._cluster.note(self.name, "not closed", error)

    async def _call(self, method: str, request: object) -> Any:
        """Try until it is answered, as spec 7 allows."""
        retries = Retries(self._rng, self._shape.patience_s)
        while True:
            try:
                return await getattr(self._stub(), method)(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                self._cluster.note(self.name, method, error.reason, error.message[:80])
                wait_s = retries.wait_s(error)
                if error.reason is ErrorReason.DEADLINE and not retries.is_over():
                    wait_s = 0.0  # its own patience with a coordinator that says nothing
                if wait_s is None:
                    self._witness.refused(self.session, method, error)
                    raise GaveUp(f"{method}: {error.reason}") from None
                await asyncio.sleep(wait_s)

    # --- rounds ------------------------------------------------------------------------------

    def _ask(self, index: int) -> Ask:
        rng, shape = self._rng, self._shape
        block = self._cluster.shape.block_tokens
        edges = [block * k + d for k in (1, 2, 4) for d in (-1, 0, 1)] + [1, 2, 3]
        count = (
            rng.choice(edges)
            if rng.random() < 0.5
            else rng.randint(1, max(1, shape.max_increment_tokens))
        )
        least = min(len(history) for history in self._histories)
        keep: int | None = None
        if least and rng.random() < shape.rewind_share:
            keep = rng.choice((0, least, rng.randint(0, least), least // block * block))
        elif rng.random() < 0.3:
            keep = least
        tool_rounds = TOOL_ROUNDS if self._rng_tools.random() < shape.tools_share else 0
        room = self._cluster.shape.max_model_tokens - max(map(len, self._histories)) - count
        most = shape.max_output_tokens + block
        if room < most:
            keep = 0
        if room < most + TOOL_ROUNDS * (MAX_CALLS * MAX_MESSAGE_TOKENS + most):
            tool_rounds = 0
        ask = Ask(
            session=self.session,
            request_id=f"{self.name}-{index}",
            increment=[rng.choice(VOCABULARY) for _ in range(count)],
            keep=keep,
            sampling=self._sampling(),
            deadline_s=rng.uniform(0.01, 2.0) if rng.random() < shape.deadline_share else None,
            tool_rounds=tool_rounds,
        )
        return self._with_stops(ask) if rng.random() < 0.3 else ask

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.randint(1, self._shape.max_output_tokens)
        warm = rng.random() < 0.4
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
            temperature=rng.uniform(0.1, 2.0) if warm else 0.0,
            seed=rng.getrandbits(31) if warm else None,
            repetition_penalty=rng.uniform(0.8, 1.5) if rng.random() < 0.2 else 1.0,
            ignore_eos=rng.random() < 0.5,
        )

    def _with_stops(self, ask: Ask) -> Ask:
        """With a stop that this round is likely to come to."""
        rng = self._rng
        expected = self._witness.expected(rng.choice(self._histories), ask)
        text, tokens = expected.text, expected.tokens
        if rng.random() < 0.3:
            stops = (rng.choice(tokens), rng.choice(VOCABULARY))
            ask.sampling = replace(ask.sampling, stop_token_ids=stops)
        elif len(text) > 1:
            start = rng.randrange(len(text) - 1)
            stop = (text[start : start + rng.randint(1, 9)], "never said")
            ask.sampling = replace(
                ask.sampling, stop=stop, include_stop_str_in_output=rng.random() < 0.3
            )
        # It is another request for the witness, which remembers what it expects of one.
        ask.request_id += "-stops"
        return ask

    async def _round(self, index: int) -> None:
        rng, shape = self._rng, self._shape
        ask = self._ask(index)
        histories = self._histories
        self._witness.begins(ask, histories)
        give_up_s = rng.expovariate(1 / 0.5) if rng.random() < shape.cancel_share else None
        closing: asyncio.Task[None] | None = None
        if rng.random() < shape.close_early_share:
            ask.own_close = True
            closing = asyncio.create_task(self._close_after(rng.random()))
        retries = Retries(rng, shape.patience_s)
        begun_s = self._cluster.loop.time()
        while True:
            drop_s = rng.expovariate(1 / 0.3) if rng.random() < shape.drop_share else None
            left_s = None
            if give_up_s is not None:
                left_s = max(0.0, give_up_s - (self._cluster.loop.time() - begun_s))
            limit_s = min((s for s in (drop_s, left_s) if s is not None), default=None)
            twice = rng.random() < shape.twice_share
            calls = [self._generate(ask, limit_s)]
            if twice:
                calls.append(self._generate(ask, limit_s, after_s=0.2 * rng.random()))
            best: Seen | None = None
            for seen in await asyncio.gather(*calls):
                histories = self._witness.saw(ask, histories, seen)
                if best is None or seen.finished is not None:
                    best = seen
                self._has_left |= seen.finished is None
            assert best is not None
            if best.finished is not None:
                before = histories[0]
                last, asked = ask.rounds(before, self._witness.expected)[-1]
                self._histories = [asked.after(last, self._witness.expected)]
                self._last = (ask, before)
                break
            over = give_up_s is not None and self._cluster.loop.time() - begun_s >= give_up_s
            wait_s = 0.05 * rng.random() if best.error is None else retries.wait_s(best.error)
            if best.error is not None and self._waits_for_own(best.error, retries):
                wait_s = ROUND_RUNNING_S
            if over or wait_s is None:
                # Nobody knows whether it has settled, or will until the next round begins.
                self._histories = self._possible(histories, ask)
                error = best.error
                if error is not None and wait_s is None and not self._goes_on(error, ask):
                    if closing is not None:
                        await closing
                    raise GaveUp(f"{ask.request_id}: {error.reason}")
                break
            await asyncio.sleep(wait_s)
        if closing is not None:
            await closing
            raise GaveUp("closed early")

    def _waits_for_own(self, error: AmpdError, retries: Retries) -> bool:
        """A round that this client has left may run for a moment more: it waits for that."""
        return (
            error.reason is ErrorReason.ROUND_RUNNING and self._has_left and not retries.is_over()
        )

    @staticmethod
    def _goes_on(error: AmpdError, ask: Ask) -> bool:
        """Whether the session lives on after an error that ends its round."""
        return error.reason is ErrorReason.DEADLINE and ask.deadline_s is not None

    def _possible(self, histories: list[list[int]], ask: Ask) -> list[list[int]]:
        possible = list(histories)
        expected = self._witness.expected
        for history in histories:
            if ask.keep is not None and ask.keep > len(history):
                continue
            for before, asked in ask.rounds(history, expected):
                after = asked.after(before, expected)
                if after not in possible:
                    possible.append(after)
        return possible

    async def _repeat(self) -> None:
        """A finished round once more: the same answer, nothing run twice."""
        assert self._last is not None
        ask, before = self._last
        retries = Retries(self._rng, self._shape.patience_s)
        while True:
            seen = await self._generate(ask, None, replays=True)
            self._witness.saw(ask, [before], seen)
            if seen.error is None or (wait_s := retries.wait_s(seen.error)) is None:
                return
            await asyncio.sleep(wait_s)

    async def _close_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._close()

    async def _generate(
        self, ask: Ask, limit_s: float | None, *, after_s: float = 0.0, replays: bool = False
    ) -> Seen:
        """One Generate call, broken off after `limit_s`."""
        await asyncio.sleep(after_s)
        request = pb.GenerateRequest(
            session_id=ask.session,
            request_id=ask.request_id,
            keep_history_tokens=ask.keep,
            sampling=sampling_to_proto(ask.sampling),
        )
        request.token_ids.ids.extend(ask.increment)
        if ask.tool_rounds:
            request.server_tools.extend(TOOLS)
            request.max_tool_rounds = ask.tool_rounds
        seen = Seen(ask.session, ask.request_id, replays=replays)
        call = self._stub().Generate(request, timeout=ask.deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                async for response in call:
                    self._record(seen, response)
        except TimeoutError:
            seen.dropped = True
        except grpc.aio.AioRpcError as failure:
            seen.error = from_rpc_error(failure)
        finally:
            call.cancel()
        end = "finished" if seen.finished else seen.error.reason if seen.error else "dropped"
        detail = seen.error.message[:100] if seen.error else ""
        self._cluster.note(
            self.name, ask.request_id, "keep", ask.keep, "+", len(ask.increment), "max",
            ask.sampling.max_tokens, "got", len(seen.tokens), end, detail,
        )  # fmt: skip
        return seen

    @staticmethod
    def _record(seen: Seen, response: pb.GenerateResponse) -> None:
        if seen.finished is not None:
            seen.after_end += 1
        match response.WhichOneof("event"):
            case "placed":
                seen.placed.append(response.placed)
            case "tokens":
                seen.tokens.extend(response.tokens.token_ids)
                seen.text += response.tokens.text
            case "finished" if response.finished.continues:
                seen.earlier.append(
                    replace(seen, finished=response.finished, earlier=[], called=[], returned=[])
                )
                seen.tokens, seen.text, seen.placed = [], "", []
            case "finished":
                seen.finished = response.finished
            case "tool_called":
                call = response.tool_called
                seen.earlier[-1].called.append((call.name, call.arguments))
            case "tool_returned":
                result = response.tool_returned
                seen.earlier[-1].returned.append((result.name, result.content, result.failed))


class Visitor(Agent):
    """One of a flood: a session with one round, tried once, whatever it is told."""

    async def run(self) -> None:
        """See the class."""
        await asyncio.sleep(self._rng.random() * FLOOD_WITHIN_S)
        request = pb.CreateSessionRequest(request_id=f"{self.name}-create")
        try:
            response = await self._stub().CreateSession(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            self._witness.turned_away(from_rpc_error(failure))
            return
        self.session = response.session.session_id
        ask = self._ask(0)
        self._witness.saw(ask, self._histories, await self._generate(ask, None))
        await self._close()


class Retries:
    """When to try again; None: not at all."""

    def __init__(self, rng: random.Random, patience_s: float) -> None:
        self._rng = rng
        self._until_s = asyncio.get_running_loop().time() + patience_s
        self._backoff_s = FIRST_BACKOFF_S * rng.choice((0.1, 1.0))

    def is_over(self) -> bool:
        """Whether the client has no patience left."""
        return asyncio.get_running_loop().time() > self._until_s

    def wait_s(self, error: AmpdError) -> float | None:
        """Seconds until the next attempt that the error allows."""
        if self.is_over():
            return None
        code = STATUS_CODES[error.reason]
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED}:
            wait_s = error.retry_after_s or self._backoff_s * self._rng.uniform(0.5, 1.0)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            return wait_s
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Without a hint it may not be tried again: the witness complains.
            return error.retry_after_s
        return None
