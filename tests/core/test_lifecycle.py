"""The session's transitions: every state and call, and that history only moves at settle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import (
    MAX_PREFIX_HOLDERS,
    RunningRound,
    SessionRecord,
    SessionState,
)
from ampd.core.model import Binding, Slo

IDLE = SessionRecord("s", "t", "m", Slo(1.0, 0.1), 0.0, 0.0, history_tokens=100, rounds=3)


def running(keep: int = 100, increment: int = 20, max_tokens: int = 10) -> RunningRound:
    return RunningRound("r", "a", "c", 1, keep, increment, max_tokens)


def begin(record: SessionRecord, round_: RunningRound, *, alive: bool = True) -> SessionRecord:
    return lifecycle.begin(
        record, round_, coordinator_alive=alive, max_model_tokens=1000, now_unix_s=5.0
    )


def settle(record: SessionRecord, worker: str | None = None) -> SessionRecord:
    return lifecycle.settle(
        record, output_tokens=7, last_token_id=9, prefilled_by=worker, now_unix_s=6.0
    )


RUNNING = begin(IDLE, running())
CLOSED = lifecycle.close(IDLE, request_id="x", now_unix_s=7.0)
CALLS = {
    "begin": lambda record: begin(record, replace(running(), request_id="another")),
    "bind": lambda record: lifecycle.bind(record, Binding("d", 1)),
    "settle": settle,
    "discard": lambda record: lifecycle.discard(record, now_unix_s=6.0),
    "use": lambda record: lifecycle.use(record, now_unix_s=6.0),
    "close": lambda record: lifecycle.close(record, request_id="", now_unix_s=6.0),
}
TABLE = {
    ("idle", "begin"): SessionState.RUNNING,
    ("idle", "bind"): ErrorReason.SESSION_CONFLICT,
    ("idle", "settle"): ErrorReason.SESSION_CONFLICT,
    ("idle", "discard"): ErrorReason.SESSION_CONFLICT,
    ("idle", "use"): SessionState.IDLE,
    ("idle", "close"): SessionState.CLOSED,
    ("running", "begin"): ErrorReason.ROUND_RUNNING,
    ("running", "bind"): SessionState.RUNNING,
    ("running", "settle"): SessionState.IDLE,
    ("running", "discard"): SessionState.IDLE,
    ("running", "use"): ErrorReason.ROUND_RUNNING,
    ("running", "close"): SessionState.CLOSED,
    ("closed", "begin"): ErrorReason.SESSION_NOT_FOUND,
    ("closed", "bind"): ErrorReason.SESSION_CONFLICT,
    ("closed", "settle"): ErrorReason.SESSION_CONFLICT,
    ("closed", "discard"): ErrorReason.SESSION_CONFLICT,
    ("closed", "use"): ErrorReason.SESSION_NOT_FOUND,
    ("closed", "close"): ErrorReason.SESSION_NOT_FOUND,
}


@pytest.mark.parametrize(("state", "call"), TABLE)
def test_every_state_and_call(state: str, call: str) -> None:
    record = {"idle": IDLE, "running": RUNNING, "closed": CLOSED}[state]
    outcome = TABLE[state, call]
    if isinstance(outcome, ErrorReason):
        with pytest.raises(AmpdError) as refused:
            CALLS[call](record)
        assert refused.value.reason is outcome
        return
    after = CALLS[call](record)
    assert after.state is outcome
    assert after.version == record.version + 1
    assert (after.running is None) == (outcome is not SessionState.RUNNING)


def test_history_moves_at_settle_alone() -> None:
    assert RUNNING.history_tokens == IDLE.history_tokens
    assert lifecycle.discard(RUNNING, now_unix_s=6.0).history_tokens == IDLE.history_tokens
    after = settle(begin(IDLE, running(keep=40)))
    assert (after.history_tokens, after.last_token_id, after.rounds) == (40 + 20 + 7, 9, 4)


def test_the_same_request_takes_its_round_over_from_a_living_coordinator() -> None:
    again = begin(RUNNING, replace(running(), attempt_id="again"))
    assert again.running is not None
    assert again.running.attempt_id == "again"
    assert again.history_tokens == IDLE.history_tokens


def test_a_discarded_round_can_be_resumed_until_another_begins() -> None:
    discarded = lifecycle.discard(RUNNING, resumable="r", now_unix_s=6.0)
    assert discarded.resumable == "r"
    assert begin(discarded, running()).resumable == ""
    assert settle(begin(discarded, running())).resumable == ""


def test_the_requests_of_the_last_settled_rounds_are_remembered() -> None:
    record, requests = IDLE, [f"r-{number}" for number in range(lifecycle.MAX_SETTLED + 1)]
    for request_id in requests:
        record = settle(begin(record, replace(running(), request_id=request_id)))
    assert record.settled == tuple(requests[1:])
    again = lifecycle.with_settled(record.settled, (requests[5],))
    assert again == record.settled


def test_a_missed_end_is_written_back() -> None:
    attempt = running().attempt_id
    settled = settle(RUNNING)
    missed = lifecycle.write_back(RUNNING, settled, attempt)
    assert missed is not None
    assert (missed.rounds, missed.state) == (settled.rounds, SessionState.IDLE)
    assert missed.version == RUNNING.version + 1
    # A store that has forgotten the mark as well.
    assert lifecycle.write_back(IDLE, settled, attempt) is not None
    # Whatever has begun without knowing of it loses its mark; behind a discarded one it goes on.
    another = begin(IDLE, replace(running(), request_id="x", attempt_id="x"))
    over = lifecycle.write_back(another, settled, attempt)
    assert over is not None
    assert (over.rounds, over.running) == (settled.rounds, None)
    assert over.version == another.version + 1
    assert lifecycle.write_back(another, None, attempt) is None
    assert lifecycle.write_back(CLOSED, settled, attempt) is None
    # Published by its home meanwhile: only the answer may be missing.
    assert lifecycle.write_back(settled, settled, attempt) is None
    answered = lifecycle.write_back(settled, settled, attempt, answer_missing=True)
    assert answered is not None
    assert answered.rounds == settled.rounds
    discarded = lifecycle.write_back(RUNNING, None, attempt, resumable="r")
    assert discarded is not None
    assert (discarded.state, discarded.resumable) == (SessionState.IDLE, "r")
    assert lifecycle.write_back(IDLE, None, attempt) is None


def test_a_dead_coordinators_round_is_void() -> None:
    taken_over = begin(RUNNING, replace(running(), attempt_id="b"), alive=False)
    assert taken_over.running is not None
    assert taken_over.running.attempt_id == "b"
    assert taken_over.version == RUNNING.version + 2
    assert taken_over.history_tokens == IDLE.history_tokens


def test_a_rewind_beyond_the_history_names_its_length() -> None:
    with pytest.raises(AmpdError) as refused:
        begin(IDLE, running(keep=101))
    assert refused.value.violations[0].field == "keep_history_tokens"
    assert refused.value.metadata["history_tokens"] == "100"


@pytest.mark.parametrize(("increment", "fits"), [(890, True), (891, False)])
def test_the_context_bounds_history_increment_and_output(increment: int, fits: bool) -> None:
    wanted = running(increment=increment, max_tokens=10)
    if fits:
        assert begin(IDLE, wanted).state is SessionState.RUNNING
    else:
        with pytest.raises(AmpdError) as refused:
            begin(IDLE, wanted)
        assert refused.value.reason is ErrorReason.CONTEXT_TOO_LONG


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([None, *"abcdef"])), min_size=1, max_size=12
    )
)
def test_prefix_holders_never_claim_more_than_was_kept(
    rounds: list[tuple[int, str | None]],
) -> None:
    record = IDLE
    for keep, worker in rounds:
        keep = min(keep, record.history_tokens)
        prompt = keep + 20
        record = settle(begin(replace(record, history_tokens=400), running(keep=keep)), worker)
        holders = dict(record.prefix_holders)
        assert len(holders) == len(record.prefix_holders) <= MAX_PREFIX_HOLDERS
        for name, tokens in holders.items():
            assert tokens <= (prompt if name == worker else keep)
