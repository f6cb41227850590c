"""The simulated cluster as a whole: the core's own functions, books, queueing theory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sim_cases import COST, SLO, run, session, settings

import ampd.adapters.engine_emulated.steps as engine_steps
import services.coordinator.placing as live_placing
import services.decode.home as live_home
import services.prefill.worker as live_prefill
from ampd.core import binding, routing
from ampd.core.cost_model import CostModel, PrefillCost
from ampd.core.model import PolicySpec
from ampd.core.policies import POLICIES
from ampd.sim import cluster, decode_worker, prefill_worker
from ampd.sim.cluster import simulate
from ampd.sim.settings import SimSettings
from ampd.sim.workload import DrawnWorkload, LogNormal, RoundPlan, open_workload


def test_simulator_and_services_hold_the_same_functions() -> None:
    assert cluster.route is live_placing.route is routing.route
    assert cluster.binding.bind is live_placing.binding.bind is binding.bind
    assert cluster.RecentPlacements is live_placing.RecentPlacements
    assert decode_worker.KvLedger is live_home.KvLedger
    assert decode_worker.MeanWindow is live_home.MeanWindow is prefill_worker.MeanWindow
    assert decode_worker.chunk_tokens is engine_steps.chunk_tokens
    assert decode_worker.calibrate is engine_steps.calibrate
    assert prefill_worker.PrefillQueue is live_prefill.PrefillQueue
    assert prefill_worker.queue_order is live_prefill.queue_order
    assert prefill_worker.TASKS_IN_ENGINE == live_prefill.TASKS_IN_ENGINE
    for name in ("route", "bind", "attainment", "PrefillQueue", "KvLedger", "MeanWindow"):
        for module in (cluster, decode_worker, prefill_worker):
            if hasattr(module, name):
                assert getattr(module, name).__module__.startswith("ampd.core.")


def test_the_defaults_are_those_of_the_live_services() -> None:
    from ampd.runtime.heartbeat import INTERVAL_S
    from services.coordinator.settings import RoundLimits
    from services.decode.settings import HomeLimits

    live, simulated = HomeLimits(), settings()
    defaults = SimSettings(simulated.prefill, simulated.decode)
    assert defaults.heartbeat_s == INTERVAL_S
    assert defaults.kv_lease_s == live.kv_lease_s
    assert defaults.claim_timeout_s == live.claim_timeout_s
    assert defaults.max_prefill_attempts == RoundLimits().max_prefill_attempts


def test_a_run_is_a_function_of_its_seed() -> None:
    chosen = settings(prefill=2, decode=2, policy="ampd-paper", heartbeat_s=0.2)
    chosen = replace(chosen, policy=PolicySpec("ampd-paper", {"literal": True}))
    workload = open_workload("ToolBench")
    first, again, other = (
        simulate(chosen, workload, rate=2.0, horizon_s=30.0, seed=seed) for seed in (3, 3, 4)
    )
    assert first == again
    assert first.decisions != other.decisions


def test_decisions_see_loads_of_the_last_heartbeat() -> None:
    plans = [session(f"s{i}", 0.01 * i, RoundPlan(0.0, 10, 2)) for i in range(200)]
    ages_s = [d.state_age_s for d in run(settings(heartbeat_s=0.2, prefill=3), *plans).decisions]
    assert 0.15 < max(ages_s) <= 0.2
    assert {d.state_age_s for d in run(settings(), *plans).decisions} == {0.0}


def test_round_robin_turns() -> None:
    plans = [session(f"s{i}", float(i), RoundPlan(0.0, 10, 2)) for i in range(6)]
    chosen = replace(
        settings(prefill=3), policy=PolicySpec("always-remote", {"choice": "round-robin"})
    )
    report = run(chosen, *plans)
    assert [d.prefilled_by for d in report.decisions] == [f"prefill-{i % 3}" for i in range(6)]


def test_warm_up_is_left_out_and_utilisation_is_of_the_counted_time() -> None:
    plans = [session(f"s{i}", float(i), RoundPlan(0.0, 500, 1)) for i in range(10)]
    from sim_cases import Given

    report = simulate(
        settings(), Given("given", SLO, tuple(plans)), rate=0, horizon_s=10.0, warm_up_s=4.0
    )
    assert (report.rounds, report.attainment.rounds) == (10, 6)
    assert report.prefill_utilisation == pytest.approx(0.5)


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1000),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    capacity=st.integers(200, 3000),
    heartbeat_s=st.sampled_from([0.0, 0.2]),
    rate=st.floats(0.5, 20.0),
)
def test_every_round_ends_and_every_book_balances(
    policy: str,
    seed: int,
    prefill: int,
    decode: int,
    capacity: int,
    heartbeat_s: float,
    rate: float,
) -> None:
    workload = DrawnWorkload(
        name="small",
        slo=SLO,
        mean_rounds=3.0,
        fixed_rounds=False,
        initial=LogNormal(80, 0.8),
        increment=LogNormal(30, 0.8),
        output=LogNormal(12, 0.6),
        think=LogNormal(0.5, 0.5),
    )
    chosen = settings(
        prefill=prefill,
        decode=decode,
        policy=policy,
        kv_capacity_tokens=capacity,
        kv_block_tokens=16,
        kv_lease_s=2.0,
        heartbeat_s=heartbeat_s,
        claim_timeout_s=1.0,
        max_queued_tasks=4,
    )
    report = simulate(chosen, workload, rate=rate, horizon_s=8.0, seed=seed)  # checks its books
    plans = list(workload.sessions(rate=rate, horizon_s=8.0, seed=seed))
    planned = sum(len(plan.rounds) for plan in plans)
    if not report.refused_sessions:
        assert report.rounds == planned
    assert len(report.decisions) == report.rounds <= planned
    remote = [d for d in report.decisions if d.prefilled_by != d.home]
    assert report.increment_moved_tokens == sum(d.increment_tokens for d in remote)
    assert all(d.ttft_s > 0 for d in report.decisions)


def test_agent_sessions_start_in_the_middle_of_their_lives() -> None:
    spec = replace(settings().decode[0], kv_capacity_tokens=8_000_000)
    chosen = SimSettings((spec,), (spec,), PolicySpec("always-remote"), decision_log=True)
    workload = open_workload("agent-sessions")
    report = simulate(chosen, workload, rate=0.005, horizon_s=60.0, warm_up_s=10.0, seed=2)
    resumed = [d for d in report.decisions if d.session_id.startswith("w")]
    assert resumed
    assert report.rebuilt_rounds == 0  # their KV was resident
    assert max(d.created_s for d in report.decisions) < 60.0
    assert 0 < report.attainment.rounds < report.rounds


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_one_prefill_worker_is_an_m_g_1_queue(sigma: float) -> None:
    """Every wait is that of Lindley's recursion; their mean is near Pollaczek-Khinchine's, which
    long runs meet within 3 % (docs/simulator.md)."""
    horizon_s = 2_500.0
    cost = CostModel(prefill=PrefillCost(token_s=1e-5))
    workload = DrawnWorkload(
        name="single rounds",
        slo=SLO,
        mean_rounds=1.0,
        fixed_rounds=True,
        initial=LogNormal(50_000, sigma),
        increment=LogNormal(1, 0),
        output=LogNormal(1, 0),
        think=LogNormal(1, 0),
    )
    chosen = settings(cost=cost, kv_capacity_tokens=10**9, heartbeat_s=60.0)
    report = simulate(chosen, workload, rate=1.0, horizon_s=horizon_s, seed=1)
    free_s, waits_s, computes_s = 0.0, {}, []
    for plan in workload.sessions(rate=1.0, horizon_s=horizon_s, seed=1):
        compute_s = cost.t_pre(0, plan.rounds[0].increment_tokens)
        waits_s[plan.session_id] = max(0.0, free_s - plan.arrival_s)
        free_s = max(free_s, plan.arrival_s) + compute_s
        computes_s.append(compute_s)
    for one in report.decisions:
        tokens = one.increment_tokens
        waited_s = one.ttft_s - cost.t_pre(0, tokens) - cost.t_pre(tokens - 1, 1)
        assert waited_s == pytest.approx(waits_s[one.session_id], abs=1e-6)
    load = sum(computes_s) / horizon_s
    expected_s = sum(s * s for s in computes_s) / horizon_s / (2 * (1 - load))
    assert sum(waits_s.values()) / len(waits_s) == pytest.approx(expected_s, rel=0.15)


def test_costs_of_the_coordinator_are_those_that_workers_publish() -> None:
    report = run(settings(prefill=2, policy="ampd-paper"), session("a", 0.0, RoundPlan(0, 100, 2)))
    assert report.decisions[0].predicted_ttft_s == pytest.approx(
        COST.t_pre(0, 100) + COST.t_kv(100)
    )
