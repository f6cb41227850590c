"""SLO attainment by round, session-mean and session-strict (spec 1), and statistics of gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from ampd.core.model import ItlStatistic, RoundTimings, Slo


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares (0..1) of the units that meet both thresholds; 1 when there are no units."""

    round: float
    session_mean: float
    session_strict: float
    rounds: int = 0
    sessions: int = 0


def itl_s(timings: RoundTimings, statistic: ItlStatistic) -> float:
    """The ITL of a round that the SLO applies to, in seconds (0: one token, no gap)."""
    match statistic:
        case ItlStatistic.MEAN:
            return timings.itl_mean_s
        case ItlStatistic.P95:
            return timings.itl_p95_s
        case ItlStatistic.MAX:
            return timings.itl_max_s


def round_attains(slo: Slo, timings: RoundTimings) -> bool:
    """Its TTFT and its ITL."""
    return timings.ttft_s <= slo.ttft_s and itl_s(timings, slo.itl_statistic) <= slo.itl_s


def session_mean_attains(slo: Slo, rounds: Sequence[RoundTimings]) -> bool:
    """Mean TTFT and mean ITL over the rounds; a round without a gap has no ITL to average."""
    if not rounds:
        return True
    itls_s = [value for t in rounds if (value := itl_s(t, slo.itl_statistic)) > 0]
    return mean_s([t.ttft_s for t in rounds]) <= slo.ttft_s and mean_s(itls_s) <= slo.itl_s


def session_strict_attains(slo: Slo, rounds: Sequence[RoundTimings]) -> bool:
    """Every round attains."""
    return all(round_attains(slo, timings) for timings in rounds)


def attainment(sessions: Iterable[tuple[Slo, Sequence[RoundTimings]]]) -> Attainment:
    """All three units over sessions, each with its own SLO; sessions without rounds do not
    count."""
    session_count = round_count = attained = mean = strict = 0
    for slo, rounds in sessions:
        if not rounds:
            continue
        good = sum(round_attains(slo, timings) for timings in rounds)
        session_count += 1
        round_count += len(rounds)
        attained += good
        strict += good == len(rounds)
        mean += session_mean_attains(slo, rounds)
    return Attainment(
        round=attained / round_count if round_count else 1.0,
        session_mean=mean / session_count if session_count else 1.0,
        session_strict=strict / session_count if session_count else 1.0,
        rounds=round_count,
        sessions=session_count,
    )


def mean_s(values_s: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values_s) / len(values_s) if values_s else 0.0


def p95_s(values_s: Sequence[float]) -> float:
    """The 95th percentile by nearest rank (a value that occurred), 0 of nothing."""
    return sorted(values_s)[ceil(0.95 * len(values_s)) - 1] if values_s else 0.0


def max_s(values_s: Sequence[float]) -> float:
    """The largest, 0 of nothing."""
    return max(values_s, default=0.0)
