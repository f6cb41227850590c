"""The command tree of `ampdctl`, and how each way to fail becomes an exit code."""

from __future__ import annotations

import sys

import typer

from ampd.cli import bench, policy, profile, session, worker
from ampd.cli.chat import chat
from ampd.cli.console import say_error
from ampd.cli.demo import demo
from ampd.cli.errors import CliError, ExitCode, from_ampd_error
from ampd.cli.simulate import simulate
from ampd.cli.status import status
from ampd.cli.up import down, up
from ampd.cli.version import version
from ampd.core.errors import AmpdError
from ampd.models import ModelError

app = typer.Typer(
    name="ampdctl",
    help="Runs, shows and steers AMPD clusters.",
    no_args_is_help=True,
    # Plain text: it reads the same in a terminal, a pipe and a log.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (demo, up, down, status, chat, simulate, version):
    app.command()(command)
app.add_typer(worker.app, name="worker")
app.add_typer(session.app, name="session")
app.add_typer(policy.app, name="policy")
app.add_typer(profile.app, name="profile")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of `ampdctl`."""
    sys.exit(run())


def run() -> int:
    """Run the command line; the exit code."""
    try:
        app()
    except CliError as error:
        failure = error
    except AmpdError as error:
        failure = from_ampd_error(error)
    except ModelError as error:
        failure = CliError(str(error), exit_code=ExitCode.USAGE)
    except SystemExit as end:  # typer has told what was wrong
        return end.code if isinstance(end.code, int) else ExitCode.FAILURE
    else:
        return ExitCode.OK
    say_error(failure.message, failure.hint)
    return failure.exit_code
