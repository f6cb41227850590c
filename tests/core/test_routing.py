from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    PolicySpec,
    Role,
    Route,
    RouteDecision,
    RouteReason,
    Slo,
    WorkerInfo,
    WorkerLoad,
    WorkerView,
)
from ampd.core.policies import POLICIES, SettingValue, resolve
from ampd.core.routing import MAX_CANDIDATES, MAX_FALLBACKS, RouteTask, route

SLO = Slo(ttft_s=3.0, itl_s=0.05)
COST = CostModel(
    prefill=PrefillCost(base_s=0.02, token_s=1e-4),
    decode=DecodeCost(base_s=0.01),
    mixed=MixedCost(base_s=0.01, token_s=1e-4, sequence_s=1e-3),
    kv=KvCost(base_s=1e-3, token_s=1e-5),
)


def worker(
    name: str, role: Role = Role.PREFILL, cost: CostModel | None = COST, **load: float
) -> WorkerView:
    info = WorkerInfo(worker_id=name, role=role, incarnation=1, address="", host="", cost=cost)
    return WorkerView(info, WorkerLoad(**load), age_s=0.1)  # type: ignore[arg-type]


def home(**load: float) -> WorkerView:
    return worker("d0", Role.DECODE, COST, **load)


def decide(
    *workers: WorkerView,
    at: WorkerView | None = None,
    history: int = 10_000,
    increment: int = 1_000,
    cached: dict[str, int] | None = None,
    policy: str = "ampd-paper",
    seed: int = 0,
    **settings: SettingValue,
) -> RouteDecision:
    return route(
        RouteTask(history, increment, SLO, cached or {}),
        home=at or home(),
        prefill_workers=workers,
        policy=resolve(PolicySpec(policy, settings)),
        tie_seed=seed,
    )


# --- predictions ---------------------------------------------------------------------------


def test_predicted_times_have_their_parts() -> None:
    decision = decide(worker("p0", queued_prefill_s=0.05))
    chosen = decision.candidates[0]
    assert (chosen.worker_id, chosen.route) == ("p0", Route.REMOTE)
    assert chosen.queue_s == 0.05
    assert chosen.read_s == pytest.approx(0.001 + 0.1 - 0.05)  # the queue hides 50 ms of it
    assert chosen.compute_s == pytest.approx(0.12)
    assert chosen.return_s == pytest.approx(0.011)
    assert decision.predicted_ttft_s == chosen.total_s == chosen.statistic_s
    assert decision.state_age_s == 0.1
    local = decision.candidates[1]
    assert (local.worker_id, local.route, local.read_s, local.return_s) == (
        "d0",
        Route.LOCAL,
        0.0,
        0.0,
    )


def test_literal_predictions_are_the_papers() -> None:
    decision = decide(worker("p0", queued_prefill_s=0.05), cached={"p0": 10_000}, literal=True)
    assert decision.predicted_ttft_s == pytest.approx(0.12 + 0.101 + 0.011 + 0.05)


def test_local_is_predicted_at_the_itl_safe_rate() -> None:
    at = home(running_rounds=20, running_context_tokens=20_000)
    local = decide(worker("p0"), at=at).candidates[1]
    # 0.97 x 50 ms less 30 ms for the batch: 185 tokens a step, 6 steps.
    assert local.compute_s == pytest.approx(6 * (0.03 + 185e-4))


# --- the paper's steps -----------------------------------------------------------------------


def test_step_1_takes_an_acceptable_prefill_worker() -> None:
    decision = decide(worker("p0"))
    assert (decision.route, decision.prefill_worker) == (Route.REMOTE, "p0")
    assert decision.reason is RouteReason.PREFILL_WITHIN_TTFT


@pytest.mark.parametrize("literal", [True, False])
def test_step_2_goes_home_within_the_itl(literal: bool) -> None:
    late = worker("p0", ttft_window_s=2.71)
    decision = decide(late, at=home(itl_window_s=0.0425, running_rounds=1), literal=literal)
    assert decision.route is Route.LOCAL
    assert decision.reason is RouteReason.DECODE_WITHIN_ITL


@pytest.mark.parametrize("literal", [True, False])
def test_step_3_takes_the_cheapest(literal: bool) -> None:
    at = home(itl_window_s=0.043, running_rounds=1, queued_prefill_s=9.0)
    workers = [
        worker(f"p{i}", ttft_window_s=5.0, queued_prefill_s=queue_s)
        for i, queue_s in enumerate((8.0, 4.0, 6.0))
    ]
    decision = decide(*workers, at=at, literal=literal)
    assert (decision.prefill_worker, decision.reason) == ("p1", RouteReason.CHEAPEST_REMOTE)
    at = structs.replace(at, load=replace(at.load, queued_prefill_s=0.0))
    decision = decide(*workers, at=at, literal=literal)
    assert (decision.route, decision.reason) == (Route.LOCAL, RouteReason.CHEAPEST_LOCAL)


def test_thresholds_are_settings() -> None:
    slow = worker("p0", ttft_window_s=2.0)
    assert decide(slow).route is Route.REMOTE
    assert decide(slow, alpha=0.5).route is Route.LOCAL
    at = home(itl_window_s=0.04, running_rounds=1)
    assert decide(slow, at=at, alpha=0.5).reason is RouteReason.DECODE_WITHIN_ITL
    assert decide(slow, at=at, alpha=0.5, beta=0.7).reason is not RouteReason.DECODE_WITHIN_ITL


# --- the traps of spec 4 ---------------------------------------------------------------------


def test_trap_a_window_lags_and_the_prediction_does_not() -> None:
    """The window still looks perfect, the queue is 10 s long."""
    flooded = worker("p0", ttft_window_s=0.1, queued_prefill_s=10.0)
    assert decide(flooded).route is Route.LOCAL
    assert decide(flooded, literal=True).prefill_worker == "p0"


def test_trap_an_empty_window_is_not_idle() -> None:
    """What waits is in the published window (see window.py): the worker is not taken."""
    stuck = worker("p0", ttft_window_s=20.0, oldest_wait_s=20.0)
    assert decide(stuck, worker("p1")).prefill_worker == "p1"


def test_trap_the_least_loaded_of_the_acceptable_takes_it() -> None:
    workers = [
        worker(f"p{i}", queued_prefill_s=queue_s) for i, queue_s in enumerate((1.5, 0.5, 1.0))
    ]
    decisions = [decide(*workers, seed=seed) for seed in range(20)]
    assert {decision.prefill_worker for decision in decisions} == {"p1"}
    assert decisions[0].fallbacks == ("p2", "p0")
    literal = {decide(*workers, seed=s, literal=True).prefill_worker for s in range(20)}
    assert literal == {"p0", "p1", "p2"}


def test_trap_the_itl_gate_looks_at_what_the_prefill_will_do() -> None:
    """The past is fine, but with this batch any chunk breaks the ITL of every stream."""
    late = worker("p0", queued_prefill_s=2.9)
    crowded = home(itl_window_s=0.03, running_rounds=38, running_context_tokens=38_000)
    assert decide(late, at=crowded).reason is not RouteReason.DECODE_WITHIN_ITL
    calm = home(itl_window_s=0.03, running_rounds=8, running_context_tokens=8_000)
    assert decide(late, at=calm).reason is RouteReason.DECODE_WITHIN_ITL


def test_trap_a_slow_past_does_not_close_a_home_where_nobody_decodes() -> None:
    late = worker("p0", queued_prefill_s=2.9)
    assert decide(late, at=home(itl_window_s=0.4)).reason is RouteReason.DECODE_WITHIN_ITL


def test_trap_home_must_be_in_time_too() -> None:
    late = worker("p0", queued_prefill_s=4.0)
    backlog = home(queued_prefill_s=6.0)
    assert decide(late, at=backlog).reason is RouteReason.CHEAPEST_REMOTE
    assert decide(late, at=backlog, literal=True, alpha=0.0).route is Route.REMOTE


def test_trap_history_read_counts_only_what_the_prefill_worker_lacks() -> None:
    both = (worker("p0"), worker("p1"))
    decision = decide(*both, history=200_000, cached={"p1": 200_000})
    assert decision.prefill_worker == "p1"
    assert decision.candidates[0].read_s == 0.0
    # A cached prefix longer than the kept history (a rewind) is not a negative read.
    assert decide(*both, history=100, cached={"p1": 5_000}).candidates[0].read_s == 0.0


@given(st.permutations(["p0", "p1", "p2", "p3"]))
def test_trap_ties_break_by_id_whatever_the_order(names: list[str]) -> None:
    for policy in ("ampd", "ampd-paper", "always-remote"):
        decision = decide(*map(worker, names), policy=policy)
        assert decision.prefill_worker == "p0"
        assert decision.fallbacks == ("p1", "p2", "p3")


def test_a_tie_with_home_breaks_by_id() -> None:
    free = replace(COST, kv=KvCost())
    at = worker("m", Role.DECODE, free, itl_window_s=1.0, running_rounds=1)
    at = structs.replace(at, info=replace(at.info, cost=replace(free, mixed=MixedCost())))
    assert decide(worker("a", cost=free), at=at, alpha=0.0, beta=0.0).prefill_worker == "a"
    assert decide(worker("z", cost=free), at=at, alpha=0.0, beta=0.0).route is Route.LOCAL


# --- late binding ----------------------------------------------------------------------------


def late(*workers: WorkerView, at: WorkerView | None = None, **task: int) -> RouteDecision:
    return decide(*workers, at=at, policy="ampd", **task)  # type: ignore[arg-type]


def test_an_idle_prefill_worker_is_told_at_once() -> None:
    decision = late(worker("p0", queued_prefill_s=0.01), worker("p1"), at=home())
    # The busy one would be as quick: its queue hides the read.
    assert (decision.prefill_worker, decision.reason) == ("p1", RouteReason.IDLE_PREFILL_WORKER)
    assert decision.fallbacks == ("p0",)
    assert decision.predicted_ttft_s == pytest.approx(0.12 + 0.101 + 0.011)


def test_of_idle_ones_the_soonest_is_told() -> None:
    decision = late(worker("p0"), worker("p1"), worker("p2"), history=10_000)
    assert decision.prefill_worker == "p0"
    cached = decide(worker("p0"), worker("p1"), cached={"p1": 10_000}, policy="ampd")
    assert cached.prefill_worker == "p1"


def test_without_an_idle_one_the_task_waits_for_whoever_is_free_first() -> None:
    busy = worker("p0", queued_prefill_s=1e-3)
    decision = late(busy, at=home(queued_prefill_s=100.0))
    assert (decision.route, decision.prefill_worker) == (Route.LOCAL, None)
    assert decision.reason is RouteReason.LATE_BINDING
    assert decision.fallbacks == ()
    assert [c.worker_id for c in decision.candidates] == ["d0", "p0"]


def test_a_slow_idle_worker_is_left_out_only_for_a_sooner_home() -> None:
    # 1.2 s of the TTFT SLO are 0.4 of it: 10 k tokens take 1.02 s, and 0.1 s to come back.
    quick, slow = 10_000, 11_000
    assert late(worker("p0"), history=0, increment=quick).prefill_worker == "p0"
    decision = late(worker("p0"), history=0, increment=slow)
    assert decision.reason is RouteReason.LATE_BINDING
    queue = home(queued_prefill_s=1.0)
    assert late(worker("p0"), at=queue, history=0, increment=slow).prefill_worker == "p0"


# --- who is considered -----------------------------------------------------------------------


def test_draining_and_small_workers_are_left_out() -> None:
    small = worker("small")
    small = structs.replace(small, info=replace(small.info, kv_capacity_tokens=10_999))
    draining = worker("draining")
    draining = structs.replace(draining, load=replace(draining.load, draining=True))
    costless = worker("costless", cost=None)
    others = (small, draining, costless)
    for policy in ("ampd", "ampd-paper", "always-remote"):
        assert decide(*others, worker("p9"), policy=policy).prefill_worker == "p9"
        decision = decide(*others, policy=policy)
        assert (decision.route, decision.reason) == (
            Route.LOCAL,
            RouteReason.NO_PREFILL_WORKER,
        )
        assert decide(policy=policy).reason is RouteReason.NO_PREFILL_WORKER


def test_a_home_without_a_cost_model_is_a_defect() -> None:
    with pytest.raises(AmpdError) as caught:
        decide(worker("p0"), at=worker("d0", Role.DECODE, None))
    assert caught.value.reason is ErrorReason.INTERNAL


def test_a_decision_is_bounded() -> None:
    workers = [worker(f"p{i:03}") for i in range(256)]
    for literal in (True, False):
        decision = decide(*workers, literal=literal)
        assert len(decision.candidates) == MAX_CANDIDATES + 1
        assert len(decision.fallbacks) == MAX_FALLBACKS
        assert decision.candidates[0].worker_id == decision.prefill_worker
        assert decision.prefill_worker not in decision.fallbacks


# --- other policies --------------------------------------------------------------------------


def test_always_local() -> None:
    decision = decide(worker("p0"), policy="always-local")
    assert (decision.route, decision.reason) == (Route.LOCAL, RouteReason.ALWAYS_LOCAL)
    assert decision.prefill_worker is None
    assert decision.fallbacks == ()


def test_always_remote_least_loaded_even_when_hopeless() -> None:
    decision = decide(
        worker("p0", queued_prefill_s=90.0),
        worker("p1", queued_prefill_s=50.0),
        policy="always-remote",
    )
    assert (decision.prefill_worker, decision.reason) == ("p1", RouteReason.LEAST_LOADED)
    assert decision.fallbacks == ("p0",)


def test_always_remote_obeys_for_a_tiny_increment() -> None:
    """Case increment-shorter-than-a-block."""
    tiny = decide(worker("p0"), increment=3, policy="always-remote")
    assert tiny.route is Route.REMOTE
    assert decide(worker("p0"), increment=3, policy="always-local").route is Route.LOCAL


def test_round_robin_turns_by_the_counter() -> None:
    workers = [worker(f"p{i}", queued_prefill_s=float(i)) for i in (2, 0, 1)]
    turns = [
        decide(*workers, policy="always-remote", choice="round-robin", seed=seed)
        for seed in range(4)
    ]
    assert [turn.prefill_worker for turn in turns] == ["p0", "p1", "p2", "p0"]
    assert turns[1].fallbacks == ("p2", "p0")
    assert turns[0].reason is RouteReason.ROUND_ROBIN


def test_cheapest_is_step_3_alone() -> None:
    fast, slow = worker("p0", queued_prefill_s=0.1), worker("p1", queued_prefill_s=0.2)
    decision = decide(slow, fast, history=0, policy="cheapest")
    # At home nothing has to come back.
    assert (decision.route, decision.reason) == (Route.LOCAL, RouteReason.CHEAPEST_LOCAL)
    busy = home(queued_prefill_s=5.0)
    decision = decide(slow, fast, at=busy, history=0, policy="cheapest")
    assert (decision.prefill_worker, decision.reason) == ("p0", RouteReason.CHEAPEST_REMOTE)
    assert decision.fallbacks == ("p1",)


def test_only_the_first_round_is_remote() -> None:
    workers = [worker("p0", queued_prefill_s=9.0), worker("p1", queued_prefill_s=8.0)]
    first = decide(*workers, history=0, policy="first-remote-then-local")
    assert (first.prefill_worker, first.reason) == ("p1", RouteReason.LEAST_LOADED)
    later = decide(*workers, history=1, increment=100_000, policy="first-remote-then-local")
    assert (later.route, later.reason) == (Route.LOCAL, RouteReason.LATER_ROUND)


@pytest.mark.parametrize(
    ("history", "increment", "running_tokens", "local"),
    [
        (10_000, 1_000, 0, True),
        (0, 1_000, 0, False),  # nothing is cached
        (10_000, 1_001, 0, False),  # beyond the tokens
        (999, 1_000, 0, False),  # beyond the ratio
        (1_000, 1_000, 0, True),
        (10_000, 1_000, 81, False),  # the home is busy
        (10_000, 1_000, 80, True),
    ],
)
def test_thresholds(history: int, increment: int, running_tokens: int, local: bool) -> None:
    view = home(kv_running_tokens=running_tokens)
    decision = decide(
        worker("p0"),
        at=structs.replace(view, info=replace(view.info, kv_capacity_tokens=100)),
        history=history,
        increment=increment,
        policy="threshold",
        tokens=1_000,
        ratio=0.5,
        busy_kv=0.8,
    )
    reason = RouteReason.MOSTLY_CACHED if local else RouteReason.LEAST_LOADED
    assert (decision.route is Route.LOCAL, decision.reason) == (local, reason)


def test_literal_order_is_uniform_and_a_function_of_the_seed() -> None:
    workers = [worker(f"p{i}") for i in range(5)]
    picked = [decide(*workers, literal=True, seed=seed).prefill_worker for seed in range(5000)]
    assert picked[:50] == [
        decide(*reversed(workers), literal=True, seed=seed).prefill_worker for seed in range(50)
    ]
    assert all(900 < count < 1100 for count in Counter(picked).values())


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.integers(0, 50_000)),
        max_size=6,
    ),
    st.integers(0, 100_000),
    st.integers(1, 50_000),
    st.integers(0, 200),
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 2**64),
)
def test_any_decision_is_whole(
    loads: list[tuple[float, float, int]],
    history: int,
    increment: int,
    running: int,
    policy: str,
    seed: int,
) -> None:
    workers = [
        worker(f"p{i}", queued_prefill_s=queue_s, ttft_window_s=window_s)
        for i, (queue_s, window_s, _) in enumerate(loads)
    ]
    cached = {f"p{i}": tokens for i, (_, _, tokens) in enumerate(loads)}
    decision = decide(
        *workers,
        at=home(running_rounds=running, running_context_tokens=running * 1000),
        history=history,
        increment=increment,
        cached=cached,
        policy=policy,
        seed=seed,
    )
    chosen = decision.candidates[0]
    assert chosen.route is decision.route
    assert chosen.total_s == decision.predicted_ttft_s >= 0
    assert (decision.prefill_worker is None) == (decision.route is Route.LOCAL)
    ids = [candidate.worker_id for candidate in decision.candidates]
    assert len(ids) == len(set(ids))
    assert decision.prefill_worker not in decision.fallbacks
