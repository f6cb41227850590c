"""`ampdctl worker`: the processes of the cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import typer

from ampd.cli.options import Address, Output, connect
from ampd.cli.output import Column, Format, emit_list, seconds
from ampd.cli.runner import run_async
from ampd.cli.views import View, worker_view
from ampd.v1.worker_pb2 import WorkerRole

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
