"""Peers inside one process: the real handlers called directly, faults and loss by the test.

It behaves as the gRPC peers do where a caller can tell: unknown addresses are unavailable,
another life is stale, and calls in flight fail when their worker is lost. The caller's task
runs the handler, so that it works under any event loop, one with virtual time included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PrefillTarget, PrefillTask
from ampd.ports import (
    ClaimedTask,
    DecodeHandler,
    MoveHandler,
    PrefillHandler,
    PrefillReport,
    ToolRunner,
    WorkerHandler,
)
from ampd.wire.worker_protocol import require_incarnation


@dataclass(slots=True)
class LoopbackWorker:
    """One life of a worker on the loopback network."""

    incarnation: int
    prefill: PrefillHandler | None = None
    decode: DecodeHandler | None = None
    mover: MoveHandler | None = None
    worker: WorkerHandler | None = None
    tools: ToolRunner | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """Calls in flight: they fail when the worker is lost."""

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[None, None]:
        """The body fails with WORKER_UNAVAILABLE when this worker is lost meanwhile."""
        try:
            async with asyncio.timeout(None) as scope:
                self.calls.add(scope)
                try:
                    yield
                finally:
                    self.calls.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, "lost in mid-call") from None


class LoopbackNetwork:
    """The workers that exist, by address."""

    def __init__(self) -> None:
        self._workers: dict[str, LoopbackWorker] = {}

    def add(
        self,
        address: str,
        incarnation: int,
        *,
        prefill: PrefillHandler | None = None,
        decode: DecodeHandler | None = None,
        mover: MoveHandler | None = None,
        worker: WorkerHandler | None = None,
        tools: ToolRunner | None = None,
    ) -> None:
        """Start a worker, in place of any earlier life on that address."""
        self.lose(address)
        self._workers[address] = LoopbackWorker(incarnation, prefill, decode, mover, worker, tools)

    def lose(self, address: str) -> None:
        """The worker dies: calls in flight fail, later ones find nobody. Idempotent."""
        worker = self._workers.pop(address, None)
        if worker is None:
            return
        worker.gone.set()
        now_s = asyncio.get_running_loop().time() if worker.calls else 0.0
        for scope in tuple(worker.calls):
            scope.reschedule(now_s)

    def find(self, address: str, incarnation: int) -> LoopbackWorker:
        """That life. AmpdError WORKER_UNAVAILABLE: nobody; STALE_INCARNATION: another life."""
        worker = self._workers.get(address)
        if worker is None:
            raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, f"nobody answers at {address}")
        require_incarnation(incarnation, worker.incarnation)
        return worker

    def is_alive(self, address: str, incarnation: int) -> bool:
        """Whether that life is on the network."""
        worker = self._workers.get(address)
        return worker is not None and worker.incarnation == incarnation

    async def lost(self, address: str, incarnation: int) -> None:
        """Returns when that life is not on the network (any more)."""
        if self.is_alive(address, incarnation):
            await self._workers[address].gone.wait()

    def prefill(self, address: str, incarnation: int) -> tuple[LoopbackWorker, PrefillHandler]:
        """A prefill worker; errors as `find`."""
        worker = self.find(address, incarnation)
        if worker.prefill is None:
            raise AmpdError(ErrorReason.INTERNAL, f"no prefill worker at {address}")
        return worker, worker.prefill

    def decode(self, address: str, incarnation: int) -> tuple[LoopbackWorker, DecodeHandler]:
        """A home; errors as `find`."""
        worker = self.find(address, incarnation)
        if worker.decode is None:
            raise AmpdError(ErrorReason.INTERNAL, f"no decode worker at {address}")
        return worker, worker.decode

    def mover(self, address: str, incarnation: int) -> tuple[LoopbackWorker, MoveHandler]:
        """What a home does to hand sessions over; errors as `find`."""
        worker = self.find(address, incarnation)
        if worker.mover is None:
            raise AmpdError(ErrorReason.INTERNAL, f"no decode worker at {address}")
        return worker, worker.mover

    def worker(self, address: str, incarnation: int) -> tuple[LoopbackWorker, WorkerHandler]:
        """What both kinds of workers do; errors as `find`."""
        worker = self.find(address, incarnation)
        if worker.worker is None:
            raise AmpdError(ErrorReason.INTERNAL, f"no worker at {address}")
        return worker, worker.worker

    def tools(self, address: str, incarnation: int) -> tuple[LoopbackWorker, ToolRunner]:
        """The server-side tools of a decode worker; errors as `find`."""
        worker = self.find(address, incarnation)
        if worker.tools is None:
            raise AmpdError(ErrorReason.INTERNAL, f"no tools at {address}")
        return worker, worker.tools


class LoopbackPeers:
    """`ampd.ports.Peers` over a loopback network."""

    def __init__(
        self, network: LoopbackNetwork, *, home_address: str, home_incarnation: int
    ) -> None:
        self._network = network
        self._home_address = home_address
        self._home_incarnation = home_incarnation

    def prefill(self, target: PrefillTarget) -> LoopbackPrefillPeer:
        """That life of a prefill worker."""
        return LoopbackPrefillPeer(
            self._network, target, self._home_address, self._home_incarnation
        )

    def decode(self, address: str, incarnation: int) -> LoopbackDecodePeer:
        """That life of a home."""
        return LoopbackDecodePeer(self._network, address, incarnation)

    async def close(self) -> None:
        """Nothing is held."""


class LoopbackPrefillPeer:
    """`ampd.ports.PrefillPeer` over a loopback network."""

    def __init__(
        self,
        network: LoopbackNetwork,
        target: PrefillTarget,
        home_address: str,
        home_incarnation: int,
    ) -> None:
        self._network = network
        self._address = target.address
        self._incarnation = target.incarnation
        self._home_address = home_address
        self._home_incarnation = home_incarnation

    async def offer(self, task: PrefillTask) -> None:
        """Queue the task there."""
        worker, handler = self._network.prefill(self._address, self._incarnation)
        async with worker.call():
            await handler.offer(task, self._home_address, self._home_incarnation)

    async def withdraw(self, task_id: str) -> None:
        """The task is void there."""
        worker, handler = self._network.prefill(self._address, self._incarnation)
        async with worker.call():
            await handler.withdraw(task_id)

    async def lost(self) -> None:
        """Returns when the test says so."""
        await self._network.lost(self._address, self._incarnation)


class LoopbackDecodePeer:
    """`ampd.ports.DecodePeer` over a loopback network."""

    def __init__(self, network: LoopbackNetwork, address: str, incarnation: int) -> None:
        self._network = network
        self._address = address
        self._incarnation = incarnation

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        """Take the task."""
        worker, handler = self._network.decode(self._address, self._incarnation)
        async with worker.call():
            return await handler.claim(task_id, worker_id, claimer)

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        """Hand the result over."""
        worker, handler = self._network.decode(self._address, self._incarnation)
        async with worker.call():
            await handler.complete(task_id, worker_id, report)

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        """Say that the task could not be computed."""
        worker, handler = self._network.decode(self._address, self._incarnation)
        async with worker.call():
            await handler.fail(task_id, worker_id, error_message)

    async def lost(self) -> None:
        """Returns when the test says so."""
        await self._network.lost(self._address, self._incarnation)
