"""Homes inside one process: the coordinator's twin of `ampd.adapters.peers_loopback`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ampd.adapters.peers_loopback import LoopbackNetwork
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    Adopted,
    AdoptOrder,
    DrainStatus,
    Finished,
    Moved,
    RoundEvent,
    RoundOrder,
    ToolCall,
    ToolReturn,
    WorkerInfo,
)


class LoopbackHomes:
    """`ampd.ports.Homes` over a loopback network."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network

    def home(self, info: WorkerInfo) -> LoopbackHomePeer:
        """That life of a decode worker."""
        return LoopbackHomePeer(self._network, info.address, info.incarnation)

    def worker(self, info: WorkerInfo) -> LoopbackWorkerPeer:
        """That life of a prefill or decode worker."""
        return LoopbackWorkerPeer(self._network, info.address, info.incarnation)

    async def close(self) -> None:
        """Nothing is held."""


class LoopbackHomePeer:
    """`ampd.ports.HomePeer` over a loopback network."""

    def __init__(self, network: LoopbackNetwork, address: str, incarnation: int) -> None:
        self._network = network
        self._address = address
        self._incarnation = incarnation

    async def run_round(
        self, order: RoundOrder, timeout_s: float | None
    ) -> AsyncGenerator[RoundEvent, None]:
        """The round's events; errors as the port says."""
        worker, handler = self._network.decode(self._address, self._incarnation)
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        async with aclosing(handler.run_round(order)) as events:
            while True:
                # The scopes end before each yield: they bound the home, never the consumer.
                if worker.gone.is_set():
                    raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, "lost in mid-round")
                try:
                    async with asyncio.timeout_at(deadline_s) as deadline, worker.call():
                        event = await anext(events, None)
                except TimeoutError:
                    if not deadline.expired():
                        raise
                    raise AmpdError(
                        ErrorReason.DEADLINE, f"the round took longer than {timeout_s} s"
                    ) from None
                if event is None:
                    raise AmpdError(
                        ErrorReason.INTERNAL, f"the home at {self._address} ended in mid-round"
                    )
                yield event
                if isinstance(event, Finished):
                    return

    async def release(self, session_id: str, *, paused_after: int | None = None) -> None:
        """Free the session there."""
        worker, handler = self._network.decode(self._address, self._incarnation)
        async with worker.call():
            await handler.release(session_id, paused_after=paused_after)

    async def move(self, session_id: str, target_worker_id: str) -> Moved:
        """Let it hand the session over."""
        worker, handler = self._network.mover(self._address, self._incarnation)
        async with worker.call():
            return await handler.move(session_id, target_worker_id)

    async def adopt(self, order: AdoptOrder) -> Adopted:
        """Hand the session over to it."""
        worker, handler = self._network.mover(self._address, self._incarnation)
        async with worker.call():
            return await handler.adopt(order)

    async def run_tool(self, call: ToolCall, timeout_s: float | None) -> ToolReturn:
        """Run a tool there."""
        worker, tools = self._network.tools(self._address, self._incarnation)
        try:
            async with asyncio.timeout(timeout_s) as deadline, worker.call():
                return await tools.run(call)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise AmpdError(
                ErrorReason.DEADLINE, f"the tool took longer than {timeout_s} s"
            ) from None


class LoopbackWorkerPeer:
    """`ampd.ports.WorkerPeer` over a loopback network."""

    def __init__(self, network: LoopbackNetwork, address: str, incarnation: int) -> None:
        self._network = network
        self._address = address
        self._incarnation = incarnation

    async def drain(self) -> DrainStatus:
        """Let it finish and end."""
        worker, handler = self._network.worker(self._address, self._incarnation)
        async with worker.call():
            return await handler.drain()
