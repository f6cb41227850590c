"""`ampdctl bench`: each benchmark is one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from ampd.bench.control_path import Cell, measure_control_path
from ampd.cli.errors import CliError
from ampd.cli.options import Output
from ampd.cli.output import Column, Format, View, emit_list, emit_one, plain, seconds
from ampd.cli.runner import run_async

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the whole result there.", show_default=False)
]


@app.command()
def control_path(
    calls: Annotated[int, typer.Option(min=1, help="Calls of every cell.")] = 2000,
    seed: Annotated[int, typer.Option(help="The same seed, the same cluster.")] = 0,
    json_file: JsonFile = None,
    output: Output = Format.TABLE,
) -> None:
    """What a decision costs: routing, alone and with the store's read; the order of a queue."""
    # As every process of the product runs.
    result = run_async(measure_control_path(calls, seed), uvloop.new_event_loop)
    write_result(json_file, result)
    if output is Format.TABLE:
        emit_list([_cell_view(cell) for cell in result.cells], _CELL_COLUMNS, output)
    else:
        emit_one(msgspec.to_builtins(result), output)


_CELL_COLUMNS = (
    Column("what", "WHAT"),
    Column("policy", "POLICY"),
    Column("prefill_workers", "PREFILL WORKERS", right=True),
    Column("history_tokens", "HISTORY", right=True),
    Column("queue_tasks", "QUEUE", right=True),
    Column("p10_s", "P10", seconds, right=True),
    Column("p50_s", "P50", seconds, right=True),
    Column("p99_s", "P99", seconds, right=True),
    Column("bar_s", "BAR (P50)", seconds, right=True),
    Column("met", "MET", plain),
)


def _cell_view(cell: Cell) -> View:
    time = cell.time
    return {
        "what": cell.what,
        "policy": cell.policy,
        "prefill_workers": cell.prefill_workers or None,
        "history_tokens": cell.history_tokens if cell.policy else None,
        "queue_tasks": cell.queue_tasks or None,
        "p10_s": time.p10_s,
        "p50_s": time.p50_s,
        "p99_s": time.p99_s,
        "bar_s": cell.bar_s,
        "met": cell.met,
    }


def write_result(path: Path | None, result: object) -> None:
    """As indented JSON; nothing without a path."""
    if path is None:
        return
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
    try:
        path.write_bytes(encoded + b"\n")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
