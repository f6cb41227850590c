"""Each baseline does what is published of the system that it stands for (docs/baselines.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from sim_cases import COST, run, session, settings

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.model import ItlStatistic, PolicySpec, RouteReason, Slo
from ampd.core.policies import SettingValue
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens
from ampd.sim.cluster import simulate
from ampd.sim.report import SimReport
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import RoundPlan, open_workload

STREAMS = tuple(session(f"s{i}", 0.0, RoundPlan(0.0, 10, 400)) for i in range(8))
PROMPTS = tuple(session(f"p{i}", 0.5 + 0.1 * i, RoundPlan(0.0, 4000, 2)) for i in range(4))
MIXED = CostModel(
    PrefillCost(token_s=1e-4),
    DecodeCost(base_s=0.01),
    MixedCost(base_s=0.01, token_s=1e-4),
    COST.kv,
)


def on_h20(
    policy: str,
    workload: str,
    *,
    prefill: int,
    decode: int,
    rate: float,
    policy_settings: Mapping[str, SettingValue] | None = None,
    horizon_s: float = 40.0,
    seed: int = 0,
) -> SimReport:
    """Qwen3-32B on as many H20."""
    profile = open_profile("gpu:h20/Qwen3-32B/tp1")
    capacity = kv_capacity_tokens(profile)
    assert capacity is not None
    spec = WorkerSpec(profile.cost, capacity)
    chosen = SimSettings(
        (spec,) * prefill,
        (spec,) * decode,
        PolicySpec(policy, policy_settings or {}),
        decision_log=True,
    )
    return simulate(chosen, open_workload(workload), rate=rate, horizon_s=horizon_s, seed=seed)


def ttft_s(report: SimReport, name: str) -> float:
    return fmean(d.ttft_s for d in report.decisions if d.session_id.startswith(name))


def completion_s(report: SimReport) -> float:
    """Mean time from a session's arrival to the first token of its last round."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for one in report.decisions:
        name = one.session_id
        first[name] = min(one.created_s, first.get(name, one.created_s))
        last[name] = max(one.created_s + one.ttft_s, last.get(name, 0.0))
    return fmean(last[name] - first[name] for name in first)


# --- vLLM's chunked prefill -----------------------------------------------------------------


def test_a_larger_budget_is_better_for_ttft_and_worse_for_itl() -> None:
    slo = Slo(ttft_s=10.0, itl_s=0.1, itl_statistic=ItlStatistic.MAX)

    def with_budget(tokens: int) -> SimReport:
        chosen = settings(
            prefill=0,
            policy="colocated",
            policy_settings={"chunk_tokens": tokens},
            cost=MIXED,
        )
        return run(chosen, *STREAMS, *PROMPTS, slo=slo)

    small, large = with_budget(512), with_budget(4096)
    assert ttft_s(large, "p") < 0.9 * ttft_s(small, "p")
    # No gap is longer than a full step: 10 + 51 ms, or 10 + 410 ms, which no stream bears.
    assert small.attainment.round == 1.0
    assert large.attainment.round < 0.5


def test_a_step_takes_several_prompts_as_far_as_the_budget_goes() -> None:
    chosen = settings(
        prefill=0, policy="colocated", policy_settings={"chunk_tokens": 1000}, cost=MIXED
    )
    first = session("first", 0.0, RoundPlan(0.0, 100, 1))
    others = [session(f"o{i}", 0.001, RoundPlan(0.0, 400, 1)) for i in range(3)]
    ends_s = {d.session_id: d.created_s + d.ttft_s for d in run(chosen, first, *others).decisions}
    assert ends_s["first"] == pytest.approx(0.01)
    # 400 + 400 + 200 of the 1000, then the rest of the third alone.
    assert ends_s["o0"] == ends_s["o1"] == pytest.approx(0.01 + 0.01 + 0.1)
    assert ends_s["o2"] == pytest.approx(ends_s["o0"] + 0.02)


def test_decodes_go_first_and_are_part_of_the_budget() -> None:
    budget = {"chunk_tokens": 64}
    chosen = settings(prefill=0, policy="colocated", policy_settings=budget, cost=MIXED)
    streams = [session(f"s{i}", 0.0, RoundPlan(0.0, 1, 200)) for i in range(32)]
    prompt = session("p", 0.5, RoundPlan(0.0, 320, 1))
    report = run(chosen, *streams, prompt)
    # Ten steps of 32 prompt tokens beside 32 streams; the first waits for a step's end.
    assert ttft_s(report, "p") == pytest.approx(10 * (0.01 + 32e-4), abs=0.0101)


def test_colocated_leaves_prefill_workers_idle() -> None:
    chosen = settings(prefill=2, decode=2, policy="colocated", cost=MIXED)
    report = run(chosen, *STREAMS, *PROMPTS)
    assert (report.local_share, report.prefill_utilisation) == (1.0, 0.0)
    assert {d.reason for d in report.decisions} == {RouteReason.ALWAYS_LOCAL}


def test_paused_kv_is_kept_as_long_as_the_policy_says() -> None:
    # Room for one session: the second needs what the first holds while its tool runs.
    def evictions(policy: str, ttl_s: float) -> int:
        chosen = settings(
            prefill=0,
            policy=policy,
            policy_settings={"kv_ttl_s": ttl_s},
            cost=MIXED,
            kv_capacity_tokens=110,
            kv_block_tokens=10,
        )
        a = session("a", 0.0, RoundPlan(0.0, 90, 10), RoundPlan(3.0, 1, 9))
        return run(chosen, a, session("b", 1.0, RoundPlan(0.0, 90, 10))).evictions

    assert evictions("colocated", 0.0) == 1
    assert evictions("colocated", 10.0) == 0
    assert evictions("colocated-session-priority", 1.0) == 1
    assert evictions("colocated-session-priority", 10.0) == 0


# --- Continuum --------------------------------------------------------------------------------


def test_the_prompt_of_the_session_that_arrived_first_goes_first() -> None:
    # All come while a long prompt is computed; "late" began before both others.
    late = session("late", 0.0, RoundPlan(0.0, 10, 1), RoundPlan(0.5, 200, 1))
    long = session("long", 0.4, RoundPlan(0.0, 10_000, 1))
    others = [session(f"o{i}", 0.45 + 0.01 * i, RoundPlan(0.0, 200, 1)) for i in range(2)]

    def order(policy: str) -> list[str]:
        chosen = settings(
            prefill=0, policy=policy, policy_settings={"chunk_tokens": 200}, cost=MIXED
        )
        decisions = run(chosen, late, long, *others).decisions
        ends = sorted(decisions, key=lambda d: d.created_s + d.ttft_s)
        return [d.session_id for d in ends if (d.session_id, d.round_index) != ("late", 0)]

    assert order("colocated") == ["long", "o0", "o1", "late"]
    assert order("colocated-session-priority") == ["long", "late", "o0", "o1"]


def test_sessions_complete_sooner_by_their_priority_and_sooner_with_their_kv_kept() -> None:
    def mean_s(policy: str, ttl_s: float) -> float:
        chosen = {"chunk_tokens": 512, "kv_ttl_s": ttl_s}
        reports = (
            on_h20(
                policy,
                "DuReader",
                prefill=0,
                decode=2,
                rate=1.8,
                policy_settings=chosen,
                horizon_s=60.0,
                seed=seed,
            )
            for seed in range(3)
        )
        return fmean(completion_s(report) for report in reports)

    fcfs_s = mean_s("colocated", 0.0)
    priority_s = mean_s("colocated-session-priority", 0.0)
    kept_s = mean_s("colocated-session-priority", 10.0)
    assert priority_s < 0.95 * fcfs_s
    assert kept_s < 0.95 * priority_s


# --- disaggregation ---------------------------------------------------------------------------


def test_always_remote_keeps_prefills_out_of_the_streams() -> None:
    def itl_s(policy: str, *more: object) -> float:
        chosen = settings(policy=policy, cost=MIXED, gap_statistics=True)
        chosen = replace(chosen, prefill=chosen.prefill * 2)
        return run(chosen, *STREAMS, *more).itl.p50_s  # type: ignore[arg-type]

    assert itl_s("always-remote", *PROMPTS) < 1.02 * itl_s("always-remote")
    assert itl_s("always-local", *PROMPTS) > 1.2 * itl_s("always-local")


def test_least_loaded_waits_less_than_round_robin() -> None:
    def mean_s(choice: str) -> float:
        chosen = {"choice": choice}
        report = on_h20(
            "always-remote", "GAIA", prefill=4, decode=4, rate=1.2, policy_settings=chosen
        )
        return report.queue.mean_s

    assert mean_s("least-loaded") < 0.8 * mean_s("round-robin")


def test_short_increments_stay_home_and_long_ones_do_not() -> None:
    increments = (50, 500, 600, 5000)
    rounds = [RoundPlan(1.0, increment, 2) for increment in increments]
    plan = session("a", 0.0, RoundPlan(0.0, 20_000, 2), *rounds)
    chosen = settings(policy="threshold", policy_settings={"tokens": 512}, cost=MIXED)
    places = [d.prefilled_by for d in run(chosen, plan).decisions]
    assert places == ["prefill-0", "decode-0", "decode-0", "prefill-0", "prefill-0"]


def test_a_busy_home_lets_short_increments_go() -> None:
    # The stream's promise is most of the KV memory: the guard of 0.5 sends the increment away.
    stream = session("s", 0.5, RoundPlan(0.0, 10, 700))
    paused = session("a", 0.0, RoundPlan(0.0, 100, 2), RoundPlan(1.0, 10, 2))

    def place(busy_kv: float) -> str:
        chosen = settings(
            policy="threshold",
            policy_settings={"busy_kv": busy_kv},
            cost=MIXED,
            kv_capacity_tokens=1000,
        )
        decisions = run(chosen, paused, stream).decisions
        (second,) = (d for d in decisions if (d.session_id, d.round_index) == ("a", 1))
        return second.prefilled_by

    assert (place(0.9), place(0.5)) == ("decode-0", "prefill-0")


def test_a_conversation_moves_its_kv_once() -> None:
    report = on_h20("first-remote-then-local", "ToolBench", prefill=2, decode=2, rate=2.0)
    first = [d for d in report.decisions if d.round_index == 0]
    assert all(d.prefilled_by != d.home for d in first)
    assert all(d.prefilled_by == d.home for d in report.decisions if d.round_index)
    assert report.history_moved_tokens == 0
    assert report.increment_moved_tokens == sum(d.increment_tokens for d in first)


def test_cheapest_weighs_moving_kv_against_sharing_a_step() -> None:
    # Beside eight streams, in ITL-safe chunks, the prompt takes longer than on an idle worker.
    prompt = session("p", 1.0, RoundPlan(0.0, 4000, 2))

    def place(kv_token_s: float) -> str:
        cost = replace(MIXED, kv=KvCost(token_s=kv_token_s))
        chosen = settings(policy="cheapest", cost=cost)
        (one,) = (d for d in run(chosen, *STREAMS, prompt).decisions if d.session_id == "p")
        return one.prefilled_by

    assert (place(1e-6), place(1e-3)) == ("prefill-0", "decode-0")


def test_the_papers_policy_to_the_letter_loses_to_the_least_loaded_below_saturation() -> None:
    literal = on_h20(
        "ampd-paper",
        "ToolBench",
        prefill=4,
        decode=4,
        rate=8.0,
        policy_settings={"literal": True},
    )
    mended = on_h20("ampd-paper", "ToolBench", prefill=4, decode=4, rate=8.0)
    remote = on_h20("always-remote", "ToolBench", prefill=4, decode=4, rate=8.0)
    assert remote.attainment.round > 0.98
    assert literal.attainment.round < remote.attainment.round - 0.05
    assert mended.attainment.round > remote.attainment.round - 0.01
