"""The KV transport over NIXL: memory registered with it, READ transfers, UCX below.

What NIXL 1.5.1 over UCX was seen to do, and this module rests on:

* Its progress thread spins on a core, so it is off, and progress is made by calling. The owner
  must be called to let a new reader in, and over TCP for every byte. On one host the reader
  then copies alone, within the posting call itself (4 GB/s), even from a stopped process.
* A dead owner is an error at once: when the transfer is posted, or while it runs.
* Nothing ends a transfer that waits for its owner. Releasing its handle succeeds, and so does
  removing the remote agent, yet over TCP every byte still lands when the owner goes on (seen
  with SIGSTOP and SIGCONT) as soon as anything else on the reader's agent is polled. Only
  destroying the agent (0.2 s) ends it for good. So every peer is read by an agent of its own,
  and giving up on a peer destroys that one alone.
* A reader that vanishes in the middle of a transfer over TCP makes UCX end the *owner's*
  process ("Endpoint timeout") when it tries to answer. So a cancelled read first waits
  `END_WAIT_S` for its transfer, and only an owner that does not answer is given up.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import msgspec
import numpy as np

from ampd.adapters.kv_pieces import as_bytes, check_pieces
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.ports import KvPiece


def _nixl() -> Any:
    """NIXL's Python API, from the package of this machine's CUDA version. Its front package
    `nixl` chooses among them as well, but asks torch: 200 MB and 4 s."""
    for package in ("nixl_cu13", "nixl_cu12"):
        if find_spec(package) is not None:
            return import_module(f"{package}._api")
    return import_module("nixl._api")


_api: Final = _nixl()
_bindings: Final = _api.nixlBind

SERVE_POLL_S: Final = 0.002
"""How often an owner that lends is asked for progress."""
END_WAIT_S: Final = 2.0
"""How long a cancelled read waits for its transfer to end before it destroys the agent."""
MAX_LINKS: Final = 64
"""Peers that one transport keeps agents for (about 5 MB and 10 descriptors each)."""
MAX_POST_BYTES: Final = 8 << 20
"""Bytes of one transfer: posting one holds up the event loop for as long as it copies."""
SPINS: Final = 20
"""How often a transfer is asked for without sleeping in between; then with pauses from
`MIN_PAUSE_S`, doubling up to `MAX_PAUSE_S`."""
MIN_PAUSE_S: Final = 50e-6
MAX_PAUSE_S: Final = 1e-3

NIXL_ERRORS: Final = tuple(
    error
    for error in vars(_bindings).values()
    if isinstance(error, type) and issubclass(error, Exception)
)
"""NIXL's exceptions have no base class of their own."""


class _Locator(msgspec.Struct, frozen=True, array_like=True, tag="nixl"):
    agent: str
    metadata: bytes
    address: int
    length: int


def _agent(name: str, address: int, length: int) -> Any:
    """An agent without threads, with the memory registered."""
    config = _api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
    agent = _api.nixl_agent(name, config)
    agent.register_memory([(address, length, 0, "")], "DRAM")
    return agent


class _Link:
    """The agent that reads one peer. Transfers are known by number, so that nobody else holds
    on to the agent: `destroy` really ends it."""

    def __init__(self, name: str, peer: _Locator, address: int, length: int) -> None:
        self._agent: Any = _agent(name, address, length)
        """None: destroyed."""
        self._peer = peer
        self._address = address
        self._transfers: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._remote = self._agent.add_remote_agent(peer.metadata)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read."""
        return not self._transfers

    @property
    def is_destroyed(self) -> bool:
        """Whether the peer was given up, or is gone."""
        return self._agent is None

    # An exception of NIXL holds on to the agent by the frames of its traceback: only its text
    # goes on.

    def post(self, pieces: Sequence[KvPiece]) -> int:
        """Start a transfer; its number. AmpdError WORKER_UNAVAILABLE."""
        number = next(self._numbers)
        why = "given up"
        if self._agent is not None:
            try:
                # Learns of an owner that has closed: its memory could be read all the same.
                self._agent.get_new_notifs()
                self._transfers[number] = self._agent.initialize_xfer(
                    "READ",
                    self._descriptors([(p.local_offset, p.length) for p in pieces], self._address),
                    self._descriptors(
                        [(p.remote_offset, p.length) for p in pieces], self._peer.address
                    ),
                    self._remote,
                )
                self._agent.transfer(self._transfers[number])
                return number
            except NIXL_ERRORS as error:
                why = repr(error)
        raise self._lost(why)

    def _descriptors(self, spans: Sequence[tuple[int, int]], address: int) -> Any:
        table = np.zeros((len(spans), 3), dtype=np.uint64)  # address, length, device
        table[:, :2] = spans
        table[:, 0] += np.uint64(address)
        return _bindings.nixlXferDList(_bindings.DRAM_SEG, table)

    def has_ended(self, number: int) -> bool:
        """Whether all bytes of the transfer are there. AmpdError WORKER_UNAVAILABLE: it has
        failed, and the link with it."""
        why = "given up"
        if self._agent is not None:
            try:
                state = self._agent.check_xfer_state(self._transfers[number])
                if state == "DONE":
                    self._agent.release_xfer_handle(self._transfers.pop(number))
                if state != "ERR":
                    return bool(state == "DONE")
                why = "the transfer has failed"
            except NIXL_ERRORS as error:
                why = repr(error)
        raise self._lost(why)

    def destroy(self) -> None:
        """End all transfers: no byte lands any more. Takes up to 0.2 s; idempotent."""
        while self._transfers:
            _, transfer = self._transfers.popitem()
            try:
                transfer.release()
            except NIXL_ERRORS:
                # The agent ends it; its handle must not try again when it is collected.
                transfer._released = True
        self._agent = None

    def tell(self, message: bytes) -> None:
        """Send a message to the peer. Whoever is gone does not hear it."""
        if self._agent is not None:
            with suppress(*NIXL_ERRORS):
                self._agent.send_notif(self._remote, message)

    def _lost(self, why: str) -> AmpdError:
        self.destroy()
        return _unavailable(self._peer, why)


def _unavailable(peer: _Locator, why: str) -> AmpdError:
    return AmpdError(ErrorReason.WORKER_UNAVAILABLE, f"cannot read KV from {peer.agent}: {why}")


class NixlKvTransport:
    """`ampd.ports.KvTransport` over NIXL. One event loop uses it, and the loop's thread alone.

    It costs no time unless something is lent or read: owners poll every `SERVE_POLL_S`, readers
    while they read.
    """

    def __init__(self, name: str, incarnation: int) -> None:
        # Never reused, so that an agent of an earlier life is another agent.
        self._name = f"{name}-{incarnation}-{uuid.uuid4().hex[:8]}"
        self._address = 0
        self._length = 0
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._agent: Any = None
        self._locator = b""
        self._links: OrderedDict[str, _Link] = OrderedDict()
        """By the peer's agent, the least recently used first."""
        self._connecting = asyncio.Lock()
        self._connections = itertools.count()
        self._poll_timer: asyncio.TimerHandle | None = None
        self._hear: Callable[[bytes], None] | None = None

    def register(self, memory: memoryview) -> None:
        """See the port."""
        if self._memory is not None:
            raise ValueError(f"{self._name} has registered its memory")
        memory = as_bytes(memory)
        self._length = memory.nbytes
        self._memory = (ctypes.c_char * self._length).from_buffer(memory)
        self._address = ctypes.addressof(self._memory)
        self._agent = _agent(self._name, self._address, self._length)
        metadata = self._agent.get_agent_metadata()
        self._locator = msgspec.msgpack.encode(
            _Locator(self._name, metadata, self._address, self._length)
        )

    @property
    def locator(self) -> bytes:
        """See the port."""
        return self._locator

    def serve(self, *, lent: bool) -> None:
        """See the port."""
        if self._poll_timer is not None and not lent:
            self._poll_timer.cancel()
            self._poll_timer = None
        elif self._poll_timer is None and lent and self._agent is not None:
            self._poll(asyncio.get_running_loop())

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._agent is None:
            return
        self._poll_timer = loop.call_later(SERVE_POLL_S, self._poll, loop)
        for messages in self._agent.get_new_notifs().values():
            for message in messages:
                if self._hear is not None:
                    self._hear(message)

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """See the port."""
        self._hear = hear

    async def tell(self, locator: bytes, message: bytes) -> None:
        """See the port. Only who has been read is told: a loan that was not read is not over."""
        with suppress(msgspec.DecodeError, msgspec.ValidationError):
            peer = msgspec.msgpack.decode(locator, type=_Locator)
            link = self._links.get(peer.agent)
            if link is not None:
                link.tell(message)

    async def read(self, locator: bytes, pieces: Sequence[KvPiece], timeout_s: float) -> None:
        """See the port. A peer that was not read before takes about 0.1 s to connect to; one
        that dies in the middle is noticed at once, one that hangs at `timeout_s`; after a
        cancellation at most `END_WAIT_S` more, then up to 0.2 s."""
        try:
            peer = msgspec.msgpack.decode(locator, type=_Locator)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise invalid_field("locator", f"is not a NIXL one: {error}") from error
        if self._memory is None:
            raise _unavailable(peer, "this KV transport is closed")
        check_pieces(pieces, self._length, peer.length)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                link = await self._link(peer)
        except TimeoutError as error:
            raise _unavailable(peer, f"no connection within {timeout_s:g} s") from error
        for batch in _batches(pieces):
            await asyncio.sleep(0)
            number = link.post(batch)
            try:
                ended = await _until_ended(link, number, deadline_s)
            except asyncio.CancelledError:
                await self._end(link, number)
                raise
            if not ended:
                link.destroy()
                raise _unavailable(peer, f"no answer within {timeout_s:g} s")

    async def _end(self, link: _Link, number: int) -> None:
        """Wait for the transfer of a cancelled read."""
        deadline_s = asyncio.get_running_loop().time() + END_WAIT_S
        ended = False
        try:
            ended = await _until_ended(link, number, deadline_s)
        except AmpdError:
            ended = True  # the link has failed, and ended it
        finally:
            if not ended:
                link.destroy()

    async def _link(self, peer: _Locator) -> _Link:
        async with self._connecting:
            link = self._links.get(peer.agent)
            if link is None or link.is_destroyed:
                self._make_room()
                link = await self._connect(peer)
                self._links[peer.agent] = link
            self._links.move_to_end(peer.agent)
            return link

    def _make_room(self) -> None:
        for agent, link in list(self._links.items()):
            if link.is_destroyed or (link.is_idle and len(self._links) >= MAX_LINKS):
                link.destroy()
                del self._links[agent]
        if len(self._links) >= MAX_LINKS:
            raise AmpdError(ErrorReason.QUEUE_FULL, f"{MAX_LINKS} peers are being read")

    async def _connect(self, peer: _Locator) -> _Link:
        name = f"{self._name}-reader-{next(self._connections)}"
        try:
            link = await asyncio.to_thread(_Link, name, peer, self._address, self._length)
        except (_bindings.nixlMismatchError, _bindings.nixlInvalidParamError) as error:
            raise invalid_field("locator", f"holds no metadata of NIXL: {error}") from error
        except NIXL_ERRORS as error:
            raise _unavailable(peer, repr(error)) from error
        if self._memory is None:
            link.destroy()
            raise _unavailable(peer, "this KV transport was closed")
        return link

    async def close(self) -> None:
        """See the port. Reads that still run fail."""
        self.serve(lent=False)
        while self._links:
            _, link = self._links.popitem()
            link.destroy()
        self._agent = None
        self._memory = None


def _batches(pieces: Sequence[KvPiece]) -> Iterator[list[KvPiece]]:
    """The pieces in order, cut so that no batch has more than MAX_POST_BYTES."""
    batch: list[KvPiece] = []
    room = MAX_POST_BYTES
    for piece in pieces:
        done = 0
        while done < piece.length:
            length = min(piece.length - done, room)
            batch.append(KvPiece(piece.remote_offset + done, piece.local_offset + done, length))
            done += length
            room -= length
            if not room:
                yield batch
                batch, room = [], MAX_POST_BYTES
    if batch:
        yield batch


async def _until_ended(link: _Link, number: int, deadline_s: float) -> bool:
    """Poll a transfer until it has ended; False when it has not by `deadline_s` (loop time)."""
    loop = asyncio.get_running_loop()
    pause_s = MIN_PAUSE_S
    spins = 0
    while not link.has_ended(number):
        if loop.time() >= deadline_s:
            return False
        if spins < SPINS:
            spins += 1
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
    return True
