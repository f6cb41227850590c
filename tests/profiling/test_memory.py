"""KV memory of built-in profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens


@pytest.mark.parametrize(
    ("model", "thousands"),
    [
        ("Qwen3-32B", (68, 386, 1023, 2295)),
        ("Meta-Llama-3.1-70B", (0, 78, 587, 1606)),
        ("mixtral-8x7b", (0, 560, 1833, 4378)),
    ],
)
def test_what_an_h20_has_room_for(model: str, thousands: tuple[int, ...]) -> None:
    for tp, expected in zip((1, 2, 4, 8), thousands, strict=True):
        tokens = kv_capacity_tokens(open_profile(f"gpu:h20/{model}/tp{tp}"))
        assert tokens is not None
        assert round(tokens / 1000) == expected


def test_nobody_knows_of_other_devices_and_models() -> None:
    known = open_profile("gpu:h20/Qwen3-32B/tp1")
    assert kv_capacity_tokens(replace(known, device="cpu")) is None
    assert kv_capacity_tokens(replace(known, model="tiny")) is None
    assert kv_capacity_tokens(replace(known, kv_bytes_per_token=0)) is None
