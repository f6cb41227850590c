"""`ampdctl bench control-path` at the smallest size: every cell is there, and says where it ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ampd.bench.control_path import ROUNDS_OF_CELLS, WORKERS
from ampd.bench.timing import Spread
from ampd.cli.main import run


def test_every_cell_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    arguments = ["ampdctl", "bench", "control-path", "--calls", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert run() == 0
    table = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["provenance"]["cores"] >= 1
    assert result["provenance"]["versions"]["ampd"]
    cells = result["cells"]
    for what in ("route", "placements, route", "read, placements, route"):
        sizes = {cell["prefill_workers"] for cell in cells if cell["what"] == what}
        assert sizes == set(WORKERS)
        assert what in table
    for cell in cells:
        time = cell["time"]
        assert time["calls"] == ROUNDS_OF_CELLS
        assert 0 < time["p10_s"] <= time["p50_s"] <= time["p99_s"]


def test_quantiles() -> None:
    assert Spread.of([float(number) for number in range(100)]) == Spread(100, 10.0, 50.0, 99.0)
    assert Spread.of([3.0]) == Spread(1, 3.0, 3.0, 3.0)
