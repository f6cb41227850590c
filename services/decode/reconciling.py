"""Keeping a home's sessions and the shared store in agreement, off the path of rounds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import Binding
from ampd.core.reconcile import Fate, ResidentCopy, fate, published, unpublished
from ampd.ports import Clock, SessionWrites, StateStore
from ampd.wire.replay import RoundOutcome, encode_outcome
from services.decode.home import Home
from services.decode.round import ResidentSession

log = structlog.get_logger(__name__)

EVERY_S: Final = 2.0
MAX_SESSIONS_A_PASS: Final = 256
"""Sessions looked at in one pass, in turn, and as many whose last round is not confirmed;
doubtful ones all."""
SETTLING_S: Final = 1.0
"""A session used so recently may be about to be written by its coordinator, which knows more
of a round than its home: the answer to a repeated request."""


class Reconciler:
    """Looks at sessions in turn, and at all that the store may not know when it was down."""

    def __init__(
        self, *, me: Binding, home: Home, store: StateStore, clock: Clock, wall_clock: Clock
    ) -> None:
        self._me = me
        self._home = home
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._next = 0

    async def run(self) -> None:
        """Until cancelled."""
        doubts = self._home.doubts
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await doubts.wait()
            if doubts.is_set():
                doubts.clear()
                await asyncio.sleep(SETTLING_S)
            await self.reconcile()

    async def reconcile(self) -> None:
        """One pass. A store that does not answer ends it; the next one comes."""
        sessions = self._home.sessions()
        self._next = 0 if self._next >= len(sessions) else self._next
        turn = sessions[self._next : self._next + MAX_SESSIONS_A_PASS]
        self._next += MAX_SESSIONS_A_PASS
        doubtful = [session for session in sessions if self._home.is_doubtful(session)]
        unconfirmed = [session for session in sessions if self._home.is_unconfirmed(session)]
        due = (*doubtful, *unconfirmed[:MAX_SESSIONS_A_PASS], *turn)
        try:
            for session in {id(s): s for s in due}.values():
                try:
                    await self._reconcile(session)
                except AmpdError as error:
                    # Written by somebody else meanwhile: looked at again in its turn.
                    if error.reason is not ErrorReason.SESSION_CONFLICT:
                        raise
        except AmpdError as error:
            log.info("reconcile_ended", error=str(error))
        if any(map(self._home.is_doubtful, self._home.sessions())):
            self._home.doubts.set()

    async def _reconcile(self, session: ResidentSession) -> None:
        copy = self._copy(session)
        if copy is None:
            return
        stored = await self._store.get_session(copy.session_id)
        if self._copy(session) != copy:
            return  # a round has begun, or the session has gone, meanwhile
        decided = fate(stored, copy)
        if decided is Fate.WAIT and stored is not None and await self._is_void(stored):
            decided = Fate.PUBLISH
        match decided:
            case Fate.KEEP:
                self._home.confirm(session, copy.rounds)
            case Fate.WAIT:
                pass
            case Fate.DROP:
                log.info("copy_dropped", session=copy.session_id, rounds=copy.rounds)
                self._home.forget(session)
            case Fate.PUBLISH:
                await self._publish(session, copy, stored)

    async def _is_void(self, stored: SessionRecord) -> bool:
        """Whether nobody carries out the round that the store marks as running."""
        running = stored.running
        return running is not None and not any(
            (view.info.worker_id, view.info.incarnation)
            == (running.coordinator_id, running.coordinator_incarnation)
            for view in await self._store.list_workers()
        )

    async def _publish(
        self, session: ResidentSession, copy: ResidentCopy, stored: SessionRecord | None
    ) -> None:
        """Tokens, record and the answer of the last round, all or nothing."""
        now_unix_s = self._wall_clock()
        if stored is None:
            base = unpublished(copy, now_unix_s=now_unix_s)
            stored = await self._store.create_session(base, "")
        writes = SessionWrites(tokens=session.tokens)
        kept = session.kept
        if kept is not None and kept.finished is not None:
            outcome = RoundOutcome(
                kept.placed, kept.output.token_ids.tolist(), kept.output.text, kept.finished
            )
            writes = replace(
                writes,
                replay_request_id=kept.order.request_id,
                replay=encode_outcome(outcome),
            )
        record = published(stored, copy, now_unix_s=now_unix_s)
        if await self._store.compare_and_set(record, stored.version, writes):
            log.info("published", session=copy.session_id, rounds=copy.rounds)
            if self._copy(session) == copy:
                self._home.confirm(session, copy.rounds)

    def _copy(self, session: ResidentSession) -> ResidentCopy | None:
        """The session as it is at home here; None while it is not, or is in use."""
        resident = self._home.session(session.session_id) is session
        if not resident or not session.paused:
            return None
        if session.facts is None or session.slo is None:
            return None
        if self._clock() - session.last_used_s < SETTLING_S and not session.doubtful:
            return None
        kept = session.kept
        return ResidentCopy(
            session_id=session.session_id,
            home=self._me,
            rounds=session.rounds,
            history_tokens=len(session.tokens),
            last_token_id=session.tokens[-1] if session.tokens else None,
            facts=session.facts,
            slo=session.slo,
            unconfirmed=self._home.is_unconfirmed(session),
            restarted=self._home.has_restarted(session),
            attempt_id=kept.order.attempt_id if kept is not None and kept.finished else "",
            settled=tuple(session.settled),
        )
