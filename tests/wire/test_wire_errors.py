from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.errors import AmpdError, ErrorReason, FieldViolation, invalid_field
from ampd.v1 import error_reason_pb2
from ampd.wire import errors

PROTO = Path(__file__).parents[2] / "protos/ampd/v1/error_reason.proto"


def rpc_error(
    code: grpc.StatusCode, details: str = "", status: status_pb2.Status | None = None
) -> AioRpcError:
    trailing = Metadata()
    if status is not None:
        trailing = Metadata((errors.DETAILS_KEY, status.SerializeToString()))
    return AioRpcError(code, Metadata(), trailing, details)


def told(error: AmpdError) -> AmpdError:
    """The error after a trip over the wire."""
    status = errors.to_status(error)
    return errors.from_rpc_error(rpc_error(errors.status_code(error), status.message, status))


def test_the_table_the_proto_and_the_core_have_the_same_reasons() -> None:
    in_proto = {
        name.removeprefix("ERROR_REASON_")
        for name in error_reason_pb2.ErrorReason.keys()  # noqa: SIM118 - not a mapping
    }
    in_core = {reason.value for reason in ErrorReason}
    assert in_proto == in_core | {"UNSPECIFIED"}
    assert set(errors.STATUS_CODES) == set(ErrorReason)


@pytest.mark.parametrize("reason", list(ErrorReason))
def test_the_proto_comment_of_a_reason_names_its_code(reason: ErrorReason) -> None:
    lines = PROTO.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if f"ERROR_REASON_{reason.value} =" in line)
    comment: list[str] = []
    while lines[at - 1].lstrip().startswith("//"):
        at -= 1
        comment.insert(0, lines[at])
    assert errors.STATUS_CODES[reason].name in comment[0]


@pytest.mark.parametrize("reason", list(ErrorReason))
def test_every_reason_comes_back(reason: ErrorReason) -> None:
    error = told(AmpdError(reason, "why"))
    assert (error.reason, error.message) == (reason, "why")
    assert (error.violations, error.retry_after_s, dict(error.metadata)) == ((), None, {})


def test_violations_delay_and_metadata_come_back() -> None:
    error = told(
        AmpdError(
            ErrorReason.INVALID_FIELD,
            "keep_history_tokens: 9 is beyond 4",
            (FieldViolation("keep_history_tokens", "at most 4"),),
            retry_after_s=1.5,
            metadata={"history_tokens": "4"},
        )
    )
    assert error.violations == (FieldViolation("keep_history_tokens", "at most 4"),)
    assert error.retry_after_s == 1.5
    assert error.metadata == {"history_tokens": "4"}


def test_the_status_is_what_other_languages_expect() -> None:
    status = errors.to_status(invalid_field("sampling.top_p", "too much"))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert (status.code, info.domain, info.reason) == (3, "ampd.dev", "INVALID_FIELD")
    assert bad_request.field_violations[0].field == "sampling.top_p"


@given(
    message=st.text(),
    violations=st.lists(st.builds(FieldViolation, st.text(), st.text()), max_size=10),
    metadata=st.dictionaries(st.text(), st.text(), max_size=20),
)
def test_a_status_always_fits_the_trailers(
    message: str, violations: list[FieldViolation], metadata: dict[str, str]
) -> None:
    huge = AmpdError(
        ErrorReason.INVALID_FIELD,
        message * 1000,
        tuple(FieldViolation(v.field * 100, v.description * 100) for v in violations),
        metadata={key * 100: value * 100 for key, value in metadata.items()},
    )
    status = errors.to_status(huge)
    escaped = 3 * len(status.message.encode()) + len(status.SerializeToString()) * 4 // 3
    assert escaped < 8 * 1024
    assert errors.from_status(status) is not None


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "refused", ErrorReason.WORKER_UNAVAILABLE),
        (grpc.StatusCode.CANCELLED, "", ErrorReason.WORKER_UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", ErrorReason.DEADLINE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit", ErrorReason.QUEUE_FULL),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Sent message larger than max (9 vs. 4)",
            ErrorReason.INVALID_FIELD,
        ),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", ErrorReason.INTERNAL),
    ],
)
def test_a_failure_without_details(
    code: grpc.StatusCode, details: str, reason: ErrorReason
) -> None:
    error = errors.from_rpc_error(rpc_error(code, details))
    assert error.reason is reason
    assert (error.retry_after_s is not None) == (reason is ErrorReason.QUEUE_FULL)


def test_a_newer_servers_reason_is_kept_in_words() -> None:
    status = errors.to_status(AmpdError(ErrorReason.DRAINING, "later"))
    info = error_details_pb2.ErrorInfo(reason="TEAPOT", domain="ampd.dev")
    status.details[0].Pack(info)
    error = errors.from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "later", status))
    assert error.reason is ErrorReason.INTERNAL
    assert error.message == "TEAPOT: later"


def test_details_of_others_and_garbage_count_as_none() -> None:
    foreign = status_pb2.Status(code=14, message="x")
    error = errors.from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", foreign))
    assert error.reason is ErrorReason.WORKER_UNAVAILABLE
    garbage = AioRpcError(
        grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata((errors.DETAILS_KEY, b"\xff\xff")), "x"
    )
    assert errors.from_rpc_error(garbage).reason is ErrorReason.WORKER_UNAVAILABLE
