"""Tools, good and bad, and a parser, as a package would register them (see tool_package)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ampd.core.tool_calls import ParsedCall

FOREVER_S = 120.0


def echo(text: str) -> str:
    return text


async def echo_later(text: str, after_s: float = 0.0) -> str:
    await asyncio.sleep(after_s)
    return text


def numbers(count: int = 2) -> dict[str, object]:
    return {"numbers": list(range(count)), "é": None}


def unreadable() -> object:
    return object()


def fail(message: str) -> None:
    raise RuntimeError(message)


def leave(code: int) -> None:
    sys.exit(code)


def die(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(FOREVER_S)


def noisy() -> str:
    print("to stdout")  # noqa: T201
    os.write(1, b"\0" * 200_000)
    os.write(2, b"to stderr\n")
    return "quiet"


def long(count: int, character: str = "x") -> str:
    return character * count


def binary() -> bytes:
    return bytes(range(256))


def sleep(pids: str) -> None:
    """Writes its pid, then sleeps."""
    _note(pids, os.getpid())
    time.sleep(FOREVER_S)


def sleep_stubbornly(pids: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleep(pids)


def sleep_with_a_child(pids: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    _note(pids, os.getpid(), child.pid)
    time.sleep(FOREVER_S)


def leave_a_fork(pids: str) -> str:
    """Its fork holds whatever it had open, and goes on."""
    pid = os.fork()
    if pid == 0:
        time.sleep(FOREVER_S)
    _note(pids, os.getpid(), pid)
    return "left one"


def die_with_a_fork(pids: str) -> None:
    leave_a_fork(pids)
    os._exit(7)


def count_calls(log: str, fails: int = 0) -> str:
    """Appends a line; how many there are now. The first `fails` calls fail."""
    path = Path(log)
    with path.open("a") as file:
        file.write("call\n")
    calls = len(path.read_text().splitlines())
    if calls <= fails:
        raise RuntimeError(f"failure {calls}")
    return str(calls)


def _every_round(text: str) -> list[ParsedCall]:
    """Whatever the model says, it calls two tools with it."""
    arguments = json.dumps({"text": text})
    return [ParsedCall("echo", arguments), ParsedCall("job", arguments)]


def _note(path: str, *pids: int) -> None:
    """Whole or not at all: somebody waits for the file."""
    part = Path(f"{path}.part")
    part.write_text(" ".join(map(str, pids)))
    part.rename(path)
