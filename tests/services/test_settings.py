"""What a service refuses before it starts: as usage, with the setting named."""

from __future__ import annotations

import pytest

from ampd.runtime.settings import ServiceSettings, load
from services.coordinator.settings import CoordinatorSettings
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings

GOOD = {"--listen": "h:1", "--model": "/m", "--store-url": "redis://h"}


@pytest.mark.parametrize("settings", [CoordinatorSettings, DecodeSettings, PrefillSettings])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--store-url", "ftp://h"),
        ("--store-url", "h:6379"),
        ("--worker-id", "a b"),
        ("--worker-id", "x" * 65),
        ("--worker-id", ""),
        ("--listen", "h"),
        ("--listen", ":1"),
        ("--listen", "h:0"),
        ("--listen", "h:65536"),
        ("--listen", "h:1x"),
        ("--advertise", "h:99999"),
    ],
)
def test_a_setting_that_cannot_work_is_usage(
    settings: type[ServiceSettings], flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def arguments(flags: dict[str, str]) -> list[str]:
        return [word for pair in flags.items() for word in pair]

    load(settings, arguments(GOOD), program="ampd-x")
    with pytest.raises(SystemExit) as caught:
        load(settings, arguments(GOOD | {flag: value}), program="ampd-x")
    assert caught.value.code == 2
    assert f"flag: {flag[2:].replace('-', '_')}: " in capsys.readouterr().err


@pytest.mark.parametrize("settings", [DecodeSettings, PrefillSettings])
@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"--engine": "other"}, "engine"),
        ({"--profile": "gpu:none"}, "profile"),
        ({"--profile": "/nowhere/p.yaml"}, "profile"),
        ({"--time-scale": "-1"}, "time_scale"),
        ({"--time-scale": "inf"}, "time_scale"),
        ({"--kv-transport": "tcp"}, "kv_transport"),
        ({"--stored-bytes-per-token": "24"}, "stored_bytes_per_token"),
        ({"--kv-bytes-per-token": "0"}, "kv_bytes_per_token"),
        ({"--kv-bytes-per-token": "100000000"}, "kv_cache_bytes"),
        ({"--profile": "gpu:h20/Qwen3-32B/tp1", "--kv-cache-bytes": "8000000"}, "kv_cache_bytes"),
    ],
)
def test_an_emulated_engine_that_cannot_be_is_usage(
    settings: type[ServiceSettings],
    flags: dict[str, str],
    field: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = GOOD | {"--engine": "emulated"} | flags
    with pytest.raises(SystemExit) as caught:
        load(settings, [word for pair in wanted.items() for word in pair], program="ampd-x")
    assert caught.value.code == 2
    assert f": {field}: " in capsys.readouterr().err


def test_an_emulated_worker_counts_in_its_profiles_bytes() -> None:
    def settings(*flags: str) -> PrefillSettings:
        good = [word for pair in GOOD.items() for word in pair]
        return load(PrefillSettings, [*good, "--engine", "emulated", *flags])

    assert settings().modelled_kv_bytes_per_token == 16_384
    h100 = ("--profile", "gpu:h100_sxm/Qwen3-32B/tp1")
    assert settings(*h100).modelled_kv_bytes_per_token == 262_144
    assert settings(*h100, "--kv-bytes-per-token", "9").modelled_kv_bytes_per_token == 9
