"""When KV moves with its session, and how long a drain takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core import lifecycle
from ampd.core.cost_model import CostModel, DecodeCost, KvCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import RunningRound, SessionRecord, SessionState
from ampd.core.model import Binding, Role, Slo, WorkerInfo
from ampd.core.moving import MoveReason, RemainingRound, decide_move, drain_estimate_s

COST = CostModel(
    prefill=PrefillCost(base_s=0.01, token_s=1e-3),
    decode=DecodeCost(base_s=0.02, sequence_s=0.001),
    kv=KvCost(base_s=0.1, token_s=1e-4),
)


def worker(name: str, cost: CostModel | None = COST, **facts: object) -> WorkerInfo:
    info = WorkerInfo(name, Role.DECODE, 1, f"{name}:1", "h", "m", "e", 16, 4096, 64, cost=cost)
    return replace(info, **facts)


def test_kv_goes_along_where_reading_is_cheaper() -> None:
    decision = decide_move(worker("a"), worker("b"), history_tokens=1000, kv_tokens=992)
    assert decision.worker_id == "b"
    assert (decision.reason, decision.kv_tokens) == (MoveReason.READ_CHEAPER, 992)
    assert decision.read_s == pytest.approx(0.1 + 0.0992 + 0.01 + 0.008)
    assert decision.compute_s == pytest.approx(1.01)


def test_a_short_history_is_computed() -> None:
    decision = decide_move(worker("a"), worker("b"), history_tokens=50, kv_tokens=48)
    assert (decision.reason, decision.kv_tokens) == (MoveReason.COMPUTE_CHEAPER, 0)
    assert decision.compute_s < decision.read_s


def test_the_costs_are_the_targets() -> None:
    slow = replace(COST, prefill=PrefillCost(token_s=1.0))
    decision = decide_move(worker("a"), worker("b", slow), history_tokens=50, kv_tokens=50)
    assert decision.reason is MoveReason.READ_CHEAPER
    assert decision.read_s == pytest.approx(COST.t_kv(50))


def test_the_link_is_that_between_the_two_hosts() -> None:
    cost = replace(COST, kv_same_host=KvCost(0.01, 1e-5))
    for host, read_s in (("h", 0.01 + 0.0005), ("elsewhere", 0.1 + 0.005)):
        target = worker("b", cost, host=host)
        decision = decide_move(worker("a"), target, history_tokens=50, kv_tokens=50)
        assert decision.read_s == pytest.approx(read_s)


@pytest.mark.parametrize(
    "other",
    [{"model": "n"}, {"engine": "f"}, {"kv_block_tokens": 32}, {"kv_bytes_per_token": 128}],
)
def test_kv_of_another_layout_stays(other: dict[str, object]) -> None:
    target = worker("b", **other)
    decision = decide_move(worker("a"), target, history_tokens=1000, kv_tokens=1000)
    assert (decision.reason, decision.kv_tokens) == (MoveReason.NO_KV, 0)


def test_without_kv_there_is_none_to_move() -> None:
    decision = decide_move(worker("a"), worker("b"), history_tokens=1000, kv_tokens=0)
    assert (decision.reason, decision.kv_tokens) == (MoveReason.NO_KV, 0)
    assert decision.compute_s == pytest.approx(1.01)


@given(st.integers(1, 100_000), st.floats(0, 1))
def test_the_cheaper_way_is_taken(history_tokens: int, share: float) -> None:
    kv_tokens = max(1, int(history_tokens * share))
    decision = decide_move(
        worker("a"), worker("b"), history_tokens=history_tokens, kv_tokens=kv_tokens
    )
    assert (decision.kv_tokens > 0) == (decision.read_s <= decision.compute_s)


def test_an_empty_worker_is_drained_at_once() -> None:
    assert drain_estimate_s(COST, [], [], concurrent_moves=4) == 0.0


def test_a_drain_takes_the_longest_round_and_all_moves() -> None:
    rounds = [RemainingRound(0, 100, 10, 100), RemainingRound(50, 0, 30, 80)]
    step_s = 0.022
    assert drain_estimate_s(COST, rounds, [], concurrent_moves=4) == pytest.approx(30 * step_s)
    longer = [replace(rounds[0], output_tokens=40), rounds[1]]
    with_moves = drain_estimate_s(COST, longer, [1000, 2000], concurrent_moves=4)
    assert with_moves == pytest.approx(0.11 + 40 * step_s + (0.2 + 0.3) / 4)


# --- the binding --------------------------------------------------------------------------

A, B = Binding("a", 1), Binding("b", 2)
RECORD = SessionRecord("s", "t", "m", Slo(1.0, 0.1), 1.0, 2.0, version=7, home=A)


def test_rebinding_changes_the_home_alone() -> None:
    assert lifecycle.rebind(RECORD, B, expected=A) == replace(RECORD, version=8, home=B)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (replace(RECORD, home=None), ErrorReason.SESSION_CONFLICT),
        (replace(RECORD, home=B), ErrorReason.SESSION_CONFLICT),
        (replace(RECORD, home=Binding("a", 2)), ErrorReason.SESSION_CONFLICT),
        (replace(RECORD, state=SessionState.CLOSED), ErrorReason.SESSION_NOT_FOUND),
        (
            replace(
                RECORD,
                state=SessionState.RUNNING,
                running=RunningRound("r", "x", "c", 1, 0, 1, 1),
            ),
            ErrorReason.ROUND_RUNNING,
        ),
    ],
)
def test_what_is_not_idle_at_the_expected_home_is_not_rebound(
    record: SessionRecord, reason: ErrorReason
) -> None:
    with pytest.raises(AmpdError) as caught:
        lifecycle.rebind(record, B, expected=A)
    assert caught.value.reason is reason
