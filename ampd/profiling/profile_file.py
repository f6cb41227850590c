"""Profile files: the cost model of one engine, with what it was fitted from (spec 3).

YAML or JSON by the file's ending. Planner, simulator, workers and the emulated engine read
them; `ampdctl profile run` and a worker's self-measurement write them.

Version 2 has T_kv by link, transfers and held-out samples, and T_mixed in chunk and batch
together. A file of version 1 is read as what it says: one line for all links.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
import yaml

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, invalid_field
from ampd.ports import StepSample
from ampd.profiling.fit import FitReport, KvSample

FORMAT_VERSION: Final = 2
"""Of what is written."""
OLDEST_VERSION: Final = 1
"""That is read."""
YAML_ENDINGS: Final = (".yaml", ".yml")
JSON_ENDING: Final = ".json"
MAX_FILE_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Profile:
    """What one engine costs. `engine` is name and version, `device` what it ran on, `tp` its
    tensor-parallel degree; `provenance` says when, where and how it was measured."""

    model: str
    device: str
    engine: str
    cost: CostModel
    tp: int = 1
    fit: FitReport = FitReport()
    samples: tuple[StepSample, ...] = ()
    """Steps that the cost model was fitted to."""
    held_out: tuple[StepSample, ...] = ()
    """Steps that the fit has not seen: its errors are those on them."""
    kv_samples: tuple[KvSample, ...] = ()
    kv_held_out: tuple[KvSample, ...] = ()
    kv_bytes_per_token: int = 0
    """0: not known."""
    provenance: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def fits(self, *, model: str, device: str, engine: str, tp: int = 1) -> bool:
        """Whether it was measured on just this."""
        return (self.model, self.device, self.engine, self.tp) == (model, device, engine, tp)


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises OSError when the file cannot be read; INVALID_FIELD naming the path, and the line or
    the field, when what it holds is not a profile.
    """
    require_ending(path)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise invalid_field(str(path), f"larger than {MAX_FILE_BYTES} bytes")
    try:
        text = path.read_text(encoding="utf-8")
        raw = msgspec.json.decode(text) if path.suffix == JSON_ENDING else yaml.safe_load(text)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise invalid_field(str(path), str(error)) from error
    except yaml.YAMLError as error:
        raise invalid_field(str(path), _yaml_place(error)) from error
    if not isinstance(raw, dict):
        raise invalid_field(str(path), f"a profile is a table of fields, not {raw!r:.40}")
    version = raw.get("format_version")
    if version not in range(OLDEST_VERSION, FORMAT_VERSION + 1):
        must = f"must be {OLDEST_VERSION} to {FORMAT_VERSION}, not {version!r}"
        raise _wrong(path, "format_version", must)
    _require_known(path, "", raw, Profile)
    try:
        return msgspec.convert({**raw, "format_version": FORMAT_VERSION}, Profile)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise _wrong(path, place.rstrip("`"), message) from error


def write_profile(path: Path, profile: Profile) -> None:
    """Replace the file in one move: a reader sees the old one or the new one.

    Raises OSError, and INVALID_FIELD for an ending that is neither YAML nor JSON.
    """
    require_ending(path)
    builtins = msgspec.to_builtins(profile)
    if path.suffix == JSON_ENDING:
        text = msgspec.json.format(msgspec.json.encode(builtins), indent=2).decode() + "\n"
    else:
        text = yaml.safe_dump(builtins, sort_keys=False, default_flow_style=None, width=100)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def require_ending(path: Path) -> None:
    """INVALID_FIELD for a name that is no profile's."""
    if path.suffix not in (*YAML_ENDINGS, JSON_ENDING):
        raise invalid_field(str(path), "a profile's name ends in .yaml, .yml or .json")


def _require_known(path: Path, at: str, raw: dict[str, Any], kind: type) -> None:
    """A misspelt field would silently be its default: refuse it, in nested tables as well."""
    known = get_type_hints(kind)
    for name, value in raw.items():
        if name not in known:
            raise _wrong(path, f"{at}{name}", f"unknown field; known: {', '.join(known)}")
        if isinstance(value, dict):
            for part in get_args(known[name]) or (known[name],):  # of a union: its table
                if isinstance(part, type) and is_dataclass(part):
                    _require_known(path, f"{at}{name}.", value, part)


def _wrong(path: Path, name: str, description: str) -> AmpdError:
    return invalid_field(f"{path}: {name}" if name else str(path), description)


def _yaml_place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "not YAML"
    return f"line {mark.line + 1}: {problem}" if mark else str(error)
