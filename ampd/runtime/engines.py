"""Starting the engine that a worker's settings name. What an engine needs is imported when it is
started: an emulated worker is up in a second or two and never sees vLLM."""

from __future__ import annotations

from typing import Final

from ampd.core.cost_model import CostModel
from ampd.core.model import Role
from ampd.ports import Engine, KvTransport
from ampd.profiling.catalogue import open_profile
from ampd.runtime.worker import WorkerSettings

DEFAULT_PIN_S: Final = 600.0
"""Longest life of a pin on an engine that keeps no sessions."""


async def start_engine(
    settings: WorkerSettings, role: Role, incarnation: int, kv_lease_s: float = DEFAULT_PIN_S
) -> Engine:
    """The engine that the settings name, ready. `kv_lease_s`: the longest life of a pin."""
    if settings.engine == "emulated":
        return _start_emulated(settings, incarnation, kv_lease_s)
    return await _start_vllm(settings, role, incarnation, kv_lease_s)


async def _start_vllm(
    settings: WorkerSettings, role: Role, incarnation: int, kv_lease_s: float
) -> Engine:
    from ampd.adapters import engine_vllm

    return await engine_vllm.start(
        engine_vllm.VllmSettings(
            model=settings.model,
            role=role,
            max_model_tokens=settings.max_model_tokens,
            block_tokens=settings.block_tokens,
            kv_cache_bytes=settings.kv_cache_bytes,
            threads=settings.threads,
            side_channel_host=settings.side_channel_host,
            side_channel_port=settings.side_channel_port,
            kv_lease_s=kv_lease_s,
            dtype=settings.dtype,
            device=settings.device,
            tensor_parallel=settings.tensor_parallel,
            max_num_seqs=settings.max_running_requests,
            max_batched_tokens=settings.max_step_tokens,
            enforce_eager=not settings.compile,
            verbose=settings.log_level == "debug",
        ),
        settings.worker_id,
        incarnation,
    )


def _start_emulated(settings: WorkerSettings, incarnation: int, kv_lease_s: float) -> Engine:
    from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings

    kv_bytes_per_token = settings.modelled_kv_bytes_per_token
    blocks = settings.kv_cache_bytes // kv_bytes_per_token // settings.block_tokens
    engine_settings = EmulatedSettings(
        model=settings.model,
        host=settings.host_name,
        block_tokens=settings.block_tokens,
        kv_capacity_tokens=blocks * settings.block_tokens,
        max_model_tokens=settings.max_model_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        stored_bytes_per_token=settings.stored_bytes_per_token,
        max_running_requests=settings.max_running_requests,
        max_step_tokens=settings.max_step_tokens,
        kv_lease_s=kv_lease_s,
        cost=CostModel() if settings.profile is None else open_profile(settings.profile).cost,
        time_scale=settings.time_scale,
    )
    return EmulatedEngine(
        engine_settings,
        worker_id=settings.worker_id,
        incarnation=incarnation,
        transport=_transport(settings, incarnation),
    )


def _transport(settings: WorkerSettings, incarnation: int) -> KvTransport:
    if settings.kv_transport == "inproc":
        from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport

        return InprocKvTransport(InprocKvNetwork(), settings.worker_id, incarnation)
    from ampd.adapters.kv_nixl import NixlKvTransport

    return NixlKvTransport(settings.worker_id, incarnation)
