"""StateStore inside one process: for tests and in-process clusters, nothing survives.

No operation awaits anything, so each is atomic among the tasks of the event loop.
"""

from __future__ import annotations

import bisect
import math
import time
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ampd.adapters.state_codec import decode_page_token, encode_page_token
from ampd.adapters.state_errors import (
    history_hole,
    history_missing,
    replaced_incarnation,
    session_id_taken,
    too_many_sessions,
)
from ampd.adapters.state_limits import (
    CLOSED_TTL_S,
    CREATE_REQUEST_TTL_S,
    DEFAULT_IDLE_TTL_S,
    MAX_PAGE_SIZE,
    MAX_ROUNDS_KEPT,
    REPLAY_TTL_S,
)
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import PolicySpec, RoundRecord, WorkerInfo, WorkerLoad, WorkerView
from ampd.ports import Clock, RoundContext, SessionPage, SessionWrites, Tokens

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Expiring(Generic[K, V]):
    """A mapping whose entries vanish a fixed time after they were last put."""

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[K, tuple[float, V]] = {}

    def put(self, key: K, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._ttl_s, value)
        # With one ttl, the order of putting is the order of expiry.
        while (oldest := next(iter(self._entries))) != key and self.get(oldest) is None:
            pass

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[0] <= self._clock():
            del self._entries[key]
            return None
        return entry[1]

    def pop(self, key: K) -> None:
        self._entries.pop(key, None)

    def values(self) -> list[V]:
        live = (self.get(key) for key in list(self._entries))
        return [value for value in live if value is not None]


@dataclass(slots=True)
class _Session:
    record: SessionRecord
    tokens: Tokens = field(default_factory=lambda: array("I"))
    rounds: dict[int, RoundRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Worker:
    info: WorkerInfo
    load: WorkerLoad
    beat_s: float
    lease_s: float


class MemoryStateStore:
    """See `ampd.ports.StateStore`. `clock` in monotonic seconds decides what has expired."""

    def __init__(
        self, *, idle_ttl_s: float = DEFAULT_IDLE_TTL_S, clock: Clock = time.monotonic
    ) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._policy: PolicySpec | None = None
        self._open: _Expiring[str, _Session] = _Expiring(idle_ttl_s, clock)
        self._closed: _Expiring[str, _Session] = _Expiring(CLOSED_TTL_S, clock)
        self._replays: _Expiring[tuple[str, str], bytes] = _Expiring(REPLAY_TTL_S, clock)
        self._created: _Expiring[tuple[str, str], str] = _Expiring(CREATE_REQUEST_TTL_S, clock)

    async def heartbeat(
        self, info: WorkerInfo, load: WorkerLoad, lease_s: float
    ) -> PolicySpec | None:
        """Register or renew a worker. AmpdError STALE_INCARNATION when a newer incarnation
        of the same worker_id is registered."""
        self._drop_lapsed_leases()
        held = self._workers.get(info.worker_id)
        if held is not None and held.info.incarnation > info.incarnation:
            raise replaced_incarnation(info)
        self._workers[info.worker_id] = _Worker(info, load, self._clock(), lease_s)
        return self._policy

    @property
    def life(self) -> str:
        """It lives as long as its process: always the same."""
        return "memory"

    @property
    def age_s(self) -> float:
        """It has lost nothing, ever."""
        return math.inf

    async def deregister(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker, unless a newer incarnation has replaced it. Idempotent."""
        held = self._workers.get(worker_id)
        if held is not None and held.info.incarnation <= incarnation:
            del self._workers[worker_id]

    async def list_workers(self) -> tuple[WorkerView, ...]:
        """All live workers and coordinators, by worker_id."""
        self._drop_lapsed_leases()
        now_s = self._clock()
        return tuple(
            WorkerView(worker.info, worker.load, now_s - worker.beat_s)
            for _, worker in sorted(self._workers.items())
        )

    async def load_round(self, session_id: str, request_id: str) -> RoundContext:
        """What one routing decision reads."""
        return RoundContext(
            session=await self.get_session(session_id),
            workers=await self.list_workers(),
            policy=self._policy,
            replay=self._replays.get((session_id, request_id)),
        )

    async def create_session(
        self, record: SessionRecord, request_id: str, max_sessions: int | None = None
    ) -> SessionRecord:
        """Store a new session, or give back the one that this request_id (''; none) made.
        AmpdError SESSION_CONFLICT when the session_id is taken, QUEUE_FULL when the tenant has
        `max_sessions` already."""
        key = (record.tenant, request_id)
        if request_id and (first_id := self._created.get(key)) is not None:
            first = await self.get_session(first_id)
            if first is not None:
                return first
        held = await self.get_session(record.session_id)
        if held is not None and held != record:
            raise session_id_taken(record.session_id)
        if held is None and max_sessions is not None:
            mine = [s for s in self._open.values() if s.record.tenant == record.tenant]
            if len(mine) >= max_sessions:
                raise too_many_sessions(record.tenant, max_sessions)
        self._open.put(record.session_id, _Session(record))
        if request_id:
            self._created.put(key, record.session_id)
        return record

    async def get_session(self, session_id: str) -> SessionRecord | None:
        """The session's record; None: unknown or expired."""
        session = self._open.get(session_id) or self._closed.get(session_id)
        return None if session is None else session.record

    async def compare_and_set(
        self, record: SessionRecord, expected_version: int, writes: SessionWrites | None = None
    ) -> bool:
        """Swap the record in, with all of `writes` or nothing. AmpdError INTERNAL when the
        tokens would leave a hole behind the stored ones."""
        session_id = record.session_id
        session = self._open.get(session_id) or self._closed.get(session_id)
        if session is None or session.record.version != expected_version:
            return False
        closed = record.state is SessionState.CLOSED
        if session.record.state is SessionState.CLOSED and not closed:
            return False
        writes = writes or SessionWrites()
        if writes.tokens and writes.tokens_offset > len(session.tokens):
            raise history_hole(session_id, writes.tokens_offset)
        if closed:
            self._open.pop(session_id)
            self._closed.put(session_id, _Session(record))
        else:
            session.record = record
            self._write(session, writes)
            self._open.put(session_id, session)
        if writes.replay is not None:
            self._replays.put((session_id, writes.replay_request_id), writes.replay)
        return True

    async def list_sessions(self, tenant: str, page_size: int, page_token: str) -> SessionPage:
        """The tenant's open sessions by session_id, at most MAX_PAGE_SIZE."""
        after = decode_page_token(page_token)
        records = sorted(
            (held.record for held in self._open.values() if held.record.tenant == tenant),
            key=_session_id,
        )
        start = bisect.bisect_right(records, after, key=_session_id)
        end = start + min(max(page_size, 1), MAX_PAGE_SIZE)
        page = tuple(records[start:end])
        return SessionPage(page, encode_page_token(page[-1].session_id) if records[end:] else "")

    async def read_history(self, session_id: str, start: int, end: int) -> Tokens:
        """Token ids [start, end). AmpdError SESSION_NOT_FOUND when not all are stored."""
        session = self._open.get(session_id)
        if start >= end:
            return array("I")
        if session is None or end > len(session.tokens):
            raise history_missing(session_id, start, end)
        return session.tokens[start:end]

    async def read_rounds(self, session_id: str) -> tuple[RoundRecord, ...]:
        """The newest MAX_ROUNDS_KEPT rounds, oldest first."""
        session = self._open.get(session_id)
        if session is None:
            return ()
        return tuple(round_ for _, round_ in sorted(session.rounds.items()))

    async def get_policy(self) -> PolicySpec | None:
        """The policy in force; None: none was set."""
        return self._policy

    async def set_policy(self, policy: PolicySpec, expected_version: int) -> bool:
        """Swap the policy in; `policy.version` must be above `expected_version`."""
        if (self._policy.version if self._policy else 0) != expected_version:
            return False
        self._policy = policy
        return True

    async def ping(self) -> None:
        """Always answers."""

    async def close(self) -> None:
        """Nothing to close."""

    def _drop_lapsed_leases(self) -> None:
        now_s = self._clock()
        for worker_id, worker in list(self._workers.items()):
            if now_s - worker.beat_s >= worker.lease_s:
                del self._workers[worker_id]

    @staticmethod
    def _write(session: _Session, writes: SessionWrites) -> None:
        if writes.tokens:
            end = writes.tokens_offset + len(writes.tokens)
            session.tokens[writes.tokens_offset : end] = writes.tokens
        if writes.round is not None:
            session.rounds[writes.round.round_index] = writes.round
            if len(session.rounds) > MAX_ROUNDS_KEPT:
                del session.rounds[min(session.rounds)]


def _session_id(record: SessionRecord) -> str:
    return record.session_id
