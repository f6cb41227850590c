import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.cost_model import (
    MAX_MIXED_CHUNK_TOKENS,
    CostModel,
    DecodeCost,
    KvCost,
    Link,
    MixedCost,
    PrefillCost,
    link_between,
)

SMOLLM2 = MixedCost(52.9e-3, 2.91e-3, 2.52e-3, 9.3e-6, 2.47e-6)
"""SmolLM2 on one CPU thread, as measured with vLLM."""

coefficients = st.one_of(st.just(0.0), st.floats(1e-9, 1e-1))
sizes = st.integers(0, 200_000)


def with_bends(kind: type, slope: str, *others: str) -> st.SearchStrategy:
    """Costs whose line bends up and down, each segment with a slope of its own."""

    def build(values: list[float], first: float, segments: dict[float, float]) -> object:
        hinges, now = [], first
        for at in sorted(segments):
            hinges.append((at, segments[at] - now))
            now += segments[at] - now
        return kind(**dict(zip(others, values, strict=True)), **{slope: first}, hinges=(*hinges,))

    return st.builds(
        build,
        st.tuples(*(coefficients for _ in others)),
        coefficients,
        st.dictionaries(
            st.floats(0.0, 20_000.0), st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)), max_size=3
        ),
    )


mixed_costs = st.builds(
    replace,
    with_bends(MixedCost, "token_s", "base_s", "sequence_s", "context_token_s", "attention_pair_s"),
    batch_counts=st.booleans(),
)
models = st.builds(
    CostModel,
    prefill=with_bends(PrefillCost, "token_s", "base_s", "history_token_s", "attention_pair_s"),
    decode=with_bends(DecodeCost, "sequence_s", "base_s", "context_token_s"),
    mixed=mixed_costs,
    kv=st.builds(KvCost, base_s=coefficients, token_s=coefficients),
    kv_same_host=st.none() | st.builds(KvCost, base_s=coefficients, token_s=coefficients),
)


def test_features_are_those_of_the_spec() -> None:
    model = CostModel(
        prefill=PrefillCost(1.0, 0.1, 0.01, 0.001, hinges=((10.0, 2.0),)),
        decode=DecodeCost(1.0, 0.5, 0.25, hinges=((4.0, 1.0),)),
        mixed=SMOLLM2,
        kv=KvCost(2.0, 0.5),
    )
    assert model.t_pre(100, 20) == pytest.approx(1 + 2 + 1 + 0.001 * 20 * 110 + 2 * 10)
    assert model.t_dec(6, 8) == pytest.approx(1 + 3 + 2 + 2)
    assert model.t_mixed(64, 992, 4, 2000) == pytest.approx(
        52.9e-3 + 2.91e-3 * 64 + 2.52e-3 * 4 + 9.3e-6 * 2000 + 2.47e-6 * 64 * (992 + 32)
    )
    assert model.t_kv(4) == 4.0


def test_the_batch_may_count_with_the_chunk() -> None:
    """Where the linear layers turn from reading weights to computing, all tokens count."""
    line = CostModel(mixed=MixedCost(1.0, 0.0, hinges=((40.0, 0.5),), batch_counts=True))
    assert line.t_mixed(10, 0, 30, 0) == 1.0
    assert line.t_mixed(10, 0, 34, 0) == line.t_mixed(20, 0, 24, 0) == 3.0
    assert line.t_mixed(0, 0, 64, 0) == 13.0
    assert line.mixed_chunk(3.0, 0, 34, 0) == 10
    assert line.mixed_chunk(14.0, 0, 64, 0) == 2


@given(models, st.floats(0.0, 1e3), sizes, sizes)
def test_a_scaled_model_scales_every_time(
    model: CostModel, factor: float, history: int, increment: int
) -> None:
    scaled = model.scaled(factor)
    for one, other in (
        (scaled.t_pre(history, increment), model.t_pre(history, increment)),
        (scaled.t_dec(increment, history), model.t_dec(increment, history)),
        (
            scaled.t_mixed(increment, history, 3, history),
            model.t_mixed(increment, history, 3, history),
        ),
        (scaled.t_kv(history), model.t_kv(history)),
        (scaled.t_kv(history, Link.SAME_HOST), model.t_kv(history, Link.SAME_HOST)),
    ):
        assert one == pytest.approx(factor * other, rel=1e-9, abs=1e-12)


def test_a_link_has_its_own_line_or_that_between_hosts() -> None:
    cost = CostModel(kv=KvCost(2.0, 0.5))
    assert cost.t_kv(4, Link.SAME_HOST) == cost.t_kv(4, Link.CROSS_HOST) == cost.t_kv(4) == 4.0
    near = CostModel(kv=KvCost(2.0, 0.5), kv_same_host=KvCost(1.0, 0.25))
    assert near.t_kv(4, Link.SAME_HOST) == 2.0
    assert near.t_kv(4, Link.CROSS_HOST) == 4.0
    assert near.t_kv(0, Link.SAME_HOST) == 0.0


def test_workers_of_one_named_host_share_it() -> None:
    assert link_between("a", "a") is Link.SAME_HOST
    assert link_between("a", "b") is Link.CROSS_HOST
    assert link_between("", "") is Link.CROSS_HOST


def test_moving_nothing_takes_no_time() -> None:
    assert CostModel(kv=KvCost(base_s=1.0)).t_kv(0) == 0.0


@given(models, sizes, sizes, sizes, sizes)
def test_never_negative_never_falling(
    model: CostModel, history: int, increment: int, more_history: int, more_increment: int
) -> None:
    for time in (model.t_pre, model.t_dec):
        low = time(history, increment)
        assert 0 <= low <= time(history + more_history, increment + more_increment)
    assert 0 <= model.t_kv(history) <= model.t_kv(history + more_history)
    low = model.t_mixed(increment, history, 3, 10)
    assert 0 <= low <= model.t_mixed(increment + more_increment, history + more_history, 4, 11)


@given(models, st.integers(1, 10_000))
def test_extrapolates_by_the_last_slope(model: CostModel, beyond: int) -> None:
    # Without attention the function behind its last hinge is one line.
    line = CostModel(
        prefill=PrefillCost(
            model.prefill.base_s, model.prefill.token_s, hinges=model.prefill.hinges
        )
    )
    start = 20_000
    step = line.t_pre(0, start + 1) - line.t_pre(0, start)
    assert line.t_pre(0, start + beyond) == pytest.approx(
        line.t_pre(0, start) + beyond * step, rel=1e-6
    )


@given(mixed_costs, st.floats(0.0, 1e4), sizes, st.integers(0, 256), sizes)
def test_mixed_chunk_is_the_exact_inverse(
    cost: MixedCost, limit_s: float, history: int, batch: int, context: int
) -> None:
    model = CostModel(mixed=cost)
    chunk = model.mixed_chunk(limit_s, history, batch, context)
    assert 0 <= chunk <= MAX_MIXED_CHUNK_TOKENS
    if chunk:
        assert model.t_mixed(chunk, history, batch, context) <= limit_s
    if chunk < MAX_MIXED_CHUNK_TOKENS:
        assert model.t_mixed(chunk + 1, history, batch, context) > limit_s


@given(mixed_costs, st.integers(1, 50_000), sizes)
def test_mixed_chunk_gives_back_the_chunk_of_a_time(
    cost: MixedCost, chunk: int, history: int
) -> None:
    model = CostModel(mixed=cost)
    seconds = model.t_mixed(chunk, history, 8, 4000)
    assert model.mixed_chunk(seconds, history, 8, 4000) >= chunk


def test_free_chunks_are_bounded() -> None:
    assert CostModel().mixed_chunk(0.0, 0, 0, 0) == MAX_MIXED_CHUNK_TOKENS


def test_no_time_no_chunk() -> None:
    assert CostModel(mixed=SMOLLM2).mixed_chunk(0.05, 0, 1, 100) == 0


@given(models)
def test_survives_json(model: CostModel) -> None:
    wire = msgspec.json.encode(model)
    assert msgspec.convert(json.loads(wire), CostModel) == model


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_impossible_costs_are_refused(bad: float) -> None:
    for cost in (PrefillCost, DecodeCost, MixedCost, KvCost):
        with pytest.raises(ValueError, match="finite and not negative"):
            cost(base_s=bad)
    for hinge in ((10.0, bad), (bad, 1.0)):
        with pytest.raises(ValueError, match="finite and not negative"):
            PrefillCost(hinges=(hinge,))


def test_a_hinge_takes_no_more_slope_than_there_is() -> None:
    flat = DecodeCost(1.0, 0.5, hinges=((8.0, -0.5),))
    assert CostModel(decode=flat).t_dec(100, 0) == 5.0
    with pytest.raises(ValueError, match="finite and not negative"):
        DecodeCost(1.0, 0.5, hinges=((8.0, -0.5), (9.0, -0.1)))


def test_hinges_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        PrefillCost(hinges=((10.0, 1.0), (10.0, 1.0)))
