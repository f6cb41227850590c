"""The policy benchmark's bars on two small cells: `ampd` is not behind any of these baselines, on
the same sessions, below saturation and above it. The rates are near 0.8 and 1.2 x r50."""

from __future__ import annotations

import pytest

from ampd.bench.policies.cells import chosen_cells
from ampd.bench.policies.compare import Metric
from ampd.bench.policies.execute import execute
from ampd.bench.policies.runs import Run
from ampd.core.policies import ALWAYS_REMOTE, AMPD, AMPD_PAPER, CHEAPEST
from ampd.core.slo import Attainment

COUNTED_S = 30.0
BEHIND = 0.02
"""Two points: in so short a run a session alone is worth one."""
OVERLOAD_SHARE = 0.8
"""Session-mean attainment of `ampd` at 1.2 x r50; full runs have 0.85 for a bar."""


def attained(cell_name: str, policy: str, rate: float) -> dict[Metric, float]:
    (cell,) = chosen_cells((cell_name,))
    span = cell.span(COUNTED_S)
    run = Run(
        profile=cell.profile,
        workload=cell.workload,
        prefill=cell.balanced,
        decode=cell.workers - cell.balanced,
        policy=policy,
        settings=(),
        rate=rate,
        seed=0,
        warm_up_s=span.warm_up_s,
        end_s=span.end_s,
    )
    found: Attainment = execute(run).attainment
    assert found.sessions > 50
    return {
        Metric.ROUND: found.round,
        Metric.SESSION_MEAN: found.session_mean,
        Metric.SESSION_STRICT: found.session_strict,
    }


@pytest.mark.parametrize(
    ("cell", "rate", "overloaded"),
    [
        ("Meta-Llama-3.1-70B/HotpotQA", 3.6, False),
        ("Meta-Llama-3.1-70B/HotpotQA", 5.4, True),
        ("Meta-Llama-3.1-70B/DuReader", 2.5, False),
        ("Meta-Llama-3.1-70B/DuReader", 3.7, True),
    ],
)
def test_ampd_is_behind_no_baseline(cell: str, rate: float, overloaded: bool) -> None:
    ours = attained(cell, AMPD, rate)
    for baseline in (ALWAYS_REMOTE, AMPD_PAPER, CHEAPEST):
        theirs = attained(cell, baseline, rate)
        for metric in Metric:
            assert ours[metric] >= theirs[metric] - BEHIND, (baseline, metric)
    if overloaded:
        assert ours[Metric.SESSION_MEAN] >= OVERLOAD_SHARE
        assert attained(cell, ALWAYS_REMOTE, rate)[Metric.SESSION_MEAN] < 0.1
