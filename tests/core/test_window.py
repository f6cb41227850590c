import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.window import SLICES, MeanWindow


def test_mean_of_the_window() -> None:
    window = MeanWindow(10.0)
    window.add(0.0, 1.0)
    window.add(5.0, 3.0)
    assert window.statistic(5.0) == 2.0
    assert window.statistic(10.5) == 3.0
    assert window.statistic(15.5) == 0.0


def test_empty_window_with_an_old_waiting_task_is_not_idle() -> None:
    window = MeanWindow()
    assert window.statistic(100.0) == 0.0
    assert window.statistic(100.0, [20.0]) == 20.0


def test_what_is_open_counts_once_it_is_above_the_mean() -> None:
    window = MeanWindow()
    window.add(0.0, 1.0)
    assert window.statistic(0.0, [0.1, 0.2]) == 1.0  # young tasks do not flatter
    assert window.statistic(0.0, [3.0]) == 2.0


def test_a_stall_of_running_streams_shows_at_once() -> None:
    window = MeanWindow()
    for step in range(100):
        for _ in range(8):
            window.add(step * 0.04, 0.04)
    # 100 gaps of 40 ms, then 5.94 s of nothing: 9.9 s for 101 tokens.
    assert window.statistic(9.9, [5.94] * 8) == pytest.approx(9.9 / 101, rel=0.02)


def test_length_can_be_changed() -> None:
    window = MeanWindow(10.0)
    window.add(0.0, 1.0)
    window.window_s = 2.0
    assert window.window_s == 2.0
    assert window.statistic(3.0) == 0.0
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="longer than 0"):
            window.window_s = bad
        with pytest.raises(ValueError, match="longer than 0"):
            MeanWindow(bad)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 10.0)), max_size=300))
def test_exact_to_one_slice_in_bounded_memory(steps: list[tuple[float, float]]) -> None:
    window = MeanWindow(10.0)
    now_s = 0.0
    added: list[tuple[float, float]] = []
    for step_s, value_s in steps:
        now_s += step_s
        window.add(now_s, value_s)
        added.append((now_s, value_s))
        assert len(window._slices) <= SLICES + 1
    seen = window.statistic(now_s)
    # The statistic is the mean of a suffix: nothing older than the window is in it, and nothing
    # younger than the window's start plus one slice is missing.
    start_s, edge_s = now_s - 10.0, 1e-9
    means = []
    for first, (at_s, _) in enumerate(added):
        missing_s = added[first - 1][0] if first else start_s
        if at_s > start_s - edge_s and missing_s < start_s + 10.0 / SLICES + edge_s:
            values = [value for _, value in added[first:]]
            means.append(sum(values) / len(values))
    assert not added or any(seen == pytest.approx(mean) for mean in means)
