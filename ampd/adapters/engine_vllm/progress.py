"""What our scheduler keeps of every request, from its arrival until the front took it."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.core.model import PrefillStats, Slo


@dataclass(slots=True)
class RequestRecord:
    """One request's progress; instants on `time.monotonic()`, 0.0 = not yet."""

    order: int
    """Arrival number: prefills are computed in this order."""
    session_began_s: float = 0.0
    """See `GenerateRequest`."""
    slo: Slo | None = None
    """None: a prefill worker's request, which streams nothing."""
    wants_pin: bool = True
    """Whether its KV is pinned when it ends; not after an abort."""
    pin_id: str = ""
    cached_estimate_tokens: int | None = None
    """Found in the prefix cache when it was first looked at."""
    cached_tokens: int = 0
    pulled_tokens: int = 0
    pulled_blocks: int = 0
    computed_tokens: int = 0
    read_start_s: float = 0.0
    read_end_s: float = 0.0
    compute_start_s: float = 0.0
    first_token_s: float = 0.0

    def prefill_stats(self, block_bytes: int) -> PrefillStats:
        """Once the first token is there; `block_bytes` is the KV of one block."""
        return PrefillStats(
            computed_tokens=self.computed_tokens,
            cached_tokens=self.cached_tokens,
            pulled_tokens=self.pulled_tokens,
            pulled_bytes=self.pulled_blocks * block_bytes,
            read_start_s=self.read_start_s,
            read_end_s=self.read_end_s,
            compute_start_s=self.compute_start_s,
            compute_end_s=self.first_token_s,
        )
