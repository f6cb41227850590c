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
