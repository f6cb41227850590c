"""The drain of a decode worker: its rounds run out, its idle sessions move (spec 7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import structlog

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import DrainStatus
from ampd.core.moving import RemainingRound, drain_estimate_s
from ampd.ports import Clock
from services.decode.home import Home
from services.decode.moving import SessionMover
from services.decode.round import RunningRound

log = structlog.get_logger(__name__)

CONCURRENT_MOVES: Final = 4
"""Of one drain: the targets serve rounds meanwhile."""
MAX_ATTEMPTS: Final = 3
"""Per session; the store has the tokens of one that could not be moved."""
RETRY_S: Final = 0.3
STORE_WAIT_S: Final = 10.0
"""How long, behind the last round, sessions are held that the shared store may not know."""
POLL_S: Final = 0.05


class HomeDrain:
    """Empties a home that takes nothing new any more."""

    def __init__(self, *, home: Home, mover: SessionMover, cost: CostModel, clock: Clock) -> None:
        self._home = home
        self._mover = mover
        self._cost = cost
        self._clock = clock
        self._attempts: Counter[str] = Counter()
        self._active: set[str] = set()
        self._nowhere = False
        """No other decode worker takes sessions: they stay in the store."""

    def start(self) -> None:
        """New rounds are refused from now on."""
        self._home.draining = True

    def status(self) -> DrainStatus:
        """What the home still has, and how long that may take."""
        sessions = self._home.sessions()
        rounds = [session.round for session in sessions if session.round is not None]
        moving = () if self._nowhere else (len(session.tokens) for session in sessions)
        estimated_s = drain_estimate_s(
            self._cost, map(_remaining, rounds), moving, concurrent_moves=CONCURRENT_MOVES
        )
        return DrainStatus(len(rounds), len(sessions), estimated_s, elapsed_s=0.0)

    async def run(self) -> None:
        """Returns when no round runs, and every idle session has moved or cannot. The most
        recently used ones go first: their next rounds come first."""
        give_up_s = self._clock() + STORE_WAIT_S
        async with asyncio.TaskGroup() as moves:
            while self._busy() or (self._unpublished() and self._clock() < give_up_s):
                if self._busy():
                    give_up_s = self._clock() + STORE_WAIT_S
                while len(self._active) < CONCURRENT_MOVES and (session_id := self._next()):
                    self._active.add(session_id)
                    moves.create_task(self._move(session_id))
                await asyncio.sleep(POLL_S)
        log.info("drained", sessions_left=len(self._home.sessions()))

    def _busy(self) -> bool:
        return bool(self._home.running_rounds or self._active or self._next() is not None)

    def _unpublished(self) -> bool:
        """Whether only this home may know how a round ended."""
        return any(map(self._home.is_doubtful, self._home.sessions()))

    def _next(self) -> str | None:
        """The paused session that was used last, of those to be tried."""
        if self._nowhere:
            return None
        paused = [
            session
            for session in self._home.sessions()
            if session.paused
            and session.tokens
            and not self._home.is_doubtful(session)
            and session.session_id not in self._active
            and self._attempts[session.session_id] < MAX_ATTEMPTS
        ]
        if not paused:
            return None
        return max(paused, key=lambda session: session.last_used_s).session_id

    async def _move(self, session_id: str) -> None:
        """Move it, with its tokens alone where its KV finds no room; a failure is tried again
        after a while: its round's end may be on its way to the store."""
        self._attempts[session_id] += 1
        try:
            try:
                await self._mover.move(session_id, "")
            except AmpdError as error:
                if error.reason not in {ErrorReason.KV_EXHAUSTED, ErrorReason.ENGINE_FAILED}:
                    raise
                await self._mover.move(session_id, "", with_kv=False)
        except AmpdError as error:
            log.info("drain_move_failed", session=session_id, reason=error.reason)
            if error.reason is ErrorReason.STORE_UNAVAILABLE:
                # Then it may lack the session's last round as well: that is waited for.
                self._home.doubt(session_id)
            if error.reason is ErrorReason.NO_DECODE_WORKER:
                self._nowhere = True
            else:
                await asyncio.sleep(RETRY_S)
        finally:
            self._active.discard(session_id)


def _remaining(round_: RunningRound) -> RemainingRound:
    """What a running round may still take, at the most."""
    said = len(round_.output.token_ids)
    return RemainingRound(
        history_tokens=round_.order.keep_history_tokens,
        increment_tokens=0 if round_.decoding else len(round_.order.increment),
        output_tokens=round_.order.sampling.max_tokens - said,
        context_tokens=len(round_.prompt) + said,
    )
