"""Settings of the decode worker; each is a flag, an `AMPD_...` variable and a key of the file."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ampd.runtime.process import WORKER_ID
from ampd.runtime.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class HomeLimits:
    """The home's bounds. Times in seconds."""

    max_sessions: int = 4096
    """Sessions resident at once; the least recently used paused one makes room."""
    kv_lease_s: float = 60.0
    """How long a paused session's KV is safe from eviction."""
    session_ttl_s: float = 3600.0
    """How long an idle session stays resident at all."""
    claim_timeout_s: float = 120.0
    """From an offer to its claim: the longest wait in a prefill queue."""
    prefill_timeout_s: float = 120.0
    """From a claim to its completion: the longest prefill."""


class DecodeSettings(WorkerSettings):
    """ampd-decode: owns sessions and decodes them."""

    worker_id: str = Field("decode-0", pattern=WORKER_ID)
    """Unique name in the cluster."""
    max_sessions: PositiveInt = 4096
    """Sessions resident at once; the least recently used paused one makes room."""
    session_kv_lease_s: NonNegativeFloat = 60.0
    """Seconds that a paused session's KV is safe from eviction."""
    session_ttl_s: PositiveFloat = 3600.0
    """Seconds that an idle session stays resident; its tokens stay in the store."""
    claim_timeout_s: PositiveFloat = 120.0
    """Longest wait of an offered prefill in a queue, in seconds."""
    prefill_timeout_s: PositiveFloat = 120.0
    """Longest computation of a claimed prefill, in seconds."""

    def limits(self) -> HomeLimits:
        """The home's bounds."""
        return HomeLimits(
            max_sessions=self.max_sessions,
            kv_lease_s=self.session_kv_lease_s,
            session_ttl_s=self.session_ttl_s,
            claim_timeout_s=self.claim_timeout_s,
            prefill_timeout_s=self.prefill_timeout_s,
        )
