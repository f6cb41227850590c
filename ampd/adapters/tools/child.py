"""The process that runs one call of a tool: `python -P -m ampd.adapters.tools.child FD PARENT`.

FD is a socket to the worker, PARENT its process id. One JSON line comes in: {"function":
"module:attribute", "arguments": {...}, "max_bytes": N}. Out goes HEADER, then the content.
What the tool writes to stdout or stderr is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, Final

HEADER: Final = struct.Struct("!?I")
"""Whether the tool failed; bytes of content that follow, at most one more than `max_bytes`."""

MAX_PROBLEM_CHARS: Final = 1000
"""Of what is told about a failure."""

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run the call, answer, and end, whatever threads the tool has left running."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    with channel.makefile("rb") as lines:
        order = json.loads(lines.readline())
    failed, content = False, b""
    try:
        content = _content(_call(order["function"], order["arguments"]))
    except BaseException as error:  # noqa: BLE001 - whatever a tool raises is its answer
        failed, content = True, problem(error).encode(errors="replace")
    content = content[: order["max_bytes"] + 1]
    with contextlib.suppress(OSError):  # the worker does not want the answer any more
        channel.sendall(HEADER.pack(failed, len(content)) + content)
    os._exit(0)


def problem(error: BaseException) -> str:
    """What the model is told about a failure."""
    return f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]


def _call(function: str, arguments: dict[str, Any]) -> Any:
    module, _, attributes = function.partition(":")
    tool: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        tool = getattr(tool, attribute)
    result = tool(**arguments)
    if hasattr(result, "__await__"):
        import asyncio  # here: it takes longer to import than most tools to run

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())
    return result


def _content(result: Any) -> bytes:
    """Text as it is, bytes as the text that they hold, anything else as JSON."""
    match result:
        case str():
            return result.encode(errors="replace")
        case bytes():
            return result
        case _:
            return json.dumps(result, ensure_ascii=False).encode(errors="replace")


def _die_with(parent: int) -> None:
    """The kernel kills this process when the worker dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
