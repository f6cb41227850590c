"""Connections between AMPD's own processes: one channel per address, shared and bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Final, Self

import grpc
from grpc_health.v1 import health_pb2

from ampd.core.errors import AmpdError, ErrorReason
from ampd.wire.errors import from_rpc_error
from ampd.wire.worker_protocol import life_name
from ampd.worker.v1.decode_service_pb2_grpc import DecodeServiceStub
from ampd.worker.v1.prefill_service_pb2_grpc import PrefillServiceStub
from ampd.worker.v1.worker_service_pb2_grpc import WorkerServiceStub

MAX_CHANNELS: Final = 1024
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Room for the token history of a rebuild: 16 million tokens."""
KEEPALIVE_TIME_MS: Final = 4_000
KEEPALIVE_TIMEOUT_MS: Final = 2_000
"""A host that vanished without a word, or a process that stands still, is noticed after both: 6 s
at most. (gRPC waits a minute for the answer to a ping where the peer's kernel still answers,
unless `ping_timeout_ms` says otherwise.)"""
MAX_RECONNECT_BACKOFF_MS: Final = 1_000

_HEALTH_WATCH: Final = "/grpc.health.v1.Health/Watch"
"""Its generated stub has no types."""

_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Traffic inside the cluster goes straight to its peer, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
    # Each process part has its own connections and back-off, so that none is cut by another's.
    ("grpc.use_local_subchannel_pool", 1),
)


class Connection:
    """One life of a server: a channel, and the stubs on it (a stub is not free to make)."""

    def __init__(self, address: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self.prefill = PrefillServiceStub(self.channel)
        self.decode = DecodeServiceStub(self.channel)
        self.worker = WorkerServiceStub(self.channel)
        self._watch: grpc.aio.UnaryStreamMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = self.channel.unary_stream(
            _HEALTH_WATCH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self.users = 0

    async def lost(self, incarnation: int) -> None:
        """Returns when this life of the server is gone: unreachable, or another life answers."""
        watch = self._watch(health_pb2.HealthCheckRequest(service=life_name(incarnation)))
        try:
            async for response in watch:
                if response.status != health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError:
            return
        finally:
            watch.cancel()


class ChannelCache:
    """Connections by address, least recently used first. An async context manager.

    At most `max_channels`: over it the one unused for longest is closed; when all are in use,
    AmpdError QUEUE_FULL. A restarted server gets a new connection: the one to its life before
    may still wait to be let in again. The old one is closed when its last call has ended.
    """

    def __init__(self, *, max_channels: int = MAX_CHANNELS) -> None:
        self._max_channels = max_channels
        self._connections: OrderedDict[str, Connection] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def use(self, address: str, incarnation: int) -> AsyncGenerator[Connection, None]:
        """The connection to that life of `host:port`, or to a later one, kept open at least as
        long as it is in use."""
        connection = self._known(address, incarnation)
        if connection is None:
            if address not in self._connections:
                await self._make_room()
            # Another caller may have opened it while an old one was closing.
            connection = self._known(address, incarnation)
        before = None
        if connection is None:
            before = self._connections.get(address)
            connection = self._connections[address] = Connection(address, incarnation)
        self._connections.move_to_end(address)
        connection.users += 1
        try:
            if before is not None and not before.users:
                await before.channel.close()
            yield connection
        finally:
            connection.users -= 1
            if not connection.users and self._connections.get(address) is not connection:
                await connection.channel.close()

    def _known(self, address: str, incarnation: int) -> Connection | None:
        connection = self._connections.get(address)
        return None if connection is None or connection.incarnation < incarnation else connection

    async def close(self) -> None:
        """Close all; calls in flight fail. Idempotent."""
        while self._connections:
            _, connection = self._connections.popitem()
            await connection.channel.close()

    async def _make_room(self) -> None:
        while len(self._connections) >= self._max_channels:
            idle = next((name for name, c in self._connections.items() if not c.users), None)
            if idle is None:
                raise AmpdError(
                    ErrorReason.QUEUE_FULL,
                    f"all {self._max_channels} connections are in use",
                    retry_after_s=1.0,
                )
            await self._connections.pop(idle).channel.close()


@contextmanager
def peer_errors() -> Generator[None, None, None]:
    """A failed call as AmpdError. The deadline is this side's patience with the peer, not a
    client's: a peer that does not answer in time is unavailable."""
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        error = from_rpc_error(failure)
        if error.reason is ErrorReason.DEADLINE:
            error = AmpdError(ErrorReason.WORKER_UNAVAILABLE, error.message)
        raise error from failure
