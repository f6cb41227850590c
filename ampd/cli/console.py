"""Messages to the person at the terminal: all on stderr."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line of progress or news."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def say_error(message: str, hint: str = "") -> None:
    """Why a command ends, and what may help."""
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")
