"""Rounds that call tools of the server: the stream goes on without the client (spec 2 step 5).

    round -> tool calls in its text -> the session's home runs them -> their results are the next
    round's increment -> ... -> a round that calls none

Each round is one of `Coordinator.run_round`, begun as any other: loaded, routed, placed. The
results are kept in the shared store before the round that takes them begins, so that a repeated
request_id, here or at another coordinator, gets the very same ones again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec
import structlog

from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.model import Finished, Role, ToolCall, ToolReturn, WorkerInfo
from ampd.core.tool_calls import ToolCallParser
from ampd.ports import ChatMessage, Clock, Homes, RoundContext, SessionWrites, StateStore, TokensOut
from ampd.wire.generate import TOOL_ROLE, RoundRequest
from ampd.wire.replay import RoundPlaced
from services.coordinator.coordinator import Coordinator, RoundStreamEvent
from services.coordinator.shared_state import SharedState

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_CALLS: Final = 32
"""Calls of one round that are run; the model is told that the others were not."""
MAX_CALLS_AT_ONCE: Final = 8
"""Of one session."""
MAX_WORKERS_TRIED: Final = 3
"""Decode workers that one call is given to, each when the one before was lost or full."""
LOST_CALL_S: Final = 10.0
"""How much longer than a tool may run the answer of its worker may take: the call or its answer
is lost then."""
STORE_PATIENCE_S: Final = 10.0
"""How long the store may be down between two rounds of a stream."""
STORE_RETRY_S: Final = 0.2
MAX_KEEP_ATTEMPTS: Final = 8
"""Compare-and-set attempts: each lost one means that another writer got further."""

_TRY_ELSEWHERE: Final = frozenset(
    {
        ErrorReason.WORKER_UNAVAILABLE,
        ErrorReason.STALE_INCARNATION,
        ErrorReason.DRAINING,
        ErrorReason.QUEUE_FULL,
        ErrorReason.TOOL_NOT_FOUND,
    }
)


@dataclass(frozen=True, slots=True)
class Continues:
    """The end of a round behind which the stream goes on."""

    finished: Finished


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The round that has ended called a tool of the server."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """The result of a call."""

    call: ToolCall
    returned: ToolReturn


ToolLoopEvent = RoundStreamEvent | Continues | ToolCalled | ToolReturned


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the round. `problem`: why it is not run."""

    call: ToolCall
    problem: str


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the calls behind a round returned. `rounds`: settled rounds of the session then."""

    rounds: int
    returns: list[ToolReturn]


class ToolLoop:
    """Runs a request's first round and those that its tool calls lead to."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        state: SharedState,
        store: StateStore,
        homes: Homes,
        parser: ToolCallParser,
        tool_timeout_s: float,
        clock: Clock,
        wall_clock: Clock,
    ) -> None:
        """`tool_timeout_s`: what a tool may take at its worker."""
        self._coordinator = coordinator
        self._state = state
        self._store = store
        self._homes = homes
        self._parser = parser
        self._answer_s = tool_timeout_s + LOST_CALL_S
        self._clock = clock
        self._wall_clock = wall_clock

    def run(
        self, tenant: str, request: RoundRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[ToolLoopEvent, None]:
        """`Coordinator.run_round`; with server tools also Continues, ToolCalled ...,
        ToolReturned ... and a further round, again and again. `timeout_s` is for all of it.

        Errors are those of `run_round`, of `HomePeer.run_tool`, and INVALID_FIELD for a tool that
        no live worker has. Rounds that have ended stay; closing the generator early ends the
        tools that run.
        """
        if not request.server_tools:
            return self._coordinator.run_round(tenant, request, timeout_s)
        return self._run(tenant, request, timeout_s)

    async def _run(
        self, tenant: str, request: RoundRequest, timeout_s: float | None
    ) -> AsyncGenerator[ToolLoopEvent, None]:
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        await self._check_tools(request)
        wanted = request
        for number in range(1, request.max_tool_rounds + 2):
            may_continue = number <= request.max_tool_rounds
            text: list[str] = []
            calls: list[_Call] = []
            round_index = 0
            rounds = self._coordinator.run_round(tenant, wanted, self._left_s(deadline_s))
            async with aclosing(rounds) as events:
                async for event in events:
                    match event:
                        case TokensOut():
                            text.append(event.text)
                            yield event
                        case RoundPlaced():
                            round_index = event.round_index
                            yield event
                        case Finished():
                            if may_continue:
                                calls = self._calls(request, round_index, "".join(text))
                            yield Continues(event) if calls else event
            if not calls:
                return
            for call in calls:
                yield ToolCalled(call.call)
            next_id = f"{request.request_id}#{number}" if request.request_id else ""
            behind = round_index + 1
            returns: list[ToolReturn] = []
            results = self._results(tenant, calls, behind, next_id, deadline_s, returns)
            async with aclosing(results) as returned:
                async for result in returned:
                    yield result
            wanted = replace(
                request,
                request_id=next_id,
                text=None,
                token_ids=None,
                messages=tuple(map(_message, calls, returns)),
                keep_history_tokens=None,
            )

    # --- calls -----------------------------------------------------------------------------

    async def _check_tools(self, request: RoundRequest) -> None:
        """INVALID_FIELD for a tool that is nowhere; a request that was answered once is not
        asked again what it may."""
        context = (await self._state.load(request.session_id, request.request_id)).context
        views = [view for view in context.workers if view.info.role is Role.DECODE]
        if context.replay is not None or not views:
            return
        known = {name for view in views for name in view.load.tools}
        for index, name in enumerate(request.server_tools):
            if name not in known:
                raise invalid_field(
                    f"server_tools[{index}]", f"no live decode worker has a tool {name!r}"
                )

    def _calls(self, request: RoundRequest, round_index: int, text: str) -> list[_Call]:
        """The calls that the server runs: all of the round's, or none when one is for a tool that
        it may not run here: then they are the client's."""
        parsed = self._parser(text)
        if any(not call.problem and call.name not in request.server_tools for call in parsed):
            return []
        return [
            _Call(
                ToolCall(
                    session_id=request.session_id,
                    # Not random: a tool that is called again can tell.
                    call_id=f"{request.session_id}-{round_index}-{number}",
                    name=call.name,
                    arguments=call.arguments,
                ),
                call.problem
                if number < MAX_CALLS
                else f"Not run: of a round's calls at most {MAX_CALLS} are.",
            )
            for number, call in enumerate(parsed)
        ]

    async def _results(
        self,
        tenant: str,
        calls: Sequence[_Call],
        rounds: int,
        next_id: str,
        deadline_s: float | None,
        returns: list[ToolReturn],
    ) -> AsyncGenerator[ToolReturned, None]:
        """What the calls behind the session's first `rounds` rounds return, as it comes; in
        their own order in `returns`. From the store where it has been kept under `next_id`."""
        session_id = calls[0].call.session_id
        kept_id = f"{next_id}/tools" if next_id else ""

        async def load() -> RoundContext:
            loaded = await self._state.load(session_id, kept_id)
            lifecycle.require_own(loaded.context.session, tenant, session_id)
            if loaded.detached:
                raise _store_lags()
            return loaded.context

        context = await self._patiently(load)
        assert context.session is not None  # noqa: S101 - it is the tenant's
        kept = None
        if context.replay is not None:
            kept = msgspec.json.decode(context.replay, type=_Kept)
        if context.session.rounds != rounds:
            await self._require_replay(session_id, next_id if kept else "")
        if kept is not None:
            returns.extend(kept.returns)
            for call, result in zip(calls, returns, strict=True):
                yield ToolReturned(call.call, result)
            return
        found: dict[int, ToolReturn] = {}
        async with aclosing(self._run_all(calls, context, deadline_s)) as running:
            async for number, result in running:
                found[number] = result
                yield ToolReturned(calls[number].call, result)
        returns.extend(found[number] for number in range(len(calls)))
        await self._keep(tenant, session_id, kept_id, _Kept(rounds, returns))

    async def _require_replay(self, session_id: str, next_id: str) -> None:
        """Other rounds of the session have followed: the next one must not be a new one."""
        if next_id:
            loaded = await self._state.load(session_id, next_id)
            if loaded.context.replay is not None:
                return
        raise lifecycle.conflict(session_id)

    # --- running ---------------------------------------------------------------------------

    async def _run_all(
        self, calls: Sequence[_Call], context: RoundContext, deadline_s: float | None
    ) -> AsyncGenerator[tuple[int, ToolReturn], None]:
        """The results by the calls' numbers, as they come. The first error ends all."""
        places = asyncio.Semaphore(MAX_CALLS_AT_ONCE)

        async def run(call: _Call) -> ToolReturn:
            if call.problem:
                return ToolReturn(call.problem, failed=True)
            async with places:
                return await self._run_call(call.call, context, deadline_s)

        tasks = [asyncio.create_task(run(call)) for call in calls]
        numbers = {task: number for number, task in enumerate(tasks)}
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=numbers.__getitem__):
                    yield numbers[task], task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_call(
        self, call: ToolCall, context: RoundContext, deadline_s: float | None
    ) -> ToolReturn:
        """At the session's home; where that is gone or full, at another worker."""
        error = AmpdError(
            ErrorReason.WORKER_UNAVAILABLE, f"no live decode worker has the tool {call.name!r}"
        )
        for info in _workers(call.name, context)[:MAX_WORKERS_TRIED]:
            left_s = self._left_s(deadline_s)
            patient = left_s is None or left_s > self._answer_s
            timeout_s = self._answer_s if patient else left_s
            try:
                returned = await self._homes.home(info).run_tool(call, timeout_s)
            except AmpdError as failure:
                if patient and failure.reason is ErrorReason.DEADLINE:
                    error = AmpdError(
                        ErrorReason.WORKER_UNAVAILABLE,
                        f"{info.worker_id} did not answer a tool call for {timeout_s} s",
                    )
                elif failure.reason in _TRY_ELSEWHERE:
                    error = failure
                else:
                    raise
                log.warning(
                    "tool_not_run",
                    session=call.session_id,
                    call=call.call_id,
                    worker=info.worker_id,
                    reason=error.reason,
                )
            else:
                log.info(
                    "tool_returned",
                    session=call.session_id,
                    call=call.call_id,
                    tool=call.name,
                    worker=info.worker_id,
                    failed=returned.failed,
                    seconds=round(returned.seconds, 3),
                )
                return returned
        raise error

    def _left_s(self, deadline_s: float | None) -> float | None:
        """What is left of the stream's time; DEADLINE when nothing is."""
        if deadline_s is None:
            return None
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            raise AmpdError(ErrorReason.DEADLINE, "the deadline passed between two rounds")
        return left_s

    # --- keeping ---------------------------------------------------------------------------

    async def _keep(self, tenant: str, session_id: str, kept_id: str, kept: _Kept) -> None:
        """Store the results, unless the session was used otherwise meanwhile."""
        writes = SessionWrites()
        if kept_id:
            writes = SessionWrites(replay_request_id=kept_id, replay=msgspec.json.encode(kept))

        async def write() -> None:
            for _ in range(MAX_KEEP_ATTEMPTS):
                stored = await self._store.get_session(session_id)
                record = lifecycle.require_own(stored, tenant, session_id)
                if record.rounds < kept.rounds:
                    raise _store_lags()
                if record.rounds > kept.rounds:
                    break
                used = lifecycle.use(record, now_unix_s=self._wall_clock())
                if await self._store.compare_and_set(used, record.version, writes):
                    return
            raise lifecycle.conflict(session_id)

        await self._patiently(write)

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Try it until the store answers, for a bounded time: without what it keeps, a repeated
        request would go another way than the first."""
        give_up_s = self._clock() + STORE_PATIENCE_S
        while True:
            try:
                return await operation()
            except AmpdError as error:
                down = error.reason is ErrorReason.STORE_UNAVAILABLE
                if not down or self._clock() >= give_up_s:
                    raise
            await asyncio.sleep(STORE_RETRY_S)


def _workers(tool: str, context: RoundContext) -> list[WorkerInfo]:
    """Decode workers that have the tool: the session's home, then the least busy."""
    home = context.session.home if context.session is not None else None
    able = [
        view
        for view in context.workers
        if view.info.role is Role.DECODE and tool in view.load.tools
    ]
    able.sort(
        key=lambda view: (
            home is None
            or (view.info.worker_id, view.info.incarnation) != (home.worker_id, home.incarnation),
            view.load.draining,
            view.load.running_rounds,
            view.info.worker_id,
        )
    )
    return [view.info for view in able]


def _message(call: _Call, returned: ToolReturn) -> ChatMessage:
    return ChatMessage(
        role=TOOL_ROLE,
        content=returned.content,
        name=call.call.name,
        tool_call_id=call.call.call_id,
    )


def _store_lags() -> AmpdError:
    return AmpdError(ErrorReason.STORE_UNAVAILABLE, "the shared store lags behind the session")
