from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from ampd.runtime.settings import ServiceSettings, SettingsPart, load


class Server(SettingsPart):
    address: str = "127.0.0.1:0"
    """host:port."""
    calls: int = Field(default=4, ge=1)
    """Most at once."""


class Settings(ServiceSettings):
    server: Server = Server()
    """The server."""
    name: str = "x"
    """Its name."""
    store_url: str = "redis://127.0.0.1"
    """Where."""
    token: SecretStr = SecretStr("")
    """A secret."""


class Strict(ServiceSettings):
    model_name: str


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load(Settings, argv, program="ampd-x")
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


def test_defaults() -> None:
    settings = load(Settings, [])
    assert settings.server == Server()
    assert (settings.log_style, settings.log_level) == ("json", "info")


def test_flags_beat_the_environment_beats_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("name: file\nserver:\n  calls: 7\n  address: file:1\nlog_level: debug\n")
    monkeypatch.setenv("AMPD_SERVER__ADDRESS", "env:1")
    monkeypatch.setenv("AMPD_NAME", "env")
    settings = load(Settings, ["--config", str(config), "--name", "flag"])
    assert settings.name == "flag"
    assert settings.server == Server(address="env:1", calls=7)
    assert settings.log_level == "debug"


def test_a_flag_for_every_key() -> None:
    settings = load(Settings, ["--server.calls", "9", "--log-style=console", "--token", "t"])
    assert settings.server.calls == 9
    assert settings.log_style == "console"
    assert settings.token.get_secret_value() == "t"


def test_an_unknown_key_of_the_file_names_file_and_key(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("server:\n  adress: a\nnam: b\n")
    error = refused(capsys, "--config", str(config))
    assert f"ampd-x: {config}: server.adress: unknown key" in error
    assert "did you mean server.address?" in error
    assert f"{config}: nam: unknown key (did you mean name?)" in error


def test_a_wrong_value_names_where_it_stands(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("server: {calls: 0}\n")
    assert f"{config}: server.calls: " in refused(capsys, "--config", str(config))
    monkeypatch.setenv("AMPD_SERVER__CALLS", "many")
    assert "environment: server.calls: " in refused(capsys, "--config", str(config))
    assert "flag: server.calls: " in refused(capsys, "--server.calls", "-1")


@pytest.mark.parametrize(
    ("text", "where"),
    [("a: [", ":2: not YAML"), ("- a\n", ": expected keys"), ("1: 2\n", ": expected keys")],
)
def test_a_malformed_file_is_named(
    config: Path, capsys: pytest.CaptureFixture[str], text: str, where: str
) -> None:
    config.write_text(text + "\n" * (text == "a: ["))
    assert f"{config}{where}" in refused(capsys, "--config", str(config))


def test_a_missing_file_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{config}: No such file" in refused(capsys, "--config", str(config))


def test_an_empty_file_is_no_settings(config: Path) -> None:
    config.write_text("# nothing\n")
    assert load(Settings, ["--config", str(config)]).name == "x"


def test_unknown_flags_and_abbreviations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--bogus" in refused(capsys, "--bogus", "1")
    assert "--nam" in refused(capsys, "--nam", "1")


def test_a_required_setting_says_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Strict, [], program="ampd-x")
    assert caught.value.code == 2
    assert "model_name: required (as a flag: --model-name)" in capsys.readouterr().err


def test_print_config_masks_secrets_and_can_be_read_again(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--print-config", "--store-url", "redis://u:p4ss@h:1/0", "--token", "t0ken"]
    with pytest.raises(SystemExit) as caught:
        load(Settings, argv)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "p4ss" not in out
    assert "t0ken" not in out
    assert "redis://***@h:1/0" in out
    config.write_text(out)
    assert load(Settings, ["--config", str(config)]).store_url == "redis://***@h:1/0"


def test_other_variables_of_the_prefix_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of one host share an environment."""
    monkeypatch.setenv("AMPD_OF_ANOTHER_SERVICE", "1")
    assert load(Settings, []).name == "x"


def test_a_variable_that_is_no_json_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMPD_SERVER", "localhost")
    said = refused(capsys)
    assert said.startswith("ampd-x: environment: ")
    assert '"server"' in said
