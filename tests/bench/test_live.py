"""`ampdctl bench live` on a small cluster of real processes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from ampd.cli.main import app


def test_the_same_sessions_run_live_and_in_the_simulator(tmp_path: Path) -> None:
    written = tmp_path / "live.json"
    arguments = ["bench", "live", "--rate", "3", "--horizon", "3", "--warm-up", "0"]
    arguments += ["--prefill", "1", "--decode", "1", "--policies", "always-remote,ampd"]
    arguments += ["--time-scale", "1", "--json", str(written)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    remote, late = json.loads(written.read_bytes())["points"]
    assert (remote["policy"], late["policy"]) == ("always-remote", "ampd")
    assert remote["local_share"] == 0
    for point in (remote, late):
        assert point["failed_rounds"] == 0
        assert point["live"]["sessions"] == point["simulated"]["sessions"] > 0
        assert point["live"]["rounds"] == point["simulated"]["rounds"]
        assert 0 < point["ttft_mean_s"] < 5


def test_an_unknown_policy_is_refused_before_anything_starts() -> None:
    arguments = ["bench", "live", "--rate", "1", "--policies", "nope"]
    assert CliRunner().invoke(app, arguments).exit_code != 0
