"""What `ampdctl` shows of the contract's messages: plain values, durations in seconds."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict

from ampd.v1.admin_service_pb2 import DrainWorkerResponse, MoveSessionResponse
from ampd.v1.policy_pb2 import Policy
from ampd.v1.round_pb2 import (
    FinishReason,
    RoundRecord,
    Route,
    RouteCandidate,
    RouteDecision,
    RouteReason,
)
from ampd.v1.session_pb2 import ItlStatistic, Session, SessionState, Slo
from ampd.v1.worker_pb2 import Worker, WorkerRole
from ampd.wire.times import duration_from_proto

View = dict[str, object]


def worker_view(worker: Worker) -> View:
    """A process of the cluster and its load."""
    load = worker.load
    return {
        "worker_id": worker.worker_id,
        "role": role_name(worker.role),
        "address": worker.address,
        "host": worker.host,
        "incarnation": worker.incarnation,
        "model": worker.model,
        "engine": worker.engine,
        "kv_capacity_tokens": worker.kv_capacity_tokens,
        "kv_block_tokens": worker.kv_block_tokens,
        "kv_bytes_per_token": worker.kv_bytes_per_token,
        "max_model_tokens": worker.max_model_tokens,
        "load_age_s": _s(load.age),
        "draining": load.draining,
        "queued_tasks": load.queued_tasks,
        "queued_prefill_s": _s(load.queued_prefill),
        "oldest_wait_s": _s(load.oldest_wait),
        "ttft_window_s": _s(load.ttft_window),
        "itl_window_s": _s(load.itl_window),
        "running_rounds": load.running_rounds,
        "running_context_tokens": load.running_context_tokens,
        "sessions": load.sessions,
        "kv_pinned_tokens": load.kv_pinned_tokens,
        "kv_running_tokens": load.kv_running_tokens,
        "kv_reserved_tokens": load.kv_reserved_tokens,
        "drain_estimate_s": _s(load.drain_estimate),
        "tools": list(load.tools),
    }


def drain_view(worker_id: str, response: DrainWorkerResponse) -> View:
    """How far a draining worker is."""
    return {
        "worker_id": worker_id,
        "running": response.running,
        "sessions": response.sessions,
        "estimated_s": _s(response.estimated),
        "elapsed_s": _s(response.elapsed),
    }


def move_view(session_id: str, response: MoveSessionResponse) -> View:
    """Where a session is now, and what was moved."""
    return {
        "session_id": session_id,
        "home_worker": response.worker_id,
        "moved_tokens": response.moved_tokens,
        "moved_bytes": response.moved_bytes,
    }


def session_view(session: Session) -> View:
    """A session."""
    return {
        "session_id": session.session_id,
        "model": session.model,
        "state": _name(SessionState.Name(session.state), "SESSION_STATE"),
        "home_worker": session.home_worker,
        "history_tokens": session.history_tokens,
        "round_count": session.round_count,
        "slo": _slo_view(session.slo),
        "create_time": session.create_time.ToJsonString(),
        "last_used_time": session.last_used_time.ToJsonString(),
        "labels": dict(session.labels),
    }


def policy_view(policy: Policy) -> View:
    """A policy with every setting."""
    return {
        "name": policy.name,
        "version": policy.version,
        # A protobuf map has no order: the same policy is to read the same each time.
        "settings": dict(sorted(MessageToDict(policy.settings).items())),
    }


def round_view(record: RoundRecord) -> View:
    """A round: where it went and why, what was considered, what it took, how it went."""
    usage, timings = record.usage, record.timings
    view: View = {
        "round": record.round_index,
        "request_id": record.request_id,
        "create_time": record.create_time.ToJsonString(),
        "route": route_name(record.route),
        "reason": reason_name(record.reason),
        "prefill_worker": record.prefill_worker or None,
        "decode_worker": record.decode_worker,
        "history_rebuilt": record.history_rebuilt,
        "finish_reason": _name(FinishReason.Name(record.finish_reason), "FINISH_REASON"),
        "attained": record.attained,
        "usage": {
            "history_tokens": usage.history_tokens,
            "increment_tokens": usage.increment_tokens,
            "output_tokens": usage.output_tokens,
            "kept_output_tokens": usage.kept_output_tokens,
            "prefill_computed_tokens": usage.prefill_computed_tokens,
            "decode_computed_tokens": usage.decode_computed_tokens,
            "decode_cached_tokens": usage.decode_cached_tokens,
            "history_pulled_tokens": usage.history_pulled_tokens,
            "history_pulled_bytes": usage.history_pulled_bytes,
            "increment_pulled_tokens": usage.increment_pulled_tokens,
            "increment_pulled_bytes": usage.increment_pulled_bytes,
        },
        "timings": {
            "queue_s": _s(timings.queue),
            "read_s": _s(timings.read),
            "compute_s": _s(timings.compute),
            "return_s": _s(timings.kv_return),
            "ttft_s": _s(timings.ttft),
            "itl_mean_s": _s(timings.itl_mean),
            "itl_p95_s": _s(timings.itl_p95),
            "itl_max_s": _s(timings.itl_max),
            "total_s": _s(timings.total),
        },
        "decision": _decision_view(record.decision),
    }
    if record.HasField("bind"):
        view["bind"] = {
            "worker_id": record.bind.worker_id,
            "reason": record.bind.reason,
            "free_kv_tokens": record.bind.free_kv_tokens,
            "footprint_tokens": record.bind.footprint_tokens,
        }
    return view


def role_name(role: WorkerRole.ValueType) -> str:
    """`prefill` for WORKER_ROLE_PREFILL."""
    return _name(WorkerRole.Name(role), "WORKER_ROLE")


def route_name(route: Route.ValueType) -> str:
    """`local` or `remote`."""
    return _name(Route.Name(route), "ROUTE")


def reason_name(reason: RouteReason.ValueType) -> str:
    """`prefill_within_ttft` for ROUTE_REASON_PREFILL_WITHIN_TTFT."""
    return _name(RouteReason.Name(reason), "ROUTE_REASON")


def _decision_view(decision: RouteDecision) -> View:
    return {
        "policy": decision.policy,
        "route": route_name(decision.route),
        "prefill_worker": decision.prefill_worker or None,
        "reason": reason_name(decision.reason),
        "predicted_ttft_s": _s(decision.predicted_ttft),
        "state_age_s": _s(decision.state_age),
        "fallbacks": list(decision.fallbacks),
        "candidates": [_candidate_view(candidate) for candidate in decision.candidates],
    }


def _candidate_view(candidate: RouteCandidate) -> View:
    return {
        "worker_id": candidate.worker_id,
        "route": route_name(candidate.route),
        "predicted_ttft_s": _s(candidate.predicted_ttft),
        "queue_s": _s(candidate.queue),
        "read_s": _s(candidate.read),
        "compute_s": _s(candidate.compute),
        "return_s": _s(candidate.kv_return),
        "statistic_s": _s(candidate.statistic),
    }


def _slo_view(slo: Slo) -> View:
    return {
        "ttft_s": _s(slo.ttft),
        "itl_s": _s(slo.itl),
        "itl_statistic": _name(ItlStatistic.Name(slo.itl_statistic), "ITL_STATISTIC"),
    }


def _s(duration: Duration) -> float:
    return duration_from_proto(duration)


def _name(proto_name: str, prefix: str) -> str:
    """An enum value's name as people write it; empty when it is unspecified."""
    name = proto_name.removeprefix(f"{prefix}_").lower()
    return "" if name == "unspecified" else name
