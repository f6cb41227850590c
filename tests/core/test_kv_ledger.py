import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.kv_ledger import KvLedger, RoundDemand

BLOCK = 16


def ledger(capacity: int = 1000) -> KvLedger:
    return KvLedger(capacity_tokens=capacity, block_tokens=BLOCK)


def demand(
    session: str, history: int = 0, increment: int = 100, output: int = 60, footprint: int = 0
) -> RoundDemand:
    return RoundDemand(session, history, increment, output, footprint)


def refusal(books: KvLedger, wanted: RoundDemand, now_s: float = 0.0) -> AmpdError:
    before = (books.free_tokens, books.running_tokens, books.pinned_tokens, books.sessions)
    assert not books.can_admit(wanted, now_s)
    with pytest.raises(AmpdError) as caught:
        books.admit(wanted, now_s)
    books.check()
    assert before == (
        books.free_tokens,
        books.running_tokens,
        books.pinned_tokens,
        books.sessions,
    )
    return caught.value


def run(books: KvLedger, session: str, tokens: int, lease_end_s: float = 0.0) -> None:
    """One whole round that leaves a history of `tokens`."""
    books.admit(demand(session, increment=tokens, output=0), 0.0)
    books.settle(session, history_tokens=tokens, lease_end_s=lease_end_s)


def test_a_round_is_promised_whole_blocks() -> None:
    books = ledger()
    assert books.capacity_tokens == 992
    assert books.admit(demand("a", increment=100, output=61), 0.0) == ()
    assert (books.running_tokens, books.pinned_tokens, books.free_tokens) == (176, 0, 816)
    books.settle("a", history_tokens=120, lease_end_s=0.0)
    assert (books.running_tokens, books.pinned_tokens, books.free_tokens) == (0, 128, 864)
    assert books.resident_tokens("a") == 128
    books.check()


@pytest.mark.parametrize("tokens", [BLOCK * k + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_lengths_around_the_block(tokens: int) -> None:
    books = ledger()
    run(books, "a", tokens)
    assert books.pinned_tokens == -(-tokens // BLOCK) * BLOCK


def test_history_of_a_running_round_is_counted_once() -> None:
    books = ledger()
    run(books, "a", 320)
    books.admit(demand("a", history=320, increment=100, output=60), 0.0)
    assert (books.running_tokens, books.pinned_tokens) == (480, 0)


def test_discard_gives_back_what_the_round_took() -> None:
    books = ledger()
    run(books, "a", 320)
    books.admit(demand("a", history=320), 0.0)
    books.discard("a")
    assert (books.running_tokens, books.pinned_tokens) == (0, 320)
    books.discard("a")
    books.admit(demand("new"), 0.0)
    books.discard("new")
    assert books.sessions == 1
    books.check()


def test_a_rewind_keeps_the_old_tail_until_it_settles() -> None:
    books = ledger()
    run(books, "a", 320)
    # 100 kept tokens share 6 whole blocks; the other 224 old tokens stay for a discard.
    books.admit(demand("a", history=100, increment=28, output=0), 0.0)
    assert books.running_tokens == 128 + 224
    books.settle("a", history_tokens=128, lease_end_s=0.0)
    assert books.pinned_tokens == 128
    books.check()


def test_a_rewind_that_does_not_fit_beside_its_old_tail_is_rebuilt() -> None:
    books = ledger()
    run(books, "a", 992)
    wanted = demand("a", history=16, increment=900, output=60)
    assert books.can_admit(wanted, 0.0)
    assert books.admit(wanted, 0.0) == ("a",)
    assert (books.running_tokens, books.free_tokens) == (976, 16)
    books.check()


def test_paused_sessions_are_evicted_least_recently_used_first() -> None:
    books = ledger()
    for name in ("a", "b", "c"):
        run(books, name, 320)
    books.admit(demand("a", history=320, increment=16, output=0), 0.0)
    books.settle("a", history_tokens=320, lease_end_s=0.0)  # a is the newest now
    assert books.evictable(0.0) == ["b", "c", "a"]
    assert books.admit(demand("d", increment=330, output=0), 0.0) == ("b",)
    assert books.resident_tokens("b") == 0
    assert books.sessions == 4  # b stays bound
    books.check()


def test_a_leased_session_is_not_evicted_and_gives_the_retry_hint() -> None:
    """Case paused-agent-evicted."""
    books = ledger()
    run(books, "a", 960, lease_end_s=5.0)
    error = refusal(books, demand("b"), 2.0)
    assert error.reason is ErrorReason.KV_EXHAUSTED
    assert error.retry_after_s == 3.0
    assert books.admit(demand("b"), 5.0) == ("a",)


def test_a_new_session_waits_until_those_here_can_grow() -> None:
    books = ledger()
    books.admit(demand("a", increment=100, output=60, footprint=640), 0.0)
    books.settle("a", history_tokens=160, lease_end_s=10.0)
    # 832 tokens are free, and three quarters of both footprints are 960 of 992.
    wanted = demand("b", increment=100, output=60, footprint=640)
    assert books.can_admit(wanted, 0.0)
    wanted = demand("b", increment=100, output=60, footprint=720)
    assert refusal(books, wanted, 0.0).retry_after_s == 10.0
    # The session that is here goes on all the same, and a leased-out one makes room.
    assert books.can_admit(demand("a", history=160, increment=500, output=100), 0.0)
    assert books.admit(wanted, 10.0) == ()
    books.check()


def test_a_new_session_with_a_footprint_larger_than_the_memory_runs_alone() -> None:
    books = ledger()
    books.admit(demand("a", footprint=5000), 0.0)
    books.settle("a", history_tokens=100, lease_end_s=0.0)
    assert books.can_admit(demand("b", footprint=5000), 0.0)
    books.evict("a")
    assert books.can_admit(demand("b", footprint=5000), -1.0)


def test_a_running_round_is_never_evicted() -> None:
    """Case over-commit."""
    books = ledger()
    books.admit(demand("a", increment=900), 0.0)
    error = refusal(books, demand("b"))
    assert error.reason is ErrorReason.KV_EXHAUSTED
    assert error.retry_after_s is not None
    assert not books.can_evict("a")
    books.evict("a")
    assert books.is_running("a")


def test_what_can_never_fit_says_so() -> None:
    error = refusal(ledger(), demand("a", increment=993, output=0))
    assert error.reason is ErrorReason.KV_TOO_SMALL
    assert error.retry_after_s is None
    assert error.metadata["kv_capacity_tokens"] == "992"


def test_one_round_at_a_time() -> None:
    books = ledger()
    books.admit(demand("a"), 0.0)
    assert refusal(books, demand("a")).reason is ErrorReason.ROUND_RUNNING


def test_settling_what_does_not_run_or_was_not_promised_is_a_defect() -> None:
    books = ledger()
    for history in (16, 500):
        with pytest.raises(AmpdError) as caught:
            books.settle("a", history_tokens=history, lease_end_s=0.0)
        assert caught.value.reason is ErrorReason.INTERNAL
        if not books.sessions:
            books.admit(demand("a"), 0.0)


def test_reserved_is_the_footprint_or_what_is_held() -> None:
    books = ledger()
    books.admit(demand("a", footprint=700), 0.0)
    assert books.reserved_tokens == 700
    books.settle("a", history_tokens=160, lease_end_s=0.0)
    books.admit(demand("a", history=160, increment=700), 0.0)
    assert books.reserved_tokens == 928
    books.close("a")
    books.close("a")
    assert (books.reserved_tokens, books.free_tokens) == (0, 992)


class Ledger(RuleBasedStateMachine):
    """Any sequence of events keeps free + running + pinned = capacity."""

    names = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.books = ledger()
        self.history: dict[str, int] = {}
        self.kept: dict[str, RoundDemand] = {}
        self.now_s = 0.0

    @rule(
        name=names,
        keep=st.floats(0.0, 1.0),
        increment=st.integers(1, 600),
        output=st.integers(0, 300),
        footprint=st.integers(0, 500),
    )
    def admit(self, name: str, keep: float, increment: int, output: int, footprint: int) -> None:
        history = int(self.history.get(name, 0) * keep)
        wanted = RoundDemand(name, history, increment, output, footprint)
        fits = self.books.can_admit(wanted, self.now_s)
        try:
            evicted = self.books.admit(wanted, self.now_s)
        except AmpdError:
            assert not fits
            return
        assert fits
        assert not any(victim in self.kept for victim in evicted)
        self.kept[name] = wanted

    @rule(name=names, share=st.floats(0.0, 1.0), lease_s=st.floats(0.0, 5.0))
    def settle(self, name: str, share: float, lease_s: float) -> None:
        if wanted := self.kept.pop(name, None):
            prompt = wanted.history_tokens + wanted.increment_tokens
            self.history[name] = prompt + int(share * wanted.max_tokens)
            self.books.settle(
                name, history_tokens=self.history[name], lease_end_s=self.now_s + lease_s
            )

    @rule(name=names)
    def discard(self, name: str) -> None:
        self.kept.pop(name, None)
        self.books.discard(name)

    @rule(name=names)
    def close(self, name: str) -> None:
        self.kept.pop(name, None)
        self.history.pop(name, None)
        self.books.close(name)
        assert self.books.resident_tokens(name) == 0

    @rule(step_s=st.floats(0.0, 3.0))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @invariant()
    def balanced(self) -> None:
        self.books.check()
        parts = self.books.free_tokens + self.books.running_tokens + self.books.pinned_tokens
        assert parts == self.books.capacity_tokens
        assert all(self.books.is_running(name) for name in self.kept)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_free_kv_is_what_no_other_session_holds() -> None:
    books = ledger(capacity=20 * BLOCK)
    run(books, "own", 5 * BLOCK)
    run(books, "other", 5 * BLOCK)
    # Both could be evicted: only the session's own KV counts as free for it.
    books.require_free(demand("own", history=15 * BLOCK, increment=0, output=0), 0.0)
    books.require_free(demand("new", history=10 * BLOCK, increment=0, output=0), 0.0)
    for session, tokens in (("own", 15 * BLOCK + 1), ("new", 10 * BLOCK + 1)):
        wanted = demand(session, history=tokens, increment=0, output=0)
        with pytest.raises(AmpdError) as caught:
            books.require_free(wanted, 0.0)
        assert caught.value.reason is ErrorReason.KV_EXHAUSTED
        assert books.can_admit(wanted, 0.0)
    with pytest.raises(AmpdError) as caught:
        books.require_free(demand("new", history=21 * BLOCK, increment=0, output=0), 0.0)
    assert caught.value.reason is ErrorReason.KV_TOO_SMALL
    books.check()
