"""`ampdctl bench live`: policies on a live cluster of emulated workers, beside the simulator."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop

from ampd.bench.live import LivePlan, LivePoint, LiveResult, measure_live
from ampd.cli.cluster import ClusterSpec, EngineKind, LocalCluster
from ampd.cli.console import say
from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import DEFAULT_EMULATED_MODEL, JsonFile, Output
from ampd.cli.output import (
    Column,
    Format,
    View,
    emit_list,
    emit_one,
    percent,
    seconds,
    write_result,
)
from ampd.cli.runner import run_async
from ampd.client import AmpdClient
from ampd.core.model import PolicySpec
from ampd.core.policies import resolve
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import open_workload

MAX_MODEL_TOKENS: Final = 32_768


def live(
    rate: Annotated[float, typer.Option(min=0.001, help="Sessions per modelled second.")],
    workload: Annotated[str, typer.Option(help="A built-in workload or a trace.")] = "ToolBench",
    profile: Annotated[str, typer.Option(help="Of every worker.")] = "gpu:h20/Qwen3-32B/tp2",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    policies: Annotated[
        str, typer.Option(help="With commas between, one after the other.")
    ] = "always-remote,ampd-paper,ampd",
    horizon: Annotated[float, typer.Option(min=1, help="Modelled seconds of arrivals.")] = 60.0,
    warm_up: Annotated[
        float, typer.Option(min=0, help="Sessions that arrive before do not count.")
    ] = 10.0,
    time_scale: Annotated[
        float, typer.Option(min=0.1, help="Real seconds of a modelled one.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(help="The same seed, the same sessions.")] = 0,
    json_file: JsonFile = None,
    output: Output = Format.TABLE,
) -> None:
    """The same sessions under several policies on real services with emulated engines, and in
    the simulator."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        resolve(PolicySpec(name))
    plan = LivePlan(rate, horizon, warm_up, time_scale, seed)
    result = run_async(
        _live(names, workload, profile, prefill, decode, plan), uvloop.new_event_loop
    )
    write_result(json_file, result)
    if output is Format.TABLE:
        emit_list([_view(point) for point in result.points], _COLUMNS, output)
    else:
        emit_one(msgspec.to_builtins(result), output)


async def _live(
    names: list[str], workload: str, profile_name: str, prefill: int, decode: int, plan: LivePlan
) -> LiveResult:
    profile = open_profile(profile_name)
    capacity = kv_capacity_tokens(profile)
    if not capacity:
        raise CliError(f"{profile_name} says nothing of KV memory", exit_code=ExitCode.USAGE)
    worker = WorkerSpec(profile.cost, capacity)
    settings = SimSettings(
        prefill=(worker,) * prefill,
        decode=(worker,) * decode,
        kv_bytes_per_token=profile.kv_bytes_per_token,
    )
    spec = ClusterSpec(
        model=DEFAULT_EMULATED_MODEL,
        engine=EngineKind.EMULATED,
        prefill=prefill,
        decode=decode,
        kv_cache_bytes=capacity * profile.kv_bytes_per_token,
        max_model_tokens=MAX_MODEL_TOKENS,
        profile=profile_name,
        time_scale=plan.time_scale,
    )
    with tempfile.TemporaryDirectory() as folder:
        async with (
            LocalCluster(spec, Path(folder), say) as cluster,
            AmpdClient(cluster.address) as client,
        ):
            return await measure_live(
                client,
                policies=names,
                workload=open_workload(workload),
                settings=settings,
                plan=plan,
                profile=profile_name,
            )


def _view(point: LivePoint) -> View:
    live_, simulated = point.live, point.simulated
    return {
        "policy": point.policy,
        "round": f"{live_.round:.3f} / {simulated.round:.3f}",
        "mean": f"{live_.session_mean:.3f} / {simulated.session_mean:.3f}",
        "strict": f"{live_.session_strict:.3f} / {simulated.session_strict:.3f}",
        "sessions": live_.sessions,
        "ttft": seconds(point.ttft_mean_s),
        "itl": seconds(point.itl_mean_s),
        "local": f"{percent(point.local_share)} / {percent(point.simulated_local_share)}",
        "failed": point.failed_rounds,
        "late": seconds(point.late_s),
    }


_COLUMNS = (
    Column("policy", "POLICY"),
    Column("round", "ROUND LIVE / SIMULATED"),
    Column("mean", "SESSION-MEAN"),
    Column("strict", "SESSION-STRICT"),
    Column("sessions", "SESSIONS", right=True),
    Column("ttft", "TTFT", right=True),
    Column("itl", "ITL", right=True),
    Column("local", "LOCAL"),
    Column("failed", "FAILED", right=True),
    Column("late", "CLIENT LATE", right=True),
)
