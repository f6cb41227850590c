"""`ampdctl demo`: concurrent agents on a local cluster, and what became of every round."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
from google.protobuf.duration_pb2 import Duration

import ampd
from ampd.cli.cluster import EMULATED_KV_CACHE_BYTES, ClusterSpec, EngineKind, LocalCluster
from ampd.cli.console import say
from ampd.cli.demo_agents import Agent, Script, Tools, Unloaded, calibrate
from ampd.cli.demo_report import (
    ATTAINMENT_COLUMNS,
    TABLE_COLUMNS,
    RoundRow,
    attained_shares,
    attainment_views,
    report_view,
    table_view,
)
from ampd.cli.demo_tools import Retriever, load_passages
from ampd.cli.errors import CliError
from ampd.cli.options import EngineOption, Model, Profile, TimeScale, served_model
from ampd.cli.output import print_table, seconds
from ampd.cli.runner import run_async
from ampd.client import AmpdClient
from ampd.core.errors import AmpdError
from ampd.core.model import Slo
from ampd.core.policies import DEFAULT_POLICY
from ampd.models import cache_dir
from ampd.v1.session_pb2 import Slo as SloMessage
from ampd.v1.worker_pb2 import WorkerRole
from ampd.wire.times import duration_to_proto

TTFT_SLO_FACTOR: Final = 2.5
ITL_SLO_FACTOR: Final = 6.0
"""The SLO in unloaded rounds. So tight that the prefill worker alone cannot meet it once
several agents come at the same time, and loose enough for a decode worker to help out: both
kinds of execution are in the policy's reach, on any machine."""
PREDICTED_TTFT_SLO_FACTOR: Final = 5.0
"""The TTFT SLO in predicted rounds at most: on a machine that is busy with other things just
now, unloaded rounds take much longer than they need to."""
KV_CACHE_BYTES: Final = 1 << 30
MAX_MODEL_TOKENS: Final = 4096
EMULATED_MAX_MODEL_TOKENS: Final = 32_768
"""A token of text is a byte here: the agents' passages are long."""
EMULATED_PROFILE: Final = "gpu:h100_sxm/Qwen3-32B/tp1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run."""

    slo: Slo
    sessions: list[list[RoundRow]]
    errors: list[AmpdError]


def demo(
    model: Model = None,
    engine: EngineOption = EngineKind.VLLM,
    profile: Profile = None,
    time_scale: TimeScale = 1.0,
    sessions: Annotated[int, typer.Option(min=1, help="Agents at the same time.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each agent.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 24,
    policy: Annotated[str, typer.Option(help="Routing policy.")] = DEFAULT_POLICY.name,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the outcome as JSON.", show_default=False),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Folder whose *.md files the agents search; default: AMPD's own.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run agents with real tools on a cluster of its own, and show where each round went."""
    passages = load_passages(docs or _own_docs())
    if not passages:
        raise CliError(
            "there are no Markdown documents to search",
            hint="--docs FOLDER names some; AMPD's own are in its source tree",
        )
    tools = Tools(Retriever(passages))
    served, model_name = served_model(engine, model)
    emulated = engine is EngineKind.EMULATED
    if emulated:
        profile = profile or EMULATED_PROFILE
        say(
            f"the engine is emulated: it takes its time from {profile}, counts KV in that model's "
            "bytes (64 per token really move), and what it says is no language"
        )
    spec = ClusterSpec(
        model=served,
        model_name=model_name,
        engine=engine,
        profile=profile,
        time_scale=time_scale,
        policy=policy,
        kv_cache_bytes=EMULATED_KV_CACHE_BYTES if emulated else KV_CACHE_BYTES,
        max_model_tokens=EMULATED_MAX_MODEL_TOKENS if emulated else MAX_MODEL_TOKENS,
        profile_dir=cache_dir() / "profiles",
    )
    run_dir = _fresh_run_dir()
    outcome = run_async(_run(spec, run_dir, tools, sessions, rounds, max_tokens))
    _show(outcome, report)
    if outcome.errors:
        raise CliError(f"{len(outcome.errors)} rounds failed", hint=f"the logs are in {run_dir}")
    shutil.rmtree(run_dir, ignore_errors=True)


async def _run(
    spec: ClusterSpec, run_dir: Path, tools: Tools, sessions: int, rounds: int, max_tokens: int
) -> Outcome:
    say("starting a store, a coordinator, a prefill worker and a decode worker")
    async with (
        LocalCluster(spec, run_dir, say) as cluster,
        AmpdClient(cluster.address, tenant="demo") as client,
    ):
        script = Script(rounds, max_tokens, await _kv_bytes_per_token(client))
        slo = _slo(await calibrate(client, tools, script, spec.policy))
        script = replace(script, longest_pause_s=slo.ttft_s)
        say(f"SLO, from rounds without load: TTFT {seconds(slo.ttft_s)}, ITL {seconds(slo.itl_s)}")
        started_s = time.monotonic()
        agents = [Agent(client, tools, script, number, say) for number in range(sessions)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(agent.run(_slo_message(slo))) for agent in agents]
        say(f"{sessions} agents are done after {time.monotonic() - started_s:.1f} s")
    results = [task.result() for task in tasks]
    return Outcome(
        slo,
        [rows for rows, _error in results],
        [error for _rows, error in results if error is not None],
    )


async def _kv_bytes_per_token(client: AmpdClient) -> int:
    async for worker in client.list_workers(WorkerRole.WORKER_ROLE_DECODE):
        return worker.kv_bytes_per_token
    raise CliError("the cluster lists no decode worker")


def _slo(unloaded: Unloaded) -> Slo:
    ttft_s = min(
        TTFT_SLO_FACTOR * unloaded.ttft_s, PREDICTED_TTFT_SLO_FACTOR * unloaded.predicted_ttft_s
    )
    return Slo(ttft_s, ITL_SLO_FACTOR * unloaded.itl_s)


def _slo_message(slo: Slo) -> SloMessage:
    ttft: Duration = duration_to_proto(slo.ttft_s)
    return SloMessage(ttft=ttft, itl=duration_to_proto(slo.itl_s))


def _show(outcome: Outcome, report: Path | None) -> None:
    rows = [row for rows in outcome.sessions for row in rows]
    shares = attained_shares(outcome.slo, outcome.sessions)
    print_table([table_view(row) for row in rows], TABLE_COLUMNS)
    local = sum(row.route == "local" for row in rows)
    moved_bytes = sum(row.history_pulled_bytes + row.increment_pulled_bytes for row in rows)
    say(
        f"{len(rows) - local} rounds were prefilled remotely, {local} locally; "
        f"{moved_bytes / 1e6:.1f} MB of KV moved"
    )
    print_table(attainment_views(shares), ATTAINMENT_COLUMNS)
    if report is not None:
        report.write_text(json.dumps(report_view(rows, shares), indent=2) + "\n")
        say(f"the report is in {report}")


def _fresh_run_dir() -> Path:
    """This run's own folder; those that failed runs have left for a look are removed."""
    base = cache_dir() / "run"
    for old in base.glob("demo-*"):
        if not psutil.pid_exists(int(old.name.removeprefix("demo-"))):
            shutil.rmtree(old, ignore_errors=True)
    return base / f"demo-{os.getpid()}"


def _own_docs() -> Path:
    return Path(ampd.__file__).resolve().parent.parent
