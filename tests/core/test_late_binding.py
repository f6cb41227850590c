"""Late binding: who takes which of the tasks that wait."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.cost_model import CostModel, DecodeCost, MixedCost, PrefillCost
from ampd.core.late_binding import (
    LOCAL_SHARE,
    MAX_SHOWN_TASKS,
    STARVED_SHARE,
    STARVED_SLOS,
    PullReason,
    RemoteOutlook,
    StarvedShare,
    Task,
    TaskMirror,
    can_decode_more,
    on_time_set,
    pull,
    remote_outlook,
    speed_of,
    take_home,
)
from ampd.core.model import Role, Slo, WaitingPrefill, WorkerInfo, WorkerLoad, WorkerView

COST = CostModel(
    prefill=PrefillCost(token_s=0.001),
    decode=DecodeCost(base_s=0.01, sequence_s=0.001),
    mixed=MixedCost(base_s=0.01, token_s=0.001),
)


def waiting(
    name: str, seconds: float, *, age_s: float = 0.0, ttft_s: float = 1.0, grace_s: float = 0.0
) -> WaitingPrefill:
    """A task of so many seconds on a worker of COST."""
    return WaitingPrefill(name, f"of-{name}", 0, round(seconds * 1000), age_s, ttft_s, grace_s)


def task(
    name: str,
    seconds: float,
    *,
    deadline_s: float = 1.0,
    created_s: float = 0.0,
    grace_s: float = 0,
) -> Task:
    ttft_s = deadline_s - created_s
    return Task(deadline_s, name, f"of-{name}", "home", 0, 1, created_s, ttft_s, grace_s, seconds)


def work_s(one: Task) -> float:
    return one.compute_s


def view(
    name: str,
    role: Role = Role.PREFILL,
    *,
    age_s: float = 0.0,
    cost: CostModel = COST,
    **load: object,
) -> WorkerView:
    info = WorkerInfo(name, role, 1, "", "", cost=cost)
    return WorkerView(info, WorkerLoad(**load), age_s)  # type: ignore[arg-type]


TASKS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=7).map(
    lambda pairs: sorted(
        task(str(index), seconds / 8, deadline_s=deadline / 8)
        for index, (seconds, deadline) in enumerate(pairs)
    )
)


# --- the set that can be on time ------------------------------------------------------------


@given(TASKS)
def test_no_larger_set_can_be_on_time(tasks: list[Task]) -> None:
    plan = on_time_set(tasks, work_s, start_s=0.0, speed=1.0)
    most = max(
        size
        for size in range(len(tasks) + 1)
        for chosen in combinations(tasks, size)
        if all(
            sum(one.compute_s for one in chosen[: end + 1]) <= chosen[end].deadline_s
            for end in range(size)
        )
    )
    assert len(plan.kept) == most


@given(TASKS, st.sampled_from([1.0, 2.0, 2.5]))
def test_what_is_kept_ends_in_time_and_nothing_is_forgotten(
    tasks: list[Task], speed: float
) -> None:
    plan = on_time_set(tasks, work_s, start_s=0.0, speed=speed)
    assert sorted(plan.kept + plan.late) == list(range(len(tasks)))
    ends = dict(zip(plan.kept, plan.finish_s, strict=True))
    for index, end_s in ends.items():
        assert end_s <= tasks[index].deadline_s + 1e-9
        assert tasks[index].compute_s <= tasks[index].deadline_s


# --- what a prefill worker takes --------------------------------------------------------------


def pulled(tasks: list[Task], now_s: float = 0.0, speed: float = 1.0) -> tuple[str, PullReason]:
    decision = pull(sorted(tasks), work_s, now_s=now_s, speed=speed, starved=StarvedShare())
    assert decision is not None
    assert decision.on_time + decision.late == len(tasks)
    return decision.task.task_id, decision.reason


def test_nothing_waits() -> None:
    assert pull([], work_s, now_s=0.0, speed=1.0, starved=StarvedShare()) is None


def test_the_earliest_deadline_of_those_that_can_be_met() -> None:
    late = task("late", 5.0, deadline_s=1.0)
    first, second = task("b", 0.5, deadline_s=1.2), task("a", 0.5, deadline_s=1.5)
    assert pulled([late, first, second]) == ("b", PullReason.ON_TIME)


def test_the_longest_is_given_up_for_many_short_ones() -> None:
    long = task("long", 0.9, deadline_s=1.0)
    short = [task(f"s{index}", 0.3, deadline_s=1.1) for index in range(3)]
    assert pulled([long, *short])[0] == "s0"
    assert pulled([long, *short], speed=2.0)[0] == "long"  # together they can do all


def test_of_late_ones_those_first_whose_sessions_mean_can_be_kept() -> None:
    lost = task("lost", 0.1, deadline_s=-1.0)
    kept = task("kept", 0.5, deadline_s=-1.0, grace_s=2.0)
    shorter = task("shorter", 0.3, deadline_s=-1.0, grace_s=2.0)
    assert pulled([lost, kept, shorter]) == ("shorter", PullReason.SESSION_MEAN)
    assert pulled([lost, task("x", 0.2, deadline_s=-1.0)]) == ("lost", PullReason.SHORTEST)


def test_a_starved_task_goes_before_others_within_its_share() -> None:
    old = task("old", 0.1, deadline_s=1.0)
    now_s = STARVED_SLOS + 0.1
    on_time = task("new", 0.1, deadline_s=now_s + 1, created_s=now_s)
    share = StarvedShare()
    taken = [
        pull([old, on_time], work_s, now_s=now_s, speed=1.0, starved=share) for _ in range(1000)
    ]
    assert all(taken)
    for _ in range(1000):
        decision = pull([old, on_time], work_s, now_s=now_s, speed=1.0, starved=share)
        assert decision is not None
        share.add(decision)
        assert share.starved_s <= STARVED_SHARE * share.worked_s + 1e-9
    assert share.starved_s >= 0.9 * STARVED_SHARE * share.worked_s


# --- what a home takes ------------------------------------------------------------------------


def taken(
    own: list[Task],
    finish_s: dict[str, float] | None = None,
    *,
    workers: int = 1,
    now_s: float = 0.0,
    queued_s: float = 0.0,
) -> str | None:
    decision = take_home(
        sorted(own),
        RemoteOutlook(finish_s or {}, workers),
        now_s=now_s,
        cost=COST,
        calibration=1.0,
        load=WorkerLoad(queued_prefill_s=queued_s),
        itl_slo_s=0.05,
    )
    return decision.task.task_id if decision is not None else None


def at_home(name: str, tokens: int, *, deadline_s: float = 1.0, created_s: float = 0.0) -> Task:
    ttft_s = deadline_s - created_s
    return Task(deadline_s, name, name, "home", 0, tokens, created_s, ttft_s, 0.0, tokens / 1000)


def test_a_home_takes_what_it_finishes_sooner() -> None:
    own = [at_home("a", 300)]
    assert taken(own, {"a": 0.5}) == "a"
    assert taken(own, {"a": 0.2}) is None
    assert taken(own, {"a": 0.5}, queued_s=0.3) is None


def test_a_home_takes_first_what_prefill_workers_cannot_do_on_time() -> None:
    own = [at_home("met", 300, deadline_s=1.0), at_home("unmet", 300, deadline_s=2.0)]
    assert taken(own, {"met": 0.5}) == "unmet"
    assert taken(own, {"met": 0.5, "unmet": 1.0}) == "met"


def test_a_home_leaves_what_it_cannot_finish_in_time_to_prefill_workers() -> None:
    too_long = at_home("a", round(LOCAL_SHARE * 1000) + 1)
    assert taken([too_long]) is None
    assert taken([at_home("late", 10, deadline_s=-1.0)]) is None


def test_without_prefill_workers_a_home_takes_everything_in_the_end() -> None:
    own = [at_home("long", 5000), at_home("late", 700, deadline_s=-1.0), at_home("met", 800)]
    order = []
    while own:
        name = taken(own, workers=0)
        assert name is not None
        order.append(name)
        own = [one for one in own if one.task_id != name]
    assert order == ["met", "late", "long"]


# --- what is known of the others --------------------------------------------------------------


def home(name: str, *tasks: WaitingPrefill, age_s: float = 0.0) -> WorkerView:
    return view(name, Role.DECODE, age_s=age_s, waiting=tasks)


def test_the_mirror_has_all_tasks_by_deadline_on_its_own_clock() -> None:
    mirror = TaskMirror(COST)
    views = [
        home("h1", waiting("a", 0.2, age_s=0.5), waiting("b", 0.1, age_s=0.1), age_s=0.2),
        home("h2", waiting("c", 0.3, ttft_s=0.5)),
        view("p1"),
    ]
    tasks = mirror.tasks(views, 10.0)
    assert [(one.task_id, one.home) for one in tasks] == [("a", "h1"), ("c", "h2"), ("b", "h1")]
    assert [one.created_s for one in tasks] == pytest.approx([9.3, 10.0, 9.7])
    assert [one.deadline_s for one in tasks] == pytest.approx([10.3, 10.5, 10.7])
    assert [one.compute_s for one in tasks] == pytest.approx([0.2, 0.3, 0.1])


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["h1", "h2", "h3"]),
            st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=4),
        ),
        max_size=6,
    )
)
def test_the_mirror_is_what_a_fresh_one_reads(
    readings: list[dict[str, list[tuple[str, int]]]],
) -> None:
    mirror = TaskMirror(COST)
    known: dict[str, WorkerView] = {}
    for now_s, reading in enumerate(readings):
        known = {name: old for name, old in known.items() if name in reading}
        for name, shown in reading.items():
            tasks = (waiting(f"{name}{task_id}", 0.1, age_s=age) for task_id, age in shown)
            new = home(name, *tasks)
            if name not in known or known[name].load != new.load:
                known[name] = new
        read = mirror.tasks(known.values(), 0.0)
        assert read == TaskMirror(COST).tasks(known.values(), 0.0), now_s


def test_prefill_workers_are_expected_to_serve_the_set_that_can_be_on_time() -> None:
    tasks = [task("a", 0.4, deadline_s=1.0), task("b", 0.4, deadline_s=1.0), task("c", 0.4)]
    one = remote_outlook(tasks, [view("p1")], 0.0)
    assert one.workers == 1
    assert sorted(one.finish_s.values()) == pytest.approx([0.4, 0.8])
    busy = remote_outlook(tasks, [view("p1", queued_prefill_s=0.5)], 0.0)
    assert list(busy.finish_s.values()) == pytest.approx([0.9])
    two = remote_outlook(tasks, [view("p1"), view("p2")], 0.0)
    assert set(two.finish_s) == {"a", "b", "c"}
    assert two.finish_s["a"] == pytest.approx(0.4)  # a task has one worker
    assert remote_outlook(tasks, [view("p1", draining=True)], 0.0) == RemoteOutlook({}, 0)


def test_the_speed_of_all_is_told_in_units_of_ones_own() -> None:
    slow = view("p2", calibration=2.0)
    assert speed_of([view("p1"), slow, view("d", Role.DECODE)], COST, 1.0) == pytest.approx(1.5)
    assert speed_of([view("p1"), slow], COST, 2.0) == pytest.approx(3.0)
    assert speed_of([view("p1", draining=True)], COST, 1.0) == 0.0


def test_a_home_with_a_long_decode_step_takes_no_more() -> None:
    slo = Slo(1.0, 0.05)
    fits = WorkerLoad(running_rounds=30)
    assert can_decode_more(COST, fits, slo, 0)
    assert not can_decode_more(COST, fits, slo, 10)
    assert not can_decode_more(COST, WorkerLoad(running_rounds=40), slo, 0)
    assert MAX_SHOWN_TASKS >= 1
