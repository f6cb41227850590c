"""The parts of the vLLM adapter that need no vLLM: pins, handles, step plans, side channel."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.adapters.engine_vllm import handles, side_channel
from ampd.adapters.engine_vllm.pins import READER_TAIL_S, PinTable
from ampd.adapters.engine_vllm.settings import VllmSettings, engine_arguments
from ampd.adapters.engine_vllm.step_plan import Prefill, plan_step
from ampd.core.errors import AmpdError
from ampd.core.model import KvHandle, Role

BLOCK = 4


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0


@dataclass
class FakePool:
    """A block pool as vLLM's: holders counted, nothing else."""

    blocks: list[FakeBlock] = field(default_factory=lambda: [FakeBlock(i) for i in range(32)])

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[FakeBlock]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tokens_of(count: int) -> array[int]:
    return array("I", range(count))


def test_a_pin_holds_its_blocks_until_release_or_lease() -> None:
    pool, clock = FakePool(), Clock()
    table = PinTable(pool, BLOCK, clock)
    pin = table.pin(tokens_of(10), pool.blocks[:3], 5.0, release_on_read=False)
    shared = table.pin(tokens_of(8), pool.blocks[:2], 50.0, release_on_read=False)
    assert (pool.get_num_free_blocks(), table.pinned_blocks()) == (29, 3)
    pool.touch(pool.blocks[:1])  # a running request uses the first block: no longer only pinned
    assert table.pinned_blocks() == 2
    clock.now_s += 4.9
    table.expire()
    assert table.get(pin.pin_id) is pin
    table.lend(pin)
    clock.now_s += 4.9
    table.expire()
    assert table.get(pin.pin_id) is pin
    clock.now_s += 0.2
    table.expire()
    assert table.get(pin.pin_id) is None
    assert pool.get_num_free_blocks() == 30
    table.release(shared.pin_id)
    table.release(shared.pin_id)
    pool.free_blocks(pool.blocks[:1])
    assert pool.get_num_free_blocks() == 32
    assert table.next_expiry_s() is None


def test_loans_end_by_reading_reclaim_release_and_a_new_loan() -> None:
    pool, clock = FakePool(), Clock()
    table = PinTable(pool, BLOCK, clock)
    pin = table.pin(tokens_of(8), pool.blocks[:2], 50.0, release_on_read=False)
    result = table.pin(tokens_of(8), pool.blocks[2:4], 50.0, release_on_read=True)
    assert not table.may_be_read
    first = table.lend(pin)
    second = table.lend(pin)
    assert not table.is_lent(first)
    assert table.is_lent(second)
    table.read_done(second)
    assert table.get(pin.pin_id) is pin
    clock.now_s += READER_TAIL_S
    assert not table.may_be_read
    loan = table.lend(result)
    table.read_done(loan)
    assert table.get(result.pin_id) is None
    assert not table.may_be_read
    # Ended unread: a reader may still be in the middle, and gets help for a while.
    unread = table.lend(pin)
    table.release(pin.pin_id)
    assert not table.is_lent(unread)
    assert table.may_be_read
    clock.now_s += READER_TAIL_S
    assert not table.may_be_read
    table.read_done(unread)


def test_truncation_gives_blocks_back() -> None:
    pool = FakePool()
    table = PinTable(pool, BLOCK, Clock())
    pin = table.pin(tokens_of(11), pool.blocks[:3], 50.0, release_on_read=False)
    table.truncate(pin, 8)
    assert (len(pin.tokens), len(pin.blocks), pool.get_num_free_blocks()) == (8, 2, 30)
    table.truncate(pin, 9)
    assert len(pin.tokens) == 8


prefills = st.lists(st.integers(1, 200), max_size=6)


def candidates(running: list[int], ready: list[int]) -> tuple[list[Prefill], list[Prefill]]:
    going = [Prefill(f"r{i}", (0.0, i), left) for i, left in enumerate(running)]
    return going, [Prefill(f"w{i}", (0.0, 50 + i), left) for i, left in enumerate(ready)]


@given(running=prefills, ready=prefills, chunk=st.integers(0, 64), entrant=st.sampled_from([0, 32]))
def test_step_plans(running: list[int], ready: list[int], chunk: int, entrant: int) -> None:
    going, waiting = candidates(running, ready)
    plan = plan_step(going, waiting, entrant_tokens=entrant, chunk_tokens=lambda _: chunk)
    short = {p.request_id for p in going + waiting if p.left_tokens <= entrant}
    long_running = [p for p in going if p.left_tokens > entrant]
    assert short & {p.request_id for p in waiting} <= plan.admitted
    assert not plan.held & short
    # At most one long prefill goes, the first, and never one that waits before one that runs.
    going_long = [p for p in long_running if p.request_id not in plan.held]
    admitted_long = plan.admitted - short
    assert len(going_long) + len(admitted_long) <= 1
    assert going_long in ([], long_running[:1])
    if not chunk:
        assert not going_long
        assert not admitted_long
    if admitted_long:
        assert not long_running
        first = min((p for p in waiting if p.left_tokens > entrant), key=lambda p: p.order)
        assert admitted_long == {first.request_id}
    if not short:
        assert plan.prefill_tokens <= chunk


@given(running=prefills, ready=prefills, budget=st.integers(-3, 600))
def test_step_plans_with_a_fixed_budget(running: list[int], ready: list[int], budget: int) -> None:
    going, waiting = candidates(running, ready)
    plan = plan_step(
        going,
        waiting,
        entrant_tokens=32,
        chunk_tokens=lambda _: pytest.fail("nobody asks"),
        budget_tokens=budget,
    )
    short = [p for p in going + waiting if p.left_tokens <= 32]
    rest = [p for p in going + waiting if p.left_tokens > 32]
    left = budget - sum(p.left_tokens for p in short)
    computing = []
    for one in rest:  # those that have begun, then by order
        if left > 0:
            computing.append(one.request_id)
            left -= min(left, one.left_tokens)
    assert plan.prefill_tokens == max(budget - left, sum(p.left_tokens for p in short))
    assert plan.held == {p.request_id for p in going if p in rest} - set(computing)
    admitted = {p.request_id for p in waiting if p in short or p.request_id in computing}
    assert plan.admitted == admitted


def test_a_fixed_budget_serves_by_order() -> None:
    begun = [Prefill("begun", (9.0, 1), 40)]
    late, early = Prefill("late", (5.0, 2), 40), Prefill("early", (1.0, 3), 40)
    plan = plan_step(
        begun,
        [late, early],
        entrant_tokens=32,
        chunk_tokens=lambda _: 0,
        budget_tokens=75,
    )
    assert plan.admitted == {"early"}
    assert not plan.held
    assert plan.prefill_tokens == 75
    assert plan.cap_tokens == 40


def handle_of(tokens: array[int], count: int) -> KvHandle:
    digest = handles.tokens_digest(tokens, count)
    loan = handles.Loan("loan", "engine", "host", 1, 1, (1, 2), digest)
    return KvHandle("d", 1, count, 5.0, handles.encode(handles.Payload("pin", loan)))


def test_a_handle_serves_only_its_own_tokens() -> None:
    tokens = tokens_of(9)
    handle = handle_of(tokens, 6)
    assert handles.loan_of(handle, tokens, "kv", block_tokens=3).blocks == (1, 2)
    other = array("I", tokens)
    other[5] = 77
    unlent = replace(handle, payload=handles.encode(handles.Payload("pin")))
    for bad_tokens, bad in (
        (other, handle),
        (tokens[:5], handle),
        (tokens, replace(handle, tokens=7)),
        (tokens, replace(handle, tokens=0)),
        (tokens, replace(handle, payload=b"")),
        (tokens, unlent),
    ):
        with pytest.raises(AmpdError) as refused:
            handles.loan_of(bad, bad_tokens, "kv", block_tokens=3)
        assert refused.value.violations[0].field == "kv"
    other[8] = 78
    other[5] = tokens[5]
    assert handles.loan_of(handle, other, "kv", block_tokens=3)
    for block_tokens in (2, 6):
        with pytest.raises(AmpdError, match="blocks"):
            handles.loan_of(handle, tokens, "kv", block_tokens=block_tokens)


def test_side_channel_confirms_reads_and_survives_nonsense() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    assert not side_channel.confirm_read("127.0.0.1", port, "loan")
    ready, stop = threading.Event(), threading.Event()
    asked: list[str] = []

    def is_alive(loan_id: str) -> bool:
        asked.append(loan_id)
        return loan_id == "alive"

    thread = threading.Thread(
        target=side_channel.serve,
        args=({(0, 0): b"handshake"}, is_alive, ready, stop, ("127.0.0.1", port)),
    )
    thread.start()
    try:
        assert ready.wait(5)
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert side_channel.confirm_read("127.0.0.1", port, "alive")
        assert not side_channel.confirm_read("127.0.0.1", port, "gone")
        assert asked == ["alive", "gone"]
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive()


def test_settings_are_checked_and_name_both_devices() -> None:
    settings = VllmSettings("m", Role.DECODE)
    with pytest.raises(ValueError, match="role"):
        replace(settings, role=Role.COORDINATOR)
    with pytest.raises(ValueError, match="prefill_chunk_tokens"):
        replace(settings, prefill_chunk_tokens=9000)
    with pytest.raises(ValueError, match="threads"):
        replace(settings, threads=0)
    arguments = engine_arguments(settings, "d0-1-x")
    assert arguments["kv_transfer_config"]["kv_buffer_device"] == "cpu"
    assert arguments["scheduler_cls"].endswith("AmpdScheduler")
