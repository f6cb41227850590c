"""`ampdctl worker`: the processes of the cluster."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated, Final

import typer

from ampd.cli.console import say
from ampd.cli.options import Address, Output, connect
from ampd.cli.output import Column, Format, emit_list, emit_one, seconds
from ampd.cli.runner import run_async
from ampd.cli.views import View, drain_view, worker_view
from ampd.core.errors import AmpdError, ErrorReason
from ampd.v1.worker_pb2 import WorkerRole

WAIT_POLL_S: Final = 0.5
_ENDED: Final = frozenset({ErrorReason.WORKER_NOT_FOUND, ErrorReason.WORKER_UNAVAILABLE})

app = typer.Typer(help="The processes of the cluster.", no_args_is_help=True)

WORKER_COLUMNS: Final = (
    Column("worker_id", "WORKER"),
    Column("role", "ROLE"),
    Column("address", "ADDRESS"),
    Column("engine", "ENGINE"),
    Column("running_rounds", "RUNNING", right=True),
    Column("queued_tasks", "QUEUED", right=True),
    Column("sessions", "SESSIONS", right=True),
    Column("kv_capacity_tokens", "KV TOKENS", right=True),
    Column("kv_pinned_tokens", "PINNED", right=True),
    Column("ttft_window_s", "TTFT", seconds, right=True),
    Column("itl_window_s", "ITL", seconds, right=True),
    Column("load_age_s", "AGE", seconds, right=True),
    Column("draining", "DRAINING"),
)


class RoleName(StrEnum):
    """What `--role` takes."""

    COORDINATOR = "coordinator"
    PREFILL = "prefill"
    DECODE = "decode"


@app.command("list")
def list_workers(
    role: Annotated[RoleName | None, typer.Option(help="Only these.")] = None,
    address: Address = "",
    output: Output = Format.TABLE,
) -> None:
    """List the live coordinators and workers with their load."""
    wanted = WorkerRole.Value(f"WORKER_ROLE_{role.name}") if role else WorkerRole.ValueType(0)

    async def read() -> list[View]:
        async with connect(address) as client:
            return [worker_view(worker) async for worker in client.list_workers(wanted)]

    emit_list(run_async(read()), WORKER_COLUMNS, output)


@app.command()
def drain(
    worker_id: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the worker has ended.")] = False,
    address: Address = "",
    output: Output = Format.TABLE,
) -> None:
    """Let a worker finish what it has, hand its idle sessions to others, and end.

    Called again, it tells how far the worker is.
    """

    async def ask() -> View:
        async with connect(address) as client:
            first = drain_view(worker_id, await client.drain_worker(worker_id))
            if not wait:
                return first
            last = first
            while True:
                say(
                    f"{worker_id}: {last['running']} running, {last['sessions']} sessions, "
                    f"about {seconds(last['estimated_s'])} to go"
                )
                await asyncio.sleep(WAIT_POLL_S)
                try:
                    last = drain_view(worker_id, await client.drain_worker(worker_id))
                except AmpdError as error:
                    if error.reason not in _ENDED:
                        raise
                    say(f"{worker_id}: drained")
                    return {**last, "running": 0, "estimated_s": 0.0}

    emit_one(run_async(ask()), output)
