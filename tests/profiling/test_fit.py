import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.ports import StepSample
from ampd.profiling.fit import KvSample, fit_cost_model, fit_decode, fit_kv, fit_prefill, nnls

TRUTH = CostModel(
    prefill=PrefillCost(30e-3, 1e-5, 4e-7, 1e-9, hinges=((512.0, 8e-5),)),
    decode=DecodeCost(20e-3, 2e-4, 5e-7),
    mixed=MixedCost(52.9e-3, 2.91e-3, 2.52e-3, 9.3e-6, 2.47e-6),
)


def prefill_samples(noise: float = 0.0, seed: int = 1) -> list[StepSample]:
    rng = random.Random(seed)
    return [
        StepSample(
            chunk, history, 0, 0, TRUTH.t_pre(history, chunk) * (1 + noise * rng.uniform(-1, 1))
        )
        for chunk in (64, 128, 256, 512, 1024, 2048, 4096)
        for history in (0, 4096, 16384, 65536)
    ]


def mixed_samples(noise: float = 0.0, seed: int = 1) -> list[StepSample]:
    rng = random.Random(seed)
    return [
        StepSample(
            chunk,
            history,
            batch,
            500 * batch,
            TRUTH.t_mixed(chunk, history, batch, 500 * batch) * (1 + noise * rng.uniform(-1, 1)),
        )
        for chunk in (0, 16, 64, 128, 256, 512)
        for history in (0, 992)
        for batch in (0, 1, 4, 8)
        if chunk + batch
    ]


def test_finds_the_coefficients_of_exact_samples() -> None:
    fitted, report = fit_cost_model(mixed_samples())
    found = fitted.mixed
    # Batch and context rise together here: only what they cost together is determined.
    assert found.base_s == pytest.approx(52.9e-3, rel=1e-3)
    assert found.sequence_s + 500 * found.context_token_s == pytest.approx(7.17e-3, rel=1e-3)
    assert fitted.t_mixed(200, 700, 6, 3000) == pytest.approx(
        TRUTH.t_mixed(200, 700, 6, 3000), rel=0.01
    )
    assert report.mixed.held_out > 0
    assert report.mixed.p95_error < 1e-3


def test_a_bend_is_a_hinge() -> None:
    cost, report = fit_prefill(prefill_samples())
    assert any(at == 512.0 for at, _ in cost.hinges)
    assert report.p95_error < 0.02
    assert (report.smallest, report.largest) == (64, 4096)


def test_a_line_may_flatten() -> None:
    """Experts: the first sequences load them, the others find them loaded."""
    experts = DecodeCost(5e-3, 2e-3, 1e-8, hinges=((8.0, -1.99e-3),))
    cost, report = fit_decode(
        [
            StepSample(0, 0, batch, batch * length, CostModel(decode=experts).t_dec(batch, length))
            for batch in (1, 8, 32, 64, 128)
            for length in (1024, 4096, 16384)
        ]
    )
    assert report.p95_error < 0.05
    assert CostModel(decode=cost).t_dec(500, 0) == pytest.approx(
        CostModel(decode=experts).t_dec(500, 0), rel=0.05
    )


def test_noise_is_reported_on_held_out_samples() -> None:
    _, report = fit_cost_model(mixed_samples(noise=0.08))
    assert 0.01 < report.mixed.median_error < 0.08
    assert report.mixed.median_error <= report.mixed.p95_error < 0.15
    assert report.mixed.held_out == report.mixed.samples


def test_disturbed_steps_do_not_bend_the_fit() -> None:
    """On a shared machine some steps take several times their time."""
    rng = random.Random(5)
    samples = [
        replace(s, seconds=s.seconds * (4 if rng.random() < 0.15 else rng.uniform(0.97, 1.03)))
        for s in mixed_samples()
    ]
    fitted, _ = fit_cost_model(samples)
    for shape in ((0, 0, 4, 2000), (128, 992, 4, 2000), (512, 0, 8, 4000)):
        assert fitted.t_mixed(*shape) == pytest.approx(TRUTH.t_mixed(*shape), rel=0.1)


def test_no_bend_rests_on_neighbouring_sizes() -> None:
    """Batches 1..8 and a jump at 7: extrapolated to 64 it would be all there is."""
    decodes = [
        StepSample(0, 0, batch, 100 * batch, (20 + batch + (5 if batch > 6 else 0)) * 1e-3)
        for batch in range(1, 9)
        for _ in range(4)
    ]
    fitted, _ = fit_cost_model(decodes)
    assert all(at <= 2 for at, _ in fitted.decode.hinges)


def test_whole_prefills_are_what_t_pre_is() -> None:
    """In steps of 256 tokens a prefill pays the start of each."""
    steps, prefills = [], []
    for count in (1, 2, 4, 8):
        parts = [
            StepSample(256, 256 * i, 0, 0, TRUTH.t_mixed(256, 256 * i, 0, 0)) for i in range(count)
        ]
        steps += parts
        prefills.append(StepSample(256 * count, 0, 0, 0, sum(part.seconds for part in parts)))
    whole, _ = fit_cost_model(steps, prefills=prefills)
    for prefill in prefills:
        assert whole.t_pre(0, prefill.chunk_tokens) == pytest.approx(prefill.seconds, rel=0.01)
    by_steps, _ = fit_cost_model(steps)
    assert by_steps.t_pre(0, 2048) < 0.98 * prefills[-1].seconds


def test_functions_without_samples_are_read_off_the_mixed_steps() -> None:
    only_mixed = [s for s in mixed_samples() if s.batch and s.chunk_tokens]
    fitted, report = fit_cost_model(only_mixed)
    assert report.prefill.samples == report.decode.samples == 0
    assert fitted.t_dec(4, 2000) == pytest.approx(TRUTH.t_mixed(0, 0, 4, 2000), rel=0.05)
    assert fitted.t_pre(992, 256) == pytest.approx(TRUTH.t_mixed(256, 992, 0, 0), rel=0.05)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            StepSample,
            chunk_tokens=st.integers(0, 4096),
            chunk_history_tokens=st.integers(0, 10_000),
            batch=st.integers(0, 64),
            context_tokens=st.integers(0, 100_000),
            seconds=st.floats(1e-4, 10.0),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_any_samples_give_a_model_that_never_falls(samples: list[StepSample]) -> None:
    usable = [s for s in samples if s.chunk_tokens + s.batch]
    if not usable:
        with pytest.raises(ValueError, match="no measured steps"):
            fit_cost_model(samples)
        return
    fitted, _ = fit_cost_model(samples)  # CostModel refuses what is negative
    assert 0 <= fitted.t_pre(10, 10) <= fitted.t_pre(100, 5000)
    assert 0 <= fitted.t_dec(1, 10) <= fitted.t_dec(128, 10_000)
    assert 0 <= fitted.t_mixed(0, 0, 1, 1) <= fitted.t_mixed(5000, 100, 2, 2)


def test_kv_is_alpha_beta_or_given() -> None:
    samples = [KvSample(tokens, 1e-3 + 2e-6 * tokens) for tokens in (0, 32, 320, 3200, 32_000)]
    cost, report = fit_kv(samples)
    assert [cost.base_s, cost.token_s] == pytest.approx([1e-3, 2e-6])
    assert report.samples == 4
    assert fit_kv([]) == (KvCost(), fit_kv([])[1])
    given_kv, _ = fit_cost_model(mixed_samples(), kv=KvCost(5.0, 6.0), kv_samples=samples)
    assert given_kv.kv == KvCost(5.0, 6.0)


@given(
    st.integers(1, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.floats(0.0, 10.0), min_size=columns + 1, max_size=columns + 1),
            min_size=columns,
            max_size=12,
        )
    )
)
@settings(deadline=None)
def test_nnls_is_optimal(rows: list[list[float]]) -> None:
    """No worse than the best of all subsets' least squares (the optimum is one of them)."""
    table = np.round(np.array(rows), 3)
    matrix, target = table[:, :-1], table[:, -1]
    found = nnls(matrix, target)
    assert (found >= 0).all()
    best = float((target**2).sum())
    for mask in range(1, 1 << matrix.shape[1]):
        picked = [i for i in range(matrix.shape[1]) if mask >> i & 1]
        solution = np.linalg.lstsq(matrix[:, picked], target, rcond=None)[0]
        if (solution >= 0).all():
            best = min(best, float(((matrix[:, picked] @ solution - target) ** 2).sum()))
    start = np.random.default_rng(0).choice([0.0, 1.0], matrix.shape[1])
    for solution in (found, nnls(matrix, target, start)):
        assert float(((matrix @ solution - target) ** 2).sum()) <= best + 1e-6 * (1 + best)
