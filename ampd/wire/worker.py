"""Workers as operators see them."""

from __future__ import annotations

from ampd.core.model import WorkerLoad, WorkerView
from ampd.v1 import worker_pb2
from ampd.wire import enums, times


def worker_to_proto(view: WorkerView) -> worker_pb2.Worker:
    """One live process with the load it published last."""
    info = view.info
    return worker_pb2.Worker(
        worker_id=info.worker_id,
        role=enums.ROLE.to_proto(info.role),
        incarnation=info.incarnation,
        address=info.address,
        host=info.host,
        model=info.model,
        engine=info.engine,
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_block_tokens=info.kv_block_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_model_tokens=info.max_model_tokens,
        load=_load_to_proto(view.load, view.age_s),
    )


def _load_to_proto(load: WorkerLoad, age_s: float) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        age=times.duration_to_proto(age_s),
        draining=load.draining,
        queued_tasks=load.queued_tasks,
        queued_prefill=times.duration_to_proto(load.queued_prefill_s),
        oldest_wait=times.duration_to_proto(load.oldest_wait_s),
        ttft_window=times.duration_to_proto(load.ttft_window_s),
        itl_window=times.duration_to_proto(load.itl_window_s),
        running_rounds=load.running_rounds,
        running_context_tokens=load.running_context_tokens,
        sessions=load.sessions,
        kv_pinned_tokens=load.kv_pinned_tokens,
        kv_running_tokens=load.kv_running_tokens,
        kv_reserved_tokens=load.kv_reserved_tokens,
        drain_estimate=times.duration_to_proto(load.drain_estimate_s),
        tools=load.tools,
        calibration=load.calibration,
        waiting_tasks=len(load.waiting),
    )
