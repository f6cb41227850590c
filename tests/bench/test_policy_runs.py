"""Runs are simulated once, whoever wants them, and survive a crash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ampd.bench.policies import execute as executing
from ampd.bench.policies.drive import Progress, drive
from ampd.bench.policies.execute import (
    CodeChangedError,
    code_fingerprint,
    cost_fingerprint,
    execute,
    outcome_of,
)
from ampd.bench.policies.journal import MAX_JOURNALS, Journal
from ampd.bench.policies.plans import Plan
from ampd.bench.policies.runs import Disturbance, Outcome, Run
from ampd.core.model import PolicySpec
from ampd.profiling.catalogue import open_profile
from ampd.sim.cluster import simulate
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import open_workload

RUN = Run(
    profile="gpu:h20/Meta-Llama-3.1-70B/tp2",
    workload="HotpotQA",
    prefill=2,
    decode=2,
    policy="always-remote",
    settings=(),
    rate=2.0,
    seed=0,
    warm_up_s=2.0,
    end_s=12.0,
)
RUNS = [replace(RUN, rate=rate, seed=seed) for rate in (1.0, 2.0) for seed in (0, 1)]


def wants(runs: Sequence[Run]) -> Plan[list[Outcome]]:
    first = yield runs[:1]
    return [*first, *(yield runs[1:])]


def run_all(
    folder: Path, *plans: Plan[list[Outcome]], jobs: int = 1
) -> tuple[list[list[Outcome]], Progress]:
    code = code_fingerprint()
    heard = [Progress()]
    journal = Journal(folder, code, cost_fingerprint)
    found = drive(list(plans), journal, code=code, jobs=jobs, told=heard.append)
    return found, heard[-1]


def test_a_run_wanted_twice_is_simulated_once_and_known_later(tmp_path: Path) -> None:
    (first, second), progress = run_all(tmp_path, wants(RUNS), wants(RUNS[:3]))
    assert progress.runs == 4
    assert progress.plans_done == 2
    assert second == first[:3]
    (again,), later = run_all(tmp_path, wants(RUNS))
    assert again == first
    assert later.runs == 0


def test_processes_find_the_same(tmp_path: Path) -> None:
    (alone,), _ = run_all(tmp_path / "one", wants(RUNS))
    (spread,), progress = run_all(tmp_path / "two", wants(RUNS), jobs=2)
    assert spread == alone
    assert progress.runs == 4


def test_a_line_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    (first,), _ = run_all(tmp_path, wants(RUNS))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    (again,), progress = run_all(tmp_path, wants(RUNS))
    assert (again, progress.runs) == (first, 1)
    (_,), progress = run_all(tmp_path, wants(RUNS))
    assert progress.runs == 0


def test_journals_of_old_code_are_dropped(tmp_path: Path) -> None:
    for number in range(MAX_JOURNALS + 3):
        journal = Journal(tmp_path, f"code{number}", cost_fingerprint)
    assert len(list(tmp_path.iterdir())) == MAX_JOURNALS
    assert journal.path.exists()


def test_a_key_is_of_all_that_a_run_depends_on() -> None:
    changed = [
        replace(RUN, rate=2.1),
        replace(RUN, seed=1),
        replace(RUN, policy="cheapest"),
        replace(RUN, settings=(("choice", "round-robin"),)),
        replace(RUN, prefill=1),
        replace(RUN, end_s=13.0),
        replace(RUN, disturbance=Disturbance(noise=0.1)),
    ]
    keys = {run.key("") for run in [RUN, *changed]} | {RUN.key("other costs")}
    assert len(keys) == len(changed) + 2


def test_runs_of_two_states_of_the_code_do_not_mix() -> None:
    with pytest.raises(CodeChangedError):
        execute(RUN, code="another")


def test_disturbances_disturb() -> None:
    settings = executing.settings_of(
        replace(RUN, disturbance=Disturbance(1.5, slow_decode=2.0, noise=0.3, heartbeat_s=0.4))
    )
    assert [worker.slowdown for worker in settings.prefill] == [1.5, 1.5]
    assert [worker.slowdown for worker in settings.decode] == [3.0, 1.5]
    assert (settings.noise, settings.heartbeat_s) == (0.3, 0.4)


def test_refusing_does_not_pay() -> None:
    """Workers that hold no session of more than 1,000 tokens refuse many."""
    cost = open_profile(RUN.profile).cost
    worker = (WorkerSpec(cost, 1000),)
    report = simulate(
        SimSettings(worker, worker, PolicySpec("always-remote")),
        open_workload("HotpotQA"),
        rate=0.5,
        horizon_s=60.0,
    )
    assert report.refused_sessions > 5
    found = outcome_of(report, 0.0).attainment
    served = report.attainment
    share = served.sessions / (served.sessions + report.refused_sessions)
    assert found.session_mean == pytest.approx(served.session_mean * share)
    assert found.session_strict < served.session_strict
    assert found.round < served.round
