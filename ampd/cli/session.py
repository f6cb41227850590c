"""`ampdctl session`: the tenant's sessions and how their rounds went."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ampd.cli.options import TENANT, Address, Output, Tenant, connect
from ampd.cli.output import Column, Format, emit_list, emit_one, megabytes, plain, seconds
from ampd.cli.runner import run_async
from ampd.cli.views import View, move_view, round_view, session_view

app = typer.Typer(help="Sessions and how their rounds went.", no_args_is_help=True)

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]

_SESSION_COLUMNS: Final = (
    Column("session_id", "SESSION"),
    Column("state", "STATE"),
    Column("home_worker", "HOME"),
    Column("round_count", "ROUNDS", right=True),
    Column("history_tokens", "HISTORY", right=True),
    Column("last_used_time", "LAST USED"),
)
_EXPLAIN_COLUMNS: Final = (
    Column("round", "ROUND", right=True),
    Column("route", "ROUTE"),
    Column("worker", "PREFILLED BY"),
    Column("reason", "WHY"),
    Column("history_tokens", "HISTORY", right=True),
    Column("increment_tokens", "INCREMENT", right=True),
    Column("computed_tokens", "COMPUTED", right=True),
    Column("pulled_bytes", "KV MOVED", megabytes, right=True),
    Column("predicted_ttft_s", "PREDICTED", seconds, right=True),
    Column("ttft_s", "TTFT", seconds, right=True),
    Column("itl_mean_s", "ITL", seconds, right=True),
    Column("attained", "SLO MET", plain),
    Column("considered", "CONSIDERED"),
)


@app.command("list")
def list_sessions(
    address: Address = "", tenant: Tenant = TENANT, output: Output = Format.TABLE
) -> None:
    """List the open sessions."""

    async def read() -> list[View]:
        async with connect(address, tenant) as client:
            return [session_view(session) async for session in client.list_sessions()]

    emit_list(run_async(read()), _SESSION_COLUMNS, output)


@app.command()
def show(
    session_id: SessionId,
    address: Address = "",
    tenant: Tenant = TENANT,
    output: Output = Format.TABLE,
) -> None:
    """Show one session."""

    async def read() -> View:
        async with connect(address, tenant) as client:
            return session_view(await client.get_session(session_id))

    emit_one(run_async(read()), output)


@app.command()
def explain(
    session_id: SessionId,
    round_index: Annotated[
        int | None, typer.Option("--round", min=0, help="Only this round.", show_default=False)
    ] = None,
    address: Address = "",
    tenant: Tenant = TENANT,
    output: Output = Format.TABLE,
) -> None:
    """Tell where each round was prefilled and why, what it took and how it went."""

    async def read() -> list[View]:
        async with connect(address, tenant) as client:
            records = await client.explain(session_id, round_index)
            if output is Format.TABLE:
                return [_summary(round_view(record)) for record in records]
            return [round_view(record) for record in records]

    emit_list(run_async(read()), _EXPLAIN_COLUMNS, output)


@app.command()
def close(
    session_ids: Annotated[list[str], typer.Argument(metavar="SESSION...", help="Their ids.")],
    address: Address = "",
    tenant: Tenant = TENANT,
    output: Output = Format.TABLE,
) -> None:
    """Close sessions and free what they hold."""

    async def close_all() -> list[View]:
        async with connect(address, tenant) as client:
            return [session_view(await client.close_session(one)) for one in session_ids]

    emit_list(run_async(close_all()), _SESSION_COLUMNS, output)


@app.command()
def move(
    session_id: SessionId,
    to: Annotated[
        str,
        typer.Option(
            metavar="WORKER",
            help="Its next home; without it the decode worker with the most free KV.",
            show_default=False,
        ),
    ] = "",
    address: Address = "",
    tenant: Tenant = TENANT,
    output: Output = Format.TABLE,
) -> None:
    """Hand an idle session over to another decode worker, its KV included where that pays."""

    async def moved() -> View:
        async with connect(address, tenant) as client:
            return move_view(session_id, await client.move_session(session_id, to))

    emit_one(run_async(moved()), output)


def _summary(view: View) -> View:
    """One line of the table from a round's whole view."""
    usage, timings, decision = view["usage"], view["timings"], view["decision"]
    assert isinstance(usage, dict)  # noqa: S101
    assert isinstance(timings, dict)  # noqa: S101
    assert isinstance(decision, dict)  # noqa: S101
    return {
        **view,
        **usage,
        **timings,
        "worker": view["prefill_worker"] or view["decode_worker"],
        "computed_tokens": usage["prefill_computed_tokens"] + usage["decode_computed_tokens"],
        "pulled_bytes": usage["history_pulled_bytes"] + usage["increment_pulled_bytes"],
        "predicted_ttft_s": decision["predicted_ttft_s"],
        "considered": ", ".join(
            f"{candidate['worker_id']} {seconds(candidate['predicted_ttft_s'])}"
            for candidate in decision["candidates"]
        ),
    }
