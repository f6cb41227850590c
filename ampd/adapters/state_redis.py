"""StateStore over Valkey or Redis (7 or newer, not in cluster mode); the keys: docs/store.md.

Every operation is one round trip, and atomic: a command, or a Lua script run by its digest.
Whatever expires does so on the server's clock.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.maint_notifications import MaintNotificationsConfig

from ampd.adapters import state_redis_scripts as scripts
from ampd.adapters.state_codec import (
    POLICY,
    ROUND,
    SESSION,
    TOKEN_BYTES,
    WORKER_INFO,
    WORKER_LOAD,
    decode,
    decode_page_token,
    encode,
    encode_page_token,
    pack_tokens,
    unpack_tokens,
)
from ampd.adapters.state_errors import (
    history_hole,
    history_missing,
    replaced_incarnation,
    session_id_taken,
    store_unavailable,
    too_many_sessions,
)
from ampd.adapters.state_limits import (
    CLOSED_TTL_S,
    CREATE_REQUEST_TTL_S,
    DEFAULT_IDLE_TTL_S,
    EXPIRED_CHECKS_PER_CREATE,
    MAX_PAGE_SIZE,
    MAX_ROUNDS_KEPT,
    REPLAY_TTL_S,
)
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import PolicySpec, RoundRecord, WorkerInfo, WorkerLoad, WorkerView
from ampd.ports import RoundContext, SessionPage, SessionWrites, Tokens

DEFAULT_TIMEOUT_S: Final = 1.0
"""The bound of every operation in seconds, waiting for a connection included."""

DEFAULT_MAX_CONNECTIONS: Final = 64
"""Connections of one process; operations beyond them wait within their timeout."""

CONNECTION_RETRIES: Final = 1
"""A pooled connection that broke while idle (server restart) is replaced and tried again once.
Safe: every write here gives the same result when it is sent twice."""

MAX_SCANNED_PER_PAGE: Final = 4 * MAX_PAGE_SIZE
"""Index entries, expired ones included, that one page looks at before it ends early."""

MAX_WORKERS_CACHED: Final = 1024
"""Decoded WorkerInfos, WorkerLoads and CostModels kept per store. A worker's info never changes,
and checking its cost model takes 20 times as long as all the rest of its entry; its load changes
with a heartbeat, which many reads see; and routing counts once where workers share one model."""

MAX_UNREADABLE_NAMED: Final = 256
"""Unreadable worker entries that are logged, once each."""

_BEAT_DIGITS: Final = scripts.INCARNATION_DIGITS + scripts.INSTANT_DIGITS
_BEAT: Final = slice(scripts.INCARNATION_DIGITS, _BEAT_DIGITS)
_LOAD: Final = slice(_BEAT_DIGITS + scripts.INSTANT_DIGITS, None)
_UNAVAILABLE_CODES: Final = ("BUSY", "MISCONF", "NOREPLICAS", "UNKILLABLE")
_UNAVAILABLE_ERRORS: Final = (ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Infos:
    """What a version of the workers' infos says, by worker_id; empty: nothing is known."""

    version: bytes = b""
    infos: Mapping[bytes, WorkerInfo] = field(default_factory=dict)


class RedisStateStore:
    """See `ampd.ports.StateStore`. Safe for concurrent use by the tasks of one event loop.

    `url`: redis://, rediss:// (TLS; `ssl_ca_certs=` and the like as query parameters) or
    unix:// with the usual user, password and database. `prefix` goes in front of every key.
    `timeout_s` bounds each operation; a write that ran into it may still have been done.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "ampd",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        idle_ttl_s: float = DEFAULT_IDLE_TTL_S,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self._timeout_s = timeout_s
        self._idle_ttl_ms = _ms(idle_ttl_s)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), CONNECTION_RETRIES),
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
        self._client = Redis.from_pool(pool)
        self._workers = f"{prefix}:workers"
        self._infos = f"{prefix}:infos"
        self._infos_version = f"{prefix}:infos-version"
        self._policy = f"{prefix}:policy"
        self._born = f"{prefix}:born"
        self._session = f"{prefix}:session:"
        self._tokens = f"{prefix}:tokens:"
        self._rounds = f"{prefix}:rounds:"
        self._replay = f"{prefix}:replay:"
        self._create = f"{prefix}:create:"
        self._sessions = f"{prefix}:sessions:"
        self._life = ""
        self._age_s = math.inf
        self._unreadable: set[str] = set()
        self._known = _Infos()
        self._decode_info = lru_cache(MAX_WORKERS_CACHED)(self._info)
        self._decode_entry = lru_cache(MAX_WORKERS_CACHED)(_entry)
        self._shared_cost = lru_cache(MAX_WORKERS_CACHED)(_same)

    # --- workers

    async def heartbeat(
        self, info: WorkerInfo, load: WorkerLoad, lease_s: float
    ) -> PolicySpec | None:
        """Register or renew a worker. AmpdError STALE_INCARNATION when a newer incarnation
        of the same worker_id is registered."""
        accepted, policy, life = await self._run(
            "heartbeat",
            scripts.HEARTBEAT,
            (self._workers, self._infos, self._infos_version, self._policy, self._born),
            info.worker_id,
            _incarnation(info.incarnation),
            encode(info),
            encode(load),
            _ms(lease_s),
            secrets.token_bytes(16),
        )
        self._met(life)
        if not accepted:
            raise replaced_incarnation(info)
        return None if policy is None else decode(POLICY, policy)

    @property
    def life(self) -> str:
        """The server's run_id at the last heartbeat, load_round or ping."""
        return self._life

    @property
    def age_s(self) -> float:
        """The server's uptime then, in whole seconds; infinite while it has never restarted."""
        return self._age_s

    async def deregister(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker, unless a newer incarnation has replaced it. Idempotent."""
        await self._run(
            "deregister",
            scripts.DEREGISTER,
            (self._workers, self._infos),
            worker_id,
            _incarnation(incarnation),
        )

    async def list_workers(self) -> tuple[WorkerView, ...]:
        """All live workers and coordinators, by worker_id."""
        known = self._known
        entries = await self._run(
            "list_workers",
            scripts.LIST_WORKERS,
            (self._workers, self._infos, self._infos_version),
            known.version,
        )
        return self._views(entries, known)

    # --- sessions

    async def load_round(self, session_id: str, request_id: str) -> RoundContext:
        """What one routing decision reads; its cost does not grow with the history."""
        known = self._known
        session, policy, replay, workers, life = await self._run(
            "load_round",
            scripts.LOAD_ROUND,
            (
                self._session + session_id,
                self._policy,
                _pair(self._replay, session_id, request_id),
                self._born,
                self._workers,
                self._infos,
                self._infos_version,
            ),
            known.version,
        )
        self._met(life)
        return RoundContext(
            session=None if session is None else decode(SESSION, session),
            workers=self._views(workers, known),
            policy=None if policy is None else decode(POLICY, policy),
            replay=replay,
        )

    async def create_session(
        self, record: SessionRecord, request_id: str, max_sessions: int | None = None
    ) -> SessionRecord:
        """Store a new session, or give back the one that this request_id (''; none) made.
        AmpdError SESSION_CONFLICT when the session_id is taken, QUEUE_FULL when the tenant has
        `max_sessions` already."""
        held = await self._run(
            "create_session",
            scripts.CREATE_SESSION,
            (
                self._session + record.session_id,
                self._sessions + record.tenant,
                _pair(self._create, record.tenant, request_id) if request_id else "",
            ),
            record.session_id,
            record.version,
            encode(record),
            self._idle_ttl_ms,
            _ms(CREATE_REQUEST_TTL_S),
            self._session,
            EXPIRED_CHECKS_PER_CREATE,
            "" if max_sessions is None else max_sessions,
        )
        if held is None:
            raise session_id_taken(record.session_id)
        if held == 0:
            raise too_many_sessions(record.tenant, max_sessions)
        return decode(SESSION, held)

    async def get_session(self, session_id: str) -> SessionRecord | None:
        """The session's record; None: unknown or expired."""
        raw = await self._command("get_session", "HGET", self._session + session_id, "record")
        return None if raw is None else decode(SESSION, raw)

    async def compare_and_set(
        self, record: SessionRecord, expected_version: int, writes: SessionWrites | None = None
    ) -> bool:
        """Swap the record in, with all of `writes` or nothing. AmpdError INTERNAL when the
        tokens would leave a hole behind the stored ones."""
        writes = writes or SessionWrites()
        closed = record.state is SessionState.CLOSED
        swapped = await self._run(
            "compare_and_set",
            scripts.COMPARE_AND_SET,
            (
                self._session + record.session_id,
                self._tokens + record.session_id,
                self._rounds + record.session_id,
                ""
                if writes.replay is None
                else _pair(self._replay, record.session_id, writes.replay_request_id),
                self._sessions + record.tenant,
            ),
            record.session_id,
            expected_version,
            record.version,
            encode(record),
            secrets.token_bytes(16),
            _ms(CLOSED_TTL_S) if closed else self._idle_ttl_ms,
            int(closed),
            writes.tokens_offset * TOKEN_BYTES,
            b"" if writes.tokens is None else pack_tokens(writes.tokens),
            "" if writes.round is None else writes.round.round_index,
            b"" if writes.round is None else encode(writes.round),
            MAX_ROUNDS_KEPT,
            b"" if writes.replay is None else writes.replay,
            _ms(REPLAY_TTL_S),
        )
        if swapped < 0:
            raise history_hole(record.session_id, writes.tokens_offset)
        return bool(swapped)

    async def list_sessions(self, tenant: str, page_size: int, page_token: str) -> SessionPage:
        """The tenant's open sessions by session_id, at most MAX_PAGE_SIZE; a page may be short
        where many sessions have expired."""
        after = decode_page_token(page_token)
        records, last = await self._run(
            "list_sessions",
            scripts.LIST_SESSIONS,
            (self._sessions + tenant,),
            self._session,
            f"({after}" if after else "-",
            min(max(page_size, 1), MAX_PAGE_SIZE),
            MAX_SCANNED_PER_PAGE,
        )
        return SessionPage(
            tuple(decode(SESSION, raw) for raw in records),
            "" if last is None else encode_page_token(last.decode()),
        )

    async def read_history(self, session_id: str, start: int, end: int) -> Tokens:
        """Token ids [start, end). AmpdError SESSION_NOT_FOUND when not all are stored."""
        if start >= end:
            return unpack_tokens(b"")
        raw = await self._command(
            "read_history",
            "GETRANGE",
            self._tokens + session_id,
            start * TOKEN_BYTES,
            end * TOKEN_BYTES - 1,
        )
        if len(raw) != (end - start) * TOKEN_BYTES:
            raise history_missing(session_id, start, end)
        return unpack_tokens(raw)

    async def read_rounds(self, session_id: str) -> tuple[RoundRecord, ...]:
        """The newest MAX_ROUNDS_KEPT rounds, oldest first."""
        raws = await self._command("read_rounds", "ZRANGE", self._rounds + session_id, 0, -1)
        return tuple(decode(ROUND, raw) for raw in raws)

    # --- policy

    async def get_policy(self) -> PolicySpec | None:
        """The policy in force; None: none was set."""
        raw = await self._command("get_policy", "HGET", self._policy, "spec")
        return None if raw is None else decode(POLICY, raw)

    async def set_policy(self, policy: PolicySpec, expected_version: int) -> bool:
        """Swap the policy in; `policy.version` must be above `expected_version`."""
        return bool(
            await self._run(
                "set_policy",
                scripts.SET_POLICY,
                (self._policy,),
                expected_version,
                policy.version,
                encode(policy),
                secrets.token_bytes(16),
            )
        )

    async def ping(self) -> None:
        """Returns when the server answers, whose `life` is known then. STORE_UNAVAILABLE."""
        self._met(await self._run("ping", scripts.LIFE, (self._born,)))

    def _met(self, life: list[bytes]) -> None:
        run_id, uptime_s, born = life
        self._life = run_id.decode()
        self._age_s = math.inf if born == run_id else float(uptime_s)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._client.aclose(close_connection_pool=True)

    # --- plumbing

    def _views(
        self, answer: tuple[list[bytes], bytes, bytes, list[bytes]], known: _Infos
    ) -> tuple[WorkerView, ...]:
        """`known`: what the store was told that we know."""
        entries, now, version, infos = answer
        if version != known.version:
            known = self._known = self._decode_infos(version, infos)
        now_ms, views = int(now), []
        for raw_id, entry in sorted(_pairs(entries)):
            info = known.infos.get(raw_id)
            if info is None:  # unreadable
                continue
            try:
                beat_ms, load = self._decode_entry(entry)
            except AmpdError as error:
                self._log_unreadable(raw_id.decode(), error)
            else:
                views.append(WorkerView(info, load, max(0, now_ms - beat_ms) / 1000))
        return tuple(views)

    def _decode_infos(self, version: bytes, raws: list[bytes]) -> _Infos:
        infos = {}
        for raw_id, raw in _pairs(raws):
            try:
                infos[raw_id] = self._decode_info(raw)
            except AmpdError as error:
                self._log_unreadable(raw_id.decode(), error)
        return _Infos(version, infos)

    def _info(self, raw: bytes) -> WorkerInfo:
        info = decode(WORKER_INFO, raw)
        return replace(info, cost=self._shared_cost(info.cost))

    def _log_unreadable(self, worker_id: str, error: AmpdError) -> None:
        # An entry of some other version must not stop the routing to all the others.
        if worker_id not in self._unreadable and len(self._unreadable) < MAX_UNREADABLE_NAMED:
            self._unreadable.add(worker_id)
            _log.warning("worker_entry_unreadable", worker_id=worker_id, error=str(error))

    async def _run(
        self,
        operation: str,
        script: scripts.Script,
        keys: Sequence[str],
        *args: bytes | str | int,
    ) -> Any:
        try:
            return await self._command(operation, "EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self._command(operation, "EVAL", script.source, len(keys), *keys, *args)

    async def _command(self, operation: str, *words: bytes | str | int) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                # redis-py leaves its generic command untyped.
                return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]
        except NoScriptError:
            raise
        except ResponseError as error:
            if isinstance(error, _UNAVAILABLE_ERRORS) or str(error).startswith(_UNAVAILABLE_CODES):
                raise store_unavailable(operation, error) from error
            raise AmpdError(ErrorReason.INTERNAL, f"store {operation}: {error}") from error
        except (RedisError, OSError) as error:
            # TimeoutError is an OSError, whoever raised it.
            raise store_unavailable(operation, error) from error


def _same(cost: CostModel | None) -> CostModel | None:
    return cost


def _entry(raw: bytes) -> tuple[int, WorkerLoad]:
    """When the worker's load was published, on the server's clock in ms, and the load."""
    return int(raw[_BEAT]), decode(WORKER_LOAD, raw[_LOAD])


def _pairs(flat: list[bytes]) -> zip[tuple[bytes, bytes]]:
    """A hash as the server gives it: field and value in turn."""
    return zip(flat[::2], flat[1::2], strict=True)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _incarnation(incarnation: int) -> str:
    return str(incarnation).zfill(scripts.INCARNATION_DIGITS)


def _pair(prefix: str, first: str, second: str) -> str:
    # Quoted, the first name holds no ':', so no two pairs make the same key.
    return f"{prefix}{quote(first, safe='')}:{second}"
