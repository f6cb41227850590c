"""One round, from the client's increment to the settled history.

`Coordinator.run_round` is the path of a round (ARCHITECTURE.md): load, advance, place, execute,
stream, settle. It decides nothing itself: the lifecycle, the binding and the route are pure
functions of `ampd.core`, given what one read of the shared store told.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import structlog

from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import RunningRound, SessionRecord, SessionState
from ampd.core.model import (
    Accepted,
    BindDecision,
    Binding,
    Finished,
    PolicySpec,
    Rerouted,
    Role,
    RoundOrder,
    RoundRecord,
    WorkerInfo,
    WorkerView,
)
from ampd.ports import (
    Clock,
    Homes,
    RoundContext,
    SessionWrites,
    StateStore,
    Tokenizer,
    TokensOut,
)
from ampd.wire.generate import RoundRequest
from services.coordinator.increment import Increments
from services.coordinator.placing import Placer
from services.coordinator.replay import RoundOutcome, RoundPlaced, decode_outcome, encode_outcome
from services.coordinator.round import Round, placed
from services.coordinator.settings import RoundLimits

log = structlog.get_logger(__name__)

MAX_BEGIN_ATTEMPTS: Final = 3
DISCARD_TIMEOUT_S: Final = 10.0
DISCARD_RETRY_S: Final = 0.5

RoundStreamEvent = RoundPlaced | TokensOut | Finished


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this coordinator is in the shared store."""

    worker_id: str
    incarnation: int


class Coordinator:
    """Runs rounds over shared state alone: any replica can run any session's next round."""

    def __init__(
        self,
        *,
        identity: Identity,
        store: StateStore,
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
        """RoundPlaced (again when the prefill moves), TokensOut ..., Finished.

        `timeout_s`: what is left of the caller's deadline; it reaches the engine.

        Errors are `AmpdError` as spec 7 and 8 say. Closing the generator early, or an error,
        discards the round: the history stays as it was.
        """
        if self.draining:
            raise AmpdError(ErrorReason.DRAINING, "this coordinator is shutting down")
        if self.running_rounds >= self._limits.max_running_rounds:
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"this coordinator runs {self.running_rounds} rounds already",
                retry_after_s=1.0,
            )
        created_s = self._clock()
        self.running_rounds += 1
        try:
            begun = await self._begin(tenant, request, created_s, timeout_s)
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
        self, tenant: str, request: RoundRequest, created_s: float, timeout_s: float | None
    ) -> Round | RoundOutcome:
        """Load and advance: the round begun, or the answer that this request_id has got already.

        A lost race is looked at again: most often it was the end of a round just cancelled.
        """
        for attempt in range(1, MAX_BEGIN_ATTEMPTS + 1):
            context = await self._store.load_round(request.session_id, request.request_id)
            session = own_session(context.session, tenant, request.session_id)
            if context.replay is not None:
                return decode_outcome(context.replay)
            try:
                return await self._advance(session, context, request, created_s, timeout_s)
            except AmpdError as error:
                lost = error.reason is ErrorReason.SESSION_CONFLICT
                if not lost or attempt == MAX_BEGIN_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _advance(
        self,
        session: SessionRecord,
        context: RoundContext,
        request: RoundRequest,
        created_s: float,
        timeout_s: float | None,
    ) -> Round:
        now_unix_s = self._wall_clock()
        policy = context.policy or self._default_policy
        keep = request.keep_history_tokens
        keep = session.history_tokens if keep is None else keep
        increment = await self._increments.tokens(session, request, keep)
        decode = tuple(view for view in context.workers if view.info.role is Role.DECODE)
        max_model_tokens = max((view.info.max_model_tokens for view in decode), default=0)
        if not decode:
            raise AmpdError(ErrorReason.NO_DECODE_WORKER, "no live decode worker")
        sampling = request.sampling.resolve(max_model_tokens - keep - len(increment))
        running = RunningRound(
            request_id=request.request_id or f"ampd-{uuid.uuid4().hex}",
            attempt_id=uuid.uuid4().hex,
            coordinator_id=self._identity.worker_id,
            coordinator_incarnation=self._identity.incarnation,
            keep_history_tokens=keep,
            increment_tokens=len(increment),
            max_tokens=sampling.max_tokens,
        )
        begun = lifecycle.begin(
            session,
            running,
            coordinator_alive=self._is_running(session, context.workers),
            max_model_tokens=max_model_tokens,
            now_unix_s=now_unix_s,
        )
        round_ = Round(
            request_id=running.request_id,
            attempt_id=running.attempt_id,
            replayable=bool(request.request_id),
            created_s=created_s,
            created_unix_s=now_unix_s,
            deadline_s=None if timeout_s is None else created_s + timeout_s,
            session=begun,
            increment=increment,
            sampling=sampling,
            homes=self._placer.homes(begun, running, decode),
            prefill=tuple(view for view in context.workers if view.info.role is Role.PREFILL),
            policy=policy,
            round_index=begun.rounds,
        )
        # Live before the mark is written: whoever reads the mark finds it valid.
        self._live.add(running.attempt_id)
        try:
            await self._swap(round_, begun, session.version)
        except BaseException:
            self._live.discard(running.attempt_id)
            await asyncio.shield(self._discard(round_))
            raise
        return round_

    def _is_running(self, session: SessionRecord, workers: Sequence[WorkerView]) -> bool:
        """Whether somebody still carries out the session's running round."""
        running = session.running
        if running is None:
            return False
        owner = Identity(running.coordinator_id, running.coordinator_incarnation)
        if owner == self._identity:
            return running.attempt_id in self._live
        return any(Identity(v.info.worker_id, v.info.incarnation) == owner for v in workers)

    # --- place and execute -----------------------------------------------------------------

    async def _execute(self, round_: Round) -> AsyncGenerator[RoundStreamEvent, None]:
        """Try the homes in order until one accepts the round; stream what it does."""
        for attempt, (home, bind) in enumerate(round_.homes):
            last = attempt + 1 == len(round_.homes)
            try:
                async with aclosing(self._run_at(round_, home, bind)) as events:
                    async for event in events:
                        yield event
                return
            except AmpdError as error:
                # Only a home that has not accepted may be passed over: nothing was bound, and
                # nothing of the round was seen by the client.
                refused = error.reason in {
                    ErrorReason.WORKER_UNAVAILABLE,
                    ErrorReason.STALE_INCARNATION,
                    ErrorReason.DRAINING,
                    ErrorReason.KV_EXHAUSTED,
                    ErrorReason.QUEUE_FULL,
                }
                if last or not refused or round_.session.home == _binding(home.info):
                    raise
                log.warning("home_refused", home=home.info.worker_id, reason=error.reason)

    async def _run_at(
        self, round_: Round, home: WorkerView, bind: BindDecision | None
    ) -> AsyncGenerator[RoundStreamEvent, None]:
        decision = self._placer.route(round_, home, rebuilt=bind is not None)
        round_.record = RoundRecord(
            round_index=round_.round_index,
            request_id=round_.request_id,
            history_tokens=round_.keep_history_tokens,
            increment_tokens=len(round_.increment),
            history_rebuilt=False,
            decode_worker=home.info.worker_id,
            prefill_worker=decision.prefill_worker,
            reason=decision.reason,
            decision=decision,
            bind=bind,
            created_unix_s=round_.created_unix_s,
        )
        log.info(
            "placed",
            session=round_.session.session_id,
            round=round_.round_index,
            home=home.info.worker_id,
            route=decision.route,
            prefill_worker=decision.prefill_worker,
            reason=decision.reason,
            policy=decision.policy,
            predicted_ttft_s=round(decision.predicted_ttft_s, 6),
        )
        footprint_tokens = bind.footprint_tokens if bind is not None else 0
        order = self._placer.order(round_, decision, footprint_tokens)
        if bind is not None and order.keep_history_tokens:
            order = await self._with_history(order)
        accepted = False
        while True:
            timeout_s = round_.time_left_s(self._clock())
            try:
                async with aclosing(
                    self._homes.home(home.info).run_round(order, timeout_s)
                ) as events:
                    async for event in events:
                        match event:
                            case Accepted():
                                accepted = True
                                if bind is not None:
                                    await self._bind(round_, home.info)
                                round_.record = replace(
                                    round_.record, history_rebuilt=event.history_rebuilt
                                )
                                yield placed(round_.record)
                            case Rerouted():
                                round_.record = replace(
                                    round_.record,
                                    reason=event.reason,
                                    prefill_worker=event.prefill_worker,
                                )
                                yield placed(round_.record)
                            case TokensOut():
                                round_.output.extend(event.token_ids)
                                round_.text.append(event.text)
                                yield event
                            case Finished():
                                yield event
                return
            except AmpdError as error:
                if (
                    accepted
                    or order.history is not None
                    or error.reason is not ErrorReason.HISTORY_NOT_RESIDENT
                ):
                    raise
                # The home lost the session (expired, evicted from its table): it gets the
                # history from the store and rebuilds the KV.
                order = await self._with_history(order)

    async def _with_history(self, order: RoundOrder) -> RoundOrder:
        history = await self._store.read_history(order.session_id, 0, order.keep_history_tokens)
        return replace(order, history=history)

    async def _bind(self, round_: Round, home: WorkerInfo) -> None:
        """The home has accepted: write the binding, unless another writer was faster."""
        bound = lifecycle.bind(round_.session, _binding(home))
        await self._swap(round_, bound, round_.session.version)

    async def _swap(
        self,
        round_: Round,
        record: SessionRecord,
        expected_version: int,
        writes: SessionWrites | None = None,
    ) -> None:
        """Write the session's next record, unless another writer was faster. A cancellation
        waits for the answer: nothing may be written behind a discard's back."""

        async def swap() -> None:
            if not await self._store.compare_and_set(record, expected_version, writes):
                raise conflict(record.session_id)
            round_.session = record

        swapping = asyncio.create_task(swap())
        try:
            await asyncio.shield(swapping)
        except asyncio.CancelledError:
            await asyncio.wait({swapping})
            raise

    # --- settle or discard -----------------------------------------------------------------

    async def _settle(self, round_: Round, finished: Finished) -> None:
        """Make increment and kept output the session's history, with the round's record and
        the answer that a repeated request_id gets, all or nothing."""
        assert round_.record is not None  # noqa: S101 - set before the first event
        kept = round_.output[: finished.usage.kept_output_tokens]
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
        outcome = RoundOutcome(placed(record), list(round_.output), "".join(round_.text), finished)
        writes = SessionWrites(
            tokens_offset=round_.keep_history_tokens,
            tokens=tokens,
            round=record,
            replay_request_id=round_.request_id if round_.replayable else "",
            replay=encode_outcome(outcome) if round_.replayable else None,
        )
        await self._swap(round_, settled, round_.session.version, writes)

    async def _discard(self, round_: Round) -> None:
        """The round did not end well: the session is idle again, its history as before.

        A store that is down is tried for a while; then the mark stays, and is void for this
        coordinator at once, for others when this one's lease is gone.
        """
        session_id = round_.session.session_id
        writes = SessionWrites(round=round_.record)
        give_up_s = self._clock() + DISCARD_TIMEOUT_S
        while True:
            try:
                # Read, not remembered: of a write that failed nobody knows whether it was made.
                stored = await self._store.get_session(session_id)
                if stored is None or stored.state is SessionState.CLOSED:
                    await self._release(round_)
                    return
                if not _is_at(stored, round_.attempt_id):
                    return
                idle = lifecycle.discard(stored, now_unix_s=self._wall_clock())
                if await self._store.compare_and_set(idle, stored.version, writes):
                    return
            except AmpdError as error:
                if self._clock() > give_up_s:
                    log.warning("discard_failed", session=session_id, reason=error.reason)
                    return
            await asyncio.sleep(DISCARD_RETRY_S)

    async def _release(self, round_: Round) -> None:
        """The session was closed meanwhile: its close may have reached the home before the
        round's order did."""
        for home, _ in round_.homes:
            if round_.record is not None and home.info.worker_id == round_.record.decode_worker:
                try:
                    await self._homes.home(home.info).release(round_.session.session_id)
                except AmpdError as error:
                    # Closed is closed: a home that cannot be told drops it as idle.
                    log.warning(
                        "release_failed", session=round_.session.session_id, reason=error.reason
                    )


def _is_at(session: SessionRecord, attempt_id: str) -> bool:
    """Whether that attempt is the session's running round."""
    return session.running is not None and session.running.attempt_id == attempt_id


def own_session(record: SessionRecord | None, tenant: str, session_id: str) -> SessionRecord:
    """The tenant's open session, or SESSION_NOT_FOUND: the same for every other case."""
    if record is None or record.tenant != tenant:
        raise lifecycle.session_not_found(session_id)
    lifecycle.require_open(record)
    return record


def conflict(session_id: str) -> AmpdError:
    """Another writer was faster."""
    return AmpdError(
        ErrorReason.SESSION_CONFLICT, f"session {session_id} was changed by another call"
    )


def _binding(info: WorkerInfo) -> Binding:
    return Binding(info.worker_id, info.incarnation)
