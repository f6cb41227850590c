"""Options that several commands share, and the client they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from ampd.cli.cluster import EngineKind
from ampd.cli.console import say
from ampd.cli.errors import CliError, ExitCode
from ampd.cli.output import Format
from ampd.cli.state import read_state
from ampd.client import AmpdClient
from ampd.core.errors import AmpdError
from ampd.models import SMOLLM2, prepare
from ampd.profiling.catalogue import open_profile
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
    str | None,
    typer.Option(
        "--model",
        help="smollm2 (default), tiny, or the folder of a Hugging Face model; for an emulated "
        "engine any name.",
        show_default=False,
    ),
]
EngineOption = Annotated[
    EngineKind,
    typer.Option("--engine", help="emulated: no model, words that are no language, real KV."),
]

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the whole result there.", show_default=False)
]


def _usable_profile(source: str | None) -> str | None:
    """Refused before anything is started."""
    if source is not None:
        try:
            open_profile(source)
        except AmpdError as error:
            raise typer.BadParameter(error.message) from error
        except OSError as error:
            raise typer.BadParameter(str(error)) from error
    return source


Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        callback=_usable_profile,
        help="Cost model of the workers: a file, or a name of `ampdctl profile list`.",
        show_default=False,
    ),
]
TimeScale = Annotated[
    float,
    typer.Option("--time-scale", min=0, help="Emulated: how long a second of the profile takes."),
]

TENANT = DEFAULT_TENANT
DEFAULT_MODEL: Final = SMOLLM2
DEFAULT_EMULATED_MODEL: Final = "emulated"


def served_model(engine: EngineKind, model: str | None) -> tuple[str, str]:
    """What the services get as model, and the name that clients see. Blocks where a model has
    to be made (see `prepare`); an emulated engine needs none."""
    if engine is EngineKind.EMULATED:
        name = model or DEFAULT_EMULATED_MODEL
        return name, name
    model = model or DEFAULT_MODEL
    return str(prepare(model, progress=say)), Path(model).name


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
