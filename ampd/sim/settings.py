"""What is simulated: workers, their costs, and the habits of the live system around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ampd.core.cost_model import CostModel
from ampd.core.model import PolicySpec
from ampd.core.policies import DEFAULT_POLICY
from ampd.core.prefill_queue import DEFAULT_MAX_TASKS

DEFAULT_KV_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. `cost` is what it publishes and predicts with; its work really takes
    `slowdown` times as long. `kv_capacity_tokens`: KV memory of a decode worker, prefix cache of
    a prefill worker."""

    cost: CostModel
    kv_capacity_tokens: int
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One simulated cluster under one policy. Times in seconds; the defaults are those of the
    live services."""

    prefill: tuple[WorkerSpec, ...]
    decode: tuple[WorkerSpec, ...]
    policy: PolicySpec = field(default_factory=lambda: DEFAULT_POLICY)
    kv_bytes_per_token: int = 0
    """0: bytes are not counted."""
    kv_block_tokens: int = DEFAULT_KV_BLOCK_TOKENS
    heartbeat_s: float = 0.2
    """Decisions see loads up to this old, each worker's at its own phase; 0: as they are."""
    kv_lease_s: float = 60.0
    """How long a paused session's KV is safe from eviction."""
    claim_timeout_s: float = 30.0
    """Longest wait in a prefill queue; then the next target gets the task, then the home."""
    max_queued_tasks: int = DEFAULT_MAX_TASKS
    max_prefill_attempts: int = 2
    max_step_tokens: int = 2048
    """Prompt tokens of one step of a decode worker."""
    max_tokens_factor: float = 1.0
    """What a round asks room for, over what it will say: 1 is a client that knows."""
    link_contention: bool = True
    """Whether transfers of one worker in one direction wait for each other."""
    noise: float = 0.0
    """Of each computation of prompt tokens: the sigma of its time's logarithm, around the mean."""
    gap_statistics: bool = False
    """Whether P95 and largest gap of every round are kept too; an SLO on them needs it."""
    decision_log: bool = False
    """Whether every decision is kept."""
