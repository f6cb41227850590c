"""The one table from an error's reason to its gRPC status, and rich statuses both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from ampd.core.errors import AmpdError, ErrorReason, FieldViolation
from ampd.wire.times import duration_from_proto, duration_to_proto

DOMAIN: Final = "ampd.dev"
"""`domain` of every google.rpc.ErrorInfo."""

DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata key that carries the google.rpc.Status."""

# A status travels in HTTP/2 trailers, of which gRPC takes 8 KiB: with these bounds the worst
# case, every byte escaped, stays below.
MAX_MESSAGE_BYTES: Final = 512
MAX_VIOLATIONS: Final = 4
MAX_VIOLATION_BYTES: Final = 256
MAX_METADATA_ENTRIES: Final = 8
MAX_METADATA_BYTES: Final = 64

STATUS_CODES: Final[Mapping[ErrorReason, grpc.StatusCode]] = {
    ErrorReason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.SESSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.ROUND_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.WORKER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.TOOL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.ROUND_RUNNING: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.SESSION_CONFLICT: grpc.StatusCode.ABORTED,
    ErrorReason.POLICY_CONFLICT: grpc.StatusCode.ABORTED,
    ErrorReason.CONTEXT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.KV_TOO_SMALL: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.KV_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.HISTORY_NOT_RESIDENT: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.TASK_GONE: grpc.StatusCode.NOT_FOUND,
    ErrorReason.STALE_INCARNATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.NO_DECODE_WORKER: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.WORKER_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorReason.ENGINE_FAILED: grpc.StatusCode.INTERNAL,
    ErrorReason.INTERNAL: grpc.StatusCode.INTERNAL,
}

_TRANSPORT_REASONS: Final[Mapping[grpc.StatusCode, ErrorReason]] = {
    grpc.StatusCode.UNAVAILABLE: ErrorReason.WORKER_UNAVAILABLE,
    # The other side cut the call: its process stopped in the middle of it.
    grpc.StatusCode.CANCELLED: ErrorReason.WORKER_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorReason.DEADLINE,
    # The server's limit on concurrent calls.
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorReason.QUEUE_FULL,
}
"""What a failed call without AMPD's details means; anything else is INTERNAL."""


FULL_RETRY_S: Final = 1.0
"""When to try again at a server that was too full to say so itself."""

_TOO_LARGE: Final = "larger than max"
"""In gRPC's words for a message over its size limit, which shares a code with a full server."""


def status_code(error: AmpdError) -> grpc.StatusCode:
    """The gRPC status code that the error is answered with."""
    return STATUS_CODES[error.reason]


def to_status(error: AmpdError) -> status_pb2.Status:
    """ErrorInfo always; BadRequest and RetryInfo where the error has violations or a delay.

    Texts are cut to fit the trailers.
    """
    status = status_pb2.Status(
        code=status_code(error).value[0], message=_clip(error.message, MAX_MESSAGE_BYTES)
    )
    _pack(
        status,
        error_details_pb2.ErrorInfo(
            reason=error.reason.value,
            domain=DOMAIN,
            metadata={
                _clip(key, MAX_METADATA_BYTES): _clip(value, MAX_METADATA_BYTES)
                for key, value in list(error.metadata.items())[:MAX_METADATA_ENTRIES]
            },
        ),
    )
    if error.violations:
        _pack(
            status,
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=_clip(violation.field, MAX_VIOLATION_BYTES),
                        description=_clip(violation.description, MAX_VIOLATION_BYTES),
                    )
                    for violation in error.violations[:MAX_VIOLATIONS]
                ]
            ),
        )
    if error.retry_after_s is not None:
        delay = duration_to_proto(error.retry_after_s)
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> AmpdError | None:
    """The error that `to_status` was made from; None without an ErrorInfo of AMPD's domain.

    A reason that this version does not know becomes INTERNAL and keeps its name in the message.
    """
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Unpack(retry):
            retry_after_s = duration_from_proto(retry.retry_delay)
    if info.domain != DOMAIN:
        return None
    try:
        reason, message = ErrorReason(info.reason), status.message
    except ValueError:
        reason, message = ErrorReason.INTERNAL, f"{info.reason}: {status.message}"
    return AmpdError(
        reason,
        message,
        tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations),
        retry_after_s=retry_after_s,
        metadata=dict(info.metadata),
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> AmpdError:
    """The error of a failed call: what the server said, or what its transport failure means."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                told = from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                break
            if told is not None:
                return told
    code, details = error.code(), error.details() or "no details"
    reason = _TRANSPORT_REASONS.get(code, ErrorReason.INTERNAL)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        reason = ErrorReason.INVALID_FIELD
    retry_after_s = FULL_RETRY_S if reason is ErrorReason.QUEUE_FULL else None
    return AmpdError(reason, f"{code.name}: {details}", retry_after_s=retry_after_s)


def _pack(
    status: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)


def _clip(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    return encoded[:max_bytes].decode(errors="ignore")
