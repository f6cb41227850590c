"""Rounds that wait for KV: in order, bounded, and for a bounded time."""

from __future__ import annotations

import asyncio
import time

import pytest

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.kv_ledger import KvLedger, RoundDemand
from services.decode.admission import Admission

BLOCK = 16


class Room:
    """A ledger of ten blocks, and who lost KV in it."""

    def __init__(self, max_waiting: int = 8) -> None:
        self.ledger = KvLedger(capacity_tokens=10 * BLOCK, block_tokens=BLOCK)
        self.evicted: list[str] = []
        self.admission = Admission(
            self.ledger,
            evict=self.evicted.append,
            max_waiting=max_waiting,
            clock=time.monotonic,
        )
        self.admitted: list[str] = []

    async def admit(self, name: str, blocks: int, wait_s: float = 5.0) -> None:
        await self.admission.admit(RoundDemand(name, 0, 1, blocks * BLOCK - 1), wait_s)
        self.admitted.append(name)
        self.ledger.check()

    def start(self, name: str, blocks: int, wait_s: float = 5.0) -> asyncio.Task[None]:
        return asyncio.create_task(self.admit(name, blocks, wait_s))

    def end(self, name: str, *, pins: int = 0, lease_s: float = 0.0) -> None:
        lease_end_s = time.monotonic() + lease_s
        self.ledger.settle(name, history_tokens=pins * BLOCK, lease_end_s=lease_end_s)
        self.admission.poke()


async def reason(admission: asyncio.Task[None]) -> tuple[ErrorReason, float | None]:
    with pytest.raises(AmpdError) as error:
        await admission
    return error.value.reason, error.value.retry_after_s


async def test_a_round_that_fits_does_not_wait() -> None:
    room = Room()
    await room.admit("a", 10, wait_s=0.0)
    assert room.admitted == ["a"]


async def test_first_come_first_served_and_a_large_one_is_not_passed_over() -> None:
    room = Room()
    await room.admit("a", 5)
    await room.admit("b", 5)
    large, small = room.start("large", 8), room.start("small", 1)
    await asyncio.sleep(0.01)
    room.end("a")
    await asyncio.sleep(0.01)
    assert room.admitted == ["a", "b"]  # 5 blocks are free, and kept for the large one
    room.end("b")
    await asyncio.gather(large, small)
    assert room.admitted == ["a", "b", "large", "small"]
    assert room.admission.waiting == 0


async def test_the_wait_ends_with_a_hint() -> None:
    room = Room()
    await room.admit("a", 10)
    started_s = time.monotonic()
    why, hint_s = await reason(room.start("b", 1, wait_s=0.05))
    assert why is ErrorReason.KV_EXHAUSTED
    assert hint_s is not None
    assert 0.05 <= time.monotonic() - started_s < 1.0
    assert (await reason(room.start("c", 1, wait_s=0.0)))[0] is ErrorReason.KV_EXHAUSTED
    room.end("a")
    await room.admit("b", 10)


async def test_so_many_wait_and_no_more() -> None:
    room = Room(max_waiting=2)
    await room.admit("a", 10)
    waiting = [room.start("b", 1), room.start("c", 1)]
    await asyncio.sleep(0)
    assert (await reason(room.start("d", 1)))[0] is ErrorReason.KV_EXHAUSTED
    room.end("a")
    await asyncio.gather(*waiting)


async def test_what_never_fits_is_said_at_once() -> None:
    room = Room()
    assert (await reason(room.start("a", 11)))[0] is ErrorReason.KV_TOO_SMALL
    await room.admit("b", 10)
    waiting = room.start("c", 1)
    await asyncio.sleep(0)
    assert (await reason(room.start("d", 11)))[0] is ErrorReason.KV_TOO_SMALL
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_lease_that_ends_lets_the_next_one_in() -> None:
    room = Room()
    await room.admit("paused", 10)
    room.end("paused", pins=10, lease_s=0.1)
    started_s = time.monotonic()
    await room.admit("next", 5)
    assert 0.1 <= time.monotonic() - started_s < 1.0
    assert room.evicted == ["paused"]


async def test_one_that_gives_up_makes_way() -> None:
    room = Room()
    await room.admit("a", 8)
    large, small = room.start("large", 9), room.start("small", 2)
    await asyncio.sleep(0.01)
    large.cancel()
    await small
    assert room.admitted == ["a", "small"]
    assert room.admission.waiting == 0


async def test_sessions_that_live_here_go_before_new_ones() -> None:
    room = Room()
    await room.admit("here", 6)
    room.end("here", pins=6, lease_s=60.0)
    await room.admit("other", 4)
    new, here = room.start("new", 4), room.start("here", 8)
    await asyncio.sleep(0.01)
    room.end("other", pins=0)
    await here
    assert room.admitted == ["here", "other", "here"]
    room.end("here")
    await new
