"""The cells of the benchmark: a model on GPUs under a workload, and how long it is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from ampd.core.errors import invalid_field
from ampd.profiling.catalogue import PREFIX, open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.profiling.roofline import TP_DEGREES
from ampd.sim.workload import (
    AGENT_SESSIONS,
    MAX_AGENT_CONTEXT_TOKENS,
    DrawnWorkload,
    open_workload,
)

QWEN: Final = "Qwen3-32B"
MODELS: Final = (QWEN, "Meta-Llama-3.1-70B", "mixtral-8x7b")
GPUS: Final = {"ToolBench": 8, "HotpotQA": 8, "DuReader": 16, "GAIA": 32}
"""H20s that a workload gets, as in the paper."""
AGENT_GPU: Final = "h200_sxm"
AGENT_GPUS: Final = 16
SESSIONS_A_WORKER: Final = 16
"""A worker has KV memory for so many whole sessions of mean length, at least."""
CONTEXTS_A_WORKER: Final = 4
"""And for so many of the longest contexts, where a workload has a longest one."""
WARM_UP_S: Final = 60.0
LEAST_WARM_UP_S: Final = 15.0
"""Sessions that arrive before do not count. A short horizon has a quarter of itself, but no less
than sessions need to fill the decode workers."""
STEADY_FACTOR: Final = 10.0
"""Workloads that start in steady state have rounds minutes apart: they are counted for so many
times the others' horizon."""


@dataclass(frozen=True, slots=True)
class Span:
    """Counted is what arrives from `warm_up_s` to `end_s`, seconds of simulated time."""

    warm_up_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """`gpus` of one kind in workers of `tp`, each for prefill or for decode."""

    model: str
    workload: str
    gpu: str
    gpus: int
    tp: int

    @property
    def name(self) -> str:
        """`Qwen3-32B/ToolBench`."""
        return f"{self.model}/{self.workload}"

    @property
    def profile(self) -> str:
        """The built-in profile of its workers."""
        return f"{PREFIX}{self.gpu}/{self.model}/tp{self.tp}"

    @property
    def workers(self) -> int:
        """Of both kinds together."""
        return self.gpus // self.tp

    @property
    def balanced(self) -> int:
        """Prefill workers of the layout that is the same for all policies: half of the workers."""
        return self.workers // 2

    def span(self, counted_s: float) -> Span:
        """With so many counted seconds, were it a workload without a steady state."""
        warm_up_s = min(WARM_UP_S, max(LEAST_WARM_UP_S, counted_s / 4))
        if open_workload(self.workload).steady:
            counted_s *= STEADY_FACTOR
        return Span(warm_up_s, warm_up_s + counted_s)


@cache
def cells() -> tuple[Cell, ...]:
    """All of them: three models times four workloads on H20, and recorded agent sessions."""
    drawn = [_cell(model, name, "h20", gpus) for model in MODELS for name, gpus in GPUS.items()]
    return (*drawn, _cell(QWEN, AGENT_SESSIONS, AGENT_GPU, AGENT_GPUS))


def chosen_cells(names: tuple[str, ...]) -> tuple[Cell, ...]:
    """Those whose name begins or ends like one of the names (a model, a workload or both), in
    the order of `cells`; all without names. INVALID_FIELD for a name that is none."""
    for name in names:
        if not any(_is_named(cell, name) for cell in cells()):
            known = ", ".join(cell.name for cell in cells())
            raise invalid_field("cells", f"{name} is none of {known}, nor a part of one")
    return tuple(
        cell for cell in cells() if not names or any(_is_named(cell, name) for name in names)
    )


def _is_named(cell: Cell, name: str) -> bool:
    return name in (cell.name, cell.model, cell.workload)


def _cell(model: str, workload: str, gpu: str, gpus: int) -> Cell:
    return Cell(model, workload, gpu, gpus, least_tp(model, workload, gpu))


def least_tp(model: str, workload: str, gpu: str) -> int:
    """The smallest TP degree whose workers have room for the workload's sessions: every further
    one costs all-reduces and leaves fewer workers to divide."""
    needed = _needed_tokens(workload)
    for tp in TP_DEGREES:
        profile = open_profile(f"{PREFIX}{gpu}/{model}/tp{tp}")
        if (kv_capacity_tokens(profile) or 0) >= needed:
            return tp
    raise invalid_field("cells", f"{model} has no room for {workload} on {gpu}")


def _needed_tokens(workload: str) -> float:
    chosen = open_workload(workload)
    if not isinstance(chosen, DrawnWorkload):
        return CONTEXTS_A_WORKER * MAX_AGENT_CONTEXT_TOKENS
    rounds = chosen.mean_rounds
    prompts = chosen.initial.mean + (rounds - 1) * chosen.increment.mean
    return SESSIONS_A_WORKER * (prompts + rounds * chosen.output.mean)
