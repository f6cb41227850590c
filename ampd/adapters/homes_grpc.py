"""Homes over gRPC: decode workers as coordinators see them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import grpc

from ampd.adapters.grpc_channels import ChannelCache, peer_errors
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import Finished, RoundEvent, RoundOrder, WorkerInfo
from ampd.ports import Clock
from ampd.wire.errors import from_rpc_error
from ampd.wire.order import event_from_proto, order_to_proto
from ampd.worker.v1 import decode_service_pb2

RELEASE_TIMEOUT_S: Final = 5.0


class GrpcHomes:
    """`ampd.ports.Homes` over gRPC. It owns its connections: close it."""

    def __init__(self, *, clock: Clock, channels: ChannelCache | None = None) -> None:
        self._clock = clock
        self._channels = channels or ChannelCache()

    def home(self, info: WorkerInfo) -> GrpcHomePeer:
        """That life of a decode worker."""
        return GrpcHomePeer(info.address, info.incarnation, self._channels, self._clock)

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
        async with self._channels.use(self._address) as connection:
            call = connection.decode.RunRound(request, timeout=timeout_s)
            try:
                async for message in call:
                    event = event_from_proto(message)
                    yield event
                    if isinstance(event, Finished):
                        return
            except grpc.aio.AioRpcError as failure:
                raise from_rpc_error(failure) from failure
            finally:
                # Closed early: the home discards the round. A call that has ended ignores it.
                call.cancel()
        raise AmpdError(ErrorReason.INTERNAL, f"the home at {self._address} ended in mid-round")

    async def release(self, session_id: str) -> None:
        """Free the session there; a home that does not answer in time is unavailable."""
        request = decode_service_pb2.ReleaseRequest(
            incarnation=self._incarnation, session_id=session_id
        )
        async with self._channels.use(self._address) as connection:
            with peer_errors():
                await connection.decode.Release(request, timeout=RELEASE_TIMEOUT_S)
