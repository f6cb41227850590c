"""Settings of a process: a YAML file, then AMPD_... variables, then flags; the later one wins.

    class CoordinatorSettings(ServiceSettings):
        server: ServerSettings = ServerSettings()

    settings = load(CoordinatorSettings, argv)    # --config FILE, --server.address HOST:PORT

`server.address` is the key `address` under `server` in the file, `AMPD_SERVER__ADDRESS` in the
environment and `--server.address` as a flag. A wrong or unknown key ends the process with exit
code 2, naming where it stands and what is wrong with it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from ampd.runtime.logging import LogLevel, LogStyle

ENV_PREFIX: Final = "AMPD_"
ENV_DELIMITER: Final = "__"
EXIT_USAGE: Final = 2
MAX_FILE_BYTES: Final = 1024 * 1024

_URL_SECRET: Final = re.compile(r"(?<=://)[^/@\s]*@")


class SettingsPart(BaseModel):
    """A group of settings below one key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ServiceSettings(BaseSettings):
    """What every process has. A subclass adds its own parts; `load` makes one."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        use_attribute_docstrings=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
    )

    log_style: LogStyle = "json"
    """JSON lines, or `console` for reading."""
    log_level: LogLevel = "info"
    """Least level that is logged."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values given alone: `load` merges the sources, so that an error can name its own."""
        return (init_settings,)


S = TypeVar("S", bound=ServiceSettings)


def load(settings_class: type[S], argv: Sequence[str], *, program: str = "ampd") -> S:
    """The settings of a process from `argv` (without the program's name) and its environment.

    Ends the process by SystemExit: 2 for settings that are wrong, 0 after `--print-config`
    (YAML on stdout, secrets masked) and `--help`.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        epilog=f"Every setting is a key of the file, a variable {ENV_PREFIX}<KEY> "
        f"({ENV_DELIMITER} between the parts of a key) and a flag.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as YAML and end"
    )
    flags_source = CliSettingsSource[Any](
        settings_class, cli_parse_args=list(argv), root_parser=parser
    )
    own = parser.parse_args(list(argv))
    flags = _known(settings_class, flags_source())
    try:
        environment = EnvSettingsSource(settings_class)()
    except SettingsError as error:
        # It names the field; the cause is what its value lacks to be JSON.
        _fail(program, [f"environment: {error}: {error.__cause__}"])
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("flag", flags),
        ("environment", environment),
    ]
    if own.config is not None:
        try:
            sources.append((str(own.config), _read_file(own.config)))
        except _ConfigFileError as error:
            _fail(program, [str(error)])
    merged: dict[str, Any] = {}
    for _, values in reversed(sources):
        merged = _merge(merged, values)
    try:
        settings = settings_class(**merged)
    except ValidationError as error:
        _fail(program, _explain(settings_class, error, sources))
    if own.print_config:
        sys.stdout.write(to_yaml(settings))
        raise SystemExit(0)
    return settings


def to_yaml(settings: BaseModel) -> str:
    """All settings as YAML. SecretStr values and passwords in URLs are masked."""
    return yaml.safe_dump(_mask(settings.model_dump(mode="json")), sort_keys=False)


class _ConfigFileError(Exception):
    pass


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _ConfigFileError(f"{path}: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise _ConfigFileError(f"{path}: over {MAX_FILE_BYTES} bytes")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise _ConfigFileError(f"{path}{line}: not YAML: {problem}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise _ConfigFileError(f"{path}: expected keys and values")
    return data


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merge(below, value)
        merged[key] = value
    return merged


def _known(settings_class: type[BaseSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the command line has beside the settings (--config, --print-config)."""
    return {key: value for key, value in values.items() if key in settings_class.model_fields}


def _explain(
    settings_class: type[BaseSettings],
    error: ValidationError,
    sources: Iterable[tuple[str, Mapping[str, Any]]],
) -> list[str]:
    """One line per wrong setting: where it stands, its key, what is wrong."""
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        path = tuple(str(part) for part in detail["loc"])
        where = next((name for name, values in sources if _holds(values, path)), "settings")
        message = detail["msg"]
        if detail["type"] == "extra_forbidden":
            message = "unknown key" + _hint(settings_class, path)
        elif detail["type"] == "missing":
            where = "settings"
            message = f"required (as a flag: --{'.'.join(path).replace('_', '-')})"
        lines.append(f"{where}: {'.'.join(path)}: {message}")
    return lines


def _holds(values: Any, path: Sequence[str]) -> bool:
    for part in path:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, Sequence) and not isinstance(values, str) and part.isdigit():
            return int(part) < len(values)
        else:
            # Below a union pydantic's path names types, which stand in no source.
            return not isinstance(values, Mapping)
    return True


def _hint(settings_class: type[BaseModel], path: Sequence[str]) -> str:
    model: Any = settings_class
    for part in path[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        model = field.annotation if field is not None else None
    close = difflib.get_close_matches(path[-1], getattr(model, "model_fields", {}), n=1)
    return f" (did you mean {'.'.join([*path[:-1], close[0]])}?)" if close else ""


def _mask(value: Any) -> Any:
    match value:
        case dict():
            return {key: _mask(part) for key, part in value.items()}
        case list():
            return [_mask(part) for part in value]
        case str():
            return _URL_SECRET.sub("***@", value)
        case _:
            return value


def _fail(program: str, lines: Iterable[str]) -> NoReturn:
    for line in lines:
        sys.stderr.write(f"{program}: {line}\n")
    raise SystemExit(EXIT_USAGE)
