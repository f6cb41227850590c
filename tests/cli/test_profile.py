"""`ampdctl profile`: built-in cost models and files alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ampd.cli.main import run

H100 = "gpu:h100_sxm/Qwen3-32B/tp1"


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ampdctl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ampdctl", *arguments])
        exit_code = run()
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return command


def test_every_built_in_profile_is_listed(ampdctl: Command) -> None:
    exit_code, out, _ = ampdctl("profile", "list", "-o", "json")
    assert exit_code == 0
    listed = {one["name"]: one for one in json.loads(out)}
    assert listed[H100] == {
        "name": H100,
        "device": "h100_sxm",
        "model": "Qwen3-32B",
        "tp": 1,
        "source": "operator table",
    }
    assert listed["gpu:h20/Qwen3-32B/tp1"]["source"] == "roofline"
    assert ampdctl("profile", "list")[1].count("gpu:") == len(listed)


def test_what_is_shown_as_yaml_is_a_profile_file(ampdctl: Command, tmp_path: Path) -> None:
    _, table, _ = ampdctl("profile", "show", H100)
    assert "held-out error" in table
    assert "aiconfigurator" in table
    file = tmp_path / "p.yaml"
    file.write_text(ampdctl("profile", "show", H100, "-o", "yaml")[1])
    assert ampdctl("profile", "show", str(file)) == (0, table, "")


@pytest.mark.parametrize("source", ["gpu:b300/m/tp1", "/nowhere/p.yaml", "p.txt", "nope"])
def test_what_is_no_profile_is_usage(ampdctl: Command, source: str) -> None:
    exit_code, out, err = ampdctl("profile", "show", source)
    assert (exit_code, out) == (2, "")
    assert source in err


def test_an_unknown_name_has_near_ones_as_hint(ampdctl: Command) -> None:
    _, _, err = ampdctl("profile", "show", "gpu:h100/Qwen3-32B/tp1")
    assert H100 in err
    _, _, err = ampdctl("profile", "show", "nope")
    assert "`ampdctl profile list` shows all" in err


def test_coefficients_are_shown_as_sums(ampdctl: Command, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        """\
format_version: 1
model: m
device: d
engine: e
cost:
  prefill: {base_s: 0.05, token_s: 0.003, attention_pair_s: 2.0e-9, hinges: [[64.0, 0.001]]}
  mixed: {base_s: 0.01, token_s: 0.001, sequence_s: 2.0e-5, batch_counts: true}
  kv: {base_s: 0.0006, token_s: 1.0e-05}
"""
    )
    _, out, _ = ampdctl("profile", "show", str(file))
    lines = {line.split("  ")[0]: line.rpartition("  ")[2] for line in out.splitlines()}
    assert lines["T_pre"] == (
        "50 ms + 3 ms x increment + 2 ns x increment x (history + increment/2); "
        "x increment: 4 ms from 64 on"
    )
    assert lines["T_dec"] == "0"
    assert lines["T_mixed"] == "10 ms + 1 ms x (chunk + batch) + 20 us x batch"
    assert lines["T_kv"] == "600 us + 10 us x tokens"
    assert lines["T_kv same host"] == "as between hosts"
