"""A vLLM engine in its own process that looks like an `ampd.ports.Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import engine_process

from ampd.adapters.engine_vllm.settings import VllmSettings
from ampd.core.cost_model import CostModel
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import KvHandle
from ampd.ports import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    PrefillRequest,
    PrefillResult,
    StepSample,
)

START_TIMEOUT_S = 240.0
"""Seconds on an idle machine; several test runs may share two cores."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RemoteEngine:
    """An engine process; `launch` it, then `connect`."""

    def __init__(self, settings: VllmSettings, worker_id: str, incarnation: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._socket_path = str(Path(self._directory.name) / "engine.sock")
        self.log_path = Path(self._directory.name) / "log"
        arguments = pickle.dumps((settings, worker_id, incarnation)).hex()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, engine_process.__file__, self._socket_path, arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Queue[tuple[str, Any]]] = {}

    async def connect(self) -> None:
        started_s = time.monotonic()
        while not Path(self._socket_path).exists():  # noqa: ASYNC240
            if self.process.poll() is not None or time.monotonic() - started_s > START_TIMEOUT_S:
                raise RuntimeError(f"the engine did not start:\n{self.log()}")
            await asyncio.sleep(0.05)
        reader, self._writer = await asyncio.open_unix_connection(self._socket_path)
        self._reader_task = asyncio.create_task(self._read(reader))
        self.info: EngineInfo = await self._call("info")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    async def stop(self, timeout_s: float = 30.0) -> int:
        """Close the engine; the process's exit code. Killed if it takes longer."""
        try:
            if self._writer is not None:
                self._writer.close()
                await self._writer.wait_closed()
                return await asyncio.to_thread(self.process.wait, timeout_s)
            return -1
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process at once, as a crash does. Idempotent."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        if self._reader_task is not None:
            await asyncio.gather(self._reader_task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        self._directory.cleanup()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, kind, value = await engine_process.read_frame(reader)
                if replies := self._replies.get(number):
                    replies.put_nowait((kind, value))
        except (asyncio.IncompleteReadError, ConnectionError):
            for replies in self._replies.values():
                replies.put_nowait(("error", ConnectionError("the engine process is gone")))

    async def _call(self, method: str, *args: Any) -> Any:
        stream = self._stream(method, *args)
        try:
            return await anext(stream)
        finally:
            await stream.aclose()

    async def _stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        assert self._writer is not None
        number = next(self._numbers)
        replies = self._replies[number] = asyncio.Queue()
        engine_process.write_frame(self._writer, (number, method, args))
        ended = False
        try:
            while True:
                kind, value = await replies.get()
                ended = kind != "event"
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                yield value
                if ended:
                    return
        finally:
            if not ended:
                engine_process.write_frame(self._writer, (-1, "cancel", (number,)))
            del self._replies[number]

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        return await self._call("prefill", request)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        return self._stream("generate", request)

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        return await self._call("lend", kv, tokens)

    async def reclaim(self, kv: KvHandle) -> None:
        await self._call("reclaim", kv)

    async def release(self, kv: KvHandle) -> None:
        await self._call("release", kv)

    async def stats_now(self) -> EngineStats:
        return await self._call("stats")

    async def take_step_samples(self) -> Sequence[StepSample]:
        return await self._call("take_step_samples")

    async def use_cost_model(self, cost: CostModel) -> None:
        await self._call("use_cost_model", cost)

    async def use_local_rule(self, rule: LocalRule) -> None:
        await self._call("use_local_rule", rule)

    async def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        return await self._call("cpu_s")

    async def evict(self) -> None:
        """Empty the prefix cache; pins stay."""
        await self._call("evict")

    async def forget(self) -> None:
        """Drop every pin and all cached KV, whoever left them."""
        await self._call("forget")
