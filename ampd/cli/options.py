"""Options that several commands share, and the client they lead to."""

from __future__ import annotations

from typing import Annotated

import typer

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.output import Format
from ampd.cli.state import read_state
from ampd.client import AmpdClient
from ampd.wire.names import DEFAULT_TENANT

Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="AMPD_ADDRESS",
        help="host:port of a coordinator; without it, the local cluster of `ampdctl up`.",
        show_default=False,
    ),
]
Tenant = Annotated[str, typer.Option("--tenant", envvar="AMPD_TENANT", help="Whose sessions.")]
Output = Annotated[Format, typer.Option("-o", "--output", help="How to print.")]
Model = Annotated[
    str, typer.Option("--model", help="smollm2, tiny, or the folder of a Hugging Face model.")
]

TENANT = DEFAULT_TENANT


def connect(address: str, tenant: str = TENANT) -> AmpdClient:
    """The client of a command; CliError when no cluster is meant."""
    return AmpdClient(resolve_address(address), tenant=tenant)


def resolve_address(address: str) -> str:
    """The address that was given, or the local cluster's."""
    if address:
        return address
    state = read_state()
    if state is None or not state.address:
        raise CliError(
            "no cluster to talk to: no --address and no local cluster",
            hint="`ampdctl up` starts one; AMPD_ADDRESS or --address names another",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return state.address
