"""Exit codes of `ampdctl`, and how a failure is told: a message, a hint, a code."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import grpc

from ampd.core.errors import AmpdError, ErrorReason
from ampd.wire.errors import STATUS_CODES


class ExitCode(IntEnum):
    """What a script can tell failures apart by."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    INFEASIBLE = 5
    """Infeasible, or an SLO that was asked for is not met."""
    INTERRUPTED = 130


class CliError(Exception):
    """A command cannot go on; `hint` says what the user can do about it."""

    def __init__(
        self, message: str, *, hint: str = "", exit_code: ExitCode = ExitCode.FAILURE
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


_EXIT_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
    grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.UNAVAILABLE,
    # Full for now: as with UNAVAILABLE, trying again later can help.
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExitCode.UNAVAILABLE,
}

_HINTS: Final = {
    ErrorReason.WORKER_UNAVAILABLE: "is a cluster running there? `ampdctl up` starts a local one",
    ErrorReason.SESSION_NOT_FOUND: "`ampdctl session list` shows this tenant's open sessions",
    ErrorReason.ROUND_RUNNING: "wait for the running round, or close the session",
    ErrorReason.POLICY_CONFLICT: "`ampdctl policy get` shows the policy in force and its version",
    ErrorReason.NO_DECODE_WORKER: "`ampdctl status` shows which workers are alive",
}


def from_ampd_error(error: AmpdError) -> CliError:
    """The server's refusal as this command's end."""
    return CliError(
        error.message,
        hint=_HINTS.get(error.reason, ""),
        exit_code=_EXIT_CODES.get(STATUS_CODES[error.reason], ExitCode.FAILURE),
    )
