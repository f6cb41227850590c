"""Workers of the simulator against numbers computed by hand, and step by step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from sim_cases import COST, SLO, run, session, settings

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.model import ItlStatistic, Slo
from ampd.sim.report import KV_RATIO_EDGES, LoggedDecision
from ampd.sim.workload import RoundPlan


def ttfts_s(decisions: tuple[LoggedDecision, ...]) -> dict[tuple[str, int], float]:
    return {(one.session_id, one.round_index): one.ttft_s for one in decisions}


def test_a_remote_round() -> None:
    report = run(settings(), session("a", 1.0, RoundPlan(0.0, 100, 5)))
    # 100 tokens computed, then returned; one of them again at home, which says the first token.
    assert report.ttft.mean_s == pytest.approx(0.1 + 0.01 + 0.001)
    assert report.itl.mean_s == pytest.approx(0.01)
    assert report.end_s == pytest.approx(1.0 + 0.111 + 4 * 0.01)
    assert (report.rounds, report.local_share) == (1, 0.0)


def test_a_local_round() -> None:
    report = run(settings(policy="always-local"), session("a", 0.0, RoundPlan(0.0, 100, 5)))
    assert report.ttft.mean_s == pytest.approx(0.1)
    assert report.end_s == pytest.approx(0.1 + 4 * 0.01)
    assert (report.local_share, report.increment_moved_tokens) == (1.0, 0)


def test_only_what_each_side_lacks_is_moved() -> None:
    rounds = (RoundPlan(0.0, 100, 5), RoundPlan(1.0, 20, 5), RoundPlan(1.0, 30, 5, keep_tokens=50))
    report = run(settings(kv_bytes_per_token=7), session("a", 0.0, *rounds))
    # Of the second round's history the prefill worker lacks the output; the third one's, a
    # rewind, it has.
    assert report.history_moved_tokens == 5
    assert report.history_moved_bytes == 35
    assert report.increment_moved_tokens == 100 + 20 + 30
    assert [d.history_tokens for d in report.decisions] == [0, 105, 50]


def test_reading_hides_behind_the_computation_before() -> None:
    first = RoundPlan(0.0, 1000, 1000)
    a = session("a", 0.0, first, RoundPlan(10.0, 100, 2))  # comes back at about 21.0
    b = session("b", 20.5, RoundPlan(0.0, 2000, 2))
    report = run(settings(link_contention=False), a, b)
    ttft_s = ttfts_s(report.decisions)
    # a's history (1000 tokens lacking, 0.1 s) is there long before b is computed.
    back_s = next(d.created_s for d in report.decisions if d.round_index == 1)
    assert report.history_moved_tokens == 1000
    assert ttft_s["a", 1] == pytest.approx(22.5 - back_s + 0.1 + 0.01 + 0.001)


def test_transfers_of_one_link_wait_for_each_other() -> None:
    plans = [session(name, 0.0, RoundPlan(0.0, 100, 1)) for name in "ab"]
    two = {"prefill": 2, "decode": 1}
    slow = CostModel(prefill=PrefillCost(token_s=1e-5), decode=COST.decode, kv=KvCost(token_s=1e-2))
    free = run(settings(cost=slow, link_contention=False, **two), *plans)
    shared = run(settings(cost=slow, **two), *plans)
    assert free.ttft.max_s == pytest.approx(1.001, abs=1e-3)
    assert shared.ttft.max_s == pytest.approx(2.001, abs=1e-3)


def test_a_slow_worker_is_not_known_to_be_slow() -> None:
    plan = session("a", 0.0, RoundPlan(0.0, 100, 5))
    chosen = settings()
    slow = replace(chosen.prefill[0], slowdown=2.0)
    report = run(replace(chosen, prefill=(slow,)), plan)
    assert report.compute.mean_s == pytest.approx(0.2)
    assert report.decisions[0].predicted_ttft_s == pytest.approx(0.11)


def test_noise_changes_times_of_prefills_about_their_mean() -> None:
    plans = [session(f"s{i}", 10.0 * i, RoundPlan(0.0, 100, 2)) for i in range(400)]
    exact, noisy, again = (run(settings(noise=sigma), *plans) for sigma in (0.0, 0.3, 0.3))
    assert noisy.compute == again.compute
    assert noisy.compute.p50_s < exact.compute.mean_s < noisy.compute.p95_s
    assert noisy.compute.mean_s == pytest.approx(exact.compute.mean_s, rel=0.05)


def test_kv_time_is_counted_over_compute_time() -> None:
    # 0.1 s of computing, 0.03 s back.
    slow = replace(COST, kv=KvCost(token_s=3e-4))
    report = run(settings(cost=slow), session("a", 0.0, RoundPlan(0.0, 100, 2)))
    assert report.kv_ratios.index(1) == KV_RATIO_EDGES.index(0.5)
    assert sum(report.kv_ratios) == 1


def test_rounds_wait_for_kv_and_evict_only_behind_the_lease() -> None:
    # Room for one session of 100 + 10 tokens in blocks of 10.
    chosen = settings(kv_capacity_tokens=110, kv_block_tokens=10, kv_lease_s=5.0)
    a = session("a", 0.0, RoundPlan(0.0, 100, 10), RoundPlan(20.0, 1, 9, keep_tokens=100))
    b = session("b", 1.0, RoundPlan(0.0, 100, 10))
    report = run(chosen, a, b)
    paused_s = 0.111 + 9 * 0.01
    ttft_s = ttfts_s(report.decisions)
    assert ttft_s["b", 0] == pytest.approx(paused_s + 5.0 - 1.0 + 0.111)
    assert (report.evictions, report.rebuilt_rounds, report.rebuilt_tokens) == (1, 1, 100)


def test_a_round_that_fits_nowhere_ends_its_session() -> None:
    chosen = settings(kv_capacity_tokens=110, kv_block_tokens=10)
    large = session("a", 0.0, RoundPlan(0.0, 200, 1), RoundPlan(0.0, 1, 1))
    grows = session("b", 0.0, RoundPlan(0.0, 50, 1), RoundPlan(0.0, 100, 1))
    report = run(chosen, large, grows)
    assert (report.refused_sessions, report.rounds) == (2, 1)


def test_a_full_queue_sends_the_task_elsewhere() -> None:
    plans = [session(f"s{i}", 0.0, RoundPlan(0.0, 100, 1)) for i in range(4)]
    report = run(settings(max_queued_tasks=1), *plans)
    # Two are in the engine, one waits, one is prefilled at home.
    assert [d.prefilled_by for d in report.decisions].count("decode-0") == 1
    assert report.rerouted_rounds == 1


def test_a_task_that_waits_too_long_comes_home() -> None:
    plans = [session(f"s{i}", 0.0, RoundPlan(0.0, 4000, 1)) for i in range(3)]
    report = run(settings(claim_timeout_s=3.0), *plans)
    late = next(d for d in report.decisions if d.prefilled_by == "decode-0")
    assert late.session_id == "s2"
    assert late.ttft_s == pytest.approx(3.0 + 4.0, abs=0.02)


def test_local_chunks_keep_the_streams_within_the_slo() -> None:
    mixed = MixedCost(base_s=0.012, token_s=2e-4, sequence_s=1e-4)
    cost = CostModel(COST.prefill, DecodeCost(base_s=0.012, sequence_s=1e-4), mixed, COST.kv)
    streams = [session(f"s{i}", 0.0, RoundPlan(0.0, 10, 400)) for i in range(8)]
    later = session("late", 1.0, RoundPlan(0.0, 3000, 2))
    chosen = settings(
        policy="always-local",
        policy_settings={"chunk": "itl-safe"},
        cost=cost,
        max_step_tokens=4000,
    )
    alone = run(chosen, *streams)
    mixed_in = run(chosen, *streams, later)
    assert alone.itl.max_s < mixed_in.itl.p50_s <= SLO.itl_s
    # The streams have banked enough for steps of 2 SLOs: (0.1 - 0.0128) / 2e-4 = 436 tokens.
    ttft_s = ttfts_s(mixed_in.decisions)["late", 0]
    assert ttft_s == pytest.approx(3000 * 2e-4 + 7 * 0.0128, abs=0.0128)


def test_p95_and_largest_gap_are_of_the_steps() -> None:
    cost = CostModel(PrefillCost(token_s=1e-3), COST.decode, MixedCost(base_s=0.3), KvCost())
    slo = Slo(1.0, 0.05, ItlStatistic.MAX)
    a = session("a", 0.0, RoundPlan(0.0, 10, 100))
    b = session("b", 0.5, RoundPlan(0.0, 10, 2))
    alone, both = run(settings(cost=cost), a, slo=slo), run(settings(cost=cost), a, b, slo=slo)
    # b's arrival is one step of 0.3 s in 99 gaps: beyond P95.
    assert (alone.attainment.round, both.attainment.round) == (1.0, 0.5)
    p95 = Slo(1.0, 0.05, ItlStatistic.P95)
    assert run(settings(cost=cost), a, b, slo=p95).attainment.round == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_runs_in_closed_form_are_the_steps_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    cost = CostModel(
        decode=DecodeCost(0.01, 1e-4, 1e-6, hinges=((4.0, 2e-4),)),
        mixed=MixedCost(0.012, 1e-3, 1e-4, 1e-6, 1e-9),
        prefill=PrefillCost(),
    )
    arrivals = sorted(rng.uniform(0.0, 3.0) for _ in range(40))
    lengths = [(rng.randint(1, 500), rng.randint(1, 80)) for _ in arrivals]
    plans = [
        session(f"s{i}", at_s, RoundPlan(0.0, prompt, output))
        for i, (at_s, (prompt, output)) in enumerate(zip(arrivals, lengths, strict=True))
    ]
    report = run(settings(cost=cost, heartbeat_s=0.05), *plans)
    first_s, end_s = one_by_one(cost, arrivals, lengths)
    for one in report.decisions:
        assert one.ttft_s == pytest.approx(first_s[int(one.session_id[1:])])
    assert report.end_s == pytest.approx(end_s)


def one_by_one(
    cost: CostModel, arrivals: list[float], lengths: list[tuple[int, int]]
) -> tuple[list[float], float]:
    """TTFTs and the end, an event per step; prefill and transfers are free."""
    coming = deque(sorted(range(len(arrivals)), key=lambda i: arrivals[i]))
    running: dict[int, int] = {}
    ttfts_s = [0.0] * len(arrivals)
    now_s = 0.0
    while coming or running:
        if not running:
            now_s = max(now_s, arrivals[coming[0]])
        entrants = []
        # An idle engine begins with the first that comes; others of that instant come next.
        while coming and arrivals[coming[0]] <= now_s:
            entrants.append(coming.popleft())
        context = sum(lengths[i][0] + said for i, said in running.items())
        if entrants and not running and len(entrants) == 1:
            now_s += cost.t_pre(lengths[entrants[0]][0] - 1, 1)
        elif entrants:
            history = max(lengths[i][0] - 1 for i in entrants)
            now_s += cost.t_mixed(len(entrants), history, len(running), context)
        else:
            now_s += cost.t_dec(len(running), context)
        running = {i: said + 1 for i, said in running.items()}
        for i in entrants:
            ttfts_s[i] = now_s - arrivals[i]
            running[i] = 1
        running = {i: said for i, said in running.items() if said < lengths[i][1]}
    return ttfts_s, now_s
