"""A gRPC server as all AMPD processes run it: health, reflection, channelz, limits, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import grpc
import structlog
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ampd.runtime.interceptor import CallInterceptor
from ampd.wire.worker_protocol import life_name

log = structlog.get_logger(__name__)

STOP_GRACE_S: Final = 1.0
"""What calls that still run get at the very end, after the drain."""

_CHANNELZ: Final = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a server. A connection beyond them waits, or is refused RESOURCE_EXHAUSTED."""

    max_message_bytes: int
    max_calls: int = 8192
    """Calls at once in all, health watches included."""
    max_streams_per_connection: int = 4096
    keepalive_time_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000
    min_ping_interval_ms: int = 1_000
    """Clients that ping more often are cut off."""


PUBLIC_LIMITS: Final = ServerLimits(max_message_bytes=16 * 1024 * 1024)
"""Where clients call."""
INTERNAL_LIMITS: Final = ServerLimits(max_message_bytes=64 * 1024 * 1024)
"""Between workers, where whole token histories travel."""


class GrpcServer:
    """One server. Add servicers to `grpc`, then enter it: it binds and serves until it is left.

        server = GrpcServer(address="127.0.0.1:0", services=[SERVICE_NAME], limits=PUBLIC_LIMITS)
        add_XServicer_to_server(servicer, server.grpc)
        async with server:
            ... server.address ...

    `services`: full names, for health and reflection. `incarnation`: this process's life, for
    peers that watch it (`ampd.wire.worker_protocol.life_name`). Entering raises OSError when
    the address cannot be bound.
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1:0",
        services: Sequence[str],
        limits: ServerLimits,
        incarnation: int | None = None,
    ) -> None:
        self._host, _, _ = address.rpartition(":")
        self._bind_address = address
        self._services = tuple(services)
        self._incarnation = incarnation
        self._health = health.aio.HealthServicer()
        self.port = 0
        self.grpc = grpc.aio.server(
            interceptors=[CallInterceptor()],
            options=_options(limits),
            maximum_concurrent_rpcs=limits.max_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        channelz.add_channelz_servicer(self.grpc)
        reflection.enable_server_reflection(
            (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME, _CHANNELZ), self.grpc
        )

    @property
    def address(self) -> str:
        """host:port as bound."""
        return f"{self._host}:{self.port}"

    async def __aenter__(self) -> Self:
        try:
            self.port = self.grpc.add_insecure_port(self._bind_address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._bind_address}: {error}") from error
        for name in (*self._services, *self._life()):
            await self._health.set(name, _SERVING)
        await self.grpc.start()
        log.info("serving", address=self.address, services=self._services)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._health.enter_graceful_shutdown()
        await asyncio.shield(self.grpc.stop(STOP_GRACE_S))

    async def drain(self) -> None:
        """Say NOT_SERVING to load balancers. Calls go on, and so does the life that peers watch:
        a draining worker finishes what it has begun."""
        for name in ("", *self._services):
            await self._health.set(name, _NOT_SERVING)

    def _life(self) -> tuple[str, ...]:
        return () if self._incarnation is None else (life_name(self._incarnation),)


def _options(limits: ServerLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.keepalive_time_ms", limits.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", limits.keepalive_timeout_ms),
        # Of a peer that stands still, whose kernel answers.
        ("grpc.http2.ping_timeout_ms", limits.keepalive_timeout_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.min_ping_interval_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", limits.min_ping_interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.enable_channelz", 1),
        # Two processes on one port would share its connections: the second one must fail.
        ("grpc.so_reuseport", 0),
    ]
