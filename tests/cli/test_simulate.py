"""`ampdctl simulate`: a table, a JSON file, and errors that name what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ampd.cli.main import run

SHORT = ("--rate", "5", "--horizon", "10", "--warm-up", "0", "--prefill", "2", "--decode", "2")


def ampdctl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ampdctl", "simulate", *arguments])
    return run()


def test_a_table_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    options = ("--policy", "ampd-paper", "--set", "alpha=0.5", "--decisions")
    assert ampdctl(monkeypatch, *SHORT, *options, "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "session-mean" in out
    assert "alpha=0.5" in out
    report = json.loads(path.read_text())
    assert report["policy"]["settings"]["alpha"] == 0.5
    assert report["rounds"] == len(report["decisions"]) == report["attainment"]["rounds"] > 50
    assert report["increment_moved_bytes"] == report["increment_moved_tokens"] * 262_144


def test_the_same_seed_prints_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for seed in ("1", "1", "2"):
        assert ampdctl(monkeypatch, *SHORT, "--seed", seed, "-o", "json") == 0
        reports.append({**json.loads(capsys.readouterr().out), "wall_s": 0, "seed": 0})
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--workload", "Gaia"), "Gaia"),
        (("--workload", "missing.jsonl"), "missing.jsonl"),
        (("--policy", "best"), "policy.name"),
        (("--set", "alpha=2000"), "policy.settings.alpha"),
        (("--set", "alpha"), "SETTING=VALUE"),
        (("--profile", "gpu:h20/nothing/tp1"), "gpu:h20/nothing/tp1"),
        (("--profile", "missing.yaml"), "missing.yaml"),
        (("--profile", "gpu:h20/Meta-Llama-3.1-70B/tp1"), "does not fit"),
        (("--rate", "0"), "rate"),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    assert ampdctl(monkeypatch, *SHORT, *arguments) == 2
    assert named in capsys.readouterr().err
