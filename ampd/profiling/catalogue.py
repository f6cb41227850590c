"""The profiles that come with AMPD, by name, wherever a profile file can be named.

`gpu:h100_sxm/Qwen3-32B/tp1`: GPU, model, tensor-parallel degree. They are fitted when asked for
(some 0.1 s), from published tables (A100, H100, H200) or a roofline (H20); the profile's
provenance says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Final

from ampd.core.errors import invalid_field
from ampd.profiling.fit import FitReport
from ampd.profiling.gpu_tables import StepTable, TableKey, tables
from ampd.profiling.links import kv_lines
from ampd.profiling.profile_file import Profile, read_profile
from ampd.profiling.roofline import GPUS, MODELS, TP_DEGREES, roofline_table

PREFIX: Final = "gpu:"
"""What tells a name from a file."""
MAX_NEAR_NAMES: Final = 3
NEAR: Final = 0.6
"""How alike (0 to 1) a name is that may have been meant."""

_LINK: Final = (
    "estimated: data-sheet rates of the GPUs' links, start-up and share of the rate from "
    "Mooncake's published transfers (ampd/profiling/links.py)"
)
_TABLE: Final[Mapping[str, str]] = {
    "method": "fitted to published operator tables",
    "source": "NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0)",
    "mixed": "the table's mixed steps, which lack the attention of the chunk over its history, "
    "plus what the table's prefills say of it (derived)",
    "kv": _LINK,
    "limits": "histories up to 65,536 tokens; whether the model fits the memory is not checked",
}
_ROOFLINE: Final[Mapping[str, str]] = {
    "method": "roofline: estimated, never measured; the fit's errors are against the estimate",
    "source": "data sheets and public measurements (ampd/profiling/roofline.py)",
    "kv": _LINK,
    "limits": "whether the model fits the memory is not checked",
}


def profile_names() -> tuple[str, ...]:
    """All built-in profiles."""
    return tuple(built_in_profiles())


def open_profile(source: str) -> Profile:
    """The profile of that name or in that file.

    Raises INVALID_FIELD for an unknown name, saying which are near, and what `read_profile`
    raises for a file.
    """
    named = source.startswith(PREFIX) or not (Path(source).suffix or Path(source).exists())
    if not named:
        return read_profile(Path(source))
    key = built_in_profiles().get(source)
    if key is None:
        raise invalid_field(source, f"no such built-in profile; {_near(source)}")
    return _fitted(key)


def _near(name: str) -> str:
    """What may have been meant."""
    names = {known.lower(): known for known in profile_names()}
    matches = get_close_matches(name.lower(), names, MAX_NEAR_NAMES, NEAR)
    parts = [part for part in name.lower().replace(PREFIX, "").split("/") if part]
    # Or every part of it is part of a name: h100, qwen.
    matches += [known for known in names if parts and all(part in known for part in parts)]
    if not matches:
        return "`ampdctl profile list` shows all"
    near = list(dict.fromkeys(names[match] for match in matches))[:MAX_NEAR_NAMES]
    return f"near: {', '.join(near)} (`ampdctl profile list` shows all)"


@cache
def built_in_profiles() -> Mapping[str, TableKey]:
    """What each name stands for; the engine of an estimate is `roofline`."""
    estimated = [
        TableKey(gpu.name, "roofline", model.name, tp)
        for gpu in GPUS
        for model in MODELS
        for tp in TP_DEGREES
    ]
    return {
        f"{PREFIX}{key.gpu}/{key.short_model}/tp{key.tp}": key for key in [*tables(), *estimated]
    }


def leave_one_out(name: str) -> FitReport:
    """The errors of a built-in profile's functions on every point of its table, each by a fit to
    all others. KeyError for an unknown name."""
    table, _ = _steps(built_in_profiles()[name])
    return table.fit(folds=len(table.steps))[1]


@cache
def _fitted(key: TableKey) -> Profile:
    table, provenance = _steps(key)
    cost, report = table.fit()
    cross_host, same_host = kv_lines(key.gpu, key.tp, table.kv_bytes_per_token)
    return Profile(
        model=key.short_model,
        device=key.gpu,
        engine=key.engine,
        tp=key.tp,
        cost=replace(cost, kv=cross_host, kv_same_host=same_host),
        fit=report,
        samples=table.steps,
        kv_bytes_per_token=table.kv_bytes_per_token,
        provenance=dict(provenance),
    )


def _steps(key: TableKey) -> tuple[StepTable, Mapping[str, str]]:
    table = tables().get(key)
    if table is not None:
        return table.with_chunk_history(), _TABLE
    gpu = next(gpu for gpu in GPUS if gpu.name == key.gpu)
    model = next(model for model in MODELS if model.name == key.model)
    return roofline_table(gpu, model, key.tp), _ROOFLINE
