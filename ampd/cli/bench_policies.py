"""`ampdctl bench policies`, and `bench report`: the page of all results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from ampd.bench.page import page, read_results
from ampd.bench.policies.cells import QWEN, chosen_cells
from ampd.bench.policies.contenders import chosen_contenders, policy_names
from ampd.bench.policies.drive import Progress, drive
from ampd.bench.policies.execute import CodeChangedError, code_fingerprint, cost_fingerprint
from ampd.bench.policies.journal import Journal
from ampd.bench.policies.plots import plot_all
from ampd.bench.policies.result import PolicyResult, cell_result
from ampd.bench.policies.search import NeverCrossedError
from ampd.bench.policies.study import Part, Scope, study
from ampd.bench.policies.tables import Table, cell_tables, summary_tables
from ampd.bench.provenance import provenance
from ampd.cli.console import say
from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import Output
from ampd.cli.output import Column, Format, emit_list, emit_one
from ampd.models import cache_dir
from ampd.sim.workload import AGENT_SESSIONS, RecordedSessions, open_workload

PROGRESS_EVERY_S: Final = 10.0
MAX_JOBS: Final = 256


@dataclass(frozen=True, slots=True)
class _Size:
    """How much runs unless options say otherwise. No cells: all of them."""

    scope: Scope
    cells: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()


_FULL: Final = _Size(Scope())
_SHORT: Final = _Size(Scope((0.8, 1.0, 1.2), (0,), 30.0, (Part.GRID,)), policies=policy_names())
_QUICK: Final = _Size(
    replace(_SHORT.scope, parts=(Part.GRID, Part.ROBUSTNESS)),
    cells=(f"{QWEN}/ToolBench", f"{QWEN}/HotpotQA"),
    policies=policy_names(),
)


def policies(
    quick: Annotated[
        bool, typer.Option("--quick", help="One model, two traces, three rates, one seed.")
    ] = False,
    short: Annotated[
        bool,
        typer.Option(
            "--short", help="All cells, three rates, one seed, 30 s: no part but the grid."
        ),
    ] = False,
    cells: Annotated[
        str, typer.Option(help="Models, workloads or MODEL/WORKLOAD, with commas between.")
    ] = "",
    policies: Annotated[str, typer.Option(help="With commas between; else all.")] = "",
    rates: Annotated[str, typer.Option(help="In r50, with commas between.")] = "",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many, from 0 on.", show_default=False)
    ] = None,
    horizon: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds that count; agent sessions: ten times as many."),
    ] = None,
    parts: Annotated[
        str, typer.Option(help="grid, ablation, sensitivity, robustness, with commas between.")
    ] = "",
    jobs: Annotated[
        int, typer.Option(min=1, max=MAX_JOBS, help="Processes.", show_default="one a core")
    ] = len(os.sched_getaffinity(0)),
    cache: Annotated[
        Path | None, typer.Option(help="Where runs are kept.", show_default=False)
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print the tables of every cell too.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Draw PNG files into that folder.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the whole result there.", show_default=False),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Every policy in every cell, by simulation. What was run before is not run again: the
    command can be stopped and started at any time."""
    if quick and short:
        raise CliError("--quick and --short exclude each other", exit_code=ExitCode.USAGE)
    size = _QUICK if quick else _SHORT if short else _FULL
    base = size.scope
    scope = Scope(
        rates=_numbers("rates", rates) or base.rates,
        seeds=base.seeds if seeds is None else tuple(range(seeds)),
        counted_s=base.counted_s if horizon is None else horizon,
        parts=_parts(parts) or base.parts,
    )
    chosen = chosen_cells(_names(cells) or size.cells)
    contenders = chosen_contenders(_names(policies) or size.policies)
    began = provenance()
    code = code_fingerprint()
    teller = _Teller(len(chosen))
    try:
        journal = Journal(cache or cache_dir() / "bench", code, cost_fingerprint)
        studies = drive(
            [study(cell, contenders, scope) for cell in chosen],
            journal,
            code=code,
            jobs=jobs,
            told=teller.told,
        )
    except (CodeChangedError, NeverCrossedError) as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from error
    progress = teller.last
    recorded = open_workload(AGENT_SESSIONS)
    assert isinstance(recorded, RecordedSessions)  # noqa: S101 - its type
    result = PolicyResult(
        provenance=began,
        code=code,
        scope=scope,
        runs=progress.runs + progress.known,
        rounds=progress.rounds,
        simulated_s=progress.simulated_s,
        clipped_rounds=recorded.clipped_rounds,
        cells=tuple(cell_result(found) for found in studies),
    )
    if json_file is not None:
        _write(json_file, msgspec.json.encode(result) + b"\n")
    if plots is not None:
        _draw(result, plots)
    if output is not Format.TABLE:
        emit_one(msgspec.to_builtins(result), output)
        return
    tables = summary_tables(result)
    if details:
        tables += [
            Table(f"{cell.name}: {table.title}", table.headings, table.rows)
            for cell in result.cells
            for table in cell_tables(cell)
        ]
    for table in tables:
        _print(table)


def report(
    results: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path(
        "benchmarks/results"
    ),
    to: Annotated[Path, typer.Option(help="The page.")] = Path("docs/benchmarks.md"),
    plots: Annotated[
        bool, typer.Option(help="Draw the plots beside it, into images/. Needs matplotlib.")
    ] = True,
) -> None:
    """Make the page of all results from their JSON files."""
    try:
        found = read_results(results)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from error
    drawn: list[tuple[str, Path]] = []
    if plots and found.policies is not None:
        drawn = _draw(found.policies, to.parent / "images")
    shown = [(title, path.relative_to(to.parent).as_posix()) for title, path in drawn]
    _write(to, page(found, shown).encode())


class _Teller:
    """Says now and then how far it is."""

    def __init__(self, cells: int) -> None:
        self.last = Progress()
        self._cells = cells
        self._next_s = time.monotonic() + PROGRESS_EVERY_S

    def told(self, progress: Progress) -> None:
        self.last = progress
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PROGRESS_EVERY_S
        speed = progress.rounds / progress.simulated_s if progress.simulated_s else 0.0
        say(
            f"{now_s - progress.started_s:.0f} s: {progress.runs} runs, {progress.known} known, "
            f"{progress.plans_done} of {self._cells} cells done; "
            f"{speed:,.0f} rounds a second and process"
        )


def _names(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _numbers(option: str, given: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(name) for name in _names(given))
    except ValueError as error:
        raise CliError(f"--{option}: {error}", exit_code=ExitCode.USAGE) from error
    if not all(0 < number < 100 for number in numbers):
        raise CliError(f"--{option} must be above 0 and below 100", exit_code=ExitCode.USAGE)
    return numbers


def _parts(given: str) -> tuple[Part, ...]:
    try:
        return tuple(Part(name) for name in _names(given))
    except ValueError as error:
        known = ", ".join(Part)
        raise CliError(f"--parts: {error}; known: {known}", exit_code=ExitCode.USAGE) from error


def _draw(result: PolicyResult, folder: Path) -> list[tuple[str, Path]]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return plot_all(result, folder)
    except ImportError as error:
        raise CliError(
            "plots need matplotlib",
            hint="pip install 'ampd[bench]'",
            exit_code=ExitCode.USAGE,
        ) from error
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from error


def _print(table: Table) -> None:
    columns = [Column(str(index), heading) for index, heading in enumerate(table.headings)]
    views = [{str(index): cell for index, cell in enumerate(row)} for row in table.rows]
    typer.echo(f"\n{table.title}")
    emit_list(views, columns, Format.TABLE)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
