"""The benchmark of the engine port, reduced: it runs, and nothing has made rounds expensive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "engine_port.py"
LEAST_ROUNDS_PER_CPU_S = 300
"""Of about 1,500 on an idle core: other work on the machine may cost a factor of a few."""


def test_rounds_per_second() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--sessions", "24"],
        check=True,
        capture_output=True,
        text=True,
    )
    result = json.loads(run.stdout)
    assert result["rounds"] == 24 * 8
    assert result["output_tokens"] == result["rounds"] * 8
    assert 0 < result["remote_rounds"] < result["rounds"]
    assert 400 < result["context_tokens_mean"] < 600
    assert result["rounds"] / result["cpu_seconds"] > LEAST_ROUNDS_PER_CPU_S
