"""Moving sessions and draining workers on the wire: between workers, and for operators."""

from __future__ import annotations

from ampd.core.errors import invalid_field
from ampd.core.model import Adopted, AdoptOrder, DrainStatus, Moved
from ampd.v1 import admin_service_pb2
from ampd.wire import names, session, times, tokens
from ampd.wire.order import facts_from_proto, facts_to_proto
from ampd.wire.worker_protocol import kv_from_proto, kv_to_proto
from ampd.worker.v1 import decode_service_pb2, worker_service_pb2


def adopt_to_proto(order: AdoptOrder, *, incarnation: int) -> decode_service_pb2.AdoptRequest:
    """`incarnation`: the life of the home that is meant."""
    return decode_service_pb2.AdoptRequest(
        incarnation=incarnation,
        session_id=order.session_id,
        rounds=order.rounds,
        tokens=tokens.tokens_to_bytes(order.tokens),
        history=kv_to_proto(order.history) if order.history is not None else None,
        facts=facts_to_proto(order.facts),
        slo=session.slo_to_proto(order.slo),
    )


def adopt_from_proto(message: decode_service_pb2.AdoptRequest) -> AdoptOrder:
    """The order; AmpdError INVALID_FIELD."""
    history = tokens.tokens_from_bytes(message.tokens, "tokens")
    if not history:
        raise invalid_field("tokens", "at least one token")
    kv = kv_from_proto(message.history, "history") if message.HasField("history") else None
    if kv is not None and kv.tokens > len(history):
        raise invalid_field("history.tokens", f"at most the {len(history)} of the history")
    return AdoptOrder(
        session_id=names.required_id(message.session_id, "session_id"),
        rounds=message.rounds,
        tokens=history,
        facts=facts_from_proto(message.facts),
        slo=session.whole_slo_from_proto(message.slo, "slo"),
        history=kv,
    )


def adopted_to_proto(adopted: Adopted) -> decode_service_pb2.AdoptResponse:
    """What was read."""
    return decode_service_pb2.AdoptResponse(
        pulled_tokens=adopted.pulled_tokens, pulled_bytes=adopted.pulled_bytes
    )


def adopted_from_proto(message: decode_service_pb2.AdoptResponse) -> Adopted:
    """What was read."""
    return Adopted(message.pulled_tokens, message.pulled_bytes)


def moved_to_proto(moved: Moved) -> decode_service_pb2.MoveResponse:
    """Where the session is now."""
    return decode_service_pb2.MoveResponse(
        worker_id=moved.worker_id,
        moved_tokens=moved.moved_tokens,
        moved_bytes=moved.moved_bytes,
    )


def moved_from_proto(message: decode_service_pb2.MoveResponse) -> Moved:
    """Where the session is now."""
    return Moved(message.worker_id, message.moved_tokens, message.moved_bytes)


def move_session_response(moved: Moved) -> admin_service_pb2.MoveSessionResponse:
    """The same for an operator."""
    return admin_service_pb2.MoveSessionResponse(
        worker_id=moved.worker_id,
        moved_tokens=moved.moved_tokens,
        moved_bytes=moved.moved_bytes,
    )


def drain_to_proto(status: DrainStatus) -> worker_service_pb2.DrainResponse:
    """How far a worker is."""
    return worker_service_pb2.DrainResponse(
        running=status.running,
        sessions=status.sessions,
        estimated=times.duration_to_proto(status.estimated_s),
        elapsed=times.duration_to_proto(status.elapsed_s),
    )


def drain_from_proto(message: worker_service_pb2.DrainResponse) -> DrainStatus:
    """How far a worker is; AmpdError INVALID_FIELD."""
    return DrainStatus(
        running=message.running,
        sessions=message.sessions,
        estimated_s=times.age_from_proto(message.estimated, "estimated"),
        elapsed_s=times.age_from_proto(message.elapsed, "elapsed"),
    )


def drain_worker_response(status: DrainStatus) -> admin_service_pb2.DrainWorkerResponse:
    """The same for an operator."""
    return admin_service_pb2.DrainWorkerResponse(
        running=status.running,
        sessions=status.sessions,
        estimated=times.duration_to_proto(status.estimated_s),
        elapsed=times.duration_to_proto(status.elapsed_s),
    )
