"""An engine in a process of its own that lends KV, for whoever measures how long reading it
takes: vLLM allows one engine a process, and a real read is one between processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import KvHandle, Role
from ampd.ports import PrefillRequest, Tokens
from ampd.runtime.engines import start_engine
from ampd.runtime.worker import WorkerSettings

STOP_TIMEOUT_S: Final = 30.0


class LenderProcess:
    """A prefill engine at the other end of a pipe; see `ampd.profiling.campaign.Lender`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._turn = asyncio.Lock()

    async def lend(self, tokens: Tokens) -> KvHandle:
        """Compute the KV of the tokens and lend it. ENGINE_FAILED when the process has ended."""
        answer = await self._ask(tokens)
        if isinstance(answer, KvHandle):
            return answer
        raise AmpdError(ErrorReason.ENGINE_FAILED, f"the lending engine: {answer}")

    async def release(self, kv: KvHandle) -> None:
        """Let go of it."""
        await self._ask(kv)

    async def _ask(self, question: Tokens | KvHandle) -> object:
        async with self._turn:
            try:
                self._pipe.send(question)
                return await asyncio.to_thread(self._pipe.recv)
            except (EOFError, OSError) as error:
                raise AmpdError(
                    ErrorReason.ENGINE_FAILED, "the lending engine's process has ended"
                ) from error


@asynccontextmanager
async def lending_engine(settings: WorkerSettings) -> AsyncIterator[LenderProcess]:
    """A second engine, ready. ENGINE_FAILED when it does not start."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # No daemon: those may not have the processes that vLLM starts for tensor parallelism.
    process = context.Process(target=_serve, args=(there, settings), daemon=False)
    process.start()
    there.close()
    lender = LenderProcess(here)
    try:
        await lender.release(await lender.lend(array("I", [0] * settings.block_tokens * 2)))
        yield lender
    finally:
        here.close()  # it ends by that
        await asyncio.to_thread(process.join, STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)


def _serve(pipe: Connection, settings: WorkerSettings) -> None:
    """The process: handles for tokens, nothing for a handle that is let go of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: its pipe is closed
    asyncio.run(_answer(pipe, settings))


async def _answer(pipe: Connection, settings: WorkerSettings) -> None:
    engine = await start_engine(settings, Role.PREFILL, incarnation=1)
    try:
        while True:
            try:
                question = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            answer: object = None
            try:
                if isinstance(question, KvHandle):
                    await engine.release(question)
                else:
                    request = PrefillRequest("lent", question, history=None)
                    answer = (await engine.prefill(request)).kv
            except AmpdError as error:
                answer = error.message
            pipe.send(answer)
    finally:
        await engine.close()
