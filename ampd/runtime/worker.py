"""What prefill and decode workers share: settings, an engine, a cost model, a registration."""

from __future__ import annotations

import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import structlog
from pydantic import Field, PositiveFloat, PositiveInt

from ampd.adapters import engine_vllm
from ampd.core.cost_model import CostModel, KvCost
from ampd.core.errors import AmpdError
from ampd.core.model import Role, WorkerInfo
from ampd.ports import Engine, EngineInfo
from ampd.profiling.fit import fit_cost_model
from ampd.profiling.measure import measure
from ampd.profiling.profile_file import Profile, read_profile, write_profile
from ampd.runtime.process import ProcessSettings

log = structlog.get_logger(__name__)

DEFAULT_PIN_S: Final = 600.0
"""Longest life of a pin on an engine that keeps no sessions."""
LINK_START_S: Final = 0.6e-3
LINK_BYTES_PER_S: Final = 4e9
"""NIXL between two processes of one host, until a profile says otherwise: a read takes the
first plus its bytes over the second (measured on a CPU; a GPU link is faster)."""


class WorkerSettings(ProcessSettings):
    """Common to both workers. Prefill and decode workers of one cluster must agree on model,
    dtype, block size and engine version: KV is exchanged as it lies."""

    engine: Literal["vllm"] = "vllm"
    """The inference engine."""
    device: engine_vllm.Device = engine_vllm.Device.CPU
    """`cpu` or `cuda`."""
    dtype: str = "float32"
    """Of weights and KV; on CUDA: `auto`."""
    tensor_parallel: PositiveInt = 1
    """GPUs of this worker."""
    max_model_tokens: int = Field(4096, ge=64)
    """Longest session in tokens."""
    block_tokens: PositiveInt = 32
    """Tokens of a KV block."""
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20)
    """Memory for KV in bytes."""
    threads: PositiveInt = 1
    """Threads of the engine's computation (CPU)."""
    max_running_requests: PositiveInt = 64
    """Sequences of one engine step."""
    max_step_tokens: int = Field(2048, ge=64)
    """Tokens of one engine step at most."""
    compile: bool = False
    """Let vLLM compile the model and capture graphs (CUDA)."""
    side_channel_host: str = "127.0.0.1"
    """Address of this host that peers reach the KV handshake by."""
    side_channel_port: int = Field(5600, ge=1, le=65535)
    """Port of the KV handshake."""
    profile: Path | None = None
    """Cost model file (.yaml, .json); default: measured at start."""
    profile_dir: Path | None = None
    """Where a measured profile is kept for the next start."""
    measure_budget_s: PositiveFloat = 8.0
    """Seconds that a worker without a profile may take to measure itself."""


async def start_engine(
    settings: WorkerSettings, role: Role, incarnation: int, kv_lease_s: float = DEFAULT_PIN_S
) -> Engine:
    """The engine that the settings name, ready. `kv_lease_s`: the longest life of a pin."""
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


async def cost_model(engine: Engine, settings: WorkerSettings) -> CostModel:
    """What this worker's work costs: from the profile file that is set, from the one that an
    earlier start has measured, or measured now (a few seconds) and kept for the next start.

    Raises INVALID_FIELD or OSError for a profile that is set and cannot be used.
    """
    if settings.profile is not None:
        return read_profile(settings.profile).cost
    model = Path(settings.model).name
    device = f"{settings.device.value}-{settings.threads}"
    engine_name, tp = engine.info.engine, settings.tensor_parallel
    kept = None
    if settings.profile_dir is not None:
        kept = settings.profile_dir / f"{_file_name(model, device, engine_name, str(tp))}.yaml"
        if kept.exists():
            try:
                profile = read_profile(kept)
                if profile.fits(model=model, device=device, engine=engine_name, tp=tp):
                    return profile.cost
            except (AmpdError, OSError) as error:
                log.warning("profile_ignored", path=str(kept), error=str(error))
    started_s = time.monotonic()
    samples = await measure(engine, budget_s=settings.measure_budget_s)
    link = KvCost(LINK_START_S, engine.info.kv_bytes_per_token / LINK_BYTES_PER_S)
    cost, report = fit_cost_model(samples, kv=link)
    log.info(
        "measured",
        seconds=round(time.monotonic() - started_s, 2),
        samples=len(samples),
        median_error=round(report.mixed.median_error, 3),
    )
    if kept is not None:
        profile = Profile(
            model=model,
            device=device,
            engine=engine_name,
            tp=tp,
            cost=cost,
            fit=report,
            samples=tuple(samples),
            provenance=_provenance(),
        )
        write_profile(kept, profile)
    return cost


def worker_info(
    settings: WorkerSettings, role: Role, incarnation: int, info: EngineInfo, cost: CostModel
) -> WorkerInfo:
    """What the worker says of itself in the shared store."""
    return WorkerInfo(
        worker_id=settings.worker_id,
        role=role,
        incarnation=incarnation,
        address=settings.address,
        host=socket.gethostname(),
        model=Path(settings.model).name,
        engine=info.engine,
        kv_block_tokens=info.block_tokens,
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_model_tokens=info.max_model_tokens,
        cost=cost,
    )


def _file_name(*parts: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts)


def _provenance() -> dict[str, str]:
    return {
        "method": "self-measurement at start",
        "host": socket.gethostname(),
        "date": datetime.now(UTC).date().isoformat(),
    }
