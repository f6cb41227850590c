"""The KV accounting of one decode worker (spec 2 and 7): tokens in whole blocks.

A session is *running* (its round's history, increment and max_tokens are promised, and never
evicted), or *paused* (its history is pinned; it may be evicted once its lease has run out,
least recently used first), or evicted (bound here, nothing held). Always

    free + running + pinned = capacity

A round in the ledger is a number: blocks and batch slot come when its prefill is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ampd.core.binding import blocks
from ampd.core.errors import AmpdError, ErrorReason

RETRY_AFTER_S: Final = 1.0
"""When only running rounds stand in the way: a round is about that long."""
RESERVED_SHARE: Final = 0.75
"""Share of their estimated footprints for which new sessions must find room: not all sessions
are at their largest at once."""
MIN_RETRY_AFTER_S: Final = 0.1
MAX_RETRY_AFTER_S: Final = 10.0
"""Bounds of the hint where a lease stands in the way."""


@dataclass(slots=True)
class _Session:
    pinned_tokens: int
    """Its history in blocks; what it held before the round while one is running."""
    footprint_tokens: int
    promised_tokens: int | None = None
    """What its running round may hold in all, old history included once; None: paused."""
    lease_end_s: float = 0.0

    @property
    def held_tokens(self) -> int:
        return self.pinned_tokens if self.promised_tokens is None else self.promised_tokens

    @property
    def reserved_tokens(self) -> int:
        return max(self.footprint_tokens, self.held_tokens)


@dataclass(frozen=True, slots=True)
class RoundDemand:
    """What a round asks for. `history_tokens`: what it keeps of the session's history, whether
    or not it is resident; `footprint_tokens`: the estimate the session was bound with."""

    session_id: str
    history_tokens: int
    increment_tokens: int
    max_tokens: int
    footprint_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The session's tokens when the round ends at its longest."""
        return self.history_tokens + self.increment_tokens + self.max_tokens


class KvLedger:
    """Sessions are kept least recently used first."""

    def __init__(self, *, capacity_tokens: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._capacity_tokens = capacity_tokens // block_tokens * block_tokens
        self._sessions: dict[str, _Session] = {}
        self._running_tokens = 0
        self._pinned_tokens = 0
        self._reserved_tokens = 0

    # --- what is ---------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Whole blocks only."""
        return self._capacity_tokens

    @property
    def free_tokens(self) -> int:
        """Neither promised nor pinned."""
        return self._capacity_tokens - self._running_tokens - self._pinned_tokens

    @property
    def running_tokens(self) -> int:
        """Promised to running rounds."""
        return self._running_tokens

    @property
    def pinned_tokens(self) -> int:
        """Held by paused sessions."""
        return self._pinned_tokens

    @property
    def reserved_tokens(self) -> int:
        """The footprint of every session bound here: the estimate, or what it holds if more."""
        return self._reserved_tokens

    @property
    def sessions(self) -> int:
        """Sessions bound here, evicted ones included."""
        return len(self._sessions)

    def resident_tokens(self, session_id: str) -> int:
        """The history of a session that is held here, in blocks; 0: evicted or unknown."""
        session = self._sessions.get(session_id)
        return session.pinned_tokens if session else 0

    def is_bound(self, session_id: str) -> bool:
        """Whether the session lives here, evicted or not."""
        return session_id in self._sessions

    def is_running(self, session_id: str) -> bool:
        """Whether a round of the session is running."""
        session = self._sessions.get(session_id)
        return session is not None and session.promised_tokens is not None

    def evictable(self, now_s: float) -> list[str]:
        """The paused sessions that may be evicted now, in the order of eviction."""
        return [
            session_id
            for session_id, session in self._sessions.items()
            if session.promised_tokens is None
            and session.pinned_tokens
            and session.lease_end_s <= now_s
        ]

    def next_lease_end_s(self, now_s: float) -> float | None:
        """When the next paused session becomes evictable; None: none will by waiting alone."""
        ends_s = [
            session.lease_end_s
            for session in self._sessions.values()
            if session.promised_tokens is None
            and session.pinned_tokens
            and session.lease_end_s > now_s
        ]
        return min(ends_s, default=None)

    # --- rounds ----------------------------------------------------------------------------

    def require_fits(self, demand: RoundDemand) -> None:
        """KV_TOO_SMALL for a round that would not fit if it were alone."""
        needed = blocks(demand.total_tokens, self._block_tokens)
        if needed > self._capacity_tokens:
            raise AmpdError(
                ErrorReason.KV_TOO_SMALL,
                f"the round needs {needed} tokens of KV, the worker has {self._capacity_tokens}",
                metadata={"kv_capacity_tokens": str(self._capacity_tokens)},
            )

    def require_free(self, demand: RoundDemand, now_s: float) -> None:
        """KV_EXHAUSTED, or KV_TOO_SMALL, unless free KV and what the session holds itself are
        enough for it: `admit` then evicts nobody else."""
        self.require_fits(demand)
        own_tokens = self.resident_tokens(demand.session_id)
        if blocks(demand.total_tokens, self._block_tokens) > self.free_tokens + own_tokens:
            raise self.exhausted(demand, now_s)

    def exhausted(self, demand: RoundDemand, now_s: float) -> AmpdError:
        """The refusal of a round that has no room now, with a retry hint."""
        lease_end_s = self.next_lease_end_s(now_s)
        hint_s = RETRY_AFTER_S if lease_end_s is None else lease_end_s - now_s
        return AmpdError(
            ErrorReason.KV_EXHAUSTED,
            f"the round needs {blocks(demand.total_tokens, self._block_tokens)} tokens of KV; "
            f"free {self.free_tokens}, running {self._running_tokens}, pinned "
            f"{self._pinned_tokens}",
            retry_after_s=min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, hint_s)),
        )

    def can_admit(self, demand: RoundDemand, now_s: float) -> bool:
        """Whether `admit` would take the round now."""
        try:
            self._plan(demand, now_s)
        except AmpdError:
            return False
        return True

    def admit(self, demand: RoundDemand, now_s: float) -> tuple[str, ...]:
        """Promise a round its KV; the result names the sessions evicted for it, whose pins the
        caller drops. The session itself may be among them, when its cut-off history stands in
        its own way: it is rebuilt.

        Raises KV_TOO_SMALL (never fits), KV_EXHAUSTED (not now, with a retry hint) and
        ROUND_RUNNING; the ledger is then as before.
        """
        evictions = self._plan(demand, now_s)
        for session_id in evictions:
            self.evict(session_id)
        session = self._sessions.pop(demand.session_id, None) or _Session(0, 0)
        self._count(session, -1)
        session.footprint_tokens = max(session.footprint_tokens, demand.footprint_tokens)
        session.promised_tokens = self._promise(demand, session)
        self._sessions[demand.session_id] = session  # at the end: most recently used
        self._count(session, 1)
        return evictions

    def settle(self, session_id: str, *, history_tokens: int, lease_end_s: float) -> None:
        """The round ended well: the session is paused with that history, safe from eviction
        until `lease_end_s`. `history_tokens` is at most what was promised."""
        session = self._require_running(session_id)
        pinned = blocks(history_tokens, self._block_tokens)
        if pinned > session.held_tokens:
            raise AmpdError(
                ErrorReason.INTERNAL,
                f"session {session_id} settles {pinned} tokens of KV, "
                f"{session.held_tokens} were promised",
            )
        self._count(session, -1)
        session.promised_tokens, session.pinned_tokens = None, pinned
        session.lease_end_s = lease_end_s
        self._count(session, 1)
        self._sessions[session_id] = self._sessions.pop(session_id)

    def discard(self, session_id: str) -> None:
        """The round failed or was cancelled: the session holds what it held before; one that
        held nothing then is not bound here. Nothing happens without a running round."""
        session = self._sessions.get(session_id)
        if session is None or session.promised_tokens is None:
            return
        self._count(session, -1)
        session.promised_tokens = None
        self._count(session, 1)
        if not session.pinned_tokens:
            self.close(session_id)

    # --- sessions --------------------------------------------------------------------------

    def can_evict(self, session_id: str) -> bool:
        """Whether the session is paused and holds anything, whatever its lease."""
        session = self._sessions.get(session_id)
        return session is not None and session.promised_tokens is None and session.pinned_tokens > 0

    def evict(self, session_id: str) -> None:
        """A paused session loses its KV and stays bound. Nothing happens if it holds none."""
        if not self.can_evict(session_id):
            return
        session = self._sessions[session_id]
        self._count(session, -1)
        session.pinned_tokens = 0
        self._count(session, 1)

    def close(self, session_id: str) -> None:
        """The session is gone, its running round included. Idempotent."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._count(session, -1)

    def check(self) -> None:
        """AssertionError unless the books balance (used by tests)."""
        sessions = self._sessions.values()
        running = sum(s.held_tokens for s in sessions if s.promised_tokens is not None)
        pinned = sum(s.held_tokens for s in sessions if s.promised_tokens is None)
        reserved = sum(s.reserved_tokens for s in sessions)
        books = (self._running_tokens, self._pinned_tokens, self._reserved_tokens)
        if (
            books != (running, pinned, reserved)
            or self.free_tokens < 0
            or any(s.held_tokens % self._block_tokens for s in sessions)
        ):
            raise AssertionError(f"KV books {books}, sessions {(running, pinned, reserved)}")

    # --- how -------------------------------------------------------------------------------

    def _plan(self, demand: RoundDemand, now_s: float) -> tuple[str, ...]:
        """The evictions that make room for a round, or the refusal."""
        self.require_fits(demand)
        needed = blocks(demand.total_tokens, self._block_tokens)
        session = self._sessions.get(demand.session_id) or _Session(0, 0)
        if session.promised_tokens is not None:
            raise AmpdError(
                ErrorReason.ROUND_RUNNING,
                f"a round of session {demand.session_id} is still running",
            )
        if demand.session_id not in self._sessions and not self._has_room_to_live(demand, now_s):
            raise self.exhausted(demand, now_s)
        missing = self._promise(demand, session) - session.pinned_tokens - self.free_tokens
        evictions = []
        for session_id in self.evictable(now_s) if missing > 0 else ():
            if session_id != demand.session_id:
                evictions.append(session_id)
                missing -= self._sessions[session_id].pinned_tokens
                if missing <= 0:
                    break
        if missing > 0:
            # Without its own old history the round needs less: no tail of it to keep.
            missing -= self._promise(demand, session) - needed
            evictions.append(demand.session_id)
        if missing > 0:
            raise self.exhausted(demand, now_s)
        return tuple(evictions)

    def _has_room_to_live(self, demand: RoundDemand, now_s: float) -> bool:
        """Whether a new session finds room for what it is expected to grow to, beside the
        sessions that still will: those that may be evicted now make room. Else it would take
        the KV that their next rounds need, and all would be rebuilt again and again."""
        needed = blocks(demand.total_tokens, self._block_tokens)
        wanted = max(needed, RESERVED_SHARE * demand.footprint_tokens)
        if wanted + RESERVED_SHARE * self._reserved_tokens <= self._capacity_tokens:
            return True
        staying = sum(
            session.reserved_tokens
            for session in self._sessions.values()
            if session.promised_tokens is not None
            or (session.pinned_tokens and session.lease_end_s > now_s)
        )
        return not staying or wanted + RESERVED_SHARE * staying <= self._capacity_tokens

    def _promise(self, demand: RoundDemand, session: _Session) -> int:
        """What the session may hold while the round runs. It shares the whole blocks of the
        kept history; the rest of the old history stays for a discard."""
        needed = blocks(demand.total_tokens, self._block_tokens)
        shared = demand.history_tokens // self._block_tokens * self._block_tokens
        rewound = blocks(demand.history_tokens, self._block_tokens) < session.pinned_tokens
        return needed + (session.pinned_tokens - shared if rewound else 0)

    def _require_running(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.promised_tokens is None:
            raise AmpdError(
                ErrorReason.INTERNAL, f"session {session_id} has no running round in the ledger"
            )
        return session

    def _count(self, session: _Session, sign: int) -> None:
        held = sign * session.held_tokens
        if session.promised_tokens is None:
            self._pinned_tokens += held
        else:
            self._running_tokens += held
        self._reserved_tokens += sign * session.reserved_tokens
