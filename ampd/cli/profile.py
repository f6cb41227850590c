"""`ampdctl profile`: cost models, built in or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import Output
from ampd.cli.output import Column, Format, View, emit_list, emit_one
from ampd.cli.profile_run import run
from ampd.cli.profile_views import draw, formulas, summary
from ampd.profiling.catalogue import built_in_profiles, leave_one_out, open_profile
from ampd.profiling.profile_file import Profile

app = typer.Typer(help="Cost models: what an engine's work takes.", no_args_is_help=True)


def per_cent(value: object) -> str:
    """A relative error."""
    return f"{value:.1%}" if isinstance(value, float) else "-"


COLUMNS: Final = (
    Column("name", "NAME"),
    Column("device", "GPU"),
    Column("model", "MODEL"),
    Column("tp", "TP", right=True),
    Column("source", "SOURCE"),
)
ERROR_COLUMNS: Final = tuple(
    Column(f"{function}_{kind}", f"{function.upper()} {heading}", per_cent, right=True)
    for function in ("prefill", "decode", "mixed")
    for kind, heading in (("median", "MEDIAN"), ("p95", "P95"))
)


@app.command("list")
def list_profiles(
    output: Output = Format.TABLE,
    errors: Annotated[
        bool,
        typer.Option("--errors", help="Fit all, and tell their leave-one-out errors (seconds)."),
    ] = False,
) -> None:
    """List the built-in profiles."""
    views: list[View] = [
        {
            "name": name,
            "device": key.gpu,
            "model": key.short_model,
            "tp": key.tp,
            "source": "roofline" if key.engine == "roofline" else "operator table",
            **(_errors(name) if errors else {}),
        }
        for name, key in built_in_profiles().items()
    ]
    emit_list(views, (*COLUMNS, *ERROR_COLUMNS) if errors else COLUMNS, output)


@app.command()
def show(
    source: Annotated[str, typer.Argument(metavar="NAME", help="A built-in name, or a file.")],
    output: Output = Format.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw measured against fitted (.png, .svg, .pdf)."),
    ] = None,
) -> None:
    """Show a profile: as a table what it predicts and how well, else the whole file."""
    try:
        profile = open_profile(source)
    except OSError as error:
        raise CliError(
            f"{source}: {error.strerror}",
            hint="`ampdctl profile list` shows the built-in ones",
            exit_code=ExitCode.USAGE,
        ) from error
    if output is Format.TABLE:
        emit_one(_table(profile), output)
    else:
        emit_one(msgspec.to_builtins(profile), output)
    if plot is not None:
        draw(profile, plot)


app.command()(run)


def _table(profile: Profile) -> View:
    return {
        "model": profile.model,
        "device": profile.device,
        "engine": profile.engine,
        "tp": profile.tp,
        "kv_bytes_per_token": profile.kv_bytes_per_token or None,
        **profile.provenance,
        **{key: value for key, value in summary(profile).items() if value},
        **formulas(profile),
    }


def _errors(name: str) -> View:
    """Of each function, by leaving every point of its table out in turn."""
    report = leave_one_out(name)
    functions = {"prefill": report.prefill, "decode": report.decode, "mixed": report.mixed}
    return {
        f"{function}_{kind}": getattr(fit, f"{kind}_error")
        for function, fit in functions.items()
        for kind in ("median", "p95")
    }
