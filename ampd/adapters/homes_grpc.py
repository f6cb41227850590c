"""Homes over gRPC: decode workers as coordinators and other homes see them, and any worker as
one who drains it does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import grpc

from ampd.adapters.grpc_channels import ChannelCache, peer_errors
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
from ampd.ports import Clock
from ampd.wire import moving, tools
from ampd.wire.errors import from_rpc_error
from ampd.wire.order import event_from_proto, order_to_proto
from ampd.worker.v1 import decode_service_pb2, worker_service_pb2

RELEASE_TIMEOUT_S: Final = 5.0
ADOPT_TIMEOUT_S: Final = 60.0
"""A read of KV that breaks off is computed again there, between the steps of running rounds."""
MOVE_TIMEOUT_S: Final = 90.0
"""An adoption, and the store before and after it."""
DRAIN_TIMEOUT_S: Final = 5.0


class GrpcHomes:
    """`ampd.ports.Homes` over gRPC. It owns its connections: close it."""

    def __init__(self, *, clock: Clock, channels: ChannelCache | None = None) -> None:
        self._clock = clock
        self._channels = channels or ChannelCache()

    def home(self, info: WorkerInfo) -> GrpcHomePeer:
        """That life of a decode worker."""
        return GrpcHomePeer(info.address, info.incarnation, self._channels, self._clock)

    def worker(self, info: WorkerInfo) -> GrpcWorkerPeer:
        """That life of a prefill or decode worker."""
        return GrpcWorkerPeer(info.address, info.incarnation, self._channels)

    async def close(self) -> None:
        """Close the connections; rounds in flight fail. Idempotent."""
        await self._channels.close()


class GrpcHomePeer:
    """`ampd.ports.HomePeer` over DecodeService."""

    def __init__(
        self, address: str, incarnation: int, channels: ChannelCache, clock: Clock
    ) -> None:
        self._address = address
        self._incarnation = incarnation
        self._channels = channels
        self._clock = clock

    async def run_round(
        self, order: RoundOrder, timeout_s: float | None
    ) -> AsyncGenerator[RoundEvent, None]:
        """The round's events; errors as the port says."""
        request = order_to_proto(order, incarnation=self._incarnation, now_s=self._clock())
        async with self._channels.use(self._address, self._incarnation) as connection:
            call = connection.decode.RunRound(request, timeout=timeout_s)
            try:
                async for message in call:
                    event = event_from_proto(message, now_s=self._clock())
                    yield event
                    if isinstance(event, Finished):
                        return
            except grpc.aio.AioRpcError as failure:
                raise from_rpc_error(failure) from failure
            finally:
                # Closed early: the home discards the round. A call that has ended ignores it.
                call.cancel()
        raise AmpdError(ErrorReason.INTERNAL, f"the home at {self._address} ended in mid-round")

    async def release(self, session_id: str, *, paused_after: int | None = None) -> None:
        """Free the session there; a home that does not answer in time is unavailable."""
        request = decode_service_pb2.ReleaseRequest(
            incarnation=self._incarnation, session_id=session_id, paused_after=paused_after
        )
        async with self._channels.use(self._address, self._incarnation) as connection:
            with peer_errors():
                await connection.decode.Release(request, timeout=RELEASE_TIMEOUT_S)

    async def move(self, session_id: str, target_worker_id: str) -> Moved:
        """Let it hand the session over; errors as the port says."""
        request = decode_service_pb2.MoveRequest(
            incarnation=self._incarnation,
            session_id=session_id,
            target_worker_id=target_worker_id,
        )
        async with self._channels.use(self._address, self._incarnation) as connection:
            with peer_errors():
                response = await connection.decode.Move(request, timeout=MOVE_TIMEOUT_S)
        return moving.moved_from_proto(response)

    async def adopt(self, order: AdoptOrder) -> Adopted:
        """Hand the session over to it; errors as the port says."""
        request = moving.adopt_to_proto(order, incarnation=self._incarnation)
        async with self._channels.use(self._address, self._incarnation) as connection:
            with peer_errors():
                response = await connection.decode.Adopt(request, timeout=ADOPT_TIMEOUT_S)
        return moving.adopted_from_proto(response)

    async def run_tool(self, call: ToolCall, timeout_s: float | None) -> ToolReturn:
        """Run a tool there; errors as the port says."""
        request = tools.call_to_proto(call, incarnation=self._incarnation)
        async with self._channels.use(self._address, self._incarnation) as connection:
            try:
                response = await connection.decode.RunTool(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as failure:
                raise from_rpc_error(failure) from failure
        return tools.return_from_proto(response)


class GrpcWorkerPeer:
    """`ampd.ports.WorkerPeer` over WorkerService."""

    def __init__(self, address: str, incarnation: int, channels: ChannelCache) -> None:
        self._address = address
        self._incarnation = incarnation
        self._channels = channels

    async def drain(self) -> DrainStatus:
        """Let it finish and end; errors as the port says."""
        request = worker_service_pb2.DrainRequest(incarnation=self._incarnation)
        async with self._channels.use(self._address, self._incarnation) as connection:
            with peer_errors():
                response = await connection.worker.Drain(request, timeout=DRAIN_TIMEOUT_S)
        return moving.drain_from_proto(response)
