"""docs/benchmarks.md, made from the results in the repository."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ampd.bench.control_path import ControlPathResult
from ampd.bench.data_path import ADDED_BAR_S, CONCURRENCY, ROUNDS_BAR, TOKENS_BAR, DataPathResult
from ampd.bench.policies.result import PolicyResult
from ampd.bench.policies.tables import Table, cell_tables, summary_tables
from ampd.bench.provenance import Provenance
from ampd.core.errors import invalid_field

POLICIES_FILE: Final = "policies.json"
CONTROL_PATH_FILE: Final = "control-path.json"
DATA_PATH_FILE: Final = "data-path.json"
MAX_RESULT_BYTES: Final = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Results:
    """What is in a folder of results; None: not measured."""

    policies: PolicyResult | None
    control_path: ControlPathResult | None
    data_path: DataPathResult | None


def read_results(folder: Path) -> Results:
    """INVALID_FIELD naming the file that is not a result, OSError where one cannot be read."""
    return Results(
        _read(folder / POLICIES_FILE, PolicyResult),
        _read(folder / CONTROL_PATH_FILE, ControlPathResult),
        _read(folder / DATA_PATH_FILE, DataPathResult),
    )


def _read(path: Path, kind: type[T]) -> T | None:
    if not path.exists():
        return None
    if path.stat().st_size > MAX_RESULT_BYTES:
        raise invalid_field(str(path), f"larger than {MAX_RESULT_BYTES} bytes")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise invalid_field(str(path), str(error)) from error


def page(results: Results, plots: Sequence[tuple[str, str]]) -> str:
    """The page; `plots`: titles and paths of images of the policy benchmark."""
    parts = [_INTRODUCTION]
    if results.policies is not None:
        parts += _policies(results.policies, plots)
    if results.control_path is not None:
        parts += _control_path(results.control_path)
    if results.data_path is not None:
        parts += _data_path(results.data_path)
    return "\n".join(parts)


_INTRODUCTION: Final = """# Benchmarks

Made by `ampdctl bench report` from `benchmarks/results/*.json`; do not edit. What is not as good
as it should be stands here like the rest.

| command | measures | result |
|---|---|---|
| `ampdctl bench policies` | every policy in every cell, by simulation | policies.json |
| `ampdctl bench control-path` | what a decision costs | control-path.json |
| `ampdctl bench data-path` | what a round costs on its way | data-path.json |

`ampdctl bench policies` runs all of it: 13 cells, every policy, six rates, five seeds, 300 counted
seconds (3,000 for agent sessions), some 10,000 simulations. It uses every core, keeps each
simulation it has done under the state of the deciding code, and goes on there when it is started
again. `--short` is all cells, three rates, one seed, 30 s; `--quick` two cells of these and the
disturbances, for every day. `--cells`, `--policies`, `--rates`, `--seeds`, `--horizon` and
`--parts` choose; `--plots` draws (`pip install 'ampd[bench]'`).
"""

_POLICIES: Final = """## Policies (simulated)

Cells are a model under a workload, on as many GPUs as the paper has. TP is the smallest degree
whose workers have KV memory for 16 whole sessions (agent sessions: four of the longest contexts).
Rates are in r50 of the cell: where always-remote to the least loaded worker, on its best layout,
attains its SLO in half of the sessions, by session-mean. Every policy is run twice: all on one
layout, half of the workers each, and each on its *own*: the split that attains most over 0.85 and
1.2 x r50 in runs of a quarter of the length (15 s at least), with the best of the settings that it
names for a search (`ampd.core.policies`), tuned on the balanced layout and again on its own.
Colocated policies have decode workers only, and so has always-local on its own layout. g90 is the
highest rate with session-mean attainment of 90 %. A refused session counts as one that attains
nothing. Intervals are 95 % over the seeds; differences are taken seed by seed. All policies see
the same sessions. GPUs' costs of H20 are a roofline, never measured (docs/profiles.md); what is
modelled is said in docs/simulator.md.
"""


def _policies(result: PolicyResult, plots: Sequence[tuple[str, str]]) -> list[str]:
    scope = result.scope
    seeds = ", ".join(str(seed) for seed in scope.seeds)
    rates = ", ".join(f"{rate:g}" for rate in scope.rates)
    run = (
        f"What was run: {len(result.cells)} cells, seeds {seeds}; {rates} x r50; "
        f"{scope.counted_s:g} counted seconds (agent sessions: ten times as many); parts: "
        f"{', '.join(scope.parts)}. {result.runs:,} simulations. "
        f"{result.clipped_rounds:,} rounds of the recorded agent sessions are cut to 131,072 "
        f"tokens.\n"
    )
    parts = [_POLICIES, run, _where(result.provenance)]
    parts += [_markdown(table, 3) for table in summary_tables(result)]
    parts += [f"### {title}\n\n![{title}]({path})\n" for title, path in plots]
    for cell in result.cells:
        parts.append(
            f"### {cell.name}\n\n`{cell.profile}`, {cell.workers} workers, {cell.end_s:g} s of "
            f"which {cell.warm_up_s:g} s warm up; SLO {cell.ttft_slo_s:g} s TTFT, "
            f"{cell.itl_slo_s * 1000:g} ms ITL. r50: {cell.r50:.4g} sessions/s, on "
            f"{cell.r50_prefill} + {cell.workers - cell.r50_prefill} workers.\n"
        )
        parts += [_markdown(table, 4) for table in cell_tables(cell)]
    return parts


def _control_path(result: ControlPathResult) -> list[str]:
    rows = [
        (
            cell.what,
            cell.policy or "-",
            str(cell.prefill_workers or "-"),
            str(cell.queue_tasks or "-"),
            *(f"{seconds * 1e3:.3f}" for seconds in (cell.time.p50_s, cell.time.p99_s)),
            "-" if cell.bar_s is None else f"{cell.bar_s * 1e3:g}",
            "-" if cell.met is None else "yes" if cell.met else "no",
        )
        for cell in result.cells
    ]
    headings = ("What", "Policy", "Prefill workers", "Queue", "P50, ms", "P99, ms", "Bar", "Met")
    table = Table("Control path", headings, tuple(rows))
    return [_markdown(table, 2), _where(result.provenance)]


def _data_path(result: DataPathResult) -> list[str]:
    ours, raw = result.concurrent["ampd"], result.concurrent["proxy"]
    tokens = result.streams["ampd"].tokens_per_cpu_s("coordinator")
    raw_tokens = result.streams["proxy"].tokens_per_cpu_s("proxy")
    lines = (
        ("added latency, P50, ms", result.added_s * 1e3, result.hop_s * 1e3, ADDED_BAR_S * 1e3),
        (f"rounds/s, {CONCURRENCY} at once", ours.rounds_per_s, raw.rounds_per_s, ROUNDS_BAR),
        ("tokens/s a coordinator core", tokens, raw_tokens, TOKENS_BAR),
    )
    rows = tuple(
        (what, f"{value:,.3g}", f"{hop:,.3g}", f"{bar:,.3g}") for what, value, hop, bar in lines
    )
    table = Table("Data path", ("What", "AMPD", "One hop of raw gRPC", "Bar"), rows)
    return [_markdown(table, 2), _where(result.provenance)]


def _where(provenance: Provenance) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
    return (
        f"On {provenance.cpu}, {provenance.cores} cores, load {provenance.load_average:g}; commit "
        f"{provenance.commit or 'unknown'}, {provenance.started}; {versions}.\n"
    )


def _markdown(table: Table, level: int) -> str:
    lines = ["#" * level + f" {table.title}", "", _row(table.headings)]
    lines.append(_row("---" for _ in table.headings))
    lines += [_row(row) for row in table.rows]
    return "\n".join([*lines, ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
