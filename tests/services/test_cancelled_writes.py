"""A round that is given up in the middle of a write to the store leaves no mark behind."""

from __future__ import annotations

import asyncio

import pytest
from inprocess import in_process, request, run

from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.ports import SessionWrites

WRITES = {"begin": 1, "bind": 2, "settle": 3}
SLOW_S = 0.02


class SlowWrite(MemoryStateStore):
    """Of its writes, one takes long, before it takes place and before the answer comes."""

    def __init__(self, slow: int, *, lose_answer: bool = False) -> None:
        super().__init__()
        self._left = slow
        self._lose_answer = lose_answer
        self.writing = asyncio.Event()

    async def compare_and_set(
        self, record: SessionRecord, expected_version: int, writes: SessionWrites | None = None
    ) -> bool:
        self._left -= 1
        if self._left:
            return await super().compare_and_set(record, expected_version, writes)
        self.writing.set()
        await asyncio.sleep(SLOW_S)
        written = await super().compare_and_set(record, expected_version, writes)
        await asyncio.sleep(SLOW_S)
        if self._lose_answer:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "the answer is lost")
        return written


@pytest.mark.parametrize("when_s", [0.0, 1.5 * SLOW_S], ids=["before", "after"])
@pytest.mark.parametrize("write", WRITES)
async def test_cancelled_in_a_write(write: str, when_s: float) -> None:
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        record = await cluster.record(session_id)
        store = SlowWrite(WRITES[write])
        await store.create_session(record, "")
        cluster.store = store
        first, second = await cluster.add_coordinator(), await cluster.add_coordinator()
        await cluster.beat()
        round_ = asyncio.create_task(run(first, request(session_id, 10)))
        await store.writing.wait()
        await asyncio.sleep(when_s)
        round_.cancel()
        with pytest.raises(asyncio.CancelledError):
            await round_
        record = await cluster.record(session_id)
        assert record.state is SessionState.IDLE
        # A round whose end was being written has ended.
        assert record.history_tokens == (14 if write == "settle" else 0)
        outcome = await run(second, request(session_id, 10))
        assert outcome.finished.history_tokens == record.history_tokens + 14
        assert not outcome.placed.history_rebuilt


async def test_a_begin_whose_answer_is_lost() -> None:
    """The write took place, and nobody here knows it: nothing is bound, nothing runs."""
    write = "begin"
    async with in_process("d0") as cluster:
        session_id = await cluster.new_session()
        record = await cluster.record(session_id)
        store = SlowWrite(WRITES[write], lose_answer=True)
        await store.create_session(record, "")
        cluster.store = store
        first, second = await cluster.add_coordinator(), await cluster.add_coordinator()
        await cluster.beat()
        with pytest.raises(AmpdError) as error:
            await run(first, request(session_id, 10))
        assert error.value.reason is ErrorReason.STORE_UNAVAILABLE
        assert (await cluster.record(session_id)).state is SessionState.IDLE
        assert (await run(second, request(session_id, 10))).finished.history_tokens == 14


async def test_a_binding_whose_answer_is_lost() -> None:
    """The round goes on without the store, and is written back when it has ended."""
    async with in_process("d0") as cluster, asyncio.timeout(10):
        session_id = await cluster.new_session()
        record = await cluster.record(session_id)
        store = SlowWrite(WRITES["bind"], lose_answer=True)
        await store.create_session(record, "")
        cluster.store = store
        first, second = await cluster.add_coordinator(), await cluster.add_coordinator()
        await cluster.beat()
        await run(first, request(session_id, 10))
        while (await cluster.record(session_id)).rounds == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        outcome = await run(second, request(session_id, 10))
        assert outcome.finished.history_tokens == 28
        assert not outcome.placed.history_rebuilt
