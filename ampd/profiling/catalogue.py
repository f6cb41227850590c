"""The profiles that come with AMPD, by name, wherever a profile file can be named.

`gpu:h100_sxm/Qwen3-32B/tp1`: GPU, model, tensor-parallel degree. They are fitted when asked for
(some 0.1 s), from published tables (A100, H100, H200) or a roofline (H20); the profile's
provenance says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from ampd.core.errors import invalid_field
from ampd.profiling.gpu_tables import StepTable, TableKey, tables
from ampd.profiling.links import kv_lines
from ampd.profiling.profile_file import Profile, read_profile
from ampd.profiling.roofline import GPUS, MODELS, TP_DEGREES, roofline_table

PREFIX: Final = "gpu:"
"""What tells a name from a file."""

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

    Raises INVALID_FIELD for an unknown name, saying which are known, and what `read_profile`
    raises for a file.
    """
    if not source.startswith(PREFIX):
        return read_profile(Path(source))
    key = built_in_profiles().get(source)
    if key is None:
        known = ", ".join(profile_names())
        raise invalid_field(source, f"no such built-in profile; known: {known}")
    return _fitted(key)


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
