"""What prefill and decode workers share: settings, an engine, a cost model, a registration."""

from __future__ import annotations

import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import structlog
from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from ampd.adapters.engine_emulated.settings import STORED_BYTES_STEP
from ampd.adapters.engine_vllm.settings import Device
from ampd.core.cost_model import CostModel, KvCost
from ampd.core.errors import AmpdError
from ampd.core.model import Role, WorkerInfo
from ampd.ports import Engine, EngineInfo
from ampd.profiling.catalogue import open_profile
from ampd.profiling.fit import fit_cost_model
from ampd.profiling.measure import measure
from ampd.profiling.profile_file import Profile, read_profile, write_profile
from ampd.runtime.process import ProcessSettings

log = structlog.get_logger(__name__)

HOST: Final = r"^[!-~]{1,253}$"
LINK_START_S: Final = 0.6e-3
LINK_BYTES_PER_S: Final = 4e9
"""NIXL between two processes of one host, until a profile says otherwise: a read takes the
first plus its bytes over the second (measured on a CPU; a GPU link is faster)."""
EMULATED_KV_BYTES_PER_TOKEN: Final = 16 * 1024
"""Modelled size of one token's KV, when neither a setting nor a profile has one."""


def _usable_profile(source: str) -> str:
    try:
        open_profile(source)
    except AmpdError as error:
        raise PydanticCustomError("profile", "{error}", {"error": error.message}) from error
    except OSError as error:
        raise PydanticCustomError("profile", "{error}", {"error": str(error)}) from error
    return source


def _modelled_kv_bytes_per_token(setting: int | None, profile: str | None) -> int:
    measured = open_profile(profile).kv_bytes_per_token if profile else 0
    return setting or measured or EMULATED_KV_BYTES_PER_TOKEN


class WorkerSettings(ProcessSettings):
    """Common to both workers. Prefill and decode workers of one cluster must agree on model,
    dtype, block size and engine version: KV is exchanged as it lies."""

    engine: Literal["vllm", "emulated"] = "vllm"
    """The inference engine. `emulated` needs no model: its words are no language, its KV moves
    for real, its time is that of `profile`."""
    device: Device = Device.CPU
    """`cpu` or `cuda`."""
    host: str | None = Field(None, pattern=HOST)
    """Name of the host: KV between workers of one name takes the links within it (in a cluster of
    containers the node's name); default: this machine's."""
    dtype: str = "float32"
    """Of weights and KV; on CUDA: `auto`."""
    tensor_parallel: PositiveInt = 1
    """GPUs of this worker."""
    max_model_tokens: int = Field(4096, ge=64)
    """Longest session in tokens."""
    block_tokens: PositiveInt = 32
    """Tokens of a KV block."""
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
    profile: Annotated[str, AfterValidator(_usable_profile)] | None = None
    """Cost model: a file (.yaml, .json) or a built-in name (`ampdctl profile list`); default:
    measured at start, or for the emulated engine: everything is free."""
    profile_dir: Path | None = None
    """Where a measured profile is kept for the next start."""
    measure_budget_s: PositiveFloat = 8.0
    """Seconds that a worker without a profile may take to measure itself."""
    time_scale: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Emulated engine: how long a second of the profile takes; 0: no time at all."""
    kv_transport: Literal["nixl", "inproc"] = "nixl"
    """Emulated engine: how KV moves. `inproc` reaches no other process: what peers hold is
    computed again."""
    stored_bytes_per_token: int = Field(64, ge=STORED_BYTES_STEP, multiple_of=STORED_BYTES_STEP)
    """Emulated engine: bytes per token that are really stored and moved."""
    kv_bytes_per_token: PositiveInt | None = None
    """Emulated engine: modelled bytes per token; default: the profile's, or 16 KiB."""
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20, validate_default=True)
    """Memory for KV in bytes. Emulated engine: the modelled memory; what is really taken is
    `stored_bytes_per_token` for each of the tokens that fit in it."""

    @property
    def host_name(self) -> str:
        """The host that the worker registers."""
        return self.host or socket.gethostname()

    @property
    def modelled_kv_bytes_per_token(self) -> int:
        """The size of a token's KV that an emulated engine counts with."""
        return _modelled_kv_bytes_per_token(self.kv_bytes_per_token, self.profile)

    @field_validator("kv_cache_bytes")
    @classmethod
    def _holds_a_block(cls, size: int, others: ValidationInfo) -> int:
        known = others.data
        if known.get("engine") == "emulated" and {"profile", "block_tokens"} <= known.keys():
            token_bytes = _modelled_kv_bytes_per_token(
                known.get("kv_bytes_per_token"), known["profile"]
            )
            if size < known["block_tokens"] * token_bytes:
                raise PydanticCustomError(
                    "kv_cache",
                    "holds not one block: {tokens} tokens of {token_bytes} bytes each",
                    {"tokens": known["block_tokens"], "token_bytes": token_bytes},
                )
        return size


async def cost_model(engine: Engine, settings: WorkerSettings) -> CostModel:
    """What this worker's work costs: from the profile file that is set, from the one that an
    earlier start has measured, or measured now (a few seconds) and kept for the next start.

    An emulated engine is never measured: its work costs what the profile says, at the time
    scale, or nothing. Raises INVALID_FIELD or OSError for a profile that is set and cannot be
    used.
    """
    if settings.engine == "emulated":
        cost = CostModel() if settings.profile is None else open_profile(settings.profile).cost
        return cost.scaled(settings.time_scale)
    if settings.profile is not None:
        return open_profile(settings.profile).cost
    model, device = Path(settings.model).name, device_name(settings)
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
    measured = await measure(engine, budget_s=settings.measure_budget_s)
    link = unmeasured_link(engine.info.kv_bytes_per_token)
    cost, report = fit_cost_model(measured.steps, prefills=measured.prefills, kv=link)
    log.info(
        "measured",
        seconds=round(time.monotonic() - started_s, 2),
        samples=len(measured.steps),
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
            samples=tuple(measured.steps),
            provenance=_provenance(),
        )
        write_profile(kept, profile)
    return cost


def device_name(settings: WorkerSettings) -> str:
    """What a profile calls the device that the engine of these settings runs on."""
    if settings.engine == "emulated":
        return "emulated"
    return f"{settings.device.value}-{settings.threads}"


def unmeasured_link(kv_bytes_per_token: int) -> KvCost:
    """T_kv until a profile says otherwise."""
    return KvCost(LINK_START_S, kv_bytes_per_token / LINK_BYTES_PER_S)


def worker_info(
    settings: WorkerSettings, role: Role, incarnation: int, info: EngineInfo, cost: CostModel
) -> WorkerInfo:
    """What the worker says of itself in the shared store."""
    return WorkerInfo(
        worker_id=settings.worker_id,
        role=role,
        incarnation=incarnation,
        address=settings.address,
        host=settings.host_name,
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
