"""`ampdctl profile run`: measures an engine of its own and writes its profile."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ValidationError

from ampd.adapters.engine_vllm.settings import Device
from ampd.cli.cluster import EngineKind
from ampd.cli.console import say
from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import EngineOption, Model, TimeScale, served_model
from ampd.cli.options import Profile as ProfileOption
from ampd.cli.profile_views import draw, summary
from ampd.cli.runner import run_async
from ampd.core.cost_model import Link
from ampd.core.errors import AmpdError
from ampd.core.model import Role
from ampd.ports import Engine
from ampd.profiling.campaign import Limits, disturbed, measure_points
from ampd.profiling.journal import Journal, Subject
from ampd.profiling.profile_file import Profile, require_ending, write_profile
from ampd.profiling.result import profile_of
from ampd.runtime.engines import start_engine
from ampd.runtime.lender import LenderProcess, lending_engine
from ampd.runtime.worker import WorkerSettings, device_name, unmeasured_link

PIN_S: Final = 24 * 3600.0
"""How long the engine keeps a history that is measured with."""
JOURNAL_ENDING: Final = ".part"
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Job:
    out: Path
    plot: Path | None
    limits: Limits
    transfers: bool
    settings: WorkerSettings
    model_name: str

    @property
    def journal_path(self) -> Path:
        return self.out.with_name(self.out.name + JOURNAL_ENDING)


def run(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The profile (.yaml or .json).")],
    engine: EngineOption = EngineKind.VLLM,
    model: Model = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, help="Seconds that measuring may take.")
    ] = 300.0,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Most sequences of one step.")
    ] = 64,
    max_model_tokens: Annotated[
        int, typer.Option("--max-model-tokens", min=64, help="Longest sequence in tokens.")
    ] = 4096,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option("--kv-cache-mib", min=1, help="Memory for KV.", show_default="1024"),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU: threads.")] = 1,
    device: Annotated[
        Device, typer.Option("--device", help="What the model runs on.")
    ] = Device.CPU,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of weights and KV.", show_default=False)
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, help="GPUs of the engine.")
    ] = 1,
    transfers: Annotated[
        bool, typer.Option(help="Start a second engine and measure KV transfers from it.")
    ] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Leave out what an interrupted run has measured.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw measured against fitted (.png, .svg, .pdf)."),
    ] = None,
    profile: ProfileOption = None,
    time_scale: TimeScale = 1.0,
) -> None:
    """Measure a live engine and write its profile.

    Interrupted, the same command goes on where it was: what is measured lies in FILE.part
    until the profile is written.
    """
    require_ending(out)
    emulated = engine is EngineKind.EMULATED
    if not emulated and profile is not None:
        raise CliError(
            "--profile is for the emulated engine: a real one is measured",
            exit_code=ExitCode.USAGE,
        )
    path, name = served_model(engine, model)
    try:
        settings = WorkerSettings.model_validate(
            {
                "worker_id": "profile",
                "listen": "127.0.0.1:1",  # nobody calls it, and it calls no store
                "store_url": "redis://127.0.0.1",
                "model": path,
                "engine": engine.value,
                "device": device,
                "dtype": dtype or ("float32" if device is Device.CPU else "auto"),
                "tensor_parallel": tensor_parallel,
                "max_model_tokens": max_model_tokens,
                "threads": threads,
                "max_running_requests": max_batch + 1,  # and a chunk beside them
                "compile": device is Device.CUDA,
                "side_channel_port": _free_port(),
                "profile": profile,
                "time_scale": time_scale,
                "kv_cache_bytes": (kv_cache_mib or (16384 if emulated else 1024)) * _MIB,
                "kv_transport": "nixl" if transfers else "inproc",
                "log_level": "error",
            }
        )
    except ValidationError as error:
        wrong = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
        raise CliError(wrong, exit_code=ExitCode.USAGE) from error
    job = _Job(
        out=out,
        plot=plot,
        limits=Limits(budget, max_batch),
        transfers=transfers,
        model_name=name,
        settings=settings,
    )
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if fresh:
        job.journal_path.unlink(missing_ok=True)
    try:
        made = run_async(_measure(job))
    except KeyboardInterrupt:
        if job.journal_path.exists():
            say(f"interrupted; the same command goes on from {job.journal_path}")
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except OSError as error:
        raise CliError(str(error), exit_code=ExitCode.USAGE) from error
    for key, value in summary(made).items():
        say(f"  {key:<10} {value}")
    say(f"wrote {out}")
    if plot is not None:
        draw(made, plot)


async def _measure(job: _Job) -> Profile:
    limits, settings = job.limits, job.settings
    say(f"starting the engine ({settings.engine}, {job.model_name})")
    async with _engine(settings) as engine, _lender(job) as lender:
        info = engine.info
        subject = Subject(
            job.model_name,
            device_name(settings),
            info.engine,
            settings.tensor_parallel,
            f"dtype {settings.dtype}, max batch {limits.max_batch}, "
            f"blocks of {info.block_tokens}, context {info.max_model_tokens}"
            + (f", {settings.profile} x {settings.time_scale:g}" if settings.profile else ""),
        )
        try:
            journal = Journal.open(job.journal_path, subject)
        except AmpdError as error:
            hint = "--fresh starts anew"
            raise CliError(error.message, hint=hint, exit_code=ExitCode.USAGE) from error
        if len(journal):
            say(f"going on: {len(journal)} measurements are there ({journal.spent_s:.0f} s)")

        def progress(text: str, spent_s: float) -> None:
            say(f"[{spent_s:5.0f} of {limits.budget_s:.0f} s] {text}")

        await measure_points(engine, journal, limits, lender=lender, progress=progress)
        provenance = {
            "method": "ampdctl profile run",
            "host": socket.gethostname(),
            "cpus": str(os.cpu_count()),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": subject.settings,
            "measured": f"{len(journal)} groups of points in {journal.spent_s:.0f} s, "
            f"{disturbed(journal)} of them while other work disturbed the machine",
            "kv": "between two processes of one host; assumed between hosts"
            if lender
            else "not measured",
        }
        made = profile_of(
            journal,
            subject,
            link=Link.SAME_HOST,
            other_link=unmeasured_link(info.kv_bytes_per_token),
            kv_bytes_per_token=info.kv_bytes_per_token,
            provenance=provenance,
        )
        write_profile(job.out, made)
        journal.remove()
        return made


@asynccontextmanager
async def _engine(settings: WorkerSettings) -> AsyncIterator[Engine]:
    engine = await start_engine(settings, Role.DECODE, incarnation=1, kv_lease_s=PIN_S)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _lender(job: _Job) -> AsyncIterator[LenderProcess | None]:
    if not job.transfers:
        yield None
        return
    say("starting a second engine to read KV from (--no-transfers: without)")
    changes = {"worker_id": "profile-lender", "side_channel_port": _free_port()}
    async with lending_engine(job.settings.model_copy(update=changes)) as lender:
        yield lender


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
