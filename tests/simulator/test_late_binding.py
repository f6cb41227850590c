"""The policy `ampd` in the simulator: tasks wait at their homes for whoever can begin them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sim_cases import COST, SLO, Given, run, session, settings

from ampd.core.cost_model import CostModel, DecodeCost, MixedCost, PrefillCost
from ampd.core.late_binding import MAX_SHOWN_TASKS
from ampd.core.model import PolicySpec, RouteReason, WaitingPrefill
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.sim.cluster import SimCluster, simulate
from ampd.sim.report import SimReport
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import DrawnWorkload, LogNormal, RoundPlan, SessionPlan, open_workload

SMALL = DrawnWorkload(
    name="small",
    slo=SLO,
    mean_rounds=3.0,
    fixed_rounds=False,
    initial=LogNormal(300, 0.8),
    increment=LogNormal(100, 0.8),
    output=LogNormal(12, 0.6),
    think=LogNormal(0.5, 0.5),
)
SLOW_HOME = CostModel(
    PrefillCost(token_s=1e-3), DecodeCost(base_s=0.01), MixedCost(base_s=0.01, token_s=1e-2)
)
"""Beside a stream a home computes a tenth of what a prefill worker does."""


def on_h20(
    policy: str,
    *,
    prefill: int = 2,
    decode: int = 2,
    heartbeat_s: float = 0.2,
    rate: float = 2.6,
    seed: int = 0,
) -> SimReport:
    """DuReader on Qwen3-32B: more than four H20 carry."""
    profile = open_profile("gpu:h20/Qwen3-32B/tp1")
    capacity = kv_capacity_tokens(profile)
    assert capacity is not None
    spec = WorkerSpec(profile.cost, capacity)
    chosen = SimSettings(
        (spec,) * prefill,
        (spec,) * decode,
        PolicySpec(policy),
        heartbeat_s=heartbeat_s,
        decision_log=True,
    )
    return simulate(chosen, open_workload("DuReader"), rate=rate, horizon_s=30.0, seed=seed)


def session_mean(*reports: SimReport) -> float:
    return fmean(report.attainment.session_mean for report in reports)


# --- who begins a task ----------------------------------------------------------------------


def beside_a_stream(*prompts: SessionPlan) -> list[SessionPlan]:
    """With a stream at the one home, so that it computes slowly."""
    return [session("stream", 0.0, RoundPlan(0.0, 1, 2000)), *prompts]


def test_a_task_waits_at_home_and_the_first_worker_that_is_free_takes_it() -> None:
    plans = beside_a_stream(
        session("long", 1.0, RoundPlan(0.0, 900, 1)),
        session("short", 1.0, RoundPlan(0.0, 500, 1)),
        session("next", 1.1, RoundPlan(0.0, 400, 1)),
    )
    report = run(settings(prefill=2, policy="ampd", cost=SLOW_HOME), *plans)
    by_name = {d.session_id: d for d in report.decisions}
    assert by_name["long"].reason == by_name["short"].reason == RouteReason.IDLE_PREFILL_WORKER
    late = by_name["next"]
    assert (late.reason, late.ordered) == (RouteReason.LATE_BINDING, "decode-0")
    # It begins at 1.5 where "short" was; a step follows for its first token.
    assert late.prefilled_by == by_name["short"].prefilled_by != by_name["long"].prefilled_by
    assert late.ttft_s == pytest.approx(0.8, abs=0.035)


def test_a_home_takes_what_it_finishes_sooner() -> None:
    plans = [
        session("long", 0.0, RoundPlan(0.0, 350, 1)),
        session("next", 0.1, RoundPlan(0.0, 500, 1)),
    ]
    by_name = {d.session_id: d for d in run(settings(policy="ampd"), *plans).decisions}
    assert by_name["long"].prefilled_by == "prefill-0"
    assert by_name["next"].prefilled_by == "decode-0"
    assert by_name["next"].ttft_s == pytest.approx(0.5)


def test_what_can_be_on_time_goes_before_what_came_first() -> None:
    # At 1.9 the worker is free: "lost" came first, and both its SLO and that of "met" are near.
    plans = beside_a_stream(
        session("long", 1.0, RoundPlan(0.0, 900, 1)),
        session("lost", 1.1, RoundPlan(0.0, 800, 1)),
        session("met", 1.2, RoundPlan(0.0, 200, 1)),
    )
    ttft_s = {
        d.session_id: d.ttft_s
        for d in run(settings(policy="ampd", cost=SLOW_HOME), *plans).decisions
    }
    assert ttft_s["met"] == pytest.approx(0.9, abs=0.035)
    assert ttft_s["lost"] == pytest.approx(0.8 + 0.2 + 0.8, abs=0.035)


# --- what homes show ------------------------------------------------------------------------


def shown_at(
    at_s: float, chosen: SimSettings, *plans: SessionPlan
) -> tuple[tuple[WaitingPrefill, ...], SimReport]:
    """What the first home shows at an instant of a run."""
    cluster = SimCluster(
        chosen, Given("given", SLO, plans), rate=0.0, horizon_s=1e9, warm_up_s=0.0, seed=0
    )
    seen: list[tuple[WaitingPrefill, ...]] = []
    home = cluster.decode[0]
    cluster.kernel.at(at_s, lambda _: seen.append(home.view(at_s).load.waiting), None)
    cluster.run()
    cluster.check()
    return seen[0], cluster.report()


def test_a_home_shows_a_bounded_list_and_all_of_it_is_served() -> None:
    plans = [session(f"s{i:03}", 1e-3 * i, RoundPlan(0.0, 300, 1)) for i in range(90)]
    shown, report = shown_at(0.15, settings(policy="ampd"), *plans)
    assert len(shown) == MAX_SHOWN_TASKS
    assert report.rounds == 90


def test_a_home_whose_steps_bear_no_more_streams_begins_none_and_shows_nothing() -> None:
    """37 streams are 47 ms a step; 60 come within 1.2 s. Prompts so tiny that many are a small
    backlog count one by one."""
    cost = replace(COST, decode=DecodeCost(0.01, 1e-3), mixed=MixedCost(0.01, 1e-3, 1e-3))
    streams = [session(f"s{i}", 0.02 * i, RoundPlan(0.0, 1, 200)) for i in range(60)]
    chosen = settings(prefill=0, policy="ampd", cost=cost)
    shown, report = shown_at(3.0, chosen, *streams)
    begun = [d for d in report.decisions if d.created_s + d.ttft_s < 3.0]
    assert len(begun) == 37
    assert shown == ()
    assert 0.04 < report.itl.max_s < SLO.itl_s
    pushed = run(replace(chosen, policy=PolicySpec("always-local")), *streams)
    assert pushed.itl.max_s > 1.2 * SLO.itl_s


def test_the_earliest_deadlines_are_shown_whenever_memory_let_them_in() -> None:
    """A round that waited for memory is older than those admitted before it."""
    flood = [session(f"f{i}", 0.1, RoundPlan(0.0, 900, 1)) for i in range(8)]
    waiting = [
        session("big", 0.2, RoundPlan(0.0, 3000, 1)),  # waits for the first ends
        session("again", 0.0, RoundPlan(0.0, 10, 1), RoundPlan(0.5, 10, 1)),
    ]
    chosen = settings(policy="ampd", kv_capacity_tokens=8_000)
    for at_s in (1.2, 2.0, 3.0):
        shown, _ = shown_at(at_s, chosen, *flood, *waiting)
        assert [one.age_s for one in shown] == sorted((one.age_s for one in shown), reverse=True)
        assert shown


# --- nothing is lost, nothing is done twice ---------------------------------------------------


@hypothesis_settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prefill=st.integers(0, 4),
    decode=st.integers(1, 3),
    heartbeat_s=st.sampled_from([0.0, 0.2]),
    rate=st.floats(1.0, 15.0),
)
def test_every_task_is_prefilled_once(
    seed: int, prefill: int, decode: int, heartbeat_s: float, rate: float
) -> None:
    chosen = settings(prefill=prefill, decode=decode, policy="ampd", heartbeat_s=heartbeat_s)
    plans = tuple(SMALL.sessions(rate=rate, horizon_s=5.0, seed=seed))
    report = run(chosen, *plans, slo=SLO)  # checks that all is empty at the end
    ended = Counter((d.session_id, d.round_index) for d in report.decisions)
    assert ended == Counter((p.session_id, i) for p in plans for i in range(len(p.rounds)))
    assert report.rerouted_rounds == 0
    # Prefill workers have computed what they prefilled, no token more.
    remote = [d for d in report.decisions if d.prefilled_by != d.home]
    worked_s = report.prefill_utilisation * prefill * report.horizon_s
    computed_s = sum(COST.t_pre(d.history_tokens, d.increment_tokens) for d in remote)
    assert worked_s == pytest.approx(computed_s, abs=1e-5)
    assert report.increment_moved_tokens == sum(d.increment_tokens for d in remote)
    if not prefill:
        assert not remote


@pytest.mark.parametrize(("prefill", "decode"), [(0, 3), (8, 1)])
def test_any_layout_works(prefill: int, decode: int) -> None:
    report = on_h20("ampd", prefill=prefill, decode=decode)
    planned = open_workload("DuReader").sessions(rate=2.6, horizon_s=30.0, seed=0)
    assert report.rounds == sum(len(plan.rounds) for plan in planned)
    reasons = {d.reason for d in report.decisions}
    if prefill:
        assert report.local_share < 0.2
        assert RouteReason.IDLE_PREFILL_WORKER in reasons
    else:
        assert report.local_share == 1.0
        assert reasons == {RouteReason.NO_PREFILL_WORKER}


# --- what it is for ---------------------------------------------------------------------------


def test_under_overload_it_keeps_more_sessions_than_pushing_does() -> None:
    late, paper, remote = (
        session_mean(*(on_h20(policy, rate=3.4, seed=seed) for seed in range(2)))
        for policy in ("ampd", "ampd-paper", "always-remote")
    )
    assert late > paper + 0.2
    assert late > remote + 0.4


def test_it_lives_with_loads_as_old_as_a_heartbeat() -> None:
    old, fresh = (
        session_mean(*(on_h20("ampd", heartbeat_s=heartbeat_s, seed=seed) for seed in range(2)))
        for heartbeat_s in (0.2, 0.0)
    )
    assert old == pytest.approx(fresh, abs=0.06)


def test_without_prefill_workers_it_keeps_more_sessions_than_arrival_order_does() -> None:
    late = session_mean(*(on_h20("ampd", prefill=0, decode=4, seed=seed) for seed in range(2)))
    local = session_mean(
        *(on_h20("always-local", prefill=0, decode=4, seed=seed) for seed in range(2))
    )
    assert late > local + 0.3
