"""The coordinators that a client knows: it talks to one of them, and to the next when that one
is unavailable. Any of them serves any session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc

from ampd.v1.admin_service_pb2_grpc import AdminServiceStub
from ampd.v1.session_service_pb2_grpc import SessionServiceStub

MAX_ADDRESSES: Final = 64
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Room for an increment of several messages at their largest (4 MiB each)."""
CONNECT_TIMEOUT_MS: Final = 3_000
KEEPALIVE_TIME_MS: Final = 4_000
KEEPALIVE_TIMEOUT_MS: Final = 2_000
"""A coordinator that vanished or froze without a word is noticed after both: 6 s."""

_OPTIONS: Final = (
    # Retries are made here, where the rules of the contract are known.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's name for how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Of a coordinator that stands still, whose kernel answers.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


class Connection:
    """One coordinator. It is connected to with the first call."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self.sessions = SessionServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)


class Connections:
    """One or several coordinators, in the order of preference at the start."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """ValueError: no address, or more than MAX_ADDRESSES."""
        if not 1 <= len(addresses) <= MAX_ADDRESSES:
            raise ValueError(f"1 to {MAX_ADDRESSES} addresses, not {len(addresses)}")
        self._all = [Connection(address) for address in addresses]
        self._current = 0

    @property
    def current(self) -> Connection:
        """The one to talk to."""
        return self._all[self._current]

    def leave(self, connection: Connection) -> None:
        """It is unavailable: the next one is to be talked to, unless another call has already
        found that."""
        if connection is self.current:
            self._current = (self._current + 1) % len(self._all)

    async def close(self) -> None:
        """Close all; calls in flight are cancelled."""
        for connection in self._all:
            await connection.channel.close()
