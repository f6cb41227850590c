from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.cost_model import CostModel, DecodeCost, MixedCost, PrefillCost
from ampd.core.fixed_chunks import fill_budget, fixed_prefill, joint_history_tokens

COST = CostModel(
    prefill=PrefillCost(base_s=0.02, token_s=1e-4),
    decode=DecodeCost(base_s=0.01),
    mixed=MixedCost(base_s=0.01, token_s=1e-4, sequence_s=1e-3, attention_pair_s=1e-9),
)


@given(left=st.lists(st.integers(1, 500), max_size=20), spare=st.integers(-10, 3000))
def test_a_budget_is_filled_in_order_and_only_the_last_is_cut(left: list[int], spare: int) -> None:
    chunks = fill_budget(left, spare)
    assert sum(chunks) == max(0, min(spare, sum(left)))
    assert chunks[:-1] == left[: max(0, len(chunks) - 1)]
    assert all(0 < chunk <= whole for chunk, whole in zip(chunks, left, strict=False))


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 50_000)), min_size=1, max_size=8))
def test_pieces_taken_as_one_cost_as_much_attention(pieces: list[tuple[int, int]]) -> None:
    tokens = sum(count for count, _ in pieces)
    together = COST.t_mixed(tokens, joint_history_tokens(pieces), 1, 0)
    others_s = COST.t_mixed(0, 0, 1, 0)
    apart = sum(COST.t_mixed(count, history, 1, 0) - others_s for count, history in pieces)
    alone_s = COST.t_mixed(tokens, 0, 1, 0) - others_s
    # To a token of history; pieces with none have less than any single chunk has.
    expected_s = max(apart, alone_s)
    assert together - others_s == pytest.approx(expected_s, abs=tokens * 1e-9)


def test_one_piece_keeps_its_history() -> None:
    assert joint_history_tokens([(512, 4096)]) == 4096


def test_predictions_with_a_fixed_budget() -> None:
    seconds, step_s = fixed_prefill(
        COST,
        history_tokens=0,
        increment_tokens=1000,
        batch=12,
        context_tokens=0,
        budget_tokens=512,
    )
    middle_s = 500 * (500 + 250) * 1e-9
    assert step_s == pytest.approx(0.01 + 0.05 + 0.012 + middle_s)
    assert seconds == pytest.approx(2 * step_s)
    # More streams than the budget has tokens: it goes on, if only just.
    slow_s, _ = fixed_prefill(
        COST, history_tokens=0, increment_tokens=10, batch=600, context_tokens=0, budget_tokens=512
    )
    assert slow_s > 10 * 0.6
