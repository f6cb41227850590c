"""`ampdctl profile run` on emulated engines, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ampd.cli.main import run
from ampd.profiling.catalogue import open_profile
from ampd.profiling.profile_file import Profile, read_profile, write_profile

H100 = "gpu:h100_sxm/Qwen3-32B/tp1"
EMULATED = (
    "--engine", "emulated", "--profile", H100, "--time-scale", "0.1", "--max-batch", "4",
    "--max-model-tokens", "512",
)  # fmt: skip
Command = Callable[..., tuple[int, str, str]]


def ampdctl(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ampd.cli", "profile", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """In this process."""

    def run_it(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ampdctl", "profile", *arguments])
        exit_code = run()
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return run_it


def test_interrupted_it_goes_on_and_writes_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    part = tmp_path / "p.yaml.part"
    arguments = ("run", str(out), *EMULATED, "--budget", "5")
    process = ampdctl(*arguments)
    until_s = time.monotonic() + 60
    while not (part.exists() and part.read_bytes().count(b"\n") > 8):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    exit_code, _, err = ended(process)
    assert exit_code == 130
    assert f"interrupted; the same command goes on from {part}" in err
    assert "Traceback" not in err
    lines = part.read_bytes().splitlines()
    measured = [json.loads(line)["key"] for line in lines[1:]]

    exit_code, _, err = ended(ampdctl(*arguments))
    assert exit_code == 0, err
    assert f"going on: {len(measured)} measurements are there" in err
    assert "held-out error" in err
    told = [line.partition("] ")[2].partition(":")[0] for line in err.splitlines()]
    assert not set(measured) & set(told)
    assert not part.exists()
    profile = read_profile(out)
    assert profile.device == "emulated"
    assert profile.provenance["method"] == "ampdctl profile run"
    # A tenth of the emulated time, and what the machine adds to short steps.
    true_s = 0.1 * open_profile(H100).cost.t_pre(0, 256)
    assert true_s * 0.95 < profile.cost.t_pre(0, 256) < 2 * true_s
    assert profile.fit.kv_same_host.samples >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p.toml",), "p.toml: a profile's name ends in .yaml, .yml or .json"),
        (("p.yaml", "--budget", "0"), "--budget"),
        (("p.yaml", "--engine", "vllm", "--profile", H100), "a real one is measured"),
        (("p.yaml", "--engine", "emulated", "--profile", "gpu:none"), "no such built-in profile"),
        (("p.yaml", *EMULATED, "--kv-cache-mib", "1"), "kv_cache_bytes: holds not one block"),
        (("file/p.yaml", *EMULATED, "--no-transfers"), "file"),
    ],
)
def test_what_cannot_be_run_says_why(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").touch()
    name, *options = arguments
    exit_code, out, err = command("run", str(tmp_path / name), *options)
    assert (exit_code, out) == (2, "")
    assert message in err


def test_a_journal_of_another_engine_is_refused_until_told_to_start_anew(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "p.yaml"
    (tmp_path / "p.yaml.part").write_text('{"model": "m"}\n')
    arguments = ("run", str(out), *EMULATED, "--no-transfers", "--budget", "1")
    exit_code, _, err = command(*arguments)
    assert exit_code == 2
    assert "p.yaml.part: line 1: not a measurement's journal" in err
    assert "--fresh" in err
    plot = tmp_path / "p.png"
    exit_code, _, err = command(*arguments, "--fresh", "--plot", str(plot))
    assert exit_code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert read_profile(out).cost.kv_same_host is None


def test_plots_of_files_and_built_in_profiles(command: Command, tmp_path: Path) -> None:
    file, plot = tmp_path / "p.json", tmp_path / "p.svg"
    profile = open_profile(H100)
    write_profile(file, Profile(profile.model, profile.device, profile.engine, profile.cost))
    for source in (H100, str(file)):
        exit_code, out, _ = command("show", source, "--plot", str(plot))
        assert exit_code == 0
        assert "T_mixed" in out
        assert b"<svg" in plot.read_bytes()
        plot.unlink()
    exit_code, _, err = command("show", H100, "--plot", str(tmp_path / "p.txt"))
    assert exit_code == 2
    assert "p.txt" in err
