"""One round, from the client's increment to the settled history.

`Coordinator.run_round` is the path of a round (ARCHITECTURE.md): load, advance, place, execute,
stream, settle. It decides nothing itself: the lifecycle, the binding and the route are pure
functions of `ampd.core`, given what one read of the shared store told.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import structlog

from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import RunningRound, SessionRecord
from ampd.core.model import (
    Accepted,
    Finished,
    PolicySpec,
    Rerouted,
    Role,
    RoundEvent,
    RoundOrder,
    RoundRecord,
    SamplingParams,
    WorkerView,
)
from ampd.core.output import RoundOutput
from ampd.ports import (
    Clock,
    Homes,
    SessionWrites,
    StateStore,
    Tokenizer,
    Tokens,
    TokensOut,
)
from ampd.wire.generate import RoundRequest
from ampd.wire.replay import (
    RoundOutcome,
    RoundPartial,
    RoundPlaced,
    decode_outcome,
    encode_outcome,
)
from services.coordinator.increment import Increments
from services.coordinator.placing import Placer
from services.coordinator.round import Candidate, Round, binding_of, placed
from services.coordinator.settings import RoundLimits
from services.coordinator.shared_state import Loaded, SharedState

log = structlog.get_logger(__name__)

MAX_BEGIN_ATTEMPTS: Final = 3
BEGIN_RETRY_S: Final = 0.05
MAX_LOST_HOMES: Final = 8
"""Homes that one round may lose before it is given up."""

RoundStreamEvent = RoundPlaced | TokensOut | Finished

_LOST_HOME: Final = frozenset(
    {ErrorReason.WORKER_UNAVAILABLE, ErrorReason.STALE_INCARNATION, ErrorReason.DRAINING}
)
_OTHER_STATE: Final = frozenset(
    {
        ErrorReason.HISTORY_NOT_RESIDENT,
        ErrorReason.ROUND_RUNNING,
        ErrorReason.SESSION_CONFLICT,
    }
)
_NO_ROOM: Final = frozenset({ErrorReason.KV_EXHAUSTED, ErrorReason.QUEUE_FULL})


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this coordinator is in the shared store."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks for, in tokens: from the request, or from its earlier attempt."""

    keep_history_tokens: int
    increment: Tokens
    sampling: SamplingParams
    created_s: float
    created_unix_s: float
    output: RoundOutput


class Coordinator:
    """Runs rounds over shared state alone: any replica can run any session's next round."""

    def __init__(
        self,
        *,
        identity: Identity,
        store: StateStore,
        state: SharedState,
        homes: Homes,
        tokenizer: Tokenizer,
        limits: RoundLimits,
        default_policy: PolicySpec,
        clock: Clock,
        wall_clock: Clock,
        tie_seed: Callable[[], int],
    ) -> None:
        self._identity = identity
        self._store = store
        self._state = state
        self._homes = homes
        self._limits = limits
        self._increments = Increments(tokenizer, store, inline_chars=limits.tokenise_inline_chars)
        self._placer = Placer(
            clock=clock, tie_seed=tie_seed, max_prefill_attempts=limits.max_prefill_attempts
        )
        self._default_policy = default_policy
        self._clock = clock
        self._wall_clock = wall_clock
        self._live: set[str] = set()
        """attempt_ids of the rounds that run here: a mark of ours without one is void."""
        self.running_rounds = 0
        self.draining = False

    async def run_round(
        self, tenant: str, request: RoundRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[RoundStreamEvent, None]:
        """RoundPlaced (again when the prefill or the home moves), TokensOut ..., Finished.

        `timeout_s`: what is left of the caller's deadline; it reaches the engine.

        Errors are `AmpdError` as spec 7 and 8 say. Closing the generator early, or an error,
        ends the round: the history stays as it was, and the same request_id goes on with what
        the round has said, until another round of the session begins.
        """
        if self.draining:
            raise AmpdError(ErrorReason.DRAINING, "this coordinator is shutting down")
        if self.running_rounds >= self._limits.max_running_rounds:
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"this coordinator runs {self.running_rounds} rounds already",
                retry_after_s=1.0,
            )
        arrived_s = self._clock()
        self.running_rounds += 1
        try:
            begun = await self._begin(tenant, request, arrived_s, timeout_s)
            if isinstance(begun, RoundOutcome):
                for event in begun.events():
                    yield event
                return
            round_ = begun
            settled = False
            try:
                async with aclosing(self._execute(round_)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            await self._settle(round_, event)
                            settled = True
                        yield event
            finally:
                self._live.discard(round_.attempt_id)
                if not settled:
                    await asyncio.shield(self._discard(round_))
        finally:
            self.running_rounds -= 1

    # --- load and advance: from idle to running, by compare-and-set ------------------------

    async def _begin(
        self, tenant: str, request: RoundRequest, arrived_s: float, timeout_s: float | None
    ) -> Round | RoundOutcome:
        """Load and advance: the round begun, or the answer that this request_id has got already.

        A lost race is looked at again: most often it was the end of a round just cancelled.
        """
        for attempt in range(1, MAX_BEGIN_ATTEMPTS + 1):
            loaded = await self._state.load(request.session_id, request.request_id)
            try:
                begun = await self._advance(tenant, loaded, request, arrived_s)
                if isinstance(begun, Round):
                    begun.deadline_s = None if timeout_s is None else arrived_s + timeout_s
                    await self._mark(begun)
            except AmpdError as error:
                if loaded.outage is not None:
                    # What the last known state forbids, the present one may allow.
                    raise loaded.outage from error
                lost = error.reason is ErrorReason.SESSION_CONFLICT
                if not lost or attempt == MAX_BEGIN_ATTEMPTS:
                    raise await self._state.doubted(error) from None
                await asyncio.sleep(BEGIN_RETRY_S)
            else:
                return begun
        raise AssertionError("the last attempt returns or raises")

    async def _advance(
        self, tenant: str, loaded: Loaded, request: RoundRequest, arrived_s: float
    ) -> Round | RoundOutcome:
        """The round as it would begin, nothing being written; or what this request was answered
        before."""
        context = loaded.context
        session = lifecycle.require_own(context.session, tenant, request.session_id)
        partial = None if context.replay is None else decode_outcome(context.replay)
        if isinstance(partial, RoundOutcome):
            return partial
        if request.request_id and request.request_id in session.settled:
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT,
                f"request {request.request_id!r} of session {session.session_id} has settled a "
                "round, and its answer is not to be had",
            )
        wanted = await self._wanted(session, request, partial, arrived_s)
        decode = tuple(view for view in context.workers if view.info.role is Role.DECODE)
        if not decode:
            raise AmpdError(ErrorReason.NO_DECODE_WORKER, "no live decode worker")
        max_model_tokens = max(view.info.max_model_tokens for view in decode)
        sampling = wanted.sampling
        if partial is None:
            room = max_model_tokens - wanted.keep_history_tokens - len(wanted.increment)
            sampling = request.sampling.resolve(room)
        running = RunningRound(
            request_id=request.request_id or f"ampd-{uuid.uuid4().hex}",
            attempt_id=uuid.uuid4().hex,
            coordinator_id=self._identity.worker_id,
            coordinator_incarnation=self._identity.incarnation,
            keep_history_tokens=wanted.keep_history_tokens,
            increment_tokens=len(wanted.increment),
            max_tokens=sampling.max_tokens,
        )
        begun = lifecycle.begin(
            session,
            running,
            coordinator_alive=self._is_running(session, context.workers),
            max_model_tokens=max_model_tokens,
            now_unix_s=self._wall_clock(),
        )
        return Round(
            request_id=running.request_id,
            attempt_id=running.attempt_id,
            replayable=bool(request.request_id),
            created_s=wanted.created_s,
            created_unix_s=wanted.created_unix_s,
            deadline_s=None,
            session=begun,
            read_version=session.version,
            increment=wanted.increment,
            sampling=sampling,
            homes=self._placer.homes(begun, running, decode),
            decode=decode,
            prefill=tuple(view for view in context.workers if view.info.role is Role.PREFILL),
            policy=context.policy or self._default_policy,
            round_index=begun.rounds,
            output=wanted.output,
            unseen=bool(wanted.output.token_ids),
            detached=loaded.detached,
        )

    async def _wanted(
        self,
        session: SessionRecord,
        request: RoundRequest,
        partial: RoundPartial | None,
        arrived_s: float,
    ) -> _Wanted:
        """What is asked for. An earlier attempt says it all: the round goes on, it is not a new
        one. Raises SESSION_CONFLICT when another round has begun since."""
        now_unix_s = self._wall_clock()
        if partial is None:
            keep = request.keep_history_tokens
            keep = session.history_tokens if keep is None else keep
            increment = await self._increments.tokens(session, request, keep)
            sampling = request.sampling.params
            return _Wanted(keep, increment, sampling, arrived_s, now_unix_s, RoundOutput())
        running_id = session.running.request_id if session.running is not None else ""
        if request.request_id not in {session.resumable, running_id}:
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT,
                f"the round of request {request.request_id!r} ended early, and another round of "
                f"session {session.session_id} has begun since",
            )
        created_s = arrived_s - max(0.0, now_unix_s - partial.created_unix_s)
        return _Wanted(
            partial.keep_history_tokens,
            array("I", partial.increment),
            partial.sampling,
            created_s,
            partial.created_unix_s,
            RoundOutput.of(partial.output(created_s=created_s)),
        )

    async def _mark(self, round_: Round) -> None:
        """Write the running mark, unless the store cannot be asked: then the session's home is
        the arbiter, and nothing can be bound."""
        # Live before the mark is written: whoever reads the mark finds it valid.
        self._live.add(round_.attempt_id)
        try:
            await self._write_mark(round_)
        except BaseException:
            self._live.discard(round_.attempt_id)
            await asyncio.shield(self._discard(round_))
            raise

    async def _write_mark(self, round_: Round) -> None:
        if not round_.detached:
            try:
                await self._state.swap(round_, round_.session, round_.read_version)
                return
            except AmpdError as error:
                bound = round_.homes[0].bind is None
                if error.reason is not ErrorReason.STORE_UNAVAILABLE or not bound:
                    raise
        self._state.detach(round_, round_.session)

    def _is_running(self, session: SessionRecord, workers: Sequence[WorkerView]) -> bool:
        """Whether somebody still carries out the session's running round."""
        running = session.running
        if running is None:
            return False
        owner = Identity(running.coordinator_id, running.coordinator_incarnation)
        if owner == self._identity:
            return running.attempt_id in self._live
        alive = any(Identity(v.info.worker_id, v.info.incarnation) == owner for v in workers)
        # Leases have run out during an outage of the store: who lives is not known at once.
        return alive or self._state.is_recovering()

    # --- place and execute -----------------------------------------------------------------

    async def _execute(self, round_: Round) -> AsyncGenerator[RoundStreamEvent, None]:
        """Have a home carry out the round. One that is lost, before or in the middle, is
        replaced by another, which goes on where the round stands."""
        while True:
            home = round_.homes[0]
            accepted = False
            try:
                async with aclosing(self._run_at(round_, home)) as events:
                    async for event in events:
                        accepted = True
                        yield event
                return
            except AmpdError as error:
                log.warning(
                    "home_failed",
                    session=round_.session.session_id,
                    round=round_.round_index,
                    home=home.view.info.worker_id,
                    accepted=accepted,
                    reason=error.reason,
                    error=error.message,
                )
                await self._next_home(round_, error, accepted=accepted)

    async def _next_home(self, round_: Round, error: AmpdError, *, accepted: bool) -> None:
        """Make another home the next to try, or raise `error`."""
        refused = round_.homes.popleft()
        if error.reason in _LOST_HOME and len(round_.lost) < MAX_LOST_HOMES:
            round_.lost.add(refused.binding)
            self._placer.lose(refused.binding)
            if refused.bind is None or accepted:
                # It was the session's home: look for a new one among those that live now.
                round_.decode = await self._state.decode_workers(round_.decode)
                running = lifecycle.require_running(round_.session)
                try:
                    round_.homes = self._placer.homes(
                        round_.session, running, round_.decode, round_.lost
                    )
                except AmpdError as none:
                    # The loss says more than that there is no other.
                    raise _unreachable(error) from none
            else:
                for candidate in [c for c in round_.homes if c.binding == refused.binding]:
                    round_.homes.remove(candidate)
        elif accepted or refused.bind is None or error.reason not in _NO_ROOM:
            raise error
        if not round_.homes:
            raise _unreachable(error)

    async def _run_at(
        self, round_: Round, home: Candidate
    ) -> AsyncGenerator[RoundStreamEvent, None]:
        """The round at one home: route, order, bind, stream."""
        if round_.detached and home.bind is not None:
            raise AmpdError(
                ErrorReason.STORE_UNAVAILABLE,
                "the shared store is down or has just restarted: nothing can be bound",
            )
        order = await self._order(round_, home)
        accepted = False
        while True:
            timeout_s = round_.time_left_s(self._clock())
            try:
                async with aclosing(
                    self._homes.home(home.view.info).run_round(order, timeout_s)
                ) as events:
                    async for event in events:
                        if isinstance(event, Accepted):
                            accepted = True
                            if home.bind is not None:
                                await self._bind(round_, home)
                        for told in self._follow(round_, event):
                            yield told
                return
            except AmpdError as error:
                if round_.detached and not accepted and error.reason in _OTHER_STATE:
                    # The home knows better than this coordinator, which has no store to ask.
                    raise AmpdError(ErrorReason.STORE_UNAVAILABLE, error.message) from error
                if (
                    accepted
                    or order.history is not None
                    or error.reason is not ErrorReason.HISTORY_NOT_RESIDENT
                ):
                    raise
                # The home lost the session (expired, evicted from its table): it gets the
                # history from the store and rebuilds the KV.
                order = await self._with_history(order)

    async def _order(self, round_: Round, home: Candidate) -> RoundOrder:
        """Route the prefill, and say what the home has to do."""
        info = home.view.info
        decision = self._placer.route(round_, home.view, rebuilt=home.bind is not None)
        round_.record = RoundRecord(
            round_index=round_.round_index,
            request_id=round_.request_id,
            history_tokens=round_.keep_history_tokens,
            increment_tokens=len(round_.increment),
            history_rebuilt=False,
            decode_worker=info.worker_id,
            prefill_worker=decision.prefill_worker,
            reason=decision.reason,
            decision=decision,
            bind=home.bind,
            created_unix_s=round_.created_unix_s,
        )
        log.info(
            "placed",
            session=round_.session.session_id,
            round=round_.round_index,
            home=info.worker_id,
            route=decision.route,
            prefill_worker=decision.prefill_worker,
            reason=decision.reason,
            policy=decision.policy,
            predicted_ttft_s=round(decision.predicted_ttft_s, 6),
            said_tokens=len(round_.output.token_ids),
        )
        order = self._placer.order(round_, decision, home)
        if home.bind is not None:
            # Even one of no tokens says that what the home may hold of the session is void.
            order = await self._with_history(order)
        return order

    def _follow(self, round_: Round, event: RoundEvent) -> Sequence[RoundStreamEvent]:
        """Note what the home tells, and what the client is told of it."""
        assert round_.record is not None  # noqa: S101 - set with the order
        match event:
            case Accepted():
                round_.record = replace(round_.record, history_rebuilt=event.history_rebuilt)
                if event.resumed is not None:
                    # The home has more of an earlier attempt than this coordinator.
                    round_.output, round_.unseen = RoundOutput.of(event.resumed), True
                if round_.unseen:
                    round_.unseen = False
                    said = TokensOut(tuple(round_.output.token_ids), round_.output.text)
                    return (placed(round_.record), said)
                return (placed(round_.record),)
            case Rerouted():
                round_.record = replace(
                    round_.record, reason=event.reason, prefill_worker=event.prefill_worker
                )
                return (placed(round_.record),)
            case TokensOut():
                round_.output.add(event.token_ids, event.text, self._clock())
                return (event,)
            case Finished():
                return (event,)

    async def _with_history(self, order: RoundOrder) -> RoundOrder:
        history = await self._store.read_history(order.session_id, 0, order.keep_history_tokens)
        return replace(order, history=history)

    async def _bind(self, round_: Round, home: Candidate) -> None:
        """The home has accepted: write the binding, unless another writer was faster. A store
        that is down gets the first one with the settled round."""
        bound = lifecycle.bind(round_.session, binding_of(home.view.info))
        try:
            await self._state.swap(round_, bound, round_.session.version)
        except AmpdError as error:
            if error.reason is not ErrorReason.STORE_UNAVAILABLE or round_.session.home is not None:
                # Its old home may live: others would go on there, as far as they know.
                raise
            self._state.detach(round_, bound)

    # --- settle or discard -----------------------------------------------------------------

    async def _settle(self, round_: Round, finished: Finished) -> None:
        """Make increment and kept output the session's history, with the round's record and
        the answer that a repeated request_id gets, all or nothing. A store that is down gets it
        later: the round has ended all the same."""
        assert round_.record is not None  # noqa: S101 - set before the first event
        output = round_.output
        kept = output.token_ids[: finished.usage.kept_output_tokens]
        tokens = round_.increment + kept
        record = replace(
            round_.record,
            finish_reason=finished.finish_reason,
            usage=finished.usage,
            timings=finished.timings,
            attained=finished.attained,
        )
        settled = lifecycle.settle(
            round_.session,
            output_tokens=len(kept),
            last_token_id=tokens[-1],
            prefilled_by=record.prefill_worker,
            now_unix_s=self._wall_clock(),
        )
        outcome = RoundOutcome(placed(record), output.token_ids.tolist(), output.text, finished)
        writes = SessionWrites(
            tokens_offset=round_.keep_history_tokens,
            tokens=tokens,
            round=record,
            replay_request_id=round_.request_id if round_.replayable else "",
            replay=encode_outcome(outcome) if round_.replayable else None,
        )
        await self._state.settle(round_, settled, writes)

    async def _discard(self, round_: Round) -> None:
        """The round did not end well: the session is idle again, its history as before. What
        it has said is kept for the same request."""
        said = round_.output.resumed() if round_.replayable else None
        writes = SessionWrites(round=round_.record)
        if said is not None:
            partial = RoundPartial.of(
                said,
                increment=round_.increment,
                keep_history_tokens=round_.keep_history_tokens,
                sampling=round_.sampling,
                created_s=round_.created_s,
                created_unix_s=round_.created_unix_s,
            )
            writes = replace(
                writes, replay_request_id=round_.request_id, replay=encode_outcome(partial)
            )
        closed = await self._state.discard(round_, writes)
        if closed:
            await self._release(round_)

    async def _release(self, round_: Round) -> None:
        """The session was closed meanwhile: its close may have reached the home before the
        round's order did."""
        for view in round_.decode:
            if round_.record is not None and view.info.worker_id == round_.record.decode_worker:
                try:
                    await self._homes.home(view.info).release(round_.session.session_id)
                except AmpdError as error:
                    # Closed is closed: a home that cannot be told finds out by itself.
                    log.warning(
                        "release_failed", session=round_.session.session_id, reason=error.reason
                    )


def _unreachable(error: AmpdError) -> AmpdError:
    """What a client is told of the last home that could not take its round."""
    if error.reason is ErrorReason.STALE_INCARNATION:
        return AmpdError(ErrorReason.WORKER_UNAVAILABLE, f"the home was restarted: {error.message}")
    return error
