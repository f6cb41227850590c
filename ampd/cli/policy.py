"""`ampdctl policy`: the routing policy in force."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import Address, Output, connect
from ampd.cli.output import Format, emit_one
from ampd.cli.runner import run_async
from ampd.cli.views import View, policy_view
from ampd.core.policies import POLICIES
from ampd.v1.policy_pb2 import Policy

app = typer.Typer(help="The routing policy in force.", no_args_is_help=True)


@app.command()
def get(address: Address = "", output: Output = Format.TABLE) -> None:
    """Show the policy in force with every setting."""

    async def read() -> View:
        async with connect(address) as client:
            return policy_view(await client.get_policy())

    emit_one(run_async(read()), output)


@app.command("set")
def set_policy(
    name: Annotated[str, typer.Argument(help=f"{', '.join(POLICIES)}.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING=VALUE]...", help="E.g. alpha=0.8.", show_default=False),
    ] = None,
    expected_version: Annotated[
        int | None,
        typer.Option(min=0, help="Only if this version is in force.", show_default=False),
    ] = None,
    address: Address = "",
    output: Output = Format.TABLE,
) -> None:
    """Replace the policy in the whole cluster while it runs."""
    policy = Policy(name=name)
    policy.settings.update(parse_settings(settings or ()))

    async def change() -> View:
        async with connect(address) as client:
            changed = await client.set_policy(policy, expected_version=expected_version)
            return policy_view(changed)

    emit_one(run_async(change()), output)


def parse_settings(texts: Iterable[str]) -> dict[str, float | bool | str]:
    """Each SETTING=VALUE; CliError for one that is not."""
    return dict(_setting(text) for text in texts)


def _setting(text: str) -> tuple[str, float | bool | str]:
    """`alpha=0.8` as name and value: a number or true or false where it reads as one."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CliError(
            f"{text!r} is not SETTING=VALUE", hint="for example alpha=0.8", exit_code=ExitCode.USAGE
        )
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, parsed if isinstance(parsed, int | float) else value
