"""Settings of the decode worker; each is a flag, an `AMPD_...` variable and a key of the file."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ampd.adapters.tools.limits import ToolLimits
from ampd.runtime.heartbeat import LEASE_S
from ampd.runtime.process import WORKER_ID, HostPort
from ampd.runtime.worker import WorkerSettings
from ampd.wire.generate import MAX_TEXT_BYTES


@dataclass(frozen=True, slots=True)
class HomeLimits:
    """The home's bounds. Times in seconds."""

    max_sessions: int = 4096
    """Sessions resident at once; the least recently used paused one makes room."""
    kv_lease_s: float = 60.0
    """How long a paused session's KV is safe from eviction."""
    session_ttl_s: float = 3600.0
    """How long an idle session stays resident at all."""
    claim_timeout_s: float = 30.0
    """From an offer to its claim: the longest wait in a prefill queue, and the longest that a
    worker which took the task may stay silent. Then another one gets it."""
    prefill_timeout_s: float = 120.0
    """From a claim to its completion: the longest prefill."""
    admission_wait_s: float = 5.0
    """How long a round may wait for KV that others hold."""
    max_waiting_rounds: int = 256
    """Rounds that may wait for KV at once; one more is refused."""
    kept_round_s: float = 60.0
    """How long the output of a round is kept for the request that ran it."""
    detached_s: float = LEASE_S
    """How long after its last heartbeat the home begins rounds that the store does not know:
    as long as its own lease, until when nobody can have taken its sessions for lost."""


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
    claim_timeout_s: PositiveFloat = 30.0
    """Longest wait of an offered prefill in a queue, in seconds; then another worker gets it."""
    prefill_timeout_s: PositiveFloat = 120.0
    """Longest computation of a claimed prefill, in seconds."""

    admission_wait_s: NonNegativeFloat = 5.0
    """Longest wait of a round for KV that others hold, in seconds; then it is refused."""
    max_waiting_rounds: PositiveInt = 256
    """Rounds that may wait for KV at once; one more is refused."""
    kept_round_s: NonNegativeFloat = 60.0
    """Seconds that a round's output is kept for the repetition of its request."""

    tools: tuple[str, ...] = ()
    """Server-side tools that sessions may use: entry points of group `ampd.tools`, by name."""
    tool_services: tuple[HostPort, ...] = ()
    """host:port of every ToolService whose tools sessions may use too."""
    tool_timeout_s: PositiveFloat = 30.0
    """Longest run of a tool in seconds; then it is ended and has failed."""
    max_tool_output_bytes: PositiveInt = Field(64 * 1024, le=MAX_TEXT_BYTES)
    """What a tool may return in bytes of UTF-8; more is cut."""
    max_running_tools: PositiveInt = 16
    """Tools that may run at once; one more is refused."""

    def tool_limits(self) -> ToolLimits:
        """The bounds of one tool call."""
        return ToolLimits(self.tool_timeout_s, self.max_tool_output_bytes)

    def limits(self) -> HomeLimits:
        """The home's bounds."""
        return HomeLimits(
            max_sessions=self.max_sessions,
            kv_lease_s=self.session_kv_lease_s,
            session_ttl_s=self.session_ttl_s,
            claim_timeout_s=self.claim_timeout_s,
            prefill_timeout_s=self.prefill_timeout_s,
            admission_wait_s=self.admission_wait_s,
            max_waiting_rounds=self.max_waiting_rounds,
            kept_round_s=self.kept_round_s,
            detached_s=self.lease_s,
        )
