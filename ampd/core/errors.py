"""The errors that AMPD answers with: one typed reason each, no transport in sight.

`ampd.wire.errors` holds the one table from a reason to its gRPC status code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ErrorReason(StrEnum):
    """Why a call was refused. The names are those of `ampd.v1.ErrorReason` without prefix."""

    INVALID_FIELD = "INVALID_FIELD"
    """A field of the request is missing, malformed or out of range."""
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    """No such session, or closed, or of another tenant: the three are not told apart."""
    ROUND_NOT_FOUND = "ROUND_NOT_FOUND"
    """The session has no record of that round."""
    WORKER_NOT_FOUND = "WORKER_NOT_FOUND"
    """No live worker of that name."""
    ROUND_RUNNING = "ROUND_RUNNING"
    """The session's current round has not ended."""
    SESSION_CONFLICT = "SESSION_CONFLICT"
    """Another writer changed the session first: read it again."""
    POLICY_CONFLICT = "POLICY_CONFLICT"
    """Another writer changed the policy first: read it again."""
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    """History, increment and output do not fit the model's context."""
    KV_TOO_SMALL = "KV_TOO_SMALL"
    """No worker's whole KV memory could hold the session."""
    KV_EXHAUSTED = "KV_EXHAUSTED"
    """The home has no room for the round now."""
    QUEUE_FULL = "QUEUE_FULL"
    """A bounded queue or table is full."""
    HISTORY_NOT_RESIDENT = "HISTORY_NOT_RESIDENT"
    """Internal: the home does not hold the session's tokens; send them with the order."""
    TASK_GONE = "TASK_GONE"
    """Internal: the claimed or completed task is no longer offered to this worker."""
    STALE_INCARNATION = "STALE_INCARNATION"
    """Internal: the call was meant for an earlier life of this worker."""
    NO_DECODE_WORKER = "NO_DECODE_WORKER"
    """No live decode worker can take the session."""
    WORKER_UNAVAILABLE = "WORKER_UNAVAILABLE"
    """The worker that is needed cannot be reached."""
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    """The shared store cannot be reached."""
    DRAINING = "DRAINING"
    """This process is shutting down and takes no new work."""
    DEADLINE = "DEADLINE"
    """The caller's deadline passed."""
    ENGINE_FAILED = "ENGINE_FAILED"
    """The inference engine failed on this request."""
    INTERNAL = "INTERNAL"
    """A defect of AMPD."""
    TOOL_NOT_FOUND = "TOOL_NOT_FOUND"
    """No server-side tool of that name."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is wrong: its path in the message, and what would be right."""

    field: str
    description: str


@dataclass(eq=False)
class AmpdError(Exception):
    """A refusal with its typed reason; `retry_after_s` (s) only where a retry can succeed."""

    reason: ErrorReason
    message: str
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def invalid_field(name: str, description: str) -> AmpdError:
    """The request is wrong in the field `name` (a path such as `sampling.top_p`)."""
    return AmpdError(
        ErrorReason.INVALID_FIELD, f"{name}: {description}", (FieldViolation(name, description),)
    )
