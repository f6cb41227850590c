"""The life of a session and of its rounds as pure transitions of one record (spec 2, 7).

    CREATE -> IDLE --begin--> RUNNING --settle | discard--> IDLE --close--> CLOSED
                                 `-------------close----------------------^

Each function takes a record and gives the next one, its `version` raised by one, or raises
AmpdError; the shell swaps it into the shared store by compare-and-set, so of two writers
exactly one wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason, FieldViolation
from ampd.core.model import Binding, Slo

MAX_DISCARDED: Final = 8
"""Discarded attempts remembered per session."""
MAX_SETTLED: Final = 12
"""Requests of settled rounds remembered per session: the last one, with all rounds that its tools
have led to by default."""
MAX_PREFIX_HOLDERS: Final = 4
"""Prefill workers remembered per session as holding a prefix of it."""


class SessionState(StrEnum):
    """What a session is doing."""

    IDLE = "idle"
    RUNNING = "running"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RunningRound:
    """The round a coordinator is carrying out; void when that coordinator is dead."""

    request_id: str
    attempt_id: str
    """Unique: two calls with one request_id are two attempts."""
    coordinator_id: str
    coordinator_incarnation: int
    keep_history_tokens: int
    increment_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session in the shared store: all but its tokens. `*_unix_s` are wall-clock times."""

    session_id: str
    tenant: str
    model: str
    slo: Slo
    created_unix_s: float
    last_used_unix_s: float
    version: int = 1
    state: SessionState = SessionState.IDLE
    home: Binding | None = None
    history_tokens: int = 0
    last_token_id: int | None = None
    """The history's last token: a chat template needs to know whether it is the stop token."""
    rounds: int = 0
    running: RunningRound | None = None
    prefix_holders: tuple[tuple[str, int], ...] = ()
    """(prefill worker, tokens of this session it computed last), newest first."""
    labels: dict[str, str] = field(default_factory=dict)
    resumable: str = ""
    """The request_id of a round that ended early with output: that request may go on with it,
    as long as no other round has begun."""
    discarded: tuple[str, ...] = ()
    """Attempts at rounds that were discarded since the last one settled: a home that has settled
    one of them all the same takes it back."""
    settled: tuple[str, ...] = ()
    """The requests of the last settled rounds, the newest last: none of them is run again, even
    where its answer cannot be read."""
    closed_by: str = ""
    """The request_id that closed it, if it had one: repeating that call gives the same answer."""


def begin(
    record: SessionRecord,
    running: RunningRound,
    *,
    coordinator_alive: bool,
    max_model_tokens: int,
    now_unix_s: float,
) -> SessionRecord:
    """Start a round. `coordinator_alive`: whether the coordinator of `record.running` lives;
    the round of a dead one is void and discarded here. So is a running attempt at the same
    request: a client repeats a request when it has lost the stream.

    Raises ROUND_RUNNING, SESSION_NOT_FOUND (closed), INVALID_FIELD (`keep_history_tokens`
    beyond the history, with its real length), CONTEXT_TOO_LONG.
    """
    require_open(record)
    if record.running is not None:
        if coordinator_alive and record.running.request_id != running.request_id:
            raise AmpdError(
                ErrorReason.ROUND_RUNNING,
                f"round {record.rounds} of session {record.session_id} is still running",
            )
        # Nobody says that its client has not seen it end: it is not among the discarded.
        record = replace(record, version=record.version + 1, state=SessionState.IDLE, running=None)
    if running.keep_history_tokens > record.history_tokens:
        raise AmpdError(
            ErrorReason.INVALID_FIELD,
            f"keep_history_tokens: {running.keep_history_tokens} is beyond the history of "
            f"{record.history_tokens} tokens",
            (
                FieldViolation(
                    "keep_history_tokens",
                    f"at most history_tokens = {record.history_tokens}",
                ),
            ),
            metadata={"history_tokens": str(record.history_tokens)},
        )
    prompt_tokens = running.keep_history_tokens + running.increment_tokens
    if prompt_tokens + running.max_tokens > max_model_tokens:
        raise AmpdError(
            ErrorReason.CONTEXT_TOO_LONG,
            f"history {running.keep_history_tokens} + increment {running.increment_tokens} + "
            f"max_tokens {running.max_tokens} exceed the model's {max_model_tokens} tokens",
            (
                FieldViolation(
                    # Where the prompt leaves room for a token, the output is what is too long.
                    "sampling.max_tokens" if prompt_tokens < max_model_tokens else "increment",
                    f"the session may hold {max_model_tokens} tokens",
                ),
            ),
            metadata={"max_model_tokens": str(max_model_tokens)},
        )
    return replace(
        record,
        version=record.version + 1,
        state=SessionState.RUNNING,
        running=running,
        resumable="",
        last_used_unix_s=now_unix_s,
    )


def bind(record: SessionRecord, home: Binding) -> SessionRecord:
    """The worker has accepted the running round: it is the session's home now."""
    require_running(record)
    return replace(record, version=record.version + 1, home=home)


def settle(
    record: SessionRecord,
    *,
    output_tokens: int,
    last_token_id: int,
    prefilled_by: str | None,
    now_unix_s: float,
) -> SessionRecord:
    """The round ended well: increment and kept output are history now."""
    running = require_running(record)
    prompt_tokens = running.keep_history_tokens + running.increment_tokens
    holders = tuple(
        (worker, min(tokens, running.keep_history_tokens))
        for worker, tokens in record.prefix_holders
        if worker != prefilled_by
    )
    if prefilled_by is not None:
        holders = ((prefilled_by, prompt_tokens), *holders)
    return replace(
        record,
        version=record.version + 1,
        state=SessionState.IDLE,
        running=None,
        history_tokens=prompt_tokens + output_tokens,
        last_token_id=last_token_id,
        rounds=record.rounds + 1,
        settled=with_settled(record.settled, (running.request_id,)),
        discarded=(),
        prefix_holders=holders[:MAX_PREFIX_HOLDERS],
        last_used_unix_s=now_unix_s,
    )


def with_settled(settled: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """The requests of the last settled rounds, after those of `more`."""
    return tuple(dict.fromkeys((*settled, *more)))[-MAX_SETTLED:]


def discard(record: SessionRecord, *, resumable: str = "", now_unix_s: float) -> SessionRecord:
    """The round failed or was cancelled: the history is what it was before. `resumable`: the
    request that may go on with the output so far, if that is kept."""
    running = require_running(record)
    return replace(
        record,
        version=record.version + 1,
        state=SessionState.IDLE,
        running=None,
        resumable=resumable,
        discarded=(*record.discarded, running.attempt_id)[-MAX_DISCARDED:],
        last_used_unix_s=now_unix_s,
    )


def rebind(record: SessionRecord, home: Binding, *, expected: Binding) -> SessionRecord:
    """The idle session has moved from its home `expected` to `home`; that is no use of it.

    Raises SESSION_NOT_FOUND (closed), ROUND_RUNNING, SESSION_CONFLICT (its home is another).
    """
    require_idle(record)
    if record.home != expected:
        raise AmpdError(
            ErrorReason.SESSION_CONFLICT,
            f"session {record.session_id} is not bound to {expected.worker_id}",
        )
    return replace(record, version=record.version + 1, home=home)


def use(record: SessionRecord, *, now_unix_s: float) -> SessionRecord:
    """The idle session is in use between two rounds: its tools have run.

    Raises SESSION_NOT_FOUND (closed), ROUND_RUNNING (another call has begun a round).
    """
    require_idle(record)
    return replace(record, version=record.version + 1, last_used_unix_s=now_unix_s)


def close(record: SessionRecord, *, request_id: str, now_unix_s: float) -> SessionRecord:
    """End the session; a round still running is void."""
    require_open(record)
    return replace(
        record,
        version=record.version + 1,
        state=SessionState.CLOSED,
        running=None,
        closed_by=request_id,
        last_used_unix_s=now_unix_s,
    )


def write_back(
    stored: SessionRecord,
    settled: SessionRecord | None,
    attempt_id: str,
    *,
    resumable: str = "",
    answer_missing: bool = False,
) -> SessionRecord | None:
    """The end of a round that the shared store missed: the record to store in place of
    `stored`; None: nothing is to be written any more.

    `settled`: as the round left it; None: discarded, with `resumable` as in `discard`.
    `answer_missing`: the store has no answer under the round's request_id. A round that has
    settled stays, whatever has begun without knowing of it: that one finds its mark gone. Behind
    a discarded one, another that has begun meanwhile goes on. A mark of this very attempt ends
    here.
    """
    if stored.state is SessionState.CLOSED:
        return None
    version = stored.version + 1
    if settled is not None and stored.rounds < settled.rounds:
        return replace(settled, version=version)
    marked = stored.running is not None and stored.running.attempt_id == attempt_id
    if stored.running is not None and not marked:
        return None
    # Nothing to settle, or the home has published the round meanwhile.
    if settled is None:
        if not marked:
            return None
        return discard(stored, resumable=resumable, now_unix_s=stored.last_used_unix_s)
    if marked or (stored.rounds == settled.rounds and answer_missing):
        return replace(stored, version=version, state=SessionState.IDLE, running=None, resumable="")
    return None


def require_own(record: SessionRecord | None, tenant: str, session_id: str) -> SessionRecord:
    """The tenant's open session, or SESSION_NOT_FOUND: the same for every other case."""
    if record is None or record.tenant != tenant:
        raise session_not_found(session_id)
    require_open(record)
    return record


def conflict(session_id: str) -> AmpdError:
    """Another writer was faster."""
    return AmpdError(
        ErrorReason.SESSION_CONFLICT, f"session {session_id} was changed by another call"
    )


def require_open(record: SessionRecord) -> None:
    """Raises SESSION_NOT_FOUND for a closed session."""
    if record.state is SessionState.CLOSED:
        raise session_not_found(record.session_id)


def require_idle(record: SessionRecord) -> None:
    """Raises SESSION_NOT_FOUND for a closed session, ROUND_RUNNING for a running one."""
    require_open(record)
    if record.state is SessionState.RUNNING:
        raise AmpdError(
            ErrorReason.ROUND_RUNNING,
            f"round {record.rounds} of session {record.session_id} is still running",
        )


def require_running(record: SessionRecord) -> RunningRound:
    """The running round, or SESSION_CONFLICT."""
    if record.state is not SessionState.RUNNING or record.running is None:
        raise AmpdError(
            ErrorReason.SESSION_CONFLICT,
            f"session {record.session_id} has no running round (it is {record.state})",
        )
    return record.running


def session_not_found(session_id: str) -> AmpdError:
    """The same for unknown, closed and foreign sessions."""
    return AmpdError(ErrorReason.SESSION_NOT_FOUND, f"no session {session_id!r}")
