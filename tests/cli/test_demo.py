"""`ampdctl demo` with the tiny model, from nothing to its report, and cut short."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from cli_harness import Ampdctl, alive

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROUND_FIELDS = {
    "session": str,
    "round": int,
    "history_tokens": int,
    "increment_tokens": int,
    "output_tokens": int,
    "route": str,
    "reason": str,
    "prefill_worker": (str, type(None)),
    "decode_worker": str,
    "computed_tokens": int,
    "history_pulled_tokens": int,
    "history_pulled_bytes": int,
    "increment_pulled_tokens": int,
    "increment_pulled_bytes": int,
    "ttft_s": float,
    "itl_mean_s": float,
    "attained": bool,
}


def test_reports_every_round(ampdctl: Ampdctl, documents: Path) -> None:
    report = documents / "report.json"
    arguments = ("--docs", str(documents), "--report", str(report))
    done = ampdctl.run("demo", "--model", "tiny", *arguments)
    assert done.returncode == 0, done.stderr

    outcome = json.loads(report.read_text())
    assert set(outcome) == {"rounds", "attainment"}
    assert set(outcome["attainment"]) == {"round", "session_mean", "session_strict"}
    assert all(0 <= share <= 1 for share in outcome["attainment"].values())
    rounds = outcome["rounds"]
    assert {(one["session"], one["round"]) for one in rounds} == {
        (f"agent-{agent}", index) for agent in range(4) for index in range(4)
    }
    for one in rounds:
        assert set(one) == set(ROUND_FIELDS)
        for field, kind in ROUND_FIELDS.items():
            assert isinstance(one[field], kind), field
        _check_movement(one)
    # By the policy's own decisions, which the load brings about.
    assert {one["route"] for one in rounds} == {"local", "remote"}
    assert len({one["reason"] for one in rounds}) >= 2

    table = done.stdout.splitlines()
    assert table[0].startswith("SESSION  ROUND")
    assert sum(line.startswith("agent-") for line in table) == 16
    assert "search(" in done.stderr
    assert "calculator(" in done.stderr


def _check_movement(one: dict[str, int | str | None]) -> None:
    pulled = int(one["history_pulled_bytes"] or 0) + int(one["increment_pulled_bytes"] or 0)
    if one["route"] == "local":
        assert one["prefill_worker"] is None
        assert pulled == 0
    else:
        assert one["prefill_worker"] == "prefill-0"
        assert int(one["increment_pulled_bytes"] or 0) > 0


def test_stops_everything_on_ctrl_c(ampdctl: Ampdctl, documents: Path) -> None:
    with ampdctl.started(
        "demo", "--model", "tiny", "--rounds", "500", "--docs", str(documents)
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "round 1 after" in line:
                break
        children = [child.pid for child in psutil.Process(demo.pid).children(recursive=True)]
        assert len(children) == 4
        os.killpg(demo.pid, signal.SIGINT)
        demo.stdout.read()
        assert demo.wait() == 130
    assert alive(children) == []
