"""`ampdctl bench`: each benchmark is one command."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from ampd.bench.control_path import Cell, measure_control_path
from ampd.bench.data_path import (
    ADDED_BAR_S,
    CONCURRENCY,
    ROUNDS_BAR,
    TOKENS_BAR,
    DataPathResult,
    Sizes,
    measure_data_path,
)
from ampd.bench.kv_path import KvCell
from ampd.cli import bench_live, bench_policies
from ampd.cli.cluster import EMULATED_KV_CACHE_BYTES, ClusterSpec, EngineKind, LocalCluster
from ampd.cli.console import say
from ampd.cli.options import DEFAULT_EMULATED_MODEL, JsonFile, Output
from ampd.cli.output import (
    Column,
    Format,
    View,
    emit_list,
    emit_one,
    megabytes,
    plain,
    seconds,
    write_result,
)
from ampd.cli.runner import run_async
from ampd.core.model import Role

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)
for command in (bench_policies.policies, bench_policies.report, bench_live.live):
    app.command()(command)


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


@app.command()
def data_path(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way.")] = 400,
    streams: Annotated[int, typer.Option(min=1, help="Rounds at once that stream.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 256,
    kv_mib: Annotated[int, typer.Option(min=4, help="KV moved for each block size.")] = 64,
    json_file: JsonFile = None,
    output: Output = Format.TABLE,
) -> None:
    """What a round costs on its way, with an engine that computes for nothing: latency, rounds
    and tokens per second beside raw gRPC, KV bytes per second beside memcpy."""
    # Its lines would stand on stdout, among the results.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    sizes = Sizes(rounds, streams, tokens, kv_mib << 20)
    result = run_async(_data_path(sizes), uvloop.new_event_loop)
    write_result(json_file, result)
    if output is Format.TABLE:
        emit_list(_bar_views(result), _BAR_COLUMNS, output)
        emit_list(_way_views(result), _WAY_COLUMNS, output)
        emit_list([_kv_view(cell) for cell in result.kv], _KV_COLUMNS, output)
    else:
        emit_one(msgspec.to_builtins(result), output)


async def _data_path(sizes: Sizes) -> DataPathResult:
    """On a cluster of its own, which ends with it."""
    spec = ClusterSpec(
        model=DEFAULT_EMULATED_MODEL,
        engine=EngineKind.EMULATED,
        prefill=0,
        kv_cache_bytes=EMULATED_KV_CACHE_BYTES,
    )
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(spec, Path(folder), say) as cluster:
            (coordinator,) = (s for s in cluster.services if s.role is Role.COORDINATOR)
            (home,) = (s for s in cluster.services if s.role is Role.DECODE)
            pids = {"coordinator": coordinator.pid, "home": home.pid}
            return await measure_data_path(cluster.address, pids, sizes)


_BAR_COLUMNS = (
    Column("what", "WHAT"),
    Column("measured", "MEASURED", right=True),
    Column("bar", "BAR", right=True),
    Column("met", "MET"),
    Column("raw", "RAW GRPC HOP", right=True),
    Column("ratio", "RATIO", right=True),
)
_WAY_COLUMNS = (
    Column("way", "WAY"),
    Column("at_once", "AT ONCE", right=True),
    Column("p50_s", "P50", seconds, right=True),
    Column("p99_s", "P99", seconds, right=True),
    Column("rounds_per_s", "ROUNDS/S", right=True),
    Column("tokens_per_s", "TOKENS/S", right=True),
    Column("tokens_a_message", "TOKENS A MESSAGE", right=True),
    Column("cpu", "CPU MS A ROUND"),
)
_KV_COLUMNS = (
    Column("block_bytes", "KV BLOCK", megabytes, right=True),
    Column("nixl", "NIXL GB/S", right=True),
    Column("memcpy", "MEMCPY GB/S", right=True),
    Column("ratio", "RATIO", right=True),
)


def _bar_views(result: DataPathResult) -> list[View]:
    """What has a bar, beside the same of one hop of raw gRPC in the same run."""
    ampd, proxy = result.concurrent["ampd"], result.concurrent["proxy"]
    tokens = result.streams["ampd"].tokens_per_cpu_s("coordinator")
    raw_tokens = result.streams["proxy"].tokens_per_cpu_s("proxy")
    return [
        {
            "what": "added latency, p50",
            "measured": seconds(result.added_s),
            "bar": seconds(ADDED_BAR_S),
            "met": result.added_s < ADDED_BAR_S,
            "raw": seconds(result.hop_s),
            "ratio": f"{result.added_s / result.hop_s:.2f}",
        },
        {
            "what": f"rounds/s, {CONCURRENCY} at once",
            "measured": f"{ampd.rounds_per_s:,.0f}",
            "bar": f"{ROUNDS_BAR:,.0f}",
            "met": ampd.rounds_per_s > ROUNDS_BAR,
            "raw": f"{proxy.rounds_per_s:,.0f}",
            "ratio": f"{ampd.rounds_per_s / proxy.rounds_per_s:.2f}",
        },
        {
            "what": f"tokens/s a coordinator core, {result.sizes.streams} streams",
            "measured": f"{tokens:,.0f}",
            "bar": f"{TOKENS_BAR:,.0f}",
            "met": tokens > TOKENS_BAR,
            "raw": f"{raw_tokens:,.0f}",
            "ratio": f"{tokens / raw_tokens:.2f}",
        },
    ]


def _way_views(result: DataPathResult) -> list[View]:
    views: list[View] = [
        {"way": way, "at_once": 1, "p50_s": time.p50_s, "p99_s": time.p99_s}
        for way, time in result.latency.items()
    ]
    for at_once, ways in ((CONCURRENCY, result.concurrent), (result.sizes.streams, result.streams)):
        for way, run in ways.items():
            rounds = run.rounds
            cpu = {name: cpu_s / rounds * 1000 for name, cpu_s in run.cpu_s.items()}
            views.append(
                {
                    "way": way,
                    "at_once": at_once,
                    "rounds_per_s": f"{run.rounds_per_s:,.0f}",
                    "tokens_per_s": f"{run.tokens_per_s:,.0f}",
                    "tokens_a_message": f"{run.tokens / run.messages:.1f}",
                    "cpu": ", ".join(f"{name} {ms:.2f}" for name, ms in cpu.items() if ms >= 0.01),
                }
            )
    return views


def _kv_view(cell: KvCell) -> View:
    return {
        "block_bytes": cell.block_bytes,
        "nixl": f"{cell.nixl_bytes_per_s / 1e9:.2f}",
        "memcpy": f"{cell.memcpy_bytes_per_s / 1e9:.2f}",
        "ratio": f"{cell.nixl_bytes_per_s / cell.memcpy_bytes_per_s:.2f}",
    }


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
