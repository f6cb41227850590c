"""Settings of the coordinator; each is a flag, an `AMPD_...` variable and a key of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ampd.core.model import ItlStatistic, PolicySpec, Slo
from ampd.core.policies import DEFAULT_POLICY, resolve
from ampd.core.tool_calls import HERMES
from ampd.runtime.process import WORKER_ID, HostPort, ProcessSettings

TOKENISE_INLINE_CHARS: Final = 16_384
"""A longer increment is tokenised off the event loop: it would stall every stream."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The bounds of a coordinator."""

    max_running_rounds: int = 1024
    max_prefill_attempts: int = 2
    """Prefill workers a round may use: the chosen one and one re-route."""
    tokenise_inline_chars: int = TOKENISE_INLINE_CHARS


class CoordinatorSettings(ProcessSettings):
    """ampd-coordinator: serves clients, binds sessions, routes prefills."""

    worker_id: str = Field("coordinator-0", pattern=WORKER_ID)
    """Unique name in the cluster."""
    listen: HostPort = "127.0.0.1:7070"
    """host:port to serve clients on."""
    model_name: str = ""
    """Name that clients see; default: that of the model's folder."""
    tokenizer: Literal["model", "emulated"] = "model"
    """Text to tokens: by the files in the model's folder, or as the emulated engine's words;
    `model` is then a mere name."""
    policy: str = DEFAULT_POLICY.name
    """Policy while none is set in the store."""
    policy_settings: dict[str, float | int | bool | str] = Field(default_factory=dict)
    """Its settings."""
    ttft_slo_s: float = Field(3.0, gt=0, le=3600)
    """Default TTFT objective in seconds."""
    itl_slo_s: float = Field(0.1, gt=0, le=3600)
    """Default ITL objective in seconds."""
    itl_statistic: ItlStatistic = ItlStatistic.MEAN
    """What of a round's ITL the objective applies to: `mean`, `p95` or `max`."""
    max_running_rounds: PositiveInt = 1024
    """Rounds that may run here at once; one more is refused."""

    tool_call_parser: str = HERMES
    """How the model writes calls of server-side tools: `hermes`, or the name of an entry point of
    group `ampd.tool_call_parsers`."""
    tool_timeout_s: PositiveFloat = 30.0
    """Longest run of a server-side tool in seconds, as the decode workers' setting of that name
    has it: a call that is not answered for 10 s more is lost, and made again elsewhere."""
    max_sessions: PositiveInt = 100_000
    """Sessions that one tenant may have open; one more is refused."""
    max_state_age_s: PositiveFloat = 10.0
    """Seconds that rounds may begin on the last known state while the store is down."""

    def slo(self) -> Slo:
        """The default objective of a session."""
        return Slo(self.ttft_slo_s, self.itl_slo_s, self.itl_statistic)

    def default_policy(self) -> PolicySpec:
        """Raises INVALID_FIELD for an unknown name or setting."""
        return resolve(PolicySpec(self.policy, self.policy_settings))

    def limits(self) -> RoundLimits:
        """The coordinator's bounds."""
        return RoundLimits(max_running_rounds=self.max_running_rounds)
