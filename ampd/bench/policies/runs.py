"""One run of the simulator as a value, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

import msgspec

from ampd.bench.policies.contenders import Settings
from ampd.core.slo import Attainment
from ampd.sim.report import Distribution

RATE_DIGITS: Final = 4
"""Significant digits of a rate: a run that is found twice has one key."""
LIVE_HEARTBEAT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How the cluster differs from what its workers publish. Factors are on times: 2 is half as
    fast."""

    slowdown: float = 1.0
    """Of all workers: costs that are wrong."""
    slow_prefill: float = 1.0
    """Of the first prefill worker, besides."""
    slow_decode: float = 1.0
    """Of the first decode worker, besides."""
    noise: float = 0.0
    """See `SimSettings.noise`."""
    heartbeat_s: float = LIVE_HEARTBEAT_S


UNDISTURBED: Final = Disturbance()


@dataclass(frozen=True, slots=True)
class Run:
    """All that a simulation depends on, but for the code. Times in seconds."""

    profile: str
    workload: str
    prefill: int
    decode: int
    policy: str
    settings: Settings
    rate: float
    """Sessions a second."""
    seed: int
    warm_up_s: float
    end_s: float
    disturbance: Disturbance = UNDISTURBED

    def key(self, costs: str) -> str:
        """What its result is kept under; `costs` is the fingerprint of its profile."""
        return sha256(msgspec.json.encode((self, costs))).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. Sessions that no memory holds count as ones that attain nothing."""

    attainment: Attainment
    ttft: Distribution
    itl: Distribution
    queue_s: float
    """Means of the parts of TTFT."""
    read_s: float
    compute_s: float
    return_s: float
    local_share: float
    kv_ratios: tuple[int, ...]
    history_moved_bytes: int
    increment_moved_bytes: int
    rounds: int
    """Counted or not."""
    rerouted_rounds: int
    refused_sessions: int
    evictions: int
    rebuilt_rounds: int
    prefill_utilisation: float
    decode_utilisation: float
    wall_s: float = field(compare=False)


def rounded_rate(rate: float) -> float:
    """With the digits that a run's rate has."""
    return float(f"{rate:.{RATE_DIGITS}g}")
