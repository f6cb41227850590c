"""Settings of one vLLM engine, and what they become: environment and engine arguments.

CPU is what the tests run. CUDA goes through the same code by settings alone:
`VllmSettings(device=Device.CUDA, dtype="auto", tensor_parallel=4, enforce_eager=False,
kv_buffer_device="cuda", max_num_seqs=256, max_batched_tokens=8192, prefill_chunk_tokens=8192)`.
KV then moves between GPU memories, tensor-parallel ranks are vLLM's own worker processes and
scheduling is asynchronous (the scheduler's second class). Both sides of a transfer need the
same model string, dtype, block size, vLLM and connector version: vLLM compares a hash of them
at the first contact.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ampd.core.model import Role

CONNECTOR_MODULE = "ampd.adapters.engine_vllm.connector"
CONNECTOR_CLASS = "AmpdConnector"
SCHEDULER_MODULE = "ampd.adapters.engine_vllm.scheduler"
LOGITS_PROCESSOR = "ampd.adapters.engine_vllm.penalties:ResumedPenalties"
OPTIONS_KEY = "ampd"
"""Where our options lie in vLLM's `additional_config`."""


class Device(StrEnum):
    """What the model runs on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One engine. Memory in bytes, times in seconds, sizes in tokens."""

    model: str
    """Path of a Hugging Face folder (or a name that vLLM resolves offline). Prefill and
    decode workers must use the very same string."""
    role: Role
    max_model_tokens: int = 4096
    block_tokens: int = 32
    kv_cache_bytes: int = 1 << 30
    threads: int = 1
    """OpenMP threads of the computation (CPU)."""
    side_channel_host: str = "127.0.0.1"
    """An address of this host that the peers reach: it travels in the handles."""
    side_channel_port: int = 5600
    kv_lease_s: float = 600.0
    """How long a session's pin lives without being lent or released."""
    result_lease_s: float = 30.0
    """How long a prefill result waits to be read."""
    dtype: str = "float32"
    device: Device = Device.CPU
    kv_buffer_device: str = ""
    """Where the transferred KV lies; empty: on `device`."""
    tensor_parallel: int = 1
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 256
    """The longest piece of a prefill in one step: pulls and aborts wait for a step's end, so it
    should compute in well under a second."""
    enforce_eager: bool = True
    nixl_progress_thread: bool = False
    """UCX's own thread spins a whole core; without it the engine thread polls while KV is lent
    or read."""
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.role not in (Role.PREFILL, Role.DECODE):
            raise ValueError(f"role: an engine is prefill or decode, not {self.role}")
        for name in ("max_model_tokens", "block_tokens", "threads", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if not 0 < self.prefill_chunk_tokens <= self.max_batched_tokens:
            raise ValueError("prefill_chunk_tokens: must be in 1..max_batched_tokens")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError("max_batched_tokens: must be at least max_num_seqs")


def environment(settings: VllmSettings) -> dict[str, str]:
    """Environment variables that vLLM and OpenMP read when they are imported."""
    env = {
        # The engine core lives in this process: our thread calls step() itself.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "INFO" if settings.verbose else "WARNING",
        "NIXL_LOG_LEVEL": "INFO" if settings.verbose else "WARN",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(settings.side_channel_port),
    }
    if settings.device is Device.CPU:
        env["OMP_NUM_THREADS"] = str(settings.threads)
    return env


def has_tokenizer(model: str) -> bool:
    """Whether the model's folder carries a tokenizer (a name always does)."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json")
    return any((folder / name).exists() for name in names)


def engine_arguments(settings: VllmSettings, engine_id: str) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`."""
    on_cpu = settings.device is Device.CPU
    variant = "AmpdScheduler" if on_cpu else "AmpdAsyncScheduler"
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_tokens,
        "block_size": settings.block_tokens,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "tensor_parallel_size": settings.tensor_parallel,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": settings.verbose,
        # One block table per request: pins and loans are lists of block ids.
        "disable_hybrid_kv_cache_manager": True,
        "skip_tokenizer_init": not has_tokenizer(settings.model),
        "scheduler_cls": f"{SCHEDULER_MODULE}.{variant}",
        "logits_processors": [LOGITS_PROCESSOR],
        "additional_config": {
            OPTIONS_KEY: {
                "role": settings.role.value,
                "prefill_chunk_tokens": settings.prefill_chunk_tokens,
                "kv_lease_s": settings.kv_lease_s,
                "result_lease_s": settings.result_lease_s,
            }
        },
        "kv_transfer_config": {
            "kv_connector": CONNECTOR_CLASS,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_producer" if settings.role is Role.PREFILL else "kv_consumer",
            "kv_buffer_device": settings.kv_buffer_device or settings.device.value,
            "engine_id": engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                # Reads go both ways: history from D to P, the increment from P to D.
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": 0,
                "nixl_progress_thread": settings.nixl_progress_thread,
            },
        },
    }
    if settings.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments
