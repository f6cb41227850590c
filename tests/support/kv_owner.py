"""A process that lends its memory over NIXL, forked from a server that has imported it."""

import asyncio
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 30.0


class OwnerProcess:
    """Lends `size` bytes of value `fill` until it is told otherwise, closed or killed."""

    def __init__(self, *arguments: object) -> None:
        """`arguments`: those of `_lend`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "ampd.adapters.kv_nixl"])
        self._here, there = context.Pipe()
        environment = {k: v for k, v in os.environ.items() if k.startswith("UCX_")}
        self._process = context.Process(
            target=_main, args=(there, environment, arguments), daemon=True
        )
        self._process.start()
        there.close()
        self.locator = b""

    async def start(self) -> "OwnerProcess":
        self.locator = await self._answer()
        return self

    async def serve(self, *, lent: bool) -> float:
        """Its CPU seconds so far."""
        self._here.send("lend" if lent else "keep")
        return float(await self._answer())

    async def close(self) -> None:
        """Close the transport; the process lives on."""
        self._here.send("close")
        await self._answer()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    async def _answer(self) -> Any:
        assert await asyncio.to_thread(self._here.poll, ANSWER_S), "the owner does not answer"
        return self._here.recv()


def _main(
    parent: Connection, environment: dict[str, str], arguments: tuple[str, int, int, int]
) -> None:
    os.environ.update(environment)
    with suppress(EOFError):
        asyncio.run(_lend(parent, *arguments))


async def _lend(parent: Connection, name: str, incarnation: int, fill: int, size: int) -> None:
    from ampd.adapters.kv_nixl import NixlKvTransport

    transport = NixlKvTransport(name, incarnation)
    transport.register(memoryview(bytearray([fill]) * size))
    transport.serve(lent=True)
    parent.send(transport.locator)
    while True:
        word = await asyncio.to_thread(parent.recv)
        if word == "close":
            await transport.close()
        else:
            transport.serve(lent=word == "lend")
        parent.send(time.process_time())
