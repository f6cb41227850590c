"""What a simulation comes to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from ampd.core.model import PolicySpec, RoundTimings, Slo
from ampd.core.slo import Attainment


@dataclass(slots=True)
class Totals:
    """Sums over a run. What has no counted time in its name counts from the first event on."""

    from_s: float
    until_s: float
    """The counted time."""
    rounds: int = 0
    local_rounds: int = 0
    rerouted_rounds: int = 0
    refused_sessions: int = 0
    evictions: int = 0
    rebuilt_rounds: int = 0
    rebuilt_tokens: int = 0
    history_moved_tokens: int = 0
    increment_moved_tokens: int = 0

    def counted_s(self, start_s: float, end_s: float) -> float:
        """How much of an interval is counted time (s)."""
        if start_s < self.from_s:
            start_s = self.from_s
        if end_s > self.until_s:
            end_s = self.until_s
        return end_s - start_s if end_s > start_s else 0.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of times in seconds; percentiles are values that occurred. All 0 of nothing."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @staticmethod
    def of(values_s: Sequence[float]) -> Distribution:
        """Of these values."""
        if not values_s:
            return Distribution()
        ordered = sorted(values_s)
        count = len(ordered)
        p50_s, p95_s, p99_s = (ordered[ceil(q * count) - 1] for q in (0.5, 0.95, 0.99))
        return Distribution(count, sum(ordered) / count, p50_s, p95_s, p99_s, ordered[-1])


KV_RATIO_EDGES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between two bins of the histogram of KV time over compute time."""


def kv_ratios(timings: Iterable[RoundTimings]) -> tuple[int, ...]:
    """Remote prefills by (read + return) / compute: bins below, between and above the edges.
    A local one returns nothing."""
    counts = [0] * (len(KV_RATIO_EDGES) + 1)
    for t in timings:
        if t.return_s > 0 and t.compute_s > 0:
            counts[bisect_right(KV_RATIO_EDGES, (t.read_s + t.return_s) / t.compute_s)] += 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One decision: where a round was sent and why, and where it was prefilled in the end."""

    session_id: str
    round_index: int
    created_s: float
    home: str
    bound: bool
    """Whether the session got its home now."""
    route: str
    reason: str
    ordered: str
    prefilled_by: str
    history_tokens: int
    increment_tokens: int
    predicted_ttft_s: float
    ttft_s: float
    state_age_s: float


@dataclass(frozen=True, slots=True)
class SimReport:
    """One run. `attainment`, the distributions and `local_share` are over counted rounds;
    tokens and bytes over all."""

    workload: str
    policy: PolicySpec
    slo: Slo
    rate: float
    """Sessions a second; 0: as recorded."""
    horizon_s: float
    warm_up_s: float
    seed: int
    prefill_workers: int
    decode_workers: int
    attainment: Attainment
    ttft: Distribution
    itl: Distribution
    """Of the rounds' means."""
    queue: Distribution
    read: Distribution
    compute: Distribution
    returned: Distribution
    kv_ratios: tuple[int, ...]
    """Of counted remote prefills: how many moved KV for so long, over their computing; one more
    than `KV_RATIO_EDGES`."""
    local_share: float
    rounds: int
    """Counted or not."""
    rerouted_rounds: int
    """A prefill worker was full or too slow: another place prefilled."""
    refused_sessions: int
    evictions: int
    rebuilt_rounds: int
    rebuilt_tokens: int
    history_moved_tokens: int
    history_moved_bytes: int
    increment_moved_tokens: int
    increment_moved_bytes: int
    prefill_utilisation: float
    """Share of the counted time that prefill workers compute, their mean."""
    decode_utilisation: float
    """Share of the counted time that decode workers are in a step, their mean."""
    end_s: float
    """When the last round had ended."""
    wall_s: float = 0.0
    """What the simulation took; 0: not measured."""
    decisions: tuple[LoggedDecision, ...] = field(default=())
