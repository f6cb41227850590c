"""The home: owns its sessions, drives their rounds, and is the arbiter of their prefill tasks.

`Home.run_round` is a round as the decode worker sees it: admit, prefill (on a prefill worker or
here), decode, settle. The prefill side of it is `services.decode.tasks`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from math import inf

import structlog

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import ITL_SAFE_RULE
from ampd.core.kv_ledger import KvLedger, RoundDemand
from ampd.core.model import (
    Accepted,
    Finished,
    KvHandle,
    PolicySpec,
    PrefillStats,
    PrefillTarget,
    Rerouted,
    RoundEvent,
    RoundOrder,
    WaitingPrefill,
    WorkerLoad,
)
from ampd.core.output import RoundOutput
from ampd.core.policies import is_literal, local_rule, number
from ampd.core.window import MeanWindow
from ampd.ports import (
    ClaimedTask,
    Clock,
    Engine,
    GenerateDone,
    GenerateRequest,
    PrefillDone,
    PrefillReport,
    TokensOut,
)
from services.decode.admission import Admission
from services.decode.late_tasks import PrefillState
from services.decode.round import KeptRound, ResidentSession, RunningRound
from services.decode.settings import HomeLimits
from services.decode.tasks import ComputedPrefill, PrefillTasks

log = structlog.get_logger(__name__)


class Home:
    """The decode worker's use case, behind `ampd.ports.DecodeHandler`."""

    def __init__(
        self,
        *,
        worker_id: str,
        engine: Engine,
        tasks: PrefillTasks,
        cost: CostModel,
        limits: HomeLimits,
        chores: asyncio.TaskGroup,
        clock: Clock,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._tasks = tasks
        self._cost = cost
        self._limits = limits
        self._chores = chores
        self._clock = clock
        self._sessions: dict[str, ResidentSession] = {}
        self._ledger = KvLedger(
            capacity_tokens=engine.info.kv_capacity_tokens, block_tokens=engine.info.block_tokens
        )
        self._admission = Admission(
            self._ledger,
            evict=self._evict,
            max_waiting=limits.max_waiting_rounds,
            clock=clock,
        )
        tasks.late.state = self._prefill_state
        self._unpinned: list[KvHandle] = []
        self._itl = MeanWindow()
        self._counts_open = True
        self._rule = ITL_SAFE_RULE
        self._store_life = ""
        self._heard_s = float("-inf")
        self.doubts = asyncio.Event()
        """Set when the store may not know what settled here."""
        self.draining = False

    # --- one round -------------------------------------------------------------------------

    async def run_round(self, order: RoundOrder) -> AsyncGenerator[RoundEvent, None]:
        """Accepted, Rerouted when the prefill moves, TokensOut ..., Finished.

        Raises DRAINING, HISTORY_NOT_RESIDENT, KV_EXHAUSTED, KV_TOO_SMALL, QUEUE_FULL before it
        accepts, ROUND_RUNNING where the store cannot say which round is newer. Closing the
        generator early discards the round and frees all it took; what it has said is kept for
        a while, for the same request.
        """
        self._require_newer(order)
        newer = AmpdError(ErrorReason.SESSION_CONFLICT, "a newer round of the session has begun")
        await self.supersede(order.session_id, newer)
        answered = self._answered(order)
        if answered is not None and answered.finished is not None:
            yield Accepted(history_rebuilt=False, resumed=answered.output)
            yield answered.finished
            return
        self._require_next(order)
        session, round_ = self._take_in(order)
        # A task of its own, so that another call can end the round and nothing else.
        round_.task = asyncio.create_task(self._carry_out(session, round_))
        round_.task.add_done_callback(lambda _: self._end(session, round_))
        try:
            while True:
                event = await round_.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            round_.task.cancel()
            await asyncio.wait([round_.task])

    async def _carry_out(self, session: ResidentSession, round_: RunningRound) -> None:
        """Admit, prefill, decode, settle; on any other end the session is as before the round."""
        order, emit = round_.order, round_.events.put
        try:
            await self._admit(session, round_)
            await self._release_pins()
            round_.history_rebuilt = order.keep_history_tokens > 0 and session.kv is None
            emit(
                Accepted(
                    history_rebuilt=round_.history_rebuilt,
                    resumed=round_.output.resumed() if round_.from_kept else None,
                )
            )
            async with aclosing(self._prefill(session, round_)) as places:
                async for place in places:
                    if isinstance(place, Rerouted):
                        round_.rerouted = place
                        emit(place)
                    else:
                        round_.computed = place
            round_.prefills_here = round_.computed is None
            self._tasks.late.look()
            stats, done = await self._decode(round_)
            emit(self._settle(session, round_, stats, done))
            await self._release_pins()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            emit(error)

    def _prefill(
        self, session: ResidentSession, round_: RunningRound
    ) -> AsyncGenerator[Rerouted | ComputedPrefill, None]:
        """Where the prompt is computed; see `PrefillTasks.prefill`."""
        return self._tasks.prefill(
            round_.order,
            round_.context,
            session.kv,
            grace_s=max(0.0, session.ttft_spare_s),
            begin_here=round_.begin_here,
        )

    def _end(self, session: ResidentSession, round_: RunningRound) -> None:
        """The round's task is done, or was superseded before its first step, which nothing
        inside it would see."""
        if session.round is round_:
            self._discard(session, round_)
        if round_.superseded is not None:
            round_.events.put(round_.superseded)
        round_.ended.set()

    def _require_newer(self, order: RoundOrder) -> None:
        """An order is newer than the round that runs, because the shared store says so; where
        it could not be asked for one of the two, the round that runs goes on."""
        session = self._sessions.get(order.session_id)
        running = session.round if session is not None else None
        if running is None or running.order.request_id == order.request_id:
            return
        if order.detached or running.order.detached:
            raise AmpdError(ErrorReason.ROUND_RUNNING, f"{order.session_id} has a running round")

    def _require_next(self, order: RoundOrder) -> None:
        """What has settled here is settled, whoever knows of it: an order that does not is
        refused until the store does, and no request is run twice. Nothing changes by a detached
        order but the session as it is, and only while its home must be this one."""
        session = self._sessions.get(order.session_id)
        if session is not None:
            self._take_back(session, order)
        rounds = session.rounds if session is not None and session.accepted else 0
        if session is not None and rounds > order.round_index:
            session.doubtful = True
            self.doubts.set()
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT,
                f"the shared store does not know yet that round {rounds - 1} of session "
                f"{order.session_id} has settled",
            )
        if session is not None and order.request_id in session.settled:
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT,
                f"request {order.request_id!r} of session {order.session_id} has settled a round",
            )
        if not order.detached:
            return
        if session is None or rounds != order.round_index:
            raise AmpdError(
                ErrorReason.HISTORY_NOT_RESIDENT,
                f"session {order.session_id} is not at home at {self._worker_id} as ordered",
            )
        if self._clock() - self._heard_s > self._limits.detached_s:
            raise AmpdError(
                ErrorReason.STORE_UNAVAILABLE,
                f"{self._worker_id} has not reached the shared store for so long that its "
                "sessions may have gone elsewhere",
            )

    def _take_back(self, session: ResidentSession, order: RoundOrder) -> None:
        """Undo the last round if its coordinator has discarded it: its client has not seen it
        end. What the round had cut off does not come back; the store has it."""
        kept = session.kept
        if (
            kept is not None
            and kept.finished is not None
            and kept.order.attempt_id in order.discarded
            and session.rounds == order.round_index + 1
        ):
            session.rounds -= 1
            session.tokens = session.tokens[: kept.order.keep_history_tokens]
            session.settled.pop()
            session.kept = None

    def _answered(self, order: RoundOrder) -> KeptRound | None:
        """What is kept of an earlier attempt at this very round."""
        session = self._sessions.get(order.session_id)
        kept = session.kept if session is not None else None
        return kept if kept is not None and kept.is_of(order) else None

    def _take_in(self, order: RoundOrder) -> tuple[ResidentSession, RunningRound]:
        """Make the round the session's running one, or refuse it with nothing changed. In one
        step, so that no other order comes between."""
        if self.draining:
            raise AmpdError(ErrorReason.DRAINING, f"{self._worker_id} is draining")
        current = self._sessions.get(order.session_id)
        if current is not None and current.round is not None:
            raise AmpdError(ErrorReason.ROUND_RUNNING, f"{order.session_id} has a running round")
        kept = self._answered(order)
        session = self._resident(order)
        resumed, from_kept = order.resumed, False
        said = 0 if resumed is None else len(resumed.token_ids)
        if kept is not None and len(kept.output.token_ids) > said:
            resumed, from_kept = kept.output, True
        prompt = session.tokens[: order.keep_history_tokens] + order.increment
        self._sessions[order.session_id] = session
        session.facts, session.slo = order.facts, order.slo
        session.kept = None
        if not order.detached:
            self.confirm(session, order.round_index)
        session.last_used_s = self._clock()
        session.round = RunningRound(
            order,
            prompt,
            started_s=session.last_used_s,
            output=RoundOutput.of(resumed),
            from_kept=from_kept,
        )
        return session, session.round

    async def _admit(self, session: ResidentSession, round_: RunningRound) -> None:
        """Have the round promised its KV, after a wait where others hold it."""
        order, limits = round_.order, self._limits
        demand = RoundDemand(
            session_id=order.session_id,
            history_tokens=order.keep_history_tokens,
            increment_tokens=len(order.increment),
            max_tokens=order.sampling.max_tokens,
            footprint_tokens=order.footprint_tokens,
        )
        wait_s = limits.admission_wait_s
        if order.admission_wait_s is not None:
            wait_s = min(wait_s, order.admission_wait_s)
        await self._admission.admit(demand, wait_s)
        session.accepted = True

    def _resident(self, order: RoundOrder) -> ResidentSession:
        """The session as this order knows it: resident, or (re)opened from the order."""
        session = self._sessions.get(order.session_id)
        keep, history = order.keep_history_tokens, order.history
        if (
            session is not None
            and session.rounds == order.round_index
            and (
                len(session.tokens) >= keep if history is None else session.tokens[:keep] == history
            )
        ):
            if history is not None:
                # A copy of as many rounds need not have had the same last one.
                session.tokens = history
            return session
        if order.history is None and keep > 0:
            raise AmpdError(
                ErrorReason.HISTORY_NOT_RESIDENT,
                f"session {order.session_id} is not resident at {self._worker_id}",
            )
        if session is not None:
            self._drop(session)
        elif len(self._sessions) >= self._limits.max_sessions:
            self._make_room_for_a_session()
        return ResidentSession(
            session_id=order.session_id,
            tokens=order.history if order.history is not None else array("I"),
            rounds=order.round_index,
            last_used_s=self._clock(),
        )

    async def _decode(self, round_: RunningRound) -> tuple[PrefillStats, GenerateDone]:
        """Run the engine and pass its tokens on; what its prefill and its end came to."""
        order, output = round_.order, round_.output
        kv = round_.computed.report.kv if round_.computed is not None else None
        stats = PrefillStats()
        request = GenerateRequest(
            request_id=f"{order.session_id}/{order.round_index}",
            tokens=round_.prompt,
            kv=kv,
            sampling=order.sampling,
            slo=order.slo,
            output=output.token_ids[:],
            text_chars=len(output.text),
            session_began_s=0.0 if order.facts is None else order.facts.created_unix_s,
        )
        round_.in_engine = True
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                match event:
                    case PrefillDone():
                        stats = event.stats
                        round_.taken, round_.prefills_here = True, False
                        self._tasks.late.look()
                    case TokensOut():
                        now_s = self._clock()
                        gap_s = output.add(event.token_ids, event.text, now_s)
                        # The first gap behind a resumption is not this worker's.
                        if gap_s is not None and round_.decoding:
                            self._itl.add(now_s, gap_s)
                        round_.decoding = True
                        round_.events.put(event)
                    case GenerateDone():
                        return stats, event
        raise AmpdError(ErrorReason.ENGINE_FAILED, "the engine ended the round without a word")

    def _settle(
        self,
        session: ResidentSession,
        round_: RunningRound,
        stats: PrefillStats,
        done: GenerateDone,
    ) -> Finished:
        """The round ended well: prompt and kept output are the session's tokens now, and the
        new pin replaces the old one."""
        session.tokens = round_.prompt + round_.output.token_ids[: done.kept_output_tokens]
        session.rounds += 1
        session.round = None
        session.settled.append(round_.order.request_id)
        session.store_life = self._store_life
        if round_.order.detached:
            session.doubtful = True
            self.doubts.set()
        session.last_used_s = self._clock()
        self._unpin(session)
        session.kv = done.kv
        self._ledger.settle(
            session.session_id,
            history_tokens=len(session.tokens),
            lease_end_s=session.last_used_s + self._kv_lease_s,
        )
        finished = round_.finished(stats, done)
        session.ttft_spare_s += round_.order.slo.ttft_s - finished.timings.ttft_s
        self._keep(session, round_, finished)
        self._admission.poke()
        self._tasks.late.look()
        return finished

    def _discard(self, session: ResidentSession, round_: RunningRound) -> None:
        """The round did not end well: the session and its pinned history are as before it."""
        self._ledger.discard(session.session_id)
        session.round = None
        session.last_used_s = self._clock()
        self._keep(session, round_, None)
        if not session.accepted or not (session.tokens or session.kept):
            self._drop(session)
        if round_.computed is not None and not round_.taken:
            self._tasks.void(round_.computed.target, round_.computed.task_id)
        self._admission.poke()
        self._tasks.late.look()

    def _keep(
        self, session: ResidentSession, round_: RunningRound, finished: Finished | None
    ) -> None:
        """Keep what the round has said, for the same request."""
        output = round_.output.resumed()
        if output is not None:
            until_s = session.last_used_s + self._limits.kept_round_s
            placed = round_.placed(self._worker_id)
            session.kept = KeptRound(round_.order, output, placed, finished, until_s)

    # --- what prefill workers call ---------------------------------------------------------

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        """See `PrefillTasks.claim`."""
        return await self._tasks.claim(task_id, worker_id, claimer)

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        """See `PrefillTasks.complete`."""
        await self._tasks.complete(task_id, worker_id, report)

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        """See `PrefillTasks.fail`."""
        await self._tasks.fail(task_id, worker_id, error_message)

    # --- sessions ----------------------------------------------------------------------------

    async def supersede(self, session_id: str, error: AmpdError) -> None:
        """End the session's running round, if any, with `error`, or its move; returns when that
        has freed all."""
        while (session := self._sessions.get(session_id)) is not None and session.moving:
            session.moving.cancel()
            await asyncio.wait([session.moving])
        if session is None or session.round is None:
            return
        round_ = session.round
        if round_.task is not None:
            round_.superseded = error
            round_.task.cancel()
            await round_.ended.wait()

    async def release(self, session_id: str, *, paused_after: int | None = None) -> None:
        """Free all that the session holds here, its running round included; with
        `paused_after` only if it is paused and has settled that many rounds. Idempotent."""
        if paused_after is not None:
            while (session := self._sessions.get(session_id)) is not None and session.moving:
                await asyncio.wait([session.moving])
            if session is not None and session.paused and session.rounds == paused_after:
                self.forget(session)
            return
        closed = AmpdError(ErrorReason.SESSION_NOT_FOUND, f"session {session_id} was closed")
        # Again for an order that waited for the same end: it is admitted before this goes on.
        while (session := self._sessions.get(session_id)) is not None:
            if session.paused:
                self._drop(session)
                await self._release_pins()
                return
            await self.supersede(session_id, closed)

    def session(self, session_id: str) -> ResidentSession | None:
        """The session as it lives here; None: it does not."""
        return self._sessions.get(session_id)

    def sessions(self) -> list[ResidentSession]:
        """All that live here."""
        return list(self._sessions.values())

    def take_over(self, session: ResidentSession, *, with_kv: bool) -> None:
        """Give a session from another home its place here and, `with_kv`, the promise of its
        KV, or refuse it with nothing changed. No other session loses anything for it.

        Raises DRAINING, ROUND_RUNNING, SESSION_CONFLICT, KV_TOO_SMALL, KV_EXHAUSTED, QUEUE_FULL.
        """
        current = self._sessions.get(session.session_id)
        if self.draining:
            raise AmpdError(ErrorReason.DRAINING, f"{self._worker_id} is draining")
        if current is not None and not current.paused:
            raise AmpdError(ErrorReason.ROUND_RUNNING, f"{session.session_id} has a running round")
        if current is not None and (current.doubtful or current.rounds > session.rounds):
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT, f"{self._worker_id} has settled a later round"
            )
        if current is None and len(self._sessions) >= self._limits.max_sessions:
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"{self._worker_id} holds {len(self._sessions)} sessions",
                retry_after_s=1.0,
            )
        demand = RoundDemand(session.session_id, len(session.tokens), 0, 0)
        if with_kv:
            self._ledger.require_free(demand, self._clock())
        if current is not None:
            self._drop(current)
        if with_kv:
            self._ledger.admit(demand, self._clock())
        self._sessions[session.session_id] = session

    def keep_taken_over(self, session: ResidentSession, kv: KvHandle | None) -> None:
        """The session is at home here now; `kv` pins its KV, as promised."""
        session.accepted, session.kv = True, kv
        session.store_life = self._store_life
        session.last_used_s = self._clock()
        if kv is not None:
            self._ledger.settle(
                session.session_id,
                history_tokens=len(session.tokens),
                lease_end_s=session.last_used_s + self._kv_lease_s,
            )
            self._admission.poke()

    def forget(self, session: ResidentSession) -> None:
        """Drop the session, unless another copy of it has taken its place."""
        if self._sessions.get(session.session_id) is session:
            self._drop(session)
            self._chores.create_task(self._release_pins(), name="release")

    def heard(self, life: str | None) -> None:
        """What a heartbeat found: the life of the shared store; None: it did not answer."""
        if life is None:
            return
        self._heard_s = self._clock()
        if life != self._store_life:
            self._store_life = life
            self.doubts.set()

    def is_doubtful(self, session: ResidentSession) -> bool:
        """Whether the store is likely to lack rounds that settled here, or the session."""
        return session.doubtful or self.has_restarted(session)

    def has_restarted(self, session: ResidentSession) -> bool:
        """Whether the store has restarted since the session's last round settled here."""
        return session.store_life != self._store_life

    def doubt(self, session_id: str) -> None:
        """The store does not answer for the session: it may lack what settled here."""
        session = self._sessions.get(session_id)
        if session is not None and self.is_unconfirmed(session):
            session.doubtful = True
            self.doubts.set()

    def is_unconfirmed(self, session: ResidentSession) -> bool:
        """Whether rounds have settled here that the store is not known to have."""
        return self.is_doubtful(session) or session.confirmed_rounds < session.rounds

    def confirm(self, session: ResidentSession, rounds: int) -> None:
        """The store knows so many of the session's rounds."""
        session.confirmed_rounds = max(session.confirmed_rounds, rounds)
        if rounds >= session.rounds:
            session.doubtful, session.store_life = False, self._store_life

    async def sweep(self) -> None:
        """Forget the sessions that nobody has used for long: the store has their tokens."""
        now_s = self._clock()
        for session in tuple(self._sessions.values()):
            if session.kept is not None and session.kept.until_s < now_s:
                session.kept = None
            unused_s = now_s - session.last_used_s
            empty = not (session.tokens or session.kept)
            if session.paused and (empty or unused_s > self._limits.session_ttl_s):
                self._drop(session)
        await self._release_pins()

    def _drop(self, session: ResidentSession) -> None:
        del self._sessions[session.session_id]
        self._ledger.close(session.session_id)
        self._unpin(session)
        self._admission.poke()

    def _evict(self, session_id: str) -> None:
        """The ledger has taken the session's KV for another's round."""
        self._unpin(self._sessions[session_id])

    def _make_room_for_a_session(self) -> None:
        """Forget the least recently used paused session, of those whose tokens the store has."""
        paused = [
            session
            for session in self._sessions.values()
            if session.paused and not self.is_doubtful(session)
        ]
        if not paused:
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"{self._worker_id} cannot let go of any of its {len(self._sessions)} sessions",
                retry_after_s=1.0,
            )
        self._drop(min(paused, key=lambda session: session.last_used_s))

    def _unpin(self, session: ResidentSession) -> None:
        """Mark the session's pin for release: deciding is synchronous, releasing is not."""
        if session.kv is not None:
            self._unpinned.append(session.kv)
            session.kv = None

    async def _release_pins(self) -> None:
        """Release what was unpinned. A caller that is cancelled stops waiting, not releasing."""
        releases = [self._chores.create_task(self._engine.release(kv)) for kv in self._unpinned]
        self._unpinned.clear()
        if releases:
            await asyncio.wait(releases)

    def apply_policy(self, policy: PolicySpec) -> None:
        """The policy in force from now on: its window is this worker's, the engine prefills by
        its rule, and paused sessions keep their KV as long as it says."""
        self._itl.window_s = number(policy, "window_s")
        self._counts_open = not is_literal(policy)
        rule = local_rule(policy)
        if rule != self._rule:
            self._rule = rule
            self._engine.use_local_rule(rule)

    @property
    def _kv_lease_s(self) -> float:
        ttl_s = self._rule.kv_ttl_s
        return self._limits.kv_lease_s if ttl_s is None else ttl_s

    @property
    def running_rounds(self) -> int:
        """Rounds admitted and not ended."""
        return sum(session.round is not None for session in self._sessions.values())

    # --- load --------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """What binding and routing need to know of this worker now."""
        now_s = self._clock()
        return self._load(now_s, self._running(), self._tasks.late.shown(now_s))

    def _running(self) -> list[RunningRound]:
        return [s.round for s in self._sessions.values() if s.round is not None]

    def _load(
        self, now_s: float, rounds: Sequence[RunningRound], waiting: tuple[WaitingPrefill, ...] = ()
    ) -> WorkerLoad:
        local = [r for r in rounds if r.prefills_here]
        decoding = [r for r in rounds if r.decoding]
        waits_s = [
            now_s - r.output.last_token_s for r in decoding if r.output.last_token_s is not None
        ]
        return WorkerLoad(
            draining=self.draining,
            queued_tasks=len(local),
            queued_prefill_s=sum(
                self._cost.t_pre(
                    r.order.keep_history_tokens, len(r.order.increment) + len(r.output.token_ids)
                )
                for r in local
            ),
            oldest_wait_s=max((now_s - r.started_s for r in local), default=0.0),
            itl_window_s=self._itl.statistic(now_s, waits_s if self._counts_open else ()),
            running_rounds=len(decoding),
            running_context_tokens=sum(len(r.prompt) + len(r.output.token_ids) for r in decoding),
            sessions=len(self._sessions),
            kv_pinned_tokens=self._ledger.pinned_tokens,
            kv_running_tokens=self._ledger.running_tokens,
            kv_reserved_tokens=self._ledger.reserved_tokens,
            waiting=waiting,
        )

    def _prefill_state(self) -> PrefillState:
        """What the home's next prefill depends on."""
        rounds, engine = self._running(), self._engine.stats()
        local = [r for r in rounds if r.prefills_here]
        begun = [r.prefill_tokens for r in local if r.in_engine]
        # An engine's count may be a step old: of what it was given only one can be half done.
        backlog = max(engine.prefill_tokens_left, sum(begun) - max(begun, default=0))
        decoding = [r for r in rounds if r.decoding]
        return PrefillState(
            load=self._load(self._clock(), rounds),
            coming_rounds=self._tasks.claimed_tasks
            + sum(r.computed is not None and not r.decoding for r in rounds),
            backlog_tokens=backlog + sum(r.prefill_tokens for r in local if not r.in_engine),
            calibration=engine.calibration,
            itl_slo_s=min((r.order.slo.itl_s for r in decoding), default=inf),
        )
