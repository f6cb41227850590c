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


@pytest.mark.parametrize("source", ["gpu:b300/m/tp1", "/nowhere/p.yaml", "p.txt"])
def test_what_is_no_profile_is_usage(ampdctl: Command, source: str) -> None:
    exit_code, out, err = ampdctl("profile", "show", source)
    assert (exit_code, out) == (2, "")
    assert source in err
    if source.startswith("gpu:"):
        assert H100 in err
