"""`ampdctl bench policies` and `bench report` at the smallest size, as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from ampd.cli.main import run


def ampdctl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ampdctl", *arguments])
    return run()


def test_a_cell_from_the_search_to_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results, page = tmp_path / "results", tmp_path / "benchmarks.md"
    results.mkdir()
    arguments = (
        *("bench", "policies", "--cells", "Meta-Llama-3.1-70B/HotpotQA"),
        *("--policies", "ampd,always-remote", "--rates", "0.8", "--horizon", "1", "--seeds", "1"),
        *("--parts", "grid", "--jobs", "1", "--details"),
        *("--cache", str(tmp_path / "cache"), "--json", str(results / "policies.json")),
    )
    assert ampdctl(monkeypatch, *arguments) == 0
    table = capsys.readouterr().out
    first = json.loads((results / "policies.json").read_text())
    assert first["provenance"]["versions"]["ampd"]
    (cell,) = first["cells"]
    # Of this cell the best layout for always-remote has all workers but one prefill.
    assert (cell["workers"], cell["r50_prefill"]) == (4, 3)
    assert 3 < cell["r50"] < 9
    assert {(p["contender"], p["layout"]) for p in cell["points"]} == {
        (name, layout) for name in ("ampd", "always-remote") for layout in ("balanced", "own")
    }
    for point in cell["points"]:
        assert point["rate"] == pytest.approx(0.8 * cell["r50"], rel=1e-3)
        assert point["ttft"]["p50_s"] <= point["ttft"]["p99_s"]
    for text in ("Bars", "Goodput g90", "Layouts and goodput", "ampd minus the best baseline"):
        assert text in table

    # Again: nothing is simulated, and the same comes out.
    assert ampdctl(monkeypatch, *arguments) == 0
    again = json.loads((results / "policies.json").read_text())
    assert (again["cells"], again["rounds"]) == (first["cells"], 0)
    assert again["runs"] == first["runs"]

    drawn = importlib.util.find_spec("matplotlib") is not None
    report = ("bench", "report", "--results", str(results), "--to", str(page))
    assert ampdctl(monkeypatch, *report, *(() if drawn else ("--no-plots",))) == 0
    written = page.read_text()
    assert f"r50: {cell['r50']:.4g} sessions/s, on 3 + 1 workers" in written
    images = sorted(path.name for path in tmp_path.glob("images/*.png"))
    assert ("policies-attainment-own.png" in images) == drawn
    assert all(f"(images/{name})" in written for name in images)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cells", "nowhere"), "nowhere is none of"),
        (("--policies", "nobody"), "nobody is none of"),
        (("--rates", "fast"), "--rates"),
        (("--rates", "-1"), "--rates must be above 0"),
        (("--parts", "half"), "--parts"),
        (("--quick", "--short"), "exclude each other"),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    assert ampdctl(monkeypatch, "bench", "policies", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_result_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "policies.json").write_text('{"cells": 1}')
    report = ("bench", "report", "--results", str(tmp_path), "--to", str(tmp_path / "page.md"))
    assert ampdctl(monkeypatch, *report) != 0
    assert "policies.json" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
