"""The KV transport between engines of one process: memory copied to memory."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from ampd.adapters.kv_pieces import as_bytes, check_pieces
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.ports import KvPiece


class InprocKvNetwork:
    """The memories that can be reached: one per test or process, shared by its transports."""

    def __init__(self) -> None:
        self._memories: dict[tuple[str, int], memoryview] = {}
        self._listeners: dict[
            tuple[str, int], tuple[Callable[[bytes], None], contextvars.Context]
        ] = {}

    def add(self, name: str, incarnation: int, memory: memoryview) -> None:
        """Make the memory of that life readable. ValueError when it has one already."""
        if (name, incarnation) in self._memories:
            raise ValueError(f"{name} has registered memory in its life {incarnation}")
        self._memories[name, incarnation] = memory

    def remove(self, name: str, incarnation: int) -> None:
        """That life has ended. Idempotent."""
        self._memories.pop((name, incarnation), None)
        self._listeners.pop((name, incarnation), None)

    def listen(self, name: str, incarnation: int, hear: Callable[[bytes], None]) -> None:
        """Whom to give the messages to that life, in the context of this call."""
        self._listeners[name, incarnation] = hear, contextvars.copy_context()

    def tell(self, name: str, incarnation: int, message: bytes) -> None:
        """Give a message to that life, if it listens."""
        listener = self._listeners.get((name, incarnation))
        if listener is not None:
            hear, context = listener
            asyncio.get_running_loop().call_soon(hear, message, context=context)

    def find(self, name: str, incarnation: int) -> memoryview | None:
        """The memory of that life; None when it is unknown or has ended."""
        return self._memories.get((name, incarnation))


class _Locator(msgspec.Struct, frozen=True, array_like=True, tag="inproc"):
    name: str
    incarnation: int


class InprocKvTransport:
    """`ampd.ports.KvTransport` within a network. A read is one step of the event loop, after
    one chance for others to run: nothing can come between its bytes, and none come late."""

    def __init__(self, network: InprocKvNetwork, name: str, incarnation: int) -> None:
        self._network = network
        self._locator = _Locator(name, incarnation)
        self._memory: memoryview | None = None

    def register(self, memory: memoryview) -> None:
        """See the port."""
        memory = as_bytes(memory)
        self._network.add(self._locator.name, self._locator.incarnation, memory)
        self._memory = memory

    @property
    def locator(self) -> bytes:
        """See the port."""
        return msgspec.msgpack.encode(self._locator)

    def serve(self, *, lent: bool) -> None:
        """Costs nothing either way."""

    async def read(self, locator: bytes, pieces: Sequence[KvPiece], timeout_s: float) -> None:
        """See the port; a copy cannot time out."""
        peer = _decode(locator)
        await asyncio.sleep(0)
        if self._memory is None:
            raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, "this KV transport is closed")
        source = self._network.find(peer.name, peer.incarnation)
        if source is None:
            raise AmpdError(
                ErrorReason.WORKER_UNAVAILABLE,
                f"{peer.name} has no KV memory in its life {peer.incarnation}",
            )
        check_pieces(pieces, self._memory.nbytes, source.nbytes)
        for piece in pieces:
            start, end = piece.remote_offset, piece.remote_offset + piece.length
            at = piece.local_offset
            self._memory[at : at + piece.length] = source[start:end]

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """See the port."""
        self._network.listen(self._locator.name, self._locator.incarnation, hear)

    async def tell(self, locator: bytes, message: bytes) -> None:
        """See the port."""
        with suppress(AmpdError):
            peer = _decode(locator)
            self._network.tell(peer.name, peer.incarnation, message)

    async def close(self) -> None:
        """See the port."""
        if self._memory is not None:
            self._network.remove(self._locator.name, self._locator.incarnation)
            self._memory = None


def _decode(locator: bytes) -> _Locator:
    try:
        return msgspec.msgpack.decode(locator, type=_Locator)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise invalid_field("locator", f"is not an in-process one: {error}") from error
