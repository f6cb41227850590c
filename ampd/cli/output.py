"""Printers: views (plain dicts, units in their names) as table, JSON or YAML on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ampd.cli.errors import CliError

View = Mapping[str, object]

_WIDTH_WITHOUT_TERMINAL: Final = 200
"""Columns of a table that goes into a file or pipe: nothing is cut there."""


class Format(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def plain(value: object) -> str:
    """A cell as it is; nothing for what is unset."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def seconds(value: object) -> str:
    """A duration with three figures: 1.23 s, 45.6 ms."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.3g} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms"


def megabytes(value: object) -> str:
    """A size: 0, 12 kB, 3.4 MB."""
    if not isinstance(value, int | float):
        return "-"
    if value < 1e6:
        return f"{value / 1e3:.0f} kB" if value else "0"
    return f"{value / 1e6:.1f} MB"


def percent(value: object) -> str:
    """A share as a percentage."""
    return f"{value:.0%}" if isinstance(value, int | float) else "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the view's field, its heading, how a cell is written."""

    key: str
    heading: str
    cell: Callable[[object], str] = plain
    right: bool = False


def emit_list(views: Sequence[View], columns: Sequence[Column], output: Format) -> None:
    """Several things of a kind."""
    if output is Format.TABLE:
        print_table(views, columns)
    else:
        _emit([dict(view) for view in views], output)


def emit_one(view: View, output: Format) -> None:
    """One thing: as a table, a line per field."""
    if output is Format.TABLE:
        width = max(len(key) for key in view)
        for key, value in view.items():
            _write(f"{key:<{width}}  {_flat(value)}\n")
    else:
        _emit(dict(view), output)


def print_table(views: Sequence[View], columns: Sequence[Column]) -> None:
    """A table that reads well without colour or lines."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # A terminal that is too narrow breaks cells; it never hides part of one.
        table.add_column(
            column.heading, justify="right" if column.right else "left", overflow="fold"
        )
    for view in views:
        # As Text: a cell is data, never markup.
        table.add_row(*(Text(column.cell(view.get(column.key))) for column in columns))
    console.print(table)


def _emit(data: object, output: Format) -> None:
    if output is Format.JSON:
        _write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    else:
        _write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_flat(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(_flat(item) for item in value) or "-"
    return plain(value)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def write_result(path: Path | None, result: object) -> None:
    """As indented JSON; nothing without a path."""
    if path is None:
        return
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
    try:
        path.write_bytes(encoded + b"\n")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
