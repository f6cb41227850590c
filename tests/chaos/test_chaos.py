"""Processes killed, frozen, drained and cut off under load; every token compared with the oracle.

pytest tests/chaos                                 a short run
make chaos ENGINE=vllm SECONDS=300 SEED=7          minutes, on either engine
"""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

import pytest
from chaos_run import run_chaos

from ampd.cli.cluster import EngineKind

SUITE_SEED = 1


def test_nothing_is_lost_and_nothing_is_wrong(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    # Defaults: without tests/chaos on the command line nobody knows the options.
    option = pytestconfig.getoption
    engine = EngineKind(option("--chaos-engine", "emulated"))
    seconds = option("--chaos-seconds", 12.0)
    by_hand = option("--chaos-report", "") != ""
    seed = option("--chaos-seed", None)
    if seed is None:
        seed = secrets.randbelow(1 << 31) if by_hand else SUITE_SEED
    again = f"make chaos ENGINE={engine} SECONDS={seconds:.0f} SEED={seed}"
    print(f"again with: {again}; logs in {tmp_path}")
    report = asyncio.run(run_chaos(engine, seconds=seconds, seed=seed, run_dir=tmp_path))
    text = json.dumps(report.as_json(), indent=2)
    print(text)
    if by_hand:
        Path(option("--chaos-report", "")).write_text(text + "\n")
    if report.violations:
        pytest.fail("\n".join((*report.violations, "again with:", f"  {again}")), pytrace=False)
    assert report.counts["rounds_finished"] > 0
    assert sum(report.faults.values()) > 0
