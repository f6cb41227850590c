import pytest

from ampd.core.model import ItlStatistic, RoundTimings, Slo
from ampd.core.slo import (
    attainment,
    max_s,
    mean_s,
    p95_s,
    round_attains,
    session_mean_attains,
    session_strict_attains,
)

SLO = Slo(1.0, 0.05)
GOOD = RoundTimings(ttft_s=0.5, itl_mean_s=0.04, itl_p95_s=0.06, itl_max_s=0.5)
SLOW_START = RoundTimings(ttft_s=1.2, itl_mean_s=0.04, itl_p95_s=0.04, itl_max_s=0.04)
SLOW_DECODE = RoundTimings(ttft_s=0.5, itl_mean_s=0.055)
ONE_TOKEN = RoundTimings(ttft_s=0.5)


def test_thresholds_are_inclusive() -> None:
    assert round_attains(SLO, RoundTimings(ttft_s=1.0, itl_mean_s=0.05))
    assert not round_attains(SLO, RoundTimings(ttft_s=1.0001, itl_mean_s=0.05))
    assert not round_attains(SLO, RoundTimings(ttft_s=1.0, itl_mean_s=0.0501))


@pytest.mark.parametrize(
    ("statistic", "attains"),
    [(ItlStatistic.MEAN, True), (ItlStatistic.P95, False), (ItlStatistic.MAX, False)],
)
def test_the_itl_setting_decides(statistic: ItlStatistic, attains: bool) -> None:
    assert round_attains(Slo(1.0, 0.05, statistic), GOOD) is attains


def test_session_mean_forgives_one_round_and_strict_does_not() -> None:
    assert session_mean_attains(SLO, [GOOD, SLOW_START])
    assert not session_strict_attains(SLO, [GOOD, SLOW_START])
    assert not session_mean_attains(SLO, [SLOW_START, SLOW_START])


def test_a_round_of_one_token_has_no_itl_to_flatter_the_mean() -> None:
    assert round_attains(SLO, ONE_TOKEN)
    assert not session_mean_attains(SLO, [SLOW_DECODE, ONE_TOKEN])


def test_attainment_reports_all_three_units() -> None:
    seen = attainment([(SLO, [GOOD, SLOW_START]), (SLO, [GOOD]), (SLO, [])])
    assert (seen.round, seen.session_mean, seen.session_strict) == (2 / 3, 1.0, 0.5)
    assert (seen.rounds, seen.sessions) == (3, 2)
    assert attainment([]).round == 1.0


def test_sessions_have_their_own_slo() -> None:
    assert attainment([(Slo(2.0, 0.05), [SLOW_START]), (SLO, [SLOW_START])]).round == 0.5


def test_gap_statistics() -> None:
    gaps_s = [float(gap) for gap in range(100, 0, -1)]
    assert (mean_s(gaps_s), p95_s(gaps_s), max_s(gaps_s)) == (50.5, 95.0, 100.0)
    assert (mean_s([3.0]), p95_s([3.0]), max_s([3.0])) == (3.0, 3.0, 3.0)
    assert (mean_s([]), p95_s([]), max_s([])) == (0.0, 0.0, 0.0)
