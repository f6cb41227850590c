from __future__ import annotations

import json

import pytest
import yaml

from ampd.cli.output import Column, Format, emit_list, emit_one, megabytes, percent, plain, seconds

VIEWS = [
    {"name": "decode-0", "tokens": 12345, "nested": {"a": 1.5}, "note": "[bold]as it is[/bold]"},
    {"name": "prefill-0", "tokens": 0, "nested": {}, "note": None},
]
COLUMNS = [
    Column("name", "NAME"),
    Column("tokens", "TOKENS", right=True),
    Column("note", "NOTE"),
    Column("absent", "ABSENT"),
]


def test_table_shows_the_columns_and_leaves_markup_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit_list(VIEWS, COLUMNS, Format.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "TOKENS", "NOTE", "ABSENT"]
    assert lines[1].split() == ["decode-0", "12,345", "[bold]as", "it", "is[/bold]", "-"]
    assert lines[2].split() == ["prefill-0", "0", "-", "-"]


def test_a_table_in_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    emit_list([{"name": "x" * 150}], [Column("name", "NAME")], Format.TABLE)
    assert "x" * 150 in capsys.readouterr().out


def test_json_and_yaml_hold_everything(capsys: pytest.CaptureFixture[str]) -> None:
    emit_list(VIEWS, COLUMNS, Format.JSON)
    assert json.loads(capsys.readouterr().out) == VIEWS
    emit_list(VIEWS, COLUMNS, Format.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == VIEWS


def test_one_thing_is_a_line_per_field(capsys: pytest.CaptureFixture[str]) -> None:
    emit_one(VIEWS[0], Format.TABLE)
    assert capsys.readouterr().out.splitlines() == [
        "name    decode-0",
        "tokens  12,345",
        "nested  a=1.5",
        "note    [bold]as it is[/bold]",
    ]
    emit_one(VIEWS[0], Format.JSON)
    assert json.loads(capsys.readouterr().out) == VIEWS[0]


def test_cells() -> None:
    assert [plain(v) for v in (None, "", True, False, 1234, "a")] == [
        "-", "-", "yes", "no", "1,234", "a",
    ]  # fmt: skip
    assert [seconds(v) for v in (0.0, 0.0456, 1.234, None)] == ["0 ms", "45.6 ms", "1.23 s", "-"]
    assert [megabytes(v) for v in (0, 12_300, 3_400_000)] == ["0", "12 kB", "3.4 MB"]
    assert percent(0.875) == "88%"
