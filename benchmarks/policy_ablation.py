"""What each part of the policy `ampd` is worth: the benchmark's cells with one part taken out.

`python benchmarks/policy_ablation.py [--json FILE]`; parts are taken out by replacing functions
and constants of `ampd.core` in this process, so that the policy itself needs no switches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

from ampd.bench.provenance import provenance
from ampd.core import kv_ledger, late_binding
from ampd.core.model import PolicySpec
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.sim import decode_worker, prefill_worker
from ampd.sim.cluster import simulate
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import open_workload

HORIZON_S, WARM_UP_S = 120.0, 30.0
PROFILE = "gpu:h20/Qwen3-32B/tp2"


@dataclass(frozen=True)
class Cell:
    """A workload at 1.2 x r50 (`ampdctl bench policies`) on a layout that is good for `ampd`."""

    workload: str
    prefill: int
    decode: int
    rate: float


CELLS = (
    Cell("ToolBench", 1, 3, 18.8),
    Cell("DuReader", 2, 6, 9.7),
    Cell("GAIA", 4, 12, 9.4),
)


def _no_take(*_: object, **__: object) -> None:
    """The home begins nothing itself."""


def _fifo(tasks: Any, work_s: Any, **_: Any) -> Any:
    """The task that was created first."""
    if not tasks:
        return None
    first = min(tasks, key=lambda t: (t.created_s, t.task_id))
    reason = late_binding.PullReason.ON_TIME
    return late_binding.PullDecision(first, reason, work_s(first), len(tasks), 0)


def _shortest(tasks: Any, work_s: Any, **_: Any) -> Any:
    """The task with the least work."""
    if not tasks:
        return None
    first = min(tasks, key=lambda t: (work_s(t), t.task_id))
    reason = late_binding.PullReason.SHORTEST
    return late_binding.PullDecision(first, reason, work_s(first), len(tasks), 0)


def _fixed_chunk(*, max_chunk_tokens: int, **_: Any) -> int:
    return min(512, max_chunk_tokens)


def _only_unmet(take_home: Callable[..., Any]) -> Callable[..., Any]:
    def take(*args: Any, **kwargs: Any) -> Any:
        decision = take_home(*args, **kwargs)
        return decision if decision is not None and decision.remote_s == inf else None

    return take


VARIANTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "all of it": (),
    "a fixed chunk of 512 at home": ((decode_worker, "chunk_tokens", _fixed_chunk),),
    "no prefill at home": ((decode_worker, "take_home", _no_take),),
    "at home only what prefill workers cannot do on time": (
        (decode_worker, "take_home", _only_unmet(late_binding.take_home)),
    ),
    "first come, first served": ((prefill_worker, "pull", _fifo),),
    "shortest first": ((prefill_worker, "pull", _shortest),),
    "no share for the starved": ((late_binding, "STARVED_SLOS", inf),),
    "no claim ahead of the boundary": ((prefill_worker, "AHEAD_S", -1e6),),
    "no gate on decode steps": ((late_binding, "DECODE_SHARE", inf),),
    "new sessions need no room to grow": ((kv_ledger, "RESERVED_SHARE", 0.0),),
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """The part is out meanwhile."""
    with ExitStack() as stack:
        for module, name, value in VARIANTS[part]:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def run(cell: Cell, seed: int) -> dict[str, float]:
    """One simulation of `ampd`."""
    profile = open_profile(PROFILE)
    worker = WorkerSpec(profile.cost, kv_capacity_tokens(profile) or 0)
    report = simulate(
        SimSettings(
            prefill=(worker,) * cell.prefill,
            decode=(worker,) * cell.decode,
            policy=PolicySpec("ampd"),
        ),
        open_workload(cell.workload),
        rate=cell.rate,
        horizon_s=HORIZON_S + WARM_UP_S,
        warm_up_s=WARM_UP_S,
        seed=seed,
    )
    attained = report.attainment
    return {
        "round": attained.round,
        "session_mean": attained.session_mean,
        "session_strict": attained.session_strict,
    }


def main() -> None:
    """All parts, all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    rows = []
    made = provenance()
    for part in VARIANTS:
        with without(part):
            for cell in CELLS:
                for seed in range(1, options.seeds + 1):
                    result = run(cell, seed)
                    rows.append({"without": part, "cell": cell.workload, "seed": seed, **result})
        mine = [row for row in rows if row["without"] == part]
        shares = [
            sum(row[unit] for row in mine) / len(mine)
            for unit in ("round", "session_mean", "session_strict")
        ]
        print(f"{part:55s} " + "  ".join(f"{share:.3f}" for share in shares), flush=True)
    if options.json is not None:
        result = {"provenance": asdict(made), "runs": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
