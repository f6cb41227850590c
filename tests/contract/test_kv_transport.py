"""The contract of KvTransport: in one process, over NIXL in one, between processes, over TCP.

Where NIXL is told to use TCP alone the owner has a part in every byte, as between two hosts.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import pytest
from kv_owner import OwnerProcess

from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.adapters.kv_nixl import END_WAIT_S, NixlKvTransport
from ampd.core.errors import AmpdError, ErrorReason
from ampd.ports import KvPiece, KvTransport

SIZE = 1 << 20
BIG = 32 << 20
"""Takes long enough to be cut off."""
READ_S = 10.0
GONE_S = 6.0
"""Within which a dead owner must be noticed (spec 7)."""
OWN = 0xEE
"""What the reader's memory is filled with."""


class Owner(Protocol):
    """Memory that is lent, filled with one byte value."""

    locator: bytes

    async def close(self) -> None: ...


@dataclass
class LocalOwner:
    transport: KvTransport

    @property
    def locator(self) -> bytes:
        return self.transport.locator

    async def close(self) -> None:
        await self.transport.close()


@dataclass
class Network:
    kind: str
    stack: AsyncExitStack
    inproc: InprocKvNetwork = field(default_factory=InprocKvNetwork)

    def transport(self, name: str, incarnation: int) -> KvTransport:
        if self.kind == "inproc":
            return InprocKvTransport(self.inproc, name, incarnation)
        return NixlKvTransport(name, incarnation)

    def reader(self, name: str = "reader", size: int = SIZE) -> tuple[KvTransport, bytearray]:
        transport = self.transport(name, 1)
        memory = bytearray([OWN]) * size
        transport.register(memoryview(memory))
        self.stack.push_async_callback(transport.close)
        return transport, memory

    async def owner(self, fill: int, incarnation: int = 1, size: int = SIZE) -> Owner:
        if self.kind in ("processes", "tcp"):
            return await self.owner_process(fill, incarnation, size)
        transport = self.transport("owner", incarnation)
        transport.register(memoryview(bytearray([fill]) * size))
        transport.serve(lent=True)
        self.stack.push_async_callback(transport.close)
        return LocalOwner(transport)

    async def owner_process(
        self, fill: int, incarnation: int = 1, size: int = SIZE
    ) -> OwnerProcess:
        owner = OwnerProcess("owner", incarnation, fill, size)
        self.stack.push_async_callback(owner.kill)
        return await owner.start()


async def _network(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    if kind == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    async with AsyncExitStack() as stack:
        yield Network(kind, stack)


@pytest.fixture(params=["inproc", "nixl", "processes", "tcp"])
async def network(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Network]:
    async for made in _network(request.param, monkeypatch):
        yield made


@pytest.fixture(params=["processes", "tcp"])
async def processes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Network]:
    async for made in _network(request.param, monkeypatch):
        yield made


async def refused(reader: KvTransport, locator: bytes, *pieces: KvPiece) -> AmpdError:
    with pytest.raises(AmpdError) as caught:
        await reader.read(locator, pieces or [KvPiece(0, 0, 1)], READ_S)
    return caught.value


async def test_the_pieces_arrive_and_nothing_else(network: Network) -> None:
    owner = await network.owner(0x5A)
    reader, memory = network.reader()
    pieces = [KvPiece(0, 100, 50), KvPiece(SIZE - 1, 7, 1), KvPiece(4096, SIZE - 4096, 4096)]
    await reader.read(owner.locator, pieces, READ_S)
    expected = bytearray([OWN]) * SIZE
    for piece in pieces:
        expected[piece.local_offset : piece.local_offset + piece.length] = b"\x5a" * piece.length
    assert memory == expected
    await reader.read(owner.locator, [], READ_S)
    assert memory == expected


@pytest.mark.parametrize("kind", ["inproc", "nixl"])
async def test_owners_hear_their_readers_while_they_lend(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async for network in _network(kind, monkeypatch):
        owner, _ = network.reader("owner")
        reader, _ = network.reader()
        heard: list[bytes] = []
        owner.listen(heard.append)
        owner.serve(lent=True)
        await reader.read(owner.locator, [KvPiece(0, 0, 64)], READ_S)
        await reader.tell(owner.locator, b"one")
        await reader.tell(owner.locator, b"two")
        async with asyncio.timeout(READ_S):
            while len(heard) < 2:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.005)
        assert heard == [b"one", b"two"]
        await reader.tell(b"nonsense", b"three")
        await owner.close()
        await reader.tell(owner.locator, b"to nobody")
        await asyncio.sleep(0.02)
        assert heard == [b"one", b"two"]


async def test_more_than_one_transfer_takes(network: Network) -> None:
    owner = await network.owner(0x5A, size=BIG)
    reader, memory = network.reader(size=BIG)
    await reader.read(owner.locator, [KvPiece(0, 1, 5), KvPiece(6, 6, BIG - 7)], READ_S)
    assert memory[:1] + memory[-1:] == bytes([OWN, OWN])
    assert memory.count(0x5A) == BIG - 2


async def test_readers_and_owners_at_the_same_time(network: Network) -> None:
    owners = [await network.owner(fill, incarnation=fill) for fill in (1, 2)]
    readers = [network.reader(f"reader-{i}") for i in range(2)]
    span = SIZE // 16
    await asyncio.gather(
        *(
            reader.read(owners[i % 2].locator, [KvPiece(i * span, i * span, span)], READ_S)
            for i in range(16)
            for reader, _ in readers
        )
    )
    expected = (b"\x01" * span + b"\x02" * span) * 8
    assert [memory == expected for _, memory in readers] == [True, True]


async def test_every_read_sees_the_bytes_of_its_time(network: Network) -> None:
    """A restarted owner is another one, whatever was known of the first."""
    reader, memory = network.reader()
    first = await network.owner(1, incarnation=1)
    await reader.read(first.locator, [KvPiece(0, 0, 9)], READ_S)
    await first.close()
    second = await network.owner(2, incarnation=2)
    await reader.read(second.locator, [KvPiece(0, 0, 9)], READ_S)
    assert memory[:10] == b"\x02" * 9 + bytes([OWN])
    error = await refused(reader, first.locator, KvPiece(0, 0, 10))
    assert error.reason == ErrorReason.WORKER_UNAVAILABLE
    assert memory[:10] == b"\x02" * 9 + bytes([OWN])


async def test_an_owner_that_closed_before_the_first_read(network: Network) -> None:
    reader, memory = network.reader()
    owner = await network.owner(1)
    await owner.close()
    started_s = time.monotonic()
    assert (await refused(reader, owner.locator)).reason == ErrorReason.WORKER_UNAVAILABLE
    assert time.monotonic() - started_s < GONE_S
    assert memory.count(OWN) == SIZE


async def test_a_closed_reader(network: Network) -> None:
    owner = await network.owner(1)
    reader, memory = network.reader()
    await reader.read(owner.locator, [KvPiece(0, 0, 1)], READ_S)
    for _ in range(2):
        await reader.close()
    error = await refused(reader, owner.locator, KvPiece(0, 1, 1))
    assert error.reason == ErrorReason.WORKER_UNAVAILABLE
    memory += b"resizable again"
    assert memory[:2] == bytes([1, OWN])


@pytest.mark.parametrize(
    "piece", [KvPiece(0, SIZE - 1, 2), KvPiece(SIZE - 1, 0, 2), KvPiece(-1, 0, 2), KvPiece(0, 0, 0)]
)
async def test_pieces_outside_the_memories(network: Network, piece: KvPiece) -> None:
    owner = await network.owner(1)
    reader, memory = network.reader()
    error = await refused(reader, owner.locator, KvPiece(0, 0, 1), piece)
    assert error.reason == ErrorReason.INVALID_FIELD
    assert error.violations[0].field.startswith("pieces[1].")
    assert memory.count(OWN) == SIZE


def _foreign(_: bytes) -> bytes:
    return msgspec.msgpack.encode(["other", "owner", 1])


def _garbage(_: bytes) -> bytes:
    return b"\xc1garbage"


def _cut(locator: bytes) -> bytes:
    return locator[:-1]


@pytest.mark.parametrize("damage", [_foreign, _garbage, _cut])
async def test_foreign_locators(network: Network, damage: Callable[[bytes], bytes]) -> None:
    reader, _ = network.reader()
    owner = network.reader("other")[0]
    error = await refused(reader, damage(owner.locator))
    assert error.reason == ErrorReason.INVALID_FIELD
    assert [v.field for v in error.violations] == ["locator"]


async def test_metadata_that_is_not_nixls(monkeypatch: pytest.MonkeyPatch) -> None:
    async for network in _network("nixl", monkeypatch):
        reader, _ = network.reader()
        parts: list[Any] = msgspec.msgpack.decode(network.reader("other")[0].locator)
        locator = msgspec.msgpack.encode([*parts[:2], b"garbage", *parts[3:]])
        assert (await refused(reader, locator)).reason == ErrorReason.INVALID_FIELD


@pytest.mark.parametrize("turns", [1, 3, 50])
async def test_no_byte_lands_after_a_cancellation(network: Network, turns: int) -> None:
    owner = await network.owner(0x5A, size=BIG)
    reader, memory = network.reader(size=BIG)
    await reader.read(owner.locator, [KvPiece(0, 0, 1)], READ_S)
    read = asyncio.create_task(reader.read(owner.locator, [KvPiece(0, 0, BIG)], READ_S))
    for _ in range(turns):
        await asyncio.sleep(0)
    read.cancel()
    with suppress(asyncio.CancelledError):
        await read
    memory[:] = bytes([OWN]) * BIG
    await asyncio.sleep(0.1)
    assert memory.count(OWN) == BIG
    await reader.read(owner.locator, [KvPiece(0, 0, BIG)], READ_S)
    assert memory.count(0x5A) == BIG


@pytest.mark.parametrize("was_read", [True, False])
async def test_a_killed_owner(processes: Network, was_read: bool) -> None:
    owner = await processes.owner_process(1)
    reader, memory = processes.reader()
    if was_read:
        await reader.read(owner.locator, [KvPiece(0, 0, 1)], READ_S)
    await owner.kill()
    started_s = time.monotonic()
    error = await refused(reader, owner.locator, KvPiece(0, 1, SIZE - 1))
    assert error.reason == ErrorReason.WORKER_UNAVAILABLE
    assert time.monotonic() - started_s < GONE_S
    assert memory[1:].count(OWN) == SIZE - 1


async def test_an_owner_killed_in_the_middle(processes: Network) -> None:
    owner = await processes.owner_process(1, size=BIG)
    reader, memory = processes.reader(size=BIG)
    await reader.read(owner.locator, [KvPiece(0, 0, 1)], READ_S)
    read = asyncio.create_task(reader.read(owner.locator, [KvPiece(0, 0, BIG)], READ_S))
    for _ in range(2):
        await asyncio.sleep(0)
    owner.signal(signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(AmpdError) as caught:
        await read
    assert caught.value.reason == ErrorReason.WORKER_UNAVAILABLE
    assert time.monotonic() - started_s < GONE_S
    memory[:] = bytes([OWN]) * BIG
    await asyncio.sleep(0.1)
    assert memory.count(OWN) == BIG


@pytest.mark.parametrize("way", ["timeout", "cancel", "cancel twice"])
async def test_an_owner_that_hangs(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Over TCP it would go on answering when it wakes up; the read was given up by then, and
    another owner is read all the while."""
    async for network in _network("tcp", monkeypatch):
        owner = await network.owner_process(1)
        other = await network.owner_process(2, incarnation=2)
        reader, memory = network.reader()
        for locator in (owner.locator, other.locator):
            await reader.read(locator, [KvPiece(0, 0, 1)], READ_S)
        memory[:] = bytes([OWN]) * SIZE
        owner.signal(signal.SIGSTOP)
        timeout_s = 0.3 if way == "timeout" else READ_S
        read = asyncio.create_task(reader.read(owner.locator, [KvPiece(0, 0, SIZE - 9)], timeout_s))
        started_s = time.monotonic()
        await asyncio.sleep(0.1)
        if way != "timeout":
            read.cancel()
        if way == "cancel twice":
            await asyncio.sleep(0.1)
            read.cancel()
        await reader.read(other.locator, [KvPiece(0, SIZE - 9, 9)], READ_S)
        if way == "timeout":
            with pytest.raises(AmpdError) as caught:
                await read
            assert caught.value.reason == ErrorReason.WORKER_UNAVAILABLE
        else:
            with pytest.raises(asyncio.CancelledError):
                await read
        bound_s = END_WAIT_S if way == "cancel" else 0.3
        assert time.monotonic() - started_s < bound_s + 1.5
        owner.signal(signal.SIGCONT)
        for _ in range(20):
            await reader.read(other.locator, [KvPiece(0, SIZE - 9, 9)], READ_S)
            await asyncio.sleep(0.01)
        assert memory == bytes([OWN]) * (SIZE - 9) + b"\x02" * 9


async def test_only_what_is_lent_costs_time(processes: Network) -> None:
    owner = await processes.owner_process(1)
    reader, _ = processes.reader()
    await reader.read(owner.locator, [KvPiece(0, 0, SIZE)], READ_S)

    async def share(lent: bool) -> tuple[float, float]:
        before_s = await owner.serve(lent=lent), time.process_time()
        await asyncio.sleep(1.0)
        after_s = await owner.serve(lent=lent), time.process_time()
        return after_s[0] - before_s[0], after_s[1] - before_s[1]

    lent, _ = await share(True)
    idle, reading = await share(False)
    assert idle < 0.01
    assert reading < 0.02
    assert idle < lent < 0.4
