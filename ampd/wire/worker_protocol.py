"""The prefill protocol between homes and prefill workers: tasks, KV handles, reports.

Clocks of two machines need not agree: a task's TTFT clock travels as its age, an engine's
intervals as their lengths.
"""

from __future__ import annotations

from typing import Final

from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.model import KvHandle, PrefillStats, PrefillTarget, PrefillTask
from ampd.ports import ClaimedTask, PrefillReport
from ampd.wire import names, session, times, tokens
from ampd.worker.v1 import decode_service_pb2, kv_pb2, task_pb2

MAX_KV_PAYLOAD_BYTES: Final = 1024 * 1024
MAX_FAILURE_CHARS: Final = 1024
"""Of what a prefill worker tells about a failure, for the log."""


def life_name(incarnation: int) -> str:
    """The health service name that only this life of a worker serves: watching it notices a
    restarted worker as well as a dead one."""
    return f"life/{incarnation}"


def target_to_proto(target: PrefillTarget) -> decode_service_pb2.PrefillTarget:
    """One life of a prefill worker, and where it is."""
    return decode_service_pb2.PrefillTarget(
        worker_id=target.worker_id, incarnation=target.incarnation, address=target.address
    )


def target_from_proto(message: decode_service_pb2.PrefillTarget, path: str) -> PrefillTarget:
    """One life of a prefill worker, and where it is; INVALID_FIELD."""
    return PrefillTarget(
        names.required_id(message.worker_id, f"{path}.worker_id"),
        message.incarnation,
        message.address,
    )


def require_incarnation(asked: int, own: int) -> None:
    """AmpdError STALE_INCARNATION for a call that was meant for another life of this worker."""
    if asked != own:
        raise AmpdError(
            ErrorReason.STALE_INCARNATION,
            f"meant for incarnation {asked} of this worker, which is {own} now",
        )


def task_to_proto(
    task: PrefillTask, *, home_address: str, home_incarnation: int, now_s: float
) -> task_pb2.PrefillTask:
    """`now_s`: the clock that the task's `created_s` is on."""
    return task_pb2.PrefillTask(
        task_id=task.task_id,
        session_id=task.session_id,
        round_index=task.round_index,
        home=task.home,
        home_address=home_address,
        home_incarnation=home_incarnation,
        history_tokens=task.history_tokens,
        increment_tokens=task.increment_tokens,
        age=times.duration_to_proto(max(0.0, now_s - task.created_s)),
        slo=session.slo_to_proto(task.slo),
        waits_at_home=task.waits_at_home,
    )


def task_from_proto(message: task_pb2.PrefillTask, *, now_s: float) -> tuple[PrefillTask, str, int]:
    """The task on the clock of `now_s`, its home's address and incarnation; INVALID_FIELD."""
    if message.increment_tokens < 1:
        raise invalid_field("task.increment_tokens", "at least 1")
    task = PrefillTask(
        task_id=names.required_id(message.task_id, "task.task_id"),
        session_id=names.required_id(message.session_id, "task.session_id"),
        round_index=message.round_index,
        home=names.required_id(message.home, "task.home"),
        history_tokens=message.history_tokens,
        increment_tokens=message.increment_tokens,
        created_s=now_s - times.age_from_proto(message.age, "task.age"),
        slo=session.whole_slo_from_proto(message.slo, "task.slo"),
        waits_at_home=message.waits_at_home,
    )
    if not message.home_address:
        raise invalid_field("task.home_address", "required")
    return task, message.home_address, message.home_incarnation


def kv_to_proto(kv: KvHandle) -> kv_pb2.KvHandle:
    """The handle, opaque payload included."""
    return kv_pb2.KvHandle(
        owner=kv.owner,
        incarnation=kv.incarnation,
        tokens=kv.tokens,
        lease=times.duration_to_proto(kv.lease_s),
        payload=kv.payload,
    )


def kv_from_proto(message: kv_pb2.KvHandle, path: str) -> KvHandle:
    """The handle; AmpdError INVALID_FIELD for one without tokens, or too large."""
    if message.tokens < 1:
        raise invalid_field(f"{path}.tokens", "at least 1")
    if len(message.payload) > MAX_KV_PAYLOAD_BYTES:
        raise invalid_field(f"{path}.payload", f"at most {MAX_KV_PAYLOAD_BYTES} bytes")
    return KvHandle(
        owner=names.required_id(message.owner, f"{path}.owner"),
        incarnation=message.incarnation,
        tokens=message.tokens,
        lease_s=times.age_from_proto(message.lease, f"{path}.lease"),
        payload=message.payload,
    )


def stats_to_proto(stats: PrefillStats) -> kv_pb2.PrefillStats:
    """Counts, and the lengths of the intervals."""
    return kv_pb2.PrefillStats(
        computed_tokens=stats.computed_tokens,
        cached_tokens=stats.cached_tokens,
        pulled_tokens=stats.pulled_tokens,
        pulled_bytes=stats.pulled_bytes,
        read=times.duration_to_proto(stats.read_s),
        compute=times.duration_to_proto(stats.compute_s),
    )


def stats_from_proto(message: kv_pb2.PrefillStats) -> PrefillStats:
    """Counts, and intervals of the right length that both start at 0: `read_s` and `compute_s`
    mean something, the instants do not."""
    return PrefillStats(
        computed_tokens=message.computed_tokens,
        cached_tokens=message.cached_tokens,
        pulled_tokens=message.pulled_tokens,
        pulled_bytes=message.pulled_bytes,
        read_end_s=times.age_from_proto(message.read, "stats.read"),
        compute_end_s=times.age_from_proto(message.compute, "stats.compute"),
    )


def report_to_proto(report: PrefillReport) -> decode_service_pb2.PrefillResult:
    """What a prefill worker hands over."""
    return decode_service_pb2.PrefillResult(
        kv=kv_to_proto(report.kv),
        stats=stats_to_proto(report.stats),
        queue=times.duration_to_proto(report.queue_s),
    )


def report_from_proto(message: decode_service_pb2.PrefillResult) -> PrefillReport:
    """What a prefill worker hands over; AmpdError INVALID_FIELD."""
    return PrefillReport(
        kv=kv_from_proto(message.kv, "result.kv"),
        stats=stats_from_proto(message.stats),
        queue_s=times.age_from_proto(message.queue, "result.queue"),
    )


def claimed_to_proto(claimed: ClaimedTask) -> decode_service_pb2.ClaimResponse:
    """What a claim grants."""
    return decode_service_pb2.ClaimResponse(
        tokens=tokens.tokens_to_bytes(claimed.tokens),
        history=kv_to_proto(claimed.history) if claimed.history else None,
    )


def claimed_from_proto(message: decode_service_pb2.ClaimResponse) -> ClaimedTask:
    """What a claim grants; AmpdError INVALID_FIELD."""
    return ClaimedTask(
        tokens=tokens.tokens_from_bytes(message.tokens, "tokens"),
        history=(
            kv_from_proto(message.history, "history") if message.HasField("history") else None
        ),
    )
