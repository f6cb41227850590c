from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.cost_model import CostModel, MixedCost
from ampd.core.local_prefill import (
    LOST_STEP_DECODES,
    MAX_STEP_SLOS,
    MIN_CHUNK_TOKENS,
    SAVE_HORIZON_STEPS,
    StreamProgress,
    calibrate,
    chunk_tokens,
)
from ampd.core.model import ItlStatistic

SMOLLM2 = CostModel(mixed=MixedCost(52.9e-3, 2.91e-3, 2.52e-3, 9.3e-6, 2.47e-6))
SLO_S = 0.3
MAX_CHUNK = 512


def stream(bank_s: float, slo_s: float = SLO_S, now_s: float = 100.0) -> StreamProgress:
    """A stream with that bank after 11 tokens."""
    return StreamProgress(11, now_s - (10 * slo_s - bank_s), slo_s)


def chunk(*streams: StreamProgress, calibration: float = 1.0, max_chunk: int = MAX_CHUNK) -> int:
    return chunk_tokens(
        cost=SMOLLM2,
        calibration=calibration,
        now_s=100.0,
        streams=streams,
        context_tokens=500 * len(streams),
        chunk_history_tokens=0,
        max_chunk_tokens=max_chunk,
    )


def step_s(tokens: int, batch: int) -> float:
    return SMOLLM2.t_mixed(tokens, 0, batch, 500 * batch)


def test_nobody_decoding_takes_the_whole_chunk() -> None:
    assert chunk() == MAX_CHUNK


def test_step_fills_the_target() -> None:
    tokens = chunk(stream(0.0))
    assert step_s(tokens, 1) <= 0.97 * SLO_S < step_s(tokens + 1, 1)


def test_bank_is_spent_up_to_two_slos() -> None:
    tokens = chunk(stream(0.1))
    assert step_s(tokens, 1) <= 0.97 * SLO_S + 0.1 < step_s(tokens + 1, 1)
    rich = chunk(stream(50.0))
    assert step_s(rich, 1) <= MAX_STEP_SLOS * SLO_S < step_s(rich + 1, 1)


def test_debt_is_paid_back_by_a_quarter() -> None:
    tokens = chunk(stream(-0.4))
    assert step_s(tokens, 1) <= 0.97 * SLO_S - 0.1 < step_s(tokens + 1, 1)


def test_the_worst_stream_rules() -> None:
    both = chunk(stream(5.0), stream(-0.1))
    assert step_s(both, 2) <= 0.97 * SLO_S - 0.025
    assert step_s(chunk(stream(0.0, slo_s=0.25), stream(0.0, slo_s=1.0)), 2) <= 0.97 * 0.25


def test_too_little_room_is_a_pure_decode_step() -> None:
    # 16 tokens take 0.11 s; a debt of 0.8 s leaves 0.09 s.
    assert chunk(stream(-0.8)) == 0


def test_a_short_rest_is_prefilled_all_the_same() -> None:
    assert chunk(stream(0.0), max_chunk=3) == 3


def test_a_lost_stream_leaves_the_minimum() -> None:
    lost = stream(-100.0)
    assert chunk(lost, stream(0.0)) == chunk(stream(0.0), stream(0.0))


def test_only_lost_streams_bound_the_step_loosely() -> None:
    tight = stream(-100.0, slo_s=0.03)  # below the pure decode step
    tokens = chunk(tight)
    assert tokens >= MIN_CHUNK_TOKENS
    assert step_s(tokens, 1) <= LOST_STEP_DECODES * step_s(0, 1)


def test_calibration_scales_the_prediction() -> None:
    tokens = chunk(stream(0.0), calibration=1.3)
    assert 1.3 * step_s(tokens, 1) <= 0.97 * SLO_S < 1.3 * step_s(tokens + 1, 1)


@pytest.mark.parametrize("statistic", [ItlStatistic.P95, ItlStatistic.MAX])
def test_other_itl_statistics_have_no_bank(statistic: ItlStatistic) -> None:
    rich = replace(stream(50.0), itl_statistic=statistic)
    assert chunk(rich) == chunk(stream(0.0))
    # An SLO that no chunk keeps does not stop prefill for ever.
    hopeless = replace(stream(0.0, slo_s=0.06), itl_statistic=statistic)
    assert chunk(hopeless) >= MIN_CHUNK_TOKENS


@dataclass
class Played:
    steps: int
    longest_wait_steps: int
    prefilled: int


def play(slo_s: float, debt_s: float, streams: int, steps: int) -> Played:
    """A worker with a prefill always pending and streams that never end."""
    now_s = 100.0
    first_s = now_s - (10 * slo_s + debt_s)
    emitted, wait, longest, prefilled = 11, 0, 0, 0
    for _ in range(steps):
        tokens = chunk_tokens(
            cost=SMOLLM2,
            calibration=1.0,
            now_s=now_s,
            streams=[StreamProgress(emitted, first_s, slo_s)] * streams,
            context_tokens=500 * streams,
            chunk_history_tokens=0,
            max_chunk_tokens=MAX_CHUNK,
        )
        now_s += SMOLLM2.t_mixed(tokens, 0, streams, 500 * streams)
        emitted += 1
        prefilled += tokens
        wait = 0 if tokens else wait + 1
        longest = max(longest, wait)
    return Played(steps, longest, prefilled)


@given(st.floats(0.01, 1.0), st.floats(-5.0, 60.0), st.integers(1, 12))
def test_prefill_is_never_starved_for_ever(slo_s: float, debt_s: float, streams: int) -> None:
    played = play(slo_s, debt_s, streams, 200)
    assert played.longest_wait_steps <= SAVE_HORIZON_STEPS + 1


@given(st.floats(0.15, 1.0), st.integers(1, 6))
def test_streams_keep_their_slo(slo_s: float, streams: int) -> None:
    now_s = first_s = 0.0
    emitted = 1
    for _ in range(100):
        tokens = chunk_tokens(
            cost=SMOLLM2,
            calibration=1.0,
            now_s=now_s,
            streams=[StreamProgress(emitted, first_s, slo_s)] * streams,
            context_tokens=500 * streams,
            chunk_history_tokens=1000,
            max_chunk_tokens=MAX_CHUNK,
        )
        now_s += SMOLLM2.t_mixed(tokens, 1000, streams, 500 * streams)
        emitted += 1
        assert (now_s - first_s) / (emitted - 1) <= slo_s


def test_calibrate_finds_the_factor() -> None:
    calibration = 1.0
    for _ in range(200):
        calibration = calibrate(calibration, 0.1, 0.13)
    assert calibration == pytest.approx(1.3, rel=1e-3)


def test_calibrate_bounds_outliers_and_ignores_nothing_predicted() -> None:
    assert calibrate(1.0, 0.1, 1000.0) == pytest.approx(1.05)
    assert calibrate(1.0, 0.0, 1.0) == 1.0
    calibration = 1.0
    for _ in range(1000):
        calibration = calibrate(calibration, 1.0, 1e-9)
    assert calibration == pytest.approx(0.1)
