"""Rounds: decisions, usage, timings and records, both ways."""

from __future__ import annotations

from ampd.core.model import (
    BindDecision,
    BindReason,
    Finished,
    RoundRecord,
    RoundTimings,
    RoundUsage,
    RouteCandidate,
    RouteDecision,
)
from ampd.v1 import round_pb2, session_service_pb2
from ampd.wire import enums, times

_seconds = times.duration_from_proto
_duration = times.duration_to_proto


def decision_to_proto(decision: RouteDecision) -> round_pb2.RouteDecision:
    """A routing decision with all that it considered."""
    return round_pb2.RouteDecision(
        policy=decision.policy,
        route=enums.ROUTE.to_proto(decision.route),
        prefill_worker=decision.prefill_worker or "",
        reason=enums.ROUTE_REASON.to_proto(decision.reason),
        predicted_ttft=_duration(decision.predicted_ttft_s),
        candidates=[_candidate_to_proto(candidate) for candidate in decision.candidates],
        fallbacks=decision.fallbacks,
        state_age=_duration(decision.state_age_s),
    )


def decision_from_proto(message: round_pb2.RouteDecision) -> RouteDecision:
    """The decision; AmpdError INVALID_FIELD for a value that this version does not know."""
    return RouteDecision(
        route=enums.ROUTE.from_proto(message.route, "decision.route"),
        prefill_worker=message.prefill_worker or None,
        reason=enums.ROUTE_REASON.from_proto(message.reason, "decision.reason"),
        policy=message.policy,
        predicted_ttft_s=_seconds(message.predicted_ttft),
        candidates=tuple(_candidate_from_proto(candidate) for candidate in message.candidates),
        fallbacks=tuple(message.fallbacks),
        state_age_s=_seconds(message.state_age),
    )


def bind_to_proto(decision: BindDecision) -> round_pb2.BindDecision:
    """The binding of a session."""
    return round_pb2.BindDecision(
        worker_id=decision.worker_id,
        reason=decision.reason.value,
        free_kv_tokens=decision.free_kv_tokens,
        footprint_tokens=decision.footprint_tokens,
    )


def bind_from_proto(message: round_pb2.BindDecision) -> BindDecision:
    """The binding; ValueError for a reason that this version does not know."""
    return BindDecision(
        worker_id=message.worker_id,
        reason=BindReason(message.reason),
        free_kv_tokens=message.free_kv_tokens,
        footprint_tokens=message.footprint_tokens,
    )


def usage_to_proto(usage: RoundUsage) -> round_pb2.RoundUsage:
    """Tokens and bytes."""
    return round_pb2.RoundUsage(
        history_tokens=usage.history_tokens,
        increment_tokens=usage.increment_tokens,
        output_tokens=usage.output_tokens,
        kept_output_tokens=usage.kept_output_tokens,
        prefill_computed_tokens=usage.prefill_computed_tokens,
        decode_computed_tokens=usage.decode_computed_tokens,
        decode_cached_tokens=usage.decode_cached_tokens,
        history_pulled_tokens=usage.history_pulled_tokens,
        history_pulled_bytes=usage.history_pulled_bytes,
        increment_pulled_tokens=usage.increment_pulled_tokens,
        increment_pulled_bytes=usage.increment_pulled_bytes,
    )


def usage_from_proto(message: round_pb2.RoundUsage) -> RoundUsage:
    """Tokens and bytes."""
    return RoundUsage(
        history_tokens=message.history_tokens,
        increment_tokens=message.increment_tokens,
        output_tokens=message.output_tokens,
        kept_output_tokens=message.kept_output_tokens,
        prefill_computed_tokens=message.prefill_computed_tokens,
        decode_computed_tokens=message.decode_computed_tokens,
        decode_cached_tokens=message.decode_cached_tokens,
        history_pulled_tokens=message.history_pulled_tokens,
        history_pulled_bytes=message.history_pulled_bytes,
        increment_pulled_tokens=message.increment_pulled_tokens,
        increment_pulled_bytes=message.increment_pulled_bytes,
    )


def timings_to_proto(timings: RoundTimings) -> round_pb2.RoundTimings:
    """Seconds as durations."""
    return round_pb2.RoundTimings(
        queue=_duration(timings.queue_s),
        read=_duration(timings.read_s),
        compute=_duration(timings.compute_s),
        kv_return=_duration(timings.return_s),
        ttft=_duration(timings.ttft_s),
        itl_mean=_duration(timings.itl_mean_s),
        itl_p95=_duration(timings.itl_p95_s),
        itl_max=_duration(timings.itl_max_s),
        total=_duration(timings.total_s),
    )


def timings_from_proto(message: round_pb2.RoundTimings) -> RoundTimings:
    """Durations as seconds."""
    return RoundTimings(
        queue_s=_seconds(message.queue),
        read_s=_seconds(message.read),
        compute_s=_seconds(message.compute),
        return_s=_seconds(message.kv_return),
        ttft_s=_seconds(message.ttft),
        itl_mean_s=_seconds(message.itl_mean),
        itl_p95_s=_seconds(message.itl_p95),
        itl_max_s=_seconds(message.itl_max),
        total_s=_seconds(message.total),
    )


def finished_to_proto(event: Finished) -> session_service_pb2.RoundFinished:
    """The end of a round, as homes and coordinators both send it."""
    return session_service_pb2.RoundFinished(
        finish_reason=enums.FINISH_REASON.to_proto(event.finish_reason),
        stop_reason=event.stop_reason,
        usage=usage_to_proto(event.usage),
        timings=timings_to_proto(event.timings),
        attained=event.attained,
        history_tokens=event.history_tokens,
    )


def finished_from_proto(message: session_service_pb2.RoundFinished) -> Finished:
    """The end of a round; AmpdError INVALID_FIELD without a finish reason."""
    return Finished(
        finish_reason=enums.FINISH_REASON.from_proto(
            message.finish_reason, "finished.finish_reason"
        ),
        stop_reason=message.stop_reason,
        usage=usage_from_proto(message.usage),
        timings=timings_from_proto(message.timings),
        attained=message.attained,
        history_tokens=message.history_tokens,
    )


def record_to_proto(record: RoundRecord) -> round_pb2.RoundRecord:
    """What is kept of a round."""
    return round_pb2.RoundRecord(
        round_index=record.round_index,
        request_id=record.request_id,
        create_time=times.timestamp_to_proto(record.created_unix_s),
        bind=bind_to_proto(record.bind) if record.bind else None,
        decision=decision_to_proto(record.decision),
        route=enums.ROUTE.to_proto(record.route),
        reason=enums.ROUTE_REASON.to_proto(record.reason),
        prefill_worker=record.prefill_worker or "",
        decode_worker=record.decode_worker,
        history_rebuilt=record.history_rebuilt,
        finish_reason=(
            enums.FINISH_REASON.to_proto(record.finish_reason)
            if record.finish_reason
            else round_pb2.FINISH_REASON_UNSPECIFIED
        ),
        usage=_record_usage(record),
        timings=timings_to_proto(record.timings),
        attained=record.attained,
    )


def record_from_proto(message: round_pb2.RoundRecord) -> RoundRecord:
    """What is kept of a round; errors as of its decisions."""
    return RoundRecord(
        round_index=message.round_index,
        request_id=message.request_id,
        history_tokens=message.usage.history_tokens,
        increment_tokens=message.usage.increment_tokens,
        history_rebuilt=message.history_rebuilt,
        decode_worker=message.decode_worker,
        prefill_worker=message.prefill_worker or None,
        reason=enums.ROUTE_REASON.from_proto(message.reason, "reason"),
        decision=decision_from_proto(message.decision),
        bind=bind_from_proto(message.bind) if message.HasField("bind") else None,
        finish_reason=enums.FINISH_REASON.from_proto_or_none(
            message.finish_reason, "finish_reason"
        ),
        usage=usage_from_proto(message.usage),
        timings=timings_from_proto(message.timings),
        attained=message.attained,
        created_unix_s=times.timestamp_from_proto(message.create_time),
    )


def _record_usage(record: RoundRecord) -> round_pb2.RoundUsage:
    """The usage; the record's own counts while the round has none yet."""
    usage = usage_to_proto(record.usage)
    usage.history_tokens = record.history_tokens
    usage.increment_tokens = record.increment_tokens
    return usage


def _candidate_to_proto(candidate: RouteCandidate) -> round_pb2.RouteCandidate:
    return round_pb2.RouteCandidate(
        worker_id=candidate.worker_id,
        route=enums.ROUTE.to_proto(candidate.route),
        queue=_duration(candidate.queue_s),
        read=_duration(candidate.read_s),
        compute=_duration(candidate.compute_s),
        kv_return=_duration(candidate.return_s),
        statistic=_duration(candidate.statistic_s),
        predicted_ttft=_duration(candidate.total_s),
    )


def _candidate_from_proto(message: round_pb2.RouteCandidate) -> RouteCandidate:
    return RouteCandidate(
        worker_id=message.worker_id,
        route=enums.ROUTE.from_proto(message.route, "decision.candidates.route"),
        queue_s=_seconds(message.queue),
        read_s=_seconds(message.read),
        compute_s=_seconds(message.compute),
        return_s=_seconds(message.kv_return),
        statistic_s=_seconds(message.statistic),
    )
