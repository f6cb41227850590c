"""What a service refuses before it starts: as usage, with the setting named."""

from __future__ import annotations

from types import ModuleType

import pytest

from ampd.adapters.tools.limits import ToolLimits
from ampd.runtime.settings import ServiceSettings, load
from services.coordinator import main as coordinator_main
from services.coordinator.settings import CoordinatorSettings
from services.decode import main as decode_main
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


@pytest.mark.parametrize(
    ("program", "flags", "said"),
    [
        (decode_main, {"--tools": "nothing"}, "no installed package registers 'nothing'"),
        (decode_main, {"--tool-services": "h:0"}, "tool_services"),
        (decode_main, {"--max-tool-output-bytes": "4194305"}, "max_tool_output_bytes"),
        (decode_main, {"--max-running-tools": "0"}, "max_running_tools"),
        (coordinator_main, {"--tool-call-parser": "nothing"}, "none of hermes"),
    ],
)
def test_tools_that_cannot_be_are_usage(
    program: ModuleType,
    flags: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["x", *(w for pair in (GOOD | flags).items() for w in pair)])
    # It is nothing to this process how a program logs.
    monkeypatch.setattr(program, "configure_logging", lambda **_: None)
    with pytest.raises(SystemExit) as caught:
        program.main()
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_tools_are_a_list_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPD_TOOLS", '["a", "b"]')
    settings = load(DecodeSettings, [word for pair in GOOD.items() for word in pair])
    assert settings.tools == ("a", "b")
    assert settings.tool_limits() == ToolLimits(timeout_s=30.0, max_output_bytes=65536)
