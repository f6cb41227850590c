"""The refusals that every StateStore adapter shares."""

from __future__ import annotations

from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import WorkerInfo

SESSIONS_RETRY_AFTER_S: Final = 5.0
"""Sessions are closed or expire in their own time; there is nothing to wait for."""


def store_unavailable(operation: str, error: Exception) -> AmpdError:
    """The store did not answer in time. The address stays out: it may hold a password."""
    return AmpdError(
        ErrorReason.STORE_UNAVAILABLE,
        f"shared store: {operation} failed ({type(error).__name__})",
    )


def replaced_incarnation(info: WorkerInfo) -> AmpdError:
    """A newer process holds this worker_id: this one must stop."""
    return AmpdError(
        ErrorReason.STALE_INCARNATION,
        f"worker {info.worker_id}: incarnation {info.incarnation} was replaced by a newer one",
    )


def session_id_taken(session_id: str) -> AmpdError:
    """Another session has this id."""
    return AmpdError(ErrorReason.SESSION_CONFLICT, f"session {session_id!r} exists already")


def too_many_sessions(tenant: str, max_sessions: int | None) -> AmpdError:
    """The tenant has to close one first, or wait until one expires."""
    return AmpdError(
        ErrorReason.QUEUE_FULL,
        f"tenant {tenant!r} has {max_sessions} open sessions already",
        retry_after_s=SESSIONS_RETRY_AFTER_S,
    )


def history_missing(session_id: str, start: int, end: int) -> AmpdError:
    """The session, or this part of its history, is not stored (it was closed or it expired)."""
    return AmpdError(
        ErrorReason.SESSION_NOT_FOUND,
        f"no stored tokens [{start}, {end}) of session {session_id!r}",
    )


def history_hole(session_id: str, offset: int) -> AmpdError:
    """Tokens were to be written beyond the stored ones: what lies between would be zeros."""
    return AmpdError(
        ErrorReason.INTERNAL,
        f"session {session_id!r}: tokens at offset {offset} would leave a hole in the history",
    )
