"""Workloads: means of what is drawn, and traces read as sessions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ampd.core.errors import AmpdError
from ampd.core.model import Slo
from ampd.sim.workload import (
    MAX_AGENT_CONTEXT_TOKENS,
    RecordedSessions,
    RoundPlan,
    SessionPlan,
    open_workload,
    workload_names,
)


@pytest.mark.parametrize(
    ("name", "rounds", "prefill", "decode", "think_s"),
    [
        ("ToolBench", 3.96, 703, 180, 1.0),
        ("HotpotQA", 4.0, 1200, 200, 0.3),
        ("DuReader", 4.0, 3081, 260, 0.3),
        ("GAIA", 11.32, 6161, 528, 2.0),
    ],
)
def test_sessions_have_the_means_of_the_paper(
    name: str, rounds: float, prefill: float, decode: float, think_s: float
) -> None:
    plans = list(open_workload(name).sessions(rate=5.0, horizon_s=1000.0, seed=1))
    count = len(plans)
    assert count == pytest.approx(5000, rel=0.05)
    assert sum(len(p.rounds) for p in plans) / count == pytest.approx(rounds, rel=0.05)
    every = [item for plan in plans for item in plan.rounds]
    assert sum(i.increment_tokens for i in every) / count == pytest.approx(prefill, rel=0.06)
    assert sum(i.output_tokens for i in every) / count == pytest.approx(decode, rel=0.06)
    later = [i.think_s for plan in plans for i in plan.rounds[1:]]
    assert sum(later) / len(later) == pytest.approx(think_s, rel=0.05)


def test_what_is_drawn_is_a_function_of_the_seed() -> None:
    workload = open_workload("GAIA")
    first, again, other = (
        list(workload.sessions(rate=1.0, horizon_s=50.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_an_slo_can_be_given() -> None:
    slo = Slo(9.0, 0.9)
    assert open_workload("GAIA").slo == Slo(2.0, 0.05)
    assert open_workload("GAIA", slo=slo).slo == slo


def test_recorded_agent_sessions() -> None:
    workload = open_workload("agent-sessions")
    assert isinstance(workload, RecordedSessions)
    assert len(workload.recorded) == 430
    rounds = [plan for one in workload.recorded for plan in one]
    assert len(rounds) == 27_692
    assert workload.clipped_rounds > 0
    for recorded in workload.recorded:
        history = 0
        for plan in recorded:
            keep = history if plan.keep_tokens is None else plan.keep_tokens
            assert 0 <= keep <= history
            assert plan.increment_tokens >= 1
            history = keep + plan.increment_tokens + plan.output_tokens
            assert history <= MAX_AGENT_CONTEXT_TOKENS
    plans = list(workload.sessions(rate=0.01, horizon_s=500.0, seed=1))
    alive = [plan for plan in plans if plan.alive]
    assert all(plan.history_tokens > 0 for plan in alive if len(plan.rounds) > 1)
    assert [p.arrival_s for p in plans if not p.alive] == sorted(
        p.arrival_s for p in plans if not p.alive
    )


def test_a_mooncake_trace_becomes_sessions(tmp_path: Path) -> None:
    requests = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 600, "output_length": 10, "hash_ids": [1, 9]},
        # The first one's last full block is 2: its session goes on, keeping blocks 1 and 2.
        {"timestamp": 9000, "input_length": 1600, "output_length": 5, "hash_ids": [1, 2, 4, 5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)) + "\n")
    plans = list(open_workload(str(path)).sessions(rate=0.0, horizon_s=100.0, seed=0))
    assert plans == [
        SessionPlan(
            "s0",
            0.0,
            (RoundPlan(0.0, 1100, 50), RoundPlan(0.0, 1600 - 1024, 5, 1024, 9.0)),
        ),
        SessionPlan("s1", 0.5, (RoundPlan(0.0, 600, 10),)),
    ]
    faster = list(open_workload(str(path)).sessions(rate=8.0, horizon_s=100.0, seed=0))
    assert faster[1].arrival_s == 0.25
    assert faster[0].rounds[1].earliest_s == 4.5


def _line(**fields: object) -> str:
    request = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [], **fields}
    return json.dumps(request)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("t.jsonl", "", "t.jsonl"),
        ("t.jsonl", _line() + "\n{", "line 2"),
        ("t.jsonl", _line(input_length=0), "line 1"),
        ("t.csv", "session,round\n", "t.csv"),
        ("t.csv", "session,round\na,0\n", "line 2"),
        ("t.csv.gz", "no gzip", "t.csv.gz"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(
    tmp_path: Path, name: str, content: str, place: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(AmpdError, match=place):
        open_workload(str(path))


def test_an_unknown_workload_is_told_which_there_are() -> None:
    with pytest.raises(AmpdError, match=", ".join(workload_names())):
        open_workload("Toolbench")


@pytest.mark.parametrize("name", ["GAIA", "agent-sessions"])
def test_a_drawn_workload_needs_a_rate(name: str) -> None:
    draw: Callable[[], object] = lambda: list(  # noqa: E731
        open_workload(name).sessions(rate=0.0, horizon_s=1.0, seed=0)
    )
    with pytest.raises(AmpdError, match="rate"):
        draw()
