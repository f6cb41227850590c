"""Sessions and their objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ampd.core.errors import invalid_field
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import Binding, Slo
from ampd.v1 import session_pb2, session_service_pb2
from ampd.wire import enums, names, times

MAX_SLO_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class NewSession:
    """A valid request for a session; `request_id` may be empty."""

    request_id: str
    model: str
    slo: Slo
    labels: dict[str, str]


def new_session_from_proto(
    request: session_service_pb2.CreateSessionRequest, *, model: str, default_slo: Slo
) -> NewSession:
    """`model`: the one that the cluster serves. AmpdError INVALID_FIELD."""
    if request.model not in ("", model):
        raise invalid_field("model", f"{request.model!r} is not served here, {model!r} is")
    return NewSession(
        request_id=names.optional_id(request.request_id, "request_id"),
        model=model,
        slo=slo_from_proto(request.slo, default=default_slo),
        labels=names.labels_from_proto(request.labels),
    )


def slo_from_proto(message: session_pb2.Slo, *, default: Slo, path: str = "slo") -> Slo:
    """Unset parts are the default's; each threshold above 0 to 1 h, else INVALID_FIELD."""
    statistic = enums.ITL_STATISTIC.from_proto_or_none(
        message.itl_statistic, f"{path}.itl_statistic"
    )
    return Slo(
        ttft_s=(
            times.checked_duration(message.ttft, f"{path}.ttft", max_s=MAX_SLO_S)
            if message.HasField("ttft")
            else default.ttft_s
        ),
        itl_s=(
            times.checked_duration(message.itl, f"{path}.itl", max_s=MAX_SLO_S)
            if message.HasField("itl")
            else default.itl_s
        ),
        itl_statistic=statistic or default.itl_statistic,
    )


def whole_slo_from_proto(message: session_pb2.Slo, path: str) -> Slo:
    """An objective between AMPD's own services: nothing may be unset, else INVALID_FIELD."""
    return Slo(
        ttft_s=times.checked_duration(message.ttft, f"{path}.ttft", max_s=MAX_SLO_S),
        itl_s=times.checked_duration(message.itl, f"{path}.itl", max_s=MAX_SLO_S),
        itl_statistic=enums.ITL_STATISTIC.from_proto(
            message.itl_statistic, f"{path}.itl_statistic"
        ),
    )


def slo_to_proto(slo: Slo) -> session_pb2.Slo:
    """Every part set."""
    return session_pb2.Slo(
        ttft=times.duration_to_proto(slo.ttft_s),
        itl=times.duration_to_proto(slo.itl_s),
        itl_statistic=enums.ITL_STATISTIC.to_proto(slo.itl_statistic),
    )


def session_to_proto(record: SessionRecord) -> session_pb2.Session:
    """What a client sees of a session."""
    return session_pb2.Session(
        session_id=record.session_id,
        model=record.model,
        state=enums.SESSION_STATE.to_proto(record.state),
        home_worker=record.home.worker_id if record.home else "",
        history_tokens=record.history_tokens,
        round_count=record.rounds,
        slo=slo_to_proto(record.slo),
        create_time=times.timestamp_to_proto(record.created_unix_s),
        last_used_time=times.timestamp_to_proto(record.last_used_unix_s),
        labels=record.labels,
    )


def session_from_proto(message: session_pb2.Session) -> SessionRecord:
    """A client's view as a record. What a Session does not tell stays at its default: tenant,
    version, the running round, and the incarnation of its home (0)."""
    return SessionRecord(
        session_id=message.session_id,
        tenant="",
        model=message.model,
        slo=whole_slo_from_proto(message.slo, "session.slo"),
        created_unix_s=times.timestamp_from_proto(message.create_time),
        last_used_unix_s=times.timestamp_from_proto(message.last_used_time),
        state=enums.SESSION_STATE.from_proto(message.state, "session.state"),
        home=Binding(message.home_worker, 0) if message.home_worker else None,
        history_tokens=message.history_tokens,
        rounds=message.round_count,
        labels=dict(message.labels),
    )
