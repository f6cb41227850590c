"""Simulates one run."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

from ampd.bench.policies.runs import Outcome, Run
from ampd.core.errors import invalid_field
from ampd.core.model import PolicySpec
from ampd.core.slo import Attainment
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.sim.cluster import simulate
from ampd.sim.report import SimReport
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import open_workload

DECIDING_PACKAGES: Final = ("ampd.core", "ampd.sim")
"""What a run's result depends on besides itself and its profile."""
_CODE_ENDINGS: Final = (".py", ".yaml", ".gz")


class CodeChangedError(Exception):
    """The source changed while a benchmark ran: its runs would not be of one code."""


def execute(run: Run, code: str = "") -> Outcome:
    """Simulate it. Raises CodeChangedError unless this process has that code (''  : any), and
    what `simulate` raises."""
    if code and code_fingerprint() != code:
        raise CodeChangedError("the source has changed since the benchmark began; start again")
    started_s = time.perf_counter()
    report = simulate(
        settings_of(run),
        open_workload(run.workload),
        rate=run.rate,
        horizon_s=run.end_s,
        warm_up_s=run.warm_up_s,
        seed=run.seed,
    )
    return outcome_of(report, time.perf_counter() - started_s)


def settings_of(run: Run) -> SimSettings:
    """The cluster of a run."""
    profile = open_profile(run.profile)
    room = kv_capacity_tokens(profile)
    if not room:
        raise invalid_field("profile", f"{run.profile} has no room for KV")
    disturbance = run.disturbance
    worker = WorkerSpec(profile.cost, room, disturbance.slowdown)
    return SimSettings(
        prefill=_one_slow(worker, run.prefill, disturbance.slow_prefill),
        decode=_one_slow(worker, run.decode, disturbance.slow_decode),
        policy=PolicySpec(run.policy, dict(run.settings)),
        kv_bytes_per_token=profile.kv_bytes_per_token,
        heartbeat_s=disturbance.heartbeat_s,
        noise=disturbance.noise,
    )


def _one_slow(worker: WorkerSpec, count: int, factor: float) -> tuple[WorkerSpec, ...]:
    slow = replace(worker, slowdown=worker.slowdown * factor)
    return (slow, *(worker,) * (count - 1)) if count else ()


def outcome_of(report: SimReport, wall_s: float) -> Outcome:
    """What is kept of a report."""
    counted, refused = report.attainment, report.refused_sessions
    # Refusing must not pay: a refused session is one round that failed.
    of_sessions = counted.sessions / max(1, counted.sessions + refused)
    attainment = Attainment(
        round=counted.round * counted.rounds / max(1, counted.rounds + refused),
        session_mean=counted.session_mean * of_sessions,
        session_strict=counted.session_strict * of_sessions,
        rounds=counted.rounds,
        sessions=counted.sessions,
    )
    return Outcome(
        attainment=attainment,
        ttft=report.ttft,
        itl=report.itl,
        queue_s=report.queue.mean_s,
        read_s=report.read.mean_s,
        compute_s=report.compute.mean_s,
        return_s=report.returned.mean_s,
        local_share=report.local_share,
        kv_ratios=report.kv_ratios,
        history_moved_bytes=report.history_moved_bytes,
        increment_moved_bytes=report.increment_moved_bytes,
        rounds=report.rounds,
        rerouted_rounds=report.rerouted_rounds,
        refused_sessions=refused,
        evictions=report.evictions,
        rebuilt_rounds=report.rebuilt_rounds,
        prefill_utilisation=report.prefill_utilisation,
        decode_utilisation=report.decode_utilisation,
        wall_s=wall_s,
    )


@cache
def code_fingerprint() -> str:
    """Of the source and data that decide, as this process found them first."""
    digest = sha256()
    for package in DECIDING_PACKAGES:
        for name, content in sorted(_contents(files(package), package)):
            digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _contents(folder: Traversable, path: str) -> list[tuple[str, bytes]]:
    found = []
    for item in folder.iterdir():
        name = f"{path}/{item.name}"
        if item.is_dir():
            found += _contents(item, name)
        elif item.name.endswith(_CODE_ENDINGS):
            found.append((name, item.read_bytes()))
    return found


@cache
def cost_fingerprint(profile: str) -> str:
    """Of what a built-in profile says of times and memory."""
    opened = open_profile(profile)
    said = (opened.cost, opened.kv_bytes_per_token, kv_capacity_tokens(opened))
    return sha256(msgspec.json.encode(said)).hexdigest()
