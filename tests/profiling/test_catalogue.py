"""Built-in profiles: GPUs from tables and rooflines, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.core.cost_model import Link
from ampd.core.errors import AmpdError, ErrorReason
from ampd.ports import StepSample
from ampd.profiling.catalogue import leave_one_out, open_profile, profile_names
from ampd.profiling.gpu_tables import TableKey, read_table, tables
from ampd.profiling.profile_file import Profile, write_profile
from ampd.profiling.roofline import GPUS, MODELS, Gpu, roofline_table

H100 = "gpu:h100_sxm/Qwen3-32B/tp1"
TABLES = [name for name in profile_names() if not name.startswith("gpu:h20")]
TABLES += [name for name in profile_names() if name.startswith("gpu:h200")]


def test_every_table_and_every_roofline_has_a_name() -> None:
    assert len(TABLES) == len(tables()) == 36
    assert len(profile_names()) == 36 + len(GPUS) * len(MODELS) * 4
    assert H100 in profile_names()
    assert "gpu:h20/mixtral-8x7b/tp8" in profile_names()


@pytest.mark.parametrize("name", TABLES)
def test_points_of_the_table_that_a_fit_has_not_seen(name: str) -> None:
    """A100 decode steps jump in a way that no chain of lines follows: they set the bounds."""
    fit = open_profile(name).fit
    for function in (fit.prefill, fit.decode, fit.mixed):
        assert function.held_out == function.samples > 0
        assert function.median_error < 0.05
    assert fit.prefill.p95_error < 0.08
    assert fit.decode.p95_error < (0.12 if name != "gpu:h100_sxm/mixtral-8x7b/tp2" else 0.35)
    assert fit.mixed.p95_error < 0.18


@pytest.mark.parametrize("name", [name for name in TABLES if name.endswith(("tp1", "tp8"))])
def test_every_point_of_a_table_is_met_by_a_fit_to_the_others(name: str) -> None:
    report = leave_one_out(name)
    for function in (report.prefill, report.decode, report.mixed):
        assert function.held_out == function.samples > 15
        assert function.median_error < 0.05


def errors(profile: Profile, steps: tuple[StepSample, ...]) -> list[float]:
    cost = profile.cost

    def predicted(s: StepSample) -> float:
        if not s.batch:
            return cost.t_pre(s.chunk_history_tokens, s.chunk_tokens)
        if not s.chunk_tokens:
            return cost.t_dec(s.batch, s.context_tokens)
        return cost.t_mixed(s.chunk_tokens, s.chunk_history_tokens, s.batch, s.context_tokens)

    return sorted(abs(predicted(s) / s.seconds - 1) for s in steps)


@pytest.mark.parametrize("name", TABLES)
def test_no_point_of_the_table_is_far_off(name: str) -> None:
    profile = open_profile(name)
    found = errors(profile, profile.samples)
    assert found[len(found) // 2] < 0.02
    assert found[-1] < 0.20


@settings(deadline=None)  # a profile is fitted when it is first named
@given(
    st.sampled_from(profile_names()),
    st.integers(0, 200_000),
    st.integers(0, 20_000),
    st.integers(0, 512),
    st.integers(0, 10_000),
)
def test_more_work_never_takes_less(
    name: str, history: int, increment: int, batch: int, more: int
) -> None:
    cost = open_profile(name).cost
    assert 0 < cost.t_pre(history, increment) <= cost.t_pre(history + more, increment + more)
    assert 0 < cost.t_dec(batch, history) <= cost.t_dec(batch + 1, history + more)
    low = cost.t_mixed(increment, history, batch, history)
    assert 0 < low <= cost.t_mixed(increment + more, history + more, batch + 1, history + more)
    assert cost.t_kv(history) <= cost.t_kv(history + more)


def test_what_a_profile_says_of_itself() -> None:
    profile = open_profile(H100)
    assert (profile.model, profile.device, profile.engine) == ("Qwen3-32B", "h100_sxm", "vllm")
    assert profile.kv_bytes_per_token == 262_144
    assert "aiconfigurator" in profile.provenance["source"]
    estimate = open_profile("gpu:h20/Qwen3-32B/tp1")
    assert estimate.engine == "roofline"
    assert "never measured" in estimate.provenance["method"]


def test_kv_takes_the_link() -> None:
    # Mooncake: 290 MB of KV in 2.51 ms, over 8 cards of 25 GB/s.
    tokens = 290_000_000 // 262_144
    eight = open_profile("gpu:h20/Qwen3-32B/tp8").cost
    assert eight.t_kv(tokens) == pytest.approx(2.51e-3, rel=0.03)
    one = open_profile("gpu:h20/Qwen3-32B/tp1").cost
    assert one.kv.token_s == pytest.approx(8 * eight.kv.token_s)
    for name in profile_names():
        cost = open_profile(name).cost
        assert cost.t_kv(4096, Link.SAME_HOST) < cost.t_kv(4096, Link.CROSS_HOST)


@pytest.mark.parametrize("name", TABLES)
def test_a_chunk_beside_decodes_attends_to_its_history(name: str) -> None:
    """The tables leave it out of their mixed steps; the prefills of the same table have it."""
    cost = open_profile(name).cost
    for chunk in (512, 2048):
        beside = cost.t_mixed(chunk, 65_536, 8, 8 * 4096) - cost.t_mixed(chunk, 0, 8, 8 * 4096)
        alone = cost.t_pre(65_536, chunk) - cost.t_pre(0, chunk)
        assert beside == pytest.approx(alone, rel=0.15)


def test_names_and_files_alike(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, open_profile(H100))
    assert open_profile(str(path)) == open_profile(H100)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("gpu:h100/Qwen3-32B/tp1", "gpu:h100_sxm/Qwen3-32B/tp1"),
        ("gpu:H100_SXM/qwen3-32b/tp2", "gpu:h100_sxm/Qwen3-32B/tp2"),
        ("h20/mixtral", "gpu:h20/mixtral-8x7b/"),
    ],
)
def test_an_unknown_name_is_told_with_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(AmpdError) as caught:
        open_profile(wrong)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    (violation,) = caught.value.violations
    assert violation.field == wrong
    assert near in violation.description
    assert violation.description.count("gpu:") <= 3


def test_a_name_like_none_leads_to_the_list() -> None:
    with pytest.raises(AmpdError, match="nope: no such built-in profile; `ampdctl profile list`"):
        open_profile("nope")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token"),
        ({"prefill_ms": {}}, "prefill_ms"),
        ({"decode_step_ms": {"b1x1024": 1.0}}, "decode_step_ms['b1x1024']"),
        ({"mixed_ms": {"chunk1+b1@1": -1.0}}, "mixed_ms['chunk1+b1@1']"),
    ],
)
def test_a_malformed_table_names_the_place(change: dict[str, object], where: str) -> None:
    good = {
        "prefill_ms": {"0+1": 1.0},
        "decode_step_ms": {"b1@1": 1.0},
        "mixed_ms": {"chunk1+b1@1": 1.0},
        "kv_bytes_per_token": 1,
    }
    read_table(good)
    with pytest.raises(ValueError, match="^" + where.replace("[", r"\[").replace("+", r"\+")):
        read_table(good | change)


@pytest.mark.parametrize("key", [key for key in tables() if not key.gpu.startswith("a100")])
def test_the_roofline_meets_tables_of_gpus_that_have_one(key: TableKey) -> None:
    hbm = {"h100_sxm": 3.35e12, "h200_sxm": 4.8e12}[key.gpu]
    gpu = Gpu(key.gpu, 989e12, hbm, mfu_gemm=0.78, mfu_attention=0.6, mbu=0.85)
    model = next(model for model in MODELS if model.name == key.short_model)
    table, estimate = tables()[key].with_chunk_history(), roofline_table(gpu, model, key.tp)
    assert estimate.kv_bytes_per_token == table.kv_bytes_per_token
    for measured, estimated, bound in (
        (table.prefills, estimate.prefills, 0.30),
        (table.decodes, estimate.decodes, 0.10),
        (table.mixed, estimate.mixed, 0.33),
    ):
        seconds = {_shape(step): step.seconds for step in estimated}
        off = sorted(abs(seconds[_shape(step)] / step.seconds - 1) for step in measured)
        assert off[len(off) // 2] < bound
        assert off[-1] < 0.65


def _shape(step: StepSample) -> tuple[int, ...]:
    return (step.chunk_tokens, step.chunk_history_tokens, step.batch, step.context_tokens)
