"""Settings of one emulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ampd.adapters.emulated_vocabulary import FIRST_WORD_TOKEN_ID, VOCAB_SIZE
from ampd.core.cost_model import CostModel

STORED_BYTES_STEP: Final = 16
"""`stored_bytes_per_token` is a multiple of it (see `digest.KEY_SUM`)."""


@dataclass(frozen=True, slots=True)
class EmulatedSettings:
    """One engine. Sizes in tokens or bytes, times in seconds."""

    model: str = "emulated"
    host: str = ""
    """What it runs on as far as KV is concerned: engines of one named host share its links."""
    block_tokens: int = 32
    kv_capacity_tokens: int = 65_536
    """A multiple of `block_tokens`; the memory that it takes is `stored_bytes_per_token` each."""
    max_model_tokens: int = 8192
    kv_bytes_per_token: int = 131_072
    """The modelled size: what statistics count. Nothing so large is stored or moved."""
    stored_bytes_per_token: int = 64
    """What is really stored and moved; the same on both sides of a transfer."""
    vocab_size: int = VOCAB_SIZE
    max_running_requests: int = 256
    """Requests that hold KV memory; the others wait in order of arrival."""
    max_step_tokens: int = 2048
    """Prompt tokens that one step computes."""
    kv_lease_s: float = 600.0
    """How long a session's pin lives without being lent or released."""
    result_lease_s: float = 30.0
    """How long a prefill result waits to be read."""
    read_timeout_s: float = 5.0
    """How long one read of a peer's KV may take."""
    cost: CostModel = field(default_factory=CostModel)
    """What a step and a pull take; the default costs nothing."""
    time_scale: float = 1.0
    """A second of `cost` takes so many."""
    sampling_salt: int = 0
    """Of the draws of requests that have a temperature and no seed."""

    def __post_init__(self) -> None:
        for name in (
            "block_tokens",
            "kv_capacity_tokens",
            "max_model_tokens",
            "kv_bytes_per_token",
            "stored_bytes_per_token",
            "max_running_requests",
            "max_step_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        for name in ("kv_lease_s", "result_lease_s", "read_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be positive")
        if self.kv_capacity_tokens % self.block_tokens:
            raise ValueError("kv_capacity_tokens: must be a multiple of block_tokens")
        if self.stored_bytes_per_token % STORED_BYTES_STEP:
            raise ValueError(f"stored_bytes_per_token: must be a multiple of {STORED_BYTES_STEP}")
        if not FIRST_WORD_TOKEN_ID < self.vocab_size <= VOCAB_SIZE:
            raise ValueError(f"vocab_size: must be in {FIRST_WORD_TOKEN_ID + 1}..{VOCAB_SIZE}")
        if self.time_scale < 0:
            raise ValueError("time_scale: must not be negative")
