"""Tools that installed packages register: Python functions, each call in a process of its own.

    [project.entry-points."ampd.tools"]
    word_count = "my_package.tools:word_count"

The function takes the call's arguments as keyword arguments and returns text, bytes of UTF-8, or
anything that JSON can hold; it may be async. A fresh process costs about 50 ms; in exchange a tool
cannot touch the worker, keeps nothing between calls, and ends when its process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import entry_points
from typing import Final

from ampd.adapters.tools.child import HEADER
from ampd.adapters.tools.limits import ToolLimits, cut
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.model import ToolCall, ToolReturn

GROUP: Final = "ampd.tools"

Process = subprocess.Popen[bytes]


class EntryPointTools:
    """`ampd.ports.ToolRunner` over the entry points that are named. AmpdError INVALID_FIELD
    `tools` for a name that no installed package registers."""

    def __init__(self, names: Sequence[str], limits: ToolLimits) -> None:
        self._limits = limits
        found = {point.name: point.value for point in entry_points(group=GROUP)}
        unknown = [name for name in names if name not in found]
        if unknown:
            known = ", ".join(sorted(found)) or "none"
            raise invalid_field(
                "tools", f"no installed package registers {unknown[0]!r} (registered: {known})"
            )
        # An entry point may name extras behind its object: "module:function [extra]".
        self._functions = {name: found[name].partition("[")[0].strip() for name in names}

    def names(self) -> tuple[str, ...]:
        """The tools that are enabled."""
        return tuple(self._functions)

    async def run(self, call: ToolCall) -> ToolReturn:
        """Run the call in a process of its own."""
        function = self._functions.get(call.name)
        if function is None:
            raise AmpdError(ErrorReason.TOOL_NOT_FOUND, f"no tool {call.name!r} here")
        started_s = time.monotonic()

        def returned(content: str, *, failed: bool, truncated: bool = False) -> ToolReturn:
            return ToolReturn(content, failed, truncated, time.monotonic() - started_s)

        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            return returned(f"The arguments are not JSON: {error}", failed=True)
        if not isinstance(arguments, dict):
            return returned("The arguments are not a JSON object.", failed=True)
        order = {
            "function": function,
            "arguments": arguments,
            "max_bytes": self._limits.max_output_bytes,
        }
        try:
            async with asyncio.timeout(self._limits.timeout_s), _child() as (process, channel):
                answer = await _ask(channel, json.dumps(order).encode() + b"\n", process)
        except TimeoutError:
            message = f"The tool took longer than {self._limits.timeout_s:g} s and was ended."
            return returned(message, failed=True)
        except OSError as error:
            return returned(f"The tool could not be started: {error.strerror}", failed=True)
        if answer is None:
            return returned(
                f"The tool's process ended without an answer ({_end(process)}).", failed=True
            )
        failed, content = answer
        text, truncated = cut(content, self._limits.max_output_bytes)
        return returned(text, failed=failed, truncated=truncated)

    async def close(self) -> None:
        """Nothing is held between calls."""


@asynccontextmanager
async def _child() -> AsyncGenerator[tuple[Process, socket.socket], None]:
    """A process for one call, with a socket to it; leaving kills its whole group and reaps it."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            # The start is waited for however often it is cancelled: a process that nobody
            # knows would never be killed.
            starting = asyncio.ensure_future(asyncio.to_thread(_start, theirs.fileno()))
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                while not starting.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({starting})
                if not starting.cancelled() and starting.exception() is None:
                    await _kill(starting.result())
                raise
        try:
            yield process, ours
        finally:
            await _kill(process)


def _start(fd: int) -> Process:
    """Not by the event loop's own means: uvloop forks, and in the fork of a process with gRPC
    and an engine, handlers of theirs run that may abort it. This uses vfork, which costs
    nothing that grows with the process; the start of the interpreter is not waited for."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-m", "ampd.adapters.tools.child", str(fd), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,
    )


async def _kill(process: Process) -> None:
    """End the process and what it has started, at once."""
    # It is not reaped yet, ended or not: its number is nobody else's.
    _kill_group(process)
    try:
        await _ended(process)
    finally:
        process.wait()  # cancelled once more: what is killed takes no time worth an await


def _kill_group(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _ended(process: Process) -> None:
    """Returns when the process has ended; it is not reaped."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _ask(channel: socket.socket, order: bytes, process: Process) -> tuple[bool, bytes] | None:
    """The answer (failed, content); None when the process ends without a whole one."""
    loop = asyncio.get_running_loop()
    answer = loop.create_task(_exchange(channel, order))
    ended = loop.create_task(_ended(process))
    try:
        await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            # What it has started may hold the socket open, and has nothing to say.
            _kill_group(process)
        return await answer
    finally:
        answer.cancel()
        ended.cancel()
        await asyncio.wait({answer, ended})


async def _exchange(channel: socket.socket, order: bytes) -> tuple[bool, bytes] | None:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(channel, order)
        header = await _read(channel, HEADER.size)
        if len(header) < HEADER.size:
            return None
        failed, size = HEADER.unpack(header)
        content = await _read(channel, size)
    except ConnectionError:
        return None
    return (failed, content) if len(content) == size else None


async def _read(channel: socket.socket, size: int) -> bytes:
    """That many bytes, or fewer at the end of the stream."""
    loop = asyncio.get_running_loop()
    read = bytearray()
    while len(read) < size:
        part = await loop.sock_recv(channel, size - len(read))
        if not part:
            break
        read += part
    return bytes(read)


def _end(process: Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit code {code}"
