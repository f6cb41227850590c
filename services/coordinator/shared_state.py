"""The shared store as rounds use it, through its outages (spec 7).

While the store is down, rounds that run go on and end: what they leave is written back when it
answers again. New rounds of sessions known here begin on the last known state, for a bounded
time; such a round is *detached*: no store has its mark, so the session's home is the arbiter, and
nothing is bound. A store that comes back without its last second gets the rounds of the last
seconds once more.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import PolicySpec, Role, WorkerView
from ampd.ports import Clock, RoundContext, SessionWrites, StateStore
from services.coordinator.round import Round

log = structlog.get_logger(__name__)

MAX_KNOWN_SESSIONS: Final = 16_384
"""Session records remembered for an outage; the least recently used are forgotten."""
MAX_PENDING_WRITES: Final = 8192
"""Ended rounds that wait for the store; over it a round's end fails with STORE_UNAVAILABLE."""
PENDING_TTL_S: Final = 600.0
"""A write that found no chance for so long is given up (and logged)."""
FLUSH_EVERY_S: Final = 0.2
RECENT_S: Final = 5.0
"""A store that syncs its file every second may forget so much when it dies, with room."""
MAX_RECENT_WRITES: Final = 8192
CLOCK_SKEW_S: Final = 1.0
"""Between the wall clocks of coordinators, and what a store's age is rounded by."""
RECOVERY_S: Final = 3.0
"""What homes take to notice that a store has restarted, and to publish what it has lost."""
WRITE_ATTEMPTS: Final = 2
WRITE_RETRY_S: Final = 0.1
"""The end of a round is tried again once before it waits for the store: a single operation that
fails is no outage, and whoever comes next should find the round ended."""
SETTLE_WAIT_S: Final = 0.5
"""How long the end of a round that began without the store waits for it: it may be back."""
DISCARD_ATTEMPTS: Final = 8
"""Compare-and-set attempts: each lost one means that another writer got further."""


_RESTS_ON_THE_RECORD: Final = frozenset(
    {
        ErrorReason.CONTEXT_TOO_LONG,
        ErrorReason.INVALID_FIELD,
        ErrorReason.ROUND_RUNNING,
        ErrorReason.SESSION_CONFLICT,
        ErrorReason.SESSION_NOT_FOUND,
    }
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a decision reads."""

    context: RoundContext
    detached: bool = False
    """Whether the session goes on without the store: it is down, or lags behind."""
    outage: AmpdError | None = None
    """Why this is the last known state; None: it is the present one."""


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """The end of a round for the store. `settled`: the session as it left it; None: discarded.
    Without an attempt_id: a session as it was created or closed."""

    session_id: str
    attempt_id: str
    settled: SessionRecord | None
    writes: SessionWrites
    since_s: float


class SharedState:
    """What one coordinator reads and writes for its rounds. `run` has to run beside it."""

    def __init__(
        self,
        *,
        store: StateStore,
        clock: Clock,
        wall_clock: Clock,
        max_state_age_s: float,
        lease_s: float,
    ) -> None:
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_state_age_s = max_state_age_s
        self._lease_s = lease_s
        self._workers: tuple[WorkerView, ...] = ()
        self._policy: PolicySpec | None = None
        self._read_s = float("-inf")
        self._sessions: OrderedDict[str, SessionRecord] = OrderedDict()
        self._detached: dict[str, SessionRecord] = {}
        """Sessions whose round runs here without a mark in the store."""
        self._pending: dict[str, deque[PendingWrite]] = {}
        self._recent: deque[PendingWrite] = deque(maxlen=MAX_RECENT_WRITES)
        self._flushing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._down = False
        self._recovered_s = self._store_started_s = float("-inf")
        self._life = ""
        self._heard_s = float("-inf")

    # --- the store's health ------------------------------------------------------------------

    def heard(self, life: str | None) -> None:
        """What a heartbeat found: the life of the store that answered; None: none did."""
        if life is None:
            self._down = True
            return
        self._answered()
        if self._life and life != self._life:
            self._recovered_s = now_s = self._clock()
            since_s = self._heard_s - RECENT_S
            again = [write for write in self._recent if write.since_s >= since_s]
            self._recent.clear()
            log.warning("store_restarted", written_again=len(again))
            for write in again:
                self._write_later(replace(write, since_s=now_s))
            # One that came back empty takes itself for a new one.
            self._store_started_s = now_s
        self._life, self._heard_s = life, self._clock()
        self._store_started_s = max(self._store_started_s, self._heard_s - self._store.age_s)

    def noted(self, record: SessionRecord, request_id: str) -> None:
        """A session was created or closed: a store that forgets it is told again."""
        writes = SessionWrites(replay_request_id=request_id)
        self._recent.append(PendingWrite(record.session_id, "", record, writes, self._clock()))

    def _may_be_old(self, record: SessionRecord | None) -> bool:
        """Whether the store lives so shortly that homes may have yet to publish what an earlier
        life of it knew of the session. One that was created since then is as it is."""
        store_age_s = self._clock() - self._store_started_s
        if store_age_s >= RECOVERY_S:
            return False
        started_unix_s = self._wall_clock() - store_age_s
        return record is None or record.created_unix_s < started_unix_s + CLOCK_SKEW_S

    async def written(self, session_id: str) -> None:
        """Returns when the store has all that has ended here of the session while it was down;
        STORE_UNAVAILABLE when it takes none of it."""
        if session_id in self._pending:
            await self._flush()
            if session_id in self._pending:
                raise _incomplete()

    async def require_complete(self, record: SessionRecord | None) -> None:
        """STORE_UNAVAILABLE while a store that has restarted may lack what it knew before."""
        await self._store.ping()
        self.heard(self._store.life)
        if self._may_be_old(record):
            raise _incomplete()

    async def doubted(self, error: AmpdError) -> AmpdError:
        """What to answer instead of `error`, which rests on what the store has told: a store that
        was down or has restarted a moment ago may not have got back what it lacks."""
        if error.reason in _RESTS_ON_THE_RECORD:
            try:
                await self._store.ping()
                self.heard(self._store.life)
            except AmpdError as failed:
                self._failed(failed)
                return failed
            if self.is_recovering() or self._may_be_old(None):
                return AmpdError(
                    ErrorReason.STORE_UNAVAILABLE,
                    f"the shared store is back and not complete yet: {error.message}",
                )
        return error

    def is_recovering(self) -> bool:
        """Whether the store was down a moment ago: leases may have run out meanwhile, and who
        lives is not known until everybody has had the time to register again."""
        return self._clock() - self._recovered_s < max(self._lease_s, RECOVERY_S)

    @property
    def pending_writes(self) -> int:
        """Ended rounds that wait for the store."""
        return sum(len(writes) for writes in self._pending.values())

    # --- reads -------------------------------------------------------------------------------

    async def load(self, session_id: str, request_id: str) -> Loaded:
        """What a decision reads, or what is left of it while the store is down: the last known
        state. STORE_UNAVAILABLE when that is too old, or lacks the session."""
        if session_id in self._pending:
            await self._flush()
        try:
            context = await self._store.load_round(session_id, request_id)
        except AmpdError as error:
            self._failed(error)
            return Loaded(self._last_known(session_id, request_id, error), True, error)
        self.heard(self._store.life)
        self._workers, self._policy, self._read_s = context.workers, context.policy, self._clock()
        if session_id in self._detached:
            return Loaded(replace(context, session=self._detached[session_id]), True)
        known = self._sessions.get(session_id)
        if session_id in self._pending and known is not None:
            # The store still lags behind what this coordinator has ended, unless others went on.
            stored = context.session
            if stored is None or stored.rounds <= known.rounds:
                return Loaded(replace(context, session=known), True)
        if context.session is not None:
            self._note(context.session)
        if self._may_be_old(context.session):
            # The home must confirm what the store says, as if it were down.
            return Loaded(context, True, _incomplete())
        return Loaded(context)

    async def decode_workers(self, last_known: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
        """Those that live now; `last_known` where the store cannot tell."""
        try:
            views = await self._store.list_workers()
        except AmpdError as error:
            self._failed(error)
            return last_known
        return tuple(view for view in views if view.info.role is Role.DECODE)

    def _last_known(self, session_id: str, request_id: str, error: AmpdError) -> RoundContext:
        age_s = self._clock() - self._read_s
        session = self._sessions.get(session_id)
        if age_s > self._max_state_age_s or session is None:
            raise error
        ended = (*self._recent, *self._pending.get(session_id, ()))
        replays = [
            write.writes.replay
            for write in ended
            if request_id
            and (write.session_id, write.writes.replay_request_id) == (session_id, request_id)
        ]
        workers = tuple(
            WorkerView(view.info, view.load, view.age_s + age_s) for view in self._workers
        )
        return RoundContext(session, workers, self._policy, replays[-1] if replays else None)

    # --- writes ------------------------------------------------------------------------------

    async def swap(
        self,
        round_: Round,
        record: SessionRecord,
        expected_version: int,
        writes: SessionWrites | None = None,
    ) -> None:
        """Write the session's next record, unless another writer was faster. A cancellation
        waits for the answer: nothing may be written behind a discard's back. A detached round
        is written when it ends."""
        if round_.detached:
            self.detach(round_, record)
            return

        async def write() -> None:
            if not await self._store.compare_and_set(record, expected_version, writes):
                raise lifecycle.conflict(record.session_id)
            self._answered()
            round_.session = record
            self._note(record)

        writing = asyncio.create_task(write())
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.gather(writing, return_exceptions=True)
            raise
        except AmpdError as error:
            self._failed(error)
            raise

    def detach(self, round_: Round, record: SessionRecord) -> None:
        """The round goes on without the store."""
        round_.detached = True
        round_.session = self._detached[record.session_id] = record
        self._note(record)

    async def settle(self, round_: Round, settled: SessionRecord, writes: SessionWrites) -> None:
        """The round ended well. SESSION_CONFLICT: another call has changed the session."""
        ended = PendingWrite(settled.session_id, round_.attempt_id, settled, writes, self._clock())
        for attempt in range(WRITE_ATTEMPTS):
            if round_.detached:
                break
            if attempt:
                await asyncio.sleep(WRITE_RETRY_S)
            try:
                await self.swap(round_, settled, round_.session.version, writes)
            except AmpdError as error:
                if error.reason is ErrorReason.SESSION_CONFLICT:
                    behind = await self._settle_behind(ended)
                    if behind is None:
                        break
                    if not behind:
                        raise
                elif error.reason is ErrorReason.INTERNAL:
                    # The store has lost tokens in front of it: it gets all from the home first.
                    log.warning("settle_refused", session=settled.session_id, error=error.message)
                    break
                elif error.reason is not ErrorReason.STORE_UNAVAILABLE:
                    raise
                else:
                    continue
            self._recent.append(replace(ended, since_s=self._clock()))
            return
        self._write_later(ended)
        round_.detached, round_.session = True, settled
        self._note_end(ended, settled)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_WAIT_S):
                await self._flush()

    async def _settle_behind(self, ended: PendingWrite) -> bool | None:
        """Whether the round's end got into a store that had forgotten its beginning, or that its
        home was faster with. None: it must wait; the store is down, or lacks the session."""
        try:
            context = await self._store.load_round(ended.session_id, "")
            stored, settled = context.session, ended.settled
            if stored is None:
                return None
            if settled is None or stored.state is SessionState.CLOSED:
                return False
            if stored.running is None and stored.rounds == settled.rounds:
                same_home = stored.home == settled.home
                return same_home and stored.history_tokens == settled.history_tokens
            # A round that has settled stays, whatever has begun without knowing of it.
            record = lifecycle.write_back(stored, settled, ended.attempt_id)
            return record is not None and await self._store.compare_and_set(
                record, stored.version, ended.writes
            )
        except AmpdError as error:
            self._failed(error)
            return None

    async def discard(self, round_: Round, writes: SessionWrites) -> bool:
        """The round ended without a result; whether the session is closed."""
        session_id, resumable = round_.session.session_id, writes.replay_request_id
        ended = PendingWrite(session_id, round_.attempt_id, None, writes, self._clock())
        self._forget_detached(ended)
        for attempt in range(WRITE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(WRITE_RETRY_S)
            try:
                closed = await self._discard(round_, writes)
            except AmpdError as error:
                self._failed(error)
            else:
                self._recent.append(ended)
                return closed
        if round_.session.running is not None:
            now_unix_s = round_.session.last_used_unix_s
            idle = lifecycle.discard(round_.session, resumable=resumable, now_unix_s=now_unix_s)
            self._note_end(ended, idle)
        try:
            self._write_later(ended)
        except AmpdError as full:
            log.error("discard_not_written", session=session_id, error=full.message)
        return False

    async def _discard(self, round_: Round, writes: SessionWrites) -> bool:
        session_id, resumable = round_.session.session_id, writes.replay_request_id
        for _ in range(DISCARD_ATTEMPTS):
            # Read, not remembered: of a write that failed nobody knows whether it was made.
            stored = await self._store.get_session(session_id)
            if stored is None:
                return False  # expired, or lost: its home will know
            if stored.state is SessionState.CLOSED:
                self._sessions.pop(session_id, None)
                return True
            idle = lifecycle.write_back(stored, None, round_.attempt_id, resumable=resumable)
            if idle is None:
                self._note(stored)
                return False
            if await self._store.compare_and_set(idle, stored.version, writes):
                self._note(idle)
                return False
        return False

    def _write_later(self, write: PendingWrite) -> None:
        if self.pending_writes >= MAX_PENDING_WRITES:
            raise AmpdError(
                ErrorReason.STORE_UNAVAILABLE, "too many ended rounds wait for the shared store"
            )
        self._pending.setdefault(write.session_id, deque()).append(write)
        self._wake.set()

    # --- writing back ------------------------------------------------------------------------

    async def run(self) -> None:
        """Write back what waits, whenever the store answers; until cancelled."""
        while True:
            if not self._pending:
                self._wake.clear()
                await self._wake.wait()
            await self._flush()
            if self._pending:
                await asyncio.sleep(FLUSH_EVERY_S)

    async def _flush(self) -> None:
        async with self._flushing:
            try:
                for session_id in tuple(self._pending):
                    await self._flush_session(session_id)
            except AmpdError as error:
                self._failed(error)

    async def _flush_session(self, session_id: str) -> None:
        pending = self._pending[session_id]
        while pending:
            write = pending[0]
            if self._clock() - write.since_s > PENDING_TTL_S:
                log.error("write_given_up", session=session_id, attempt=write.attempt_id)
            elif not await self._write_back(write):
                return
            else:
                # A store that restarts once more may lose it again.
                self._recent.append(replace(write, since_s=self._clock()))
            pending.popleft()
        del self._pending[session_id]

    async def _write_back(self, write: PendingWrite) -> bool:
        """Whether the write is done with: written, or void."""
        request_id = write.writes.replay_request_id
        context = await self._store.load_round(write.session_id, request_id)
        self._answered()
        stored = context.session
        if stored is None and write.attempt_id:
            # A store that has lost the session gets it from its home first.
            return write.settled is None
        if stored is None or not write.attempt_id:
            return await self._write_session_again(write, stored)
        record = lifecycle.write_back(
            stored,
            write.settled,
            write.attempt_id,
            resumable=request_id if write.settled is None else "",
            answer_missing=bool(request_id) and context.replay is None,
        )
        if record is None:
            return True
        writes = write.writes
        if stored.rounds >= record.rounds:
            # The home has published the tokens; the round's record and answer are missing.
            writes = replace(writes, tokens=None, tokens_offset=0)
        try:
            written = await self._store.compare_and_set(record, stored.version, writes)
        except AmpdError as error:
            if error.reason is not ErrorReason.INTERNAL:
                raise
            # The store lacks tokens in front: it gets all of them from the session's home.
            log.warning("write_back_refused", session=write.session_id, error=error.message)
            return False
        if written:
            self._note(record)
        return written

    async def _write_session_again(self, write: PendingWrite, stored: SessionRecord | None) -> bool:
        """A creation or a close that the store may have lost."""
        record = write.settled
        if record is None:
            return True
        if stored is None and record.state is not SessionState.CLOSED:
            try:
                await self._store.create_session(record, write.writes.replay_request_id)
            except AmpdError as error:
                # Published by its home at this moment.
                if error.reason is not ErrorReason.SESSION_CONFLICT:
                    raise
        elif stored is not None and record.state is SessionState.CLOSED:
            if stored.state is SessionState.CLOSED:
                return True
            closed = replace(record, version=stored.version + 1)
            return await self._store.compare_and_set(closed, stored.version)
        return True

    # --- how ---------------------------------------------------------------------------------

    def _note(self, record: SessionRecord) -> None:
        self._sessions[record.session_id] = record
        self._sessions.move_to_end(record.session_id)
        if len(self._sessions) > MAX_KNOWN_SESSIONS:
            self._sessions.popitem(last=False)

    def _note_end(self, ended: PendingWrite, record: SessionRecord) -> None:
        """What the session is behind an attempt's end, unless this coordinator has seen it go
        on: an end may have waited for the store while the same request was answered again."""
        self._forget_detached(ended)
        known = self._sessions.get(ended.session_id)
        behind = known is None or known.rounds < record.rounds
        if behind or _is_marked(known, ended.attempt_id):
            self._note(record)

    def _forget_detached(self, ended: PendingWrite) -> None:
        if _is_marked(self._detached.get(ended.session_id), ended.attempt_id):
            del self._detached[ended.session_id]

    def _failed(self, error: AmpdError) -> None:
        if error.reason is ErrorReason.STORE_UNAVAILABLE:
            self._down = True

    def _answered(self) -> None:
        if self._down:
            self._down = False
            self._recovered_s = self._clock()


def _is_marked(record: SessionRecord | None, attempt_id: str) -> bool:
    """Whether that attempt is the session's running one."""
    return (
        record is not None
        and record.running is not None
        and record.running.attempt_id == attempt_id
    )


def _incomplete() -> AmpdError:
    return AmpdError(
        ErrorReason.STORE_UNAVAILABLE,
        "the shared store was down and may not have got back what it lacks",
        retry_after_s=RECOVERY_S,
    )
