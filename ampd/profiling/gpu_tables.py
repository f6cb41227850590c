"""Cost models of GPUs from published operator tables: built-in profiles that need no GPU.

The table in `data/gpu_tables.json` (NVIDIA aiconfigurator-core, see NOTICE) has milliseconds of
engine steps under the key `gpu|engine|model|tpN`:

    prefill_ms      "H+I"             I new tokens over H cached ones
    decode_step_ms  "bB@L"            B sequences with context L each
    mixed_ms        "chunkC+bB@L"     C prompt tokens (context L) beside B sequences

and `kv_bytes_per_token`. It does not say whether the model fits the GPU's memory.

Its mixed steps leave out the attention of the chunk over the context before it: beside the same
decodes a chunk behind 4,096 tokens takes what it takes behind 16,384. Its prefills have it. So
each mixed step gets what T_pre of the same table says that those tokens before the chunk cost
(`with_chunk_history`): derived, not measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Final

from ampd.core.cost_model import CostModel
from ampd.ports import StepSample
from ampd.profiling.fit import FOLDS, FitReport, fit_decode, fit_mixed, fit_prefill

TABLE_FILE: Final = "gpu_tables.json"
_PREFILL: Final = re.compile(r"(?P<history>\d+)\+(?P<chunk>\d+)")
_DECODE: Final = re.compile(r"b(?P<batch>\d+)@(?P<context>\d+)")
_MIXED: Final = re.compile(r"chunk(?P<chunk>\d+)\+b(?P<batch>\d+)@(?P<context>\d+)")


@dataclass(frozen=True, slots=True)
class StepTable:
    """The steps of one GPU, engine, model and TP degree, each kind at least once."""

    prefills: tuple[StepSample, ...]
    decodes: tuple[StepSample, ...]
    mixed: tuple[StepSample, ...]
    kv_bytes_per_token: int

    def with_chunk_history(self) -> StepTable:
        """The mixed steps with the attention of their chunk over the tokens before it, as the
        prefills of this table have it."""
        prefill, _ = fit_prefill(self.prefills)
        t_pre = CostModel(prefill=prefill).t_pre

        def history_s(step: StepSample) -> float:
            chunk = step.chunk_tokens
            return t_pre(step.chunk_history_tokens, chunk) - t_pre(0, chunk)

        mixed = tuple(replace(step, seconds=step.seconds + history_s(step)) for step in self.mixed)
        return replace(self, mixed=mixed)

    def fit(self, folds: int = FOLDS) -> tuple[CostModel, FitReport]:
        """The three functions of engine steps, their errors by that many folds.

        T_mixed is also fitted to the decode steps that are no smaller than the mixed ones: what
        a mixed step tends to as its chunk shrinks. (With fewer sequences a model of experts
        loads fewer of them than beside any chunk.)"""
        prefill, prefill_fit = fit_prefill(self.prefills, folds)
        decode, decode_fit = fit_decode(self.decodes, folds)
        smallest = min(step.batch for step in self.mixed)
        limits = [step for step in self.decodes if step.batch >= smallest]
        mixed, mixed_fit = fit_mixed([*self.mixed, *limits], folds)
        return (
            CostModel(prefill, decode, mixed),
            FitReport(prefill=prefill_fit, decode=decode_fit, mixed=mixed_fit),
        )

    @property
    def steps(self) -> tuple[StepSample, ...]:
        """All of them."""
        return (*self.prefills, *self.decodes, *self.mixed)


def read_table(entry: Mapping[str, object]) -> StepTable:
    """The steps of one key's value. ValueError when it is not of that form."""
    kv_bytes = entry.get("kv_bytes_per_token")
    if not isinstance(kv_bytes, int) or kv_bytes <= 0:
        raise ValueError(f"kv_bytes_per_token: must be a positive number, not {kv_bytes!r}")
    return StepTable(
        prefills=_steps(entry, "prefill_ms", _PREFILL, _prefill_step),
        decodes=_steps(entry, "decode_step_ms", _DECODE, _decode_step),
        mixed=_steps(entry, "mixed_ms", _MIXED, _mixed_step),
        kv_bytes_per_token=kv_bytes,
    )


@dataclass(frozen=True, slots=True)
class TableKey:
    """`gpu|engine|model|tpN`."""

    gpu: str
    engine: str
    model: str
    tp: int

    @property
    def short_model(self) -> str:
        """Without its owner."""
        return self.model.rpartition("/")[2]


@cache
def tables() -> Mapping[TableKey, StepTable]:
    """The tables that come with AMPD."""
    text = (resources.files("ampd.profiling") / "data" / TABLE_FILE).read_text(encoding="utf-8")
    found = {}
    for key, entry in json.loads(text).items():
        gpu, engine, model, tp = key.split("|")
        found[TableKey(gpu, engine, model, int(tp.removeprefix("tp")))] = read_table(entry)
    return found


def _steps(
    entry: Mapping[str, object],
    kind: str,
    form: re.Pattern[str],
    step: Callable[[Mapping[str, int], float], StepSample],
) -> tuple[StepSample, ...]:
    rows = entry.get(kind)
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(f"{kind}: must be a table of milliseconds")
    steps = []
    for sizes, milliseconds in rows.items():
        match = form.fullmatch(sizes)
        if match is None or not isinstance(milliseconds, int | float) or milliseconds <= 0:
            raise ValueError(f"{kind}[{sizes!r}]: not milliseconds of {form.pattern}")
        numbers = {name: int(digits) for name, digits in match.groupdict().items()}
        steps.append(step(numbers, milliseconds / 1e3))
    return tuple(steps)


def _prefill_step(sizes: Mapping[str, int], seconds: float) -> StepSample:
    return StepSample(sizes["chunk"], sizes["history"], 0, 0, seconds)


def _decode_step(sizes: Mapping[str, int], seconds: float) -> StepSample:
    return StepSample(0, 0, sizes["batch"], sizes["batch"] * sizes["context"], seconds)


def _mixed_step(sizes: Mapping[str, int], seconds: float) -> StepSample:
    batch, context = sizes["batch"], sizes["context"]
    return StepSample(sizes["chunk"], context, batch, batch * context, seconds)
