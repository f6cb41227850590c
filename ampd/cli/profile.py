"""`ampdctl profile`: cost models, built in or in a file."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import typer

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import Output
from ampd.cli.output import Column, Format, View, emit_list, emit_one, seconds
from ampd.profiling.catalogue import built_in_profiles, open_profile
from ampd.profiling.fit import FunctionFit
from ampd.profiling.profile_file import Profile

app = typer.Typer(help="Cost models: what an engine's work takes.", no_args_is_help=True)

COLUMNS: Final = (
    Column("name", "NAME"),
    Column("device", "GPU"),
    Column("model", "MODEL"),
    Column("tp", "TP", right=True),
    Column("source", "SOURCE"),
)


@app.command("list")
def list_profiles(output: Output = Format.TABLE) -> None:
    """List the built-in profiles."""
    views: list[View] = [
        {
            "name": name,
            "device": key.gpu,
            "model": key.short_model,
            "tp": key.tp,
            "source": "roofline" if key.engine == "roofline" else "operator table",
        }
        for name, key in built_in_profiles().items()
    ]
    emit_list(views, COLUMNS, output)


@app.command()
def show(
    source: Annotated[str, typer.Argument(metavar="NAME", help="A built-in name, or a file.")],
    output: Output = Format.TABLE,
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
        emit_one(_summary(profile), output)
    else:
        emit_one(msgspec.to_builtins(profile), output)


def _summary(profile: Profile) -> View:
    cost, fit = profile.cost, profile.fit
    return {
        "model": profile.model,
        "device": profile.device,
        "engine": profile.engine,
        "tp": profile.tp,
        "kv_bytes_per_token": profile.kv_bytes_per_token or None,
        **profile.provenance,
        "prefill": f"{seconds(cost.t_pre(0, 2048))} for 2,048 tokens, "
        f"{seconds(cost.t_pre(16_384, 2048))} over 16,384; {_error(fit.prefill)}",
        "decode": f"{seconds(cost.t_dec(1, 4096))} for one sequence of 4,096 tokens, "
        f"{seconds(cost.t_dec(32, 32 * 4096))} for 32; {_error(fit.decode)}",
        "mixed": f"{seconds(cost.t_mixed(512, 4096, 32, 32 * 4096))} with a chunk of 512 beside "
        f"them; {_error(fit.mixed)}",
        "transfer": f"{seconds(cost.t_kv(2048))} for 2,048 tokens; {_error(fit.kv)}",
    }


def _error(fit: FunctionFit) -> str:
    """How far the function is off, in words."""
    if not fit.samples:
        return "not fitted"
    kind = "held-out error" if fit.held_out else "error of the fit itself"
    return (
        f"{kind} {fit.median_error:.1%} in the median, {fit.p95_error:.1%} P95 "
        f"({fit.held_out or fit.samples} steps)"
    )
