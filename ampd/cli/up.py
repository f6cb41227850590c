"""`ampdctl up` and `ampdctl down`: a cluster on this machine that outlives the command.

A detached `ampdctl up --foreground`, the supervisor, holds the services as its children and
writes down who they are; `down` ends the supervisor, which ends them in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from ampd.cli.cluster import (
    DEFAULT_KV_CACHE_BYTES,
    DEFAULT_MAX_MODEL_TOKENS,
    EMULATED_KV_CACHE_BYTES,
    START_TIMEOUT_S,
    STOP_GRACE_S,
    ClusterSpec,
    EngineKind,
    LocalCluster,
    ServiceProcess,
)
from ampd.cli.console import say
from ampd.cli.errors import CliError
from ampd.cli.options import EngineOption, Model, Profile, TimeScale, served_model
from ampd.cli.runner import run_async
from ampd.cli.state import (
    ClusterState,
    ProcessId,
    already_running,
    read_state,
    remove_state,
    run_dir,
    sole_supervisor,
    write_state,
)
from ampd.core.policies import DEFAULT_POLICY, POLICIES
from ampd.models import cache_dir

_POLL_S: Final = 0.1
_MIB: Final = 1 << 20


def _known_policy(name: str) -> str:
    """Refused before anything is started."""
    if name not in POLICIES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(POLICIES)}.")
    return name


def _positive(seconds: float | None) -> float | None:
    """No round meets an SLO of nothing."""
    if seconds == 0:
        raise typer.BadParameter("it must be greater than 0.")
    return seconds


def up(
    model: Model = None,
    engine: EngineOption = EngineKind.VLLM,
    profile: Profile = None,
    time_scale: TimeScale = 1.0,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    coordinators: Annotated[int, typer.Option(min=1, help="Coordinators.")] = 1,
    policy: Annotated[
        str, typer.Option(callback=_known_policy, help="Routing policy to start with.")
    ] = DEFAULT_POLICY.name,
    ttft_slo_s: Annotated[
        float | None,
        typer.Option(min=0, callback=_positive, help="TTFT SLO in seconds.", show_default=False),
    ] = None,
    itl_slo_s: Annotated[
        float | None,
        typer.Option(min=0, callback=_positive, help="ITL SLO in seconds.", show_default=False),
    ] = None,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV memory of each worker in MiB: 1024, or 16384 modelled ones.",
            show_default=False,
        ),
    ] = None,
    max_model_tokens: Annotated[
        int, typer.Option(min=1, help="Longest sequence in tokens.")
    ] = DEFAULT_MAX_MODEL_TOKENS,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, and stop the cluster on Ctrl-C.")
    ] = False,
) -> None:
    """Start a local cluster: embedded store, coordinator, prefill and decode workers."""
    served, model_name = served_model(engine, model)
    emulated = engine is EngineKind.EMULATED
    default_kv_bytes = EMULATED_KV_CACHE_BYTES if emulated else DEFAULT_KV_CACHE_BYTES
    spec = ClusterSpec(
        model=served,
        model_name=model_name,
        engine=engine,
        profile=profile,
        time_scale=time_scale,
        prefill=prefill,
        decode=decode,
        coordinators=coordinators,
        policy=policy,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        kv_cache_bytes=kv_cache_mib * _MIB if kv_cache_mib else default_kv_bytes,
        max_model_tokens=max_model_tokens,
        profile_dir=cache_dir() / "profiles",
    )
    if foreground:
        with sole_supervisor():
            run_async(_supervise(spec))
    else:
        _detach()


def down() -> None:
    """Stop the local cluster; nothing to do where none runs."""
    state = read_state()
    if state is None:
        say("no local cluster is running")
        return
    stop(state)
    say("the local cluster is stopped")


def stop(state: ClusterState) -> None:
    """End the supervisor, which ends its services; whatever is left after that is killed."""
    _end(state.supervisor, grace_s=STOP_GRACE_S + 5.0)
    for service in state.services:
        if service.is_alive():
            # Its supervisor was killed, and this system has no way to tie a child to it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(service.pid, signal.SIGKILL)
    remove_state()


# --- the supervisor -----------------------------------------------------------------------


async def _supervise(spec: ClusterSpec) -> None:
    supervisor = ProcessId.of("supervisor", os.getpid())
    write_state(ClusterState(supervisor))
    try:
        async with LocalCluster(spec, run_dir(), say) as cluster:
            services = tuple(ProcessId.of(s.name, s.pid) for s in cluster.services)
            write_state(ClusterState(supervisor, cluster.address, spec.model_name, services))
            say(f"the cluster is ready at {cluster.address}")
            async with asyncio.TaskGroup() as group:
                for service in cluster.services:
                    group.create_task(_report_end(service))
            raise CliError("every service has ended", hint=f"their logs are in {run_dir()}")
    finally:
        remove_state()


async def _report_end(service: ServiceProcess) -> None:
    exit_code = await service.process.wait()
    say(f"{service.name} ended with exit code {exit_code}; its log is {service.log}")


# --- starting it apart --------------------------------------------------------------------


def _detach() -> None:
    """Start the supervisor with this command's own arguments; show what it says until the
    cluster is ready."""
    if read_state() is not None:
        raise already_running()
    log = run_dir() / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "ampd.cli", *sys.argv[1:], "--foreground"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    supervisor = ProcessId.of("supervisor", process.pid)
    try:
        _follow_until_ready(process, log)
    except BaseException:
        _end(supervisor, grace_s=STOP_GRACE_S + 5.0)
        raise
    say("hint: `ampdctl status` shows it, `ampdctl chat` talks to it, `ampdctl down` stops it")


def _follow_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S + STOP_GRACE_S
    with log.open() as lines:
        while True:
            ended = process.poll() is not None
            state = read_state()
            for line in lines:
                say(line.rstrip("\n"))
            if ended:
                raise CliError("the cluster did not start", hint=f"its logs are in {log.parent}")
            if state is not None and state.supervisor.pid == process.pid and state.address:
                return
            if time.monotonic() > deadline_s:
                raise CliError("the cluster is not ready", hint=f"its logs are in {log.parent}")
            time.sleep(_POLL_S)


def _end(process: ProcessId, *, grace_s: float) -> None:
    """SIGTERM, then SIGKILL, but only to the very process that was written down."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if not process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)
        deadline_s = time.monotonic() + grace_s
        while process.is_alive() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
