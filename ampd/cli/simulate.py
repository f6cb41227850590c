"""`ampdctl simulate`: a cluster that is not there, under a policy and a workload."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import Output
from ampd.cli.output import Format, View, emit_one, percent, seconds
from ampd.cli.policy import parse_settings
from ampd.core.model import ItlStatistic, PolicySpec, Slo
from ampd.core.policies import AMPD_PAPER
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.profiling.profile_file import Profile
from ampd.sim.cluster import simulate as run_simulation
from ampd.sim.report import Distribution, SimReport
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import Workload, open_workload


def simulate(
    workload: Annotated[
        str,
        typer.Option(
            help="ToolBench, HotpotQA, DuReader, GAIA, agent-sessions, a Mooncake trace (.jsonl) "
            "or recorded sessions (.csv, .csv.gz)."
        ),
    ] = "ToolBench",
    profile: Annotated[
        str, typer.Option(help="Cost model of every worker: a name of `profile list`, or a file.")
    ] = "gpu:h20/Qwen3-32B/tp1",
    decode_profile: Annotated[
        str | None,
        typer.Option(help="Another one for decode workers.", show_default=False),
    ] = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 4,
    policy: Annotated[str, typer.Option(help="As in `ampdctl policy set`.")] = AMPD_PAPER,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SETTING=VALUE", help="Of the policy; repeatable.", show_default=False
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0, help="Sessions a second; 0: a trace's own instants.")
    ] = 2.0,
    horizon: Annotated[float, typer.Option(min=0, help="Seconds in which sessions arrive.")] = 360,
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds that do not count.")] = 60,
    seed: Annotated[int, typer.Option(help="The same seed, the same run.")] = 0,
    ttft_slo: Annotated[
        float | None, typer.Option(help="Seconds; else the workload's own.", show_default=False)
    ] = None,
    itl_slo: Annotated[
        float | None, typer.Option(help="Seconds; else the workload's own.", show_default=False)
    ] = None,
    itl_statistic: Annotated[
        ItlStatistic, typer.Option(help="What of a round's gaps the ITL SLO applies to.")
    ] = ItlStatistic.MEAN,
    kv_capacity: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of KV memory of each worker; else what the profile's GPU has room for.",
            show_default=False,
        ),
    ] = None,
    heartbeat: Annotated[
        float, typer.Option(min=0, help="Seconds between heartbeats: how old loads may be.")
    ] = 0.2,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Put every decision into the JSON file.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the whole report there.", show_default=False),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Simulate a cluster: the decisions of the live code on modelled workers."""
    prefill_profile = _profile(profile)
    decodes = prefill_profile if decode_profile is None else _profile(decode_profile)
    settings = SimSettings(
        prefill=(_worker(prefill_profile, kv_capacity),) * prefill,
        decode=(_worker(decodes, kv_capacity),) * decode,
        policy=PolicySpec(policy, parse_settings(setting or ())),
        kv_bytes_per_token=decodes.kv_bytes_per_token,
        heartbeat_s=heartbeat,
        decision_log=decisions,
    )
    sessions = _workload(workload, ttft_slo, itl_slo, itl_statistic)
    started_s = time.perf_counter()
    report = run_simulation(
        settings, sessions, rate=rate, horizon_s=horizon, warm_up_s=warm_up, seed=seed
    )
    report = replace(report, wall_s=time.perf_counter() - started_s)
    if json_file is not None:
        _write(json_file, report)
    if output is Format.TABLE:
        emit_one(_summary(report), output)
    else:
        emit_one(msgspec.to_builtins(report), output)


def _profile(source: str) -> Profile:
    try:
        return open_profile(source)
    except OSError as error:
        raise CliError(
            f"{source}: {error.strerror}",
            hint="`ampdctl profile list` shows the built-in ones",
            exit_code=ExitCode.USAGE,
        ) from error


def _worker(profile: Profile, kv_capacity: int | None) -> WorkerSpec:
    tokens = kv_capacity_tokens(profile) if kv_capacity is None else kv_capacity
    if not tokens:
        why = "does not fit its GPUs" if tokens == 0 else "says nothing of KV memory"
        raise CliError(
            f"the profile of {profile.model} on {profile.device} (TP {profile.tp}) {why}",
            hint="--kv-capacity TOKENS says how much a worker has",
            exit_code=ExitCode.USAGE,
        )
    return WorkerSpec(profile.cost, tokens)


def _workload(
    source: str, ttft_s: float | None, itl_s: float | None, statistic: ItlStatistic
) -> Workload:
    try:
        workload = open_workload(source)
    except OSError as error:
        raise CliError(f"{source}: {error.strerror}", exit_code=ExitCode.USAGE) from error
    own = workload.slo
    slo = Slo(
        own.ttft_s if ttft_s is None else ttft_s,
        own.itl_s if itl_s is None else itl_s,
        statistic,
    )
    return replace(workload, slo=slo)


def _write(path: Path, report: SimReport) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    try:
        path.write_bytes(encoded + b"\n")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error


def _summary(report: SimReport) -> View:
    attained = report.attainment
    return {
        "workload": f"{report.workload}, {report.rate:g} sessions/s for {report.horizon_s:g} s",
        "cluster": f"{report.prefill_workers} prefill + {report.decode_workers} decode workers",
        "policy": report.policy.name,
        "settings": dict(report.policy.settings),
        "slo": f"TTFT {seconds(report.slo.ttft_s)}, "
        f"{report.slo.itl_statistic} ITL {seconds(report.slo.itl_s)}",
        "attainment": f"round {attained.round:.1%}, session-mean {attained.session_mean:.1%}, "
        f"session-strict {attained.session_strict:.1%} "
        f"({attained.rounds:,} rounds of {attained.sessions:,} sessions)",
        "ttft": _times(report.ttft),
        "itl": _times(report.itl),
        "local": f"{report.local_share:.1%} of the prefills",
        "kv_moved": f"history {report.history_moved_bytes / 1e9:,.1f} GB, "
        f"increments {report.increment_moved_bytes / 1e9:,.1f} GB",
        "busy": f"prefill {percent(report.prefill_utilisation)}, "
        f"decode {percent(report.decode_utilisation)}",
        "kv_memory": f"{report.evictions:,} evictions, {report.rebuilt_rounds:,} histories "
        f"rebuilt, {report.refused_sessions:,} sessions refused",
        "simulated": f"{report.rounds:,} rounds, {report.end_s:.0f} s, in {seconds(report.wall_s)}",
    }


def _times(times: Distribution) -> str:
    return (
        f"mean {seconds(times.mean_s)}, P50 {seconds(times.p50_s)}, P95 {seconds(times.p95_s)}, "
        f"P99 {seconds(times.p99_s)}"
    )
