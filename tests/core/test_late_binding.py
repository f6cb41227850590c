"""Late binding: who takes which of the tasks that wait."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.late_binding import (
    DECODE_SHARE,
    LOCAL_SHARE,
    REMOTE_SHARE,
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
from ampd.core.late_binding import task as make_task
from ampd.core.local_prefill import local_prefill_s
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
    cost: CostModel | None = COST,
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


STARTS_S = st.integers(0, 20).map(lambda eighths: eighths / 8)
"""Seconds are whole eighths: sums are exact, and deadlines are met to the instant."""


def most_on_time(tasks: list[Task], start_s: float) -> int:
    """By trying every subset, by deadline, one after the other."""
    return max(
        size
        for size in range(len(tasks) + 1)
        for chosen in combinations(tasks, size)
        if all(
            start_s + sum(one.compute_s for one in chosen[: end + 1]) <= chosen[end].deadline_s
            for end in range(size)
        )
    )


@given(TASKS, STARTS_S)
def test_no_larger_set_can_be_on_time(tasks: list[Task], start_s: float) -> None:
    plan = on_time_set(tasks, work_s, start_s=start_s, speed=1.0)
    assert len(plan.kept) == most_on_time(tasks, start_s)


@given(TASKS, STARTS_S, st.sampled_from([1.0, 2.0, 2.5]))
def test_what_is_kept_ends_in_time_and_nothing_is_forgotten(
    tasks: list[Task], start_s: float, speed: float
) -> None:
    plan = on_time_set(tasks, work_s, start_s=start_s, speed=speed)
    assert sorted(plan.kept + plan.late) == list(range(len(tasks)))
    assert list(plan.kept) == sorted(plan.kept)
    assert list(plan.late) == sorted(plan.late)
    done_s = 0.0
    for index, end_s in zip(plan.kept, plan.finish_s, strict=True):
        done_s += tasks[index].compute_s
        assert end_s == pytest.approx(start_s + done_s / speed)
        assert end_s <= tasks[index].deadline_s + 1e-9
        assert start_s + tasks[index].compute_s <= tasks[index].deadline_s


@given(TASKS, STARTS_S)
def test_more_workers_meet_no_fewer_deadlines(tasks: list[Task], start_s: float) -> None:
    plans = [on_time_set(tasks, work_s, start_s=start_s, speed=speed) for speed in (1, 1.5, 3)]
    sizes = [len(plan.kept) for plan in plans]
    assert sizes == sorted(sizes)


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


def test_of_equally_late_ones_the_order_hangs_on_no_home() -> None:
    one = task("a", 0.2, deadline_s=-1.0)
    other = task("b", 0.2, deadline_s=-2.0)._replace(home="another")
    assert pulled([one, other]) == ("a", PullReason.SHORTEST)


def test_alone_it_counts_as_one_however_it_is_told() -> None:
    """A worker that drains is not among those that take work: together they are 0."""
    tasks = [task("a", 0.5), task("b", 0.5)]
    assert pulled(tasks, speed=0.0) == pulled(tasks, speed=1.0) == ("a", PullReason.ON_TIME)


@given(TASKS, STARTS_S, st.sampled_from([1.0, 2.5]))
def test_nothing_late_is_taken_while_something_can_be_on_time(
    tasks: list[Task], now_s: float, speed: float
) -> None:
    decision = pull(tasks, work_s, now_s=now_s, speed=speed, starved=StarvedShare())
    assert decision is not None
    chosen = decision.task
    assert decision.predicted_s == chosen.compute_s
    if any(now_s + one.compute_s <= one.deadline_s for one in tasks):
        assert decision.reason is PullReason.ON_TIME
        assert now_s + chosen.compute_s <= chosen.deadline_s
        plan = on_time_set(tasks, work_s, start_s=now_s, speed=speed)
        assert chosen.deadline_s == min(tasks[index].deadline_s for index in plan.kept)
    else:
        assert decision.reason is PullReason.SHORTEST
        assert chosen.compute_s == min(one.compute_s for one in tasks)


@given(TASKS)
def test_one_worker_that_pulls_is_late_no_oftener_than_it_must_be(tasks: list[Task]) -> None:
    """Nothing comes, and no task is old enough to starve others: boundary after boundary."""
    waiting_, now_s, met = list(tasks), 0.0, 0
    while waiting_:
        decision = pull(waiting_, work_s, now_s=now_s, speed=1.0, starved=StarvedShare())
        assert decision is not None
        waiting_.remove(decision.task)
        now_s += decision.predicted_s
        met += now_s <= decision.task.deadline_s
    assert met == most_on_time(tasks, 0.0)


def test_a_starved_task_goes_before_others_within_its_share() -> None:
    old = task("old", 0.1, deadline_s=1.0)
    now_s = STARVED_SLOS + 0.1
    on_time = task("new", 0.1, deadline_s=now_s + 1, created_s=now_s)
    share = StarvedShare()
    for _ in range(1000):
        decision = pull([old, on_time], work_s, now_s=now_s, speed=1.0, starved=share)
        assert decision is not None
        share.add(decision)
        assert share.starved_s <= STARVED_SHARE * share.worked_s + 1e-9
    assert share.starved_s >= 0.9 * STARVED_SHARE * share.worked_s


def test_a_task_is_starved_once_it_is_so_many_slos_old() -> None:
    paid = StarvedShare(worked_s=1e6)
    old = task("old", 0.1, deadline_s=1.0)
    for age_s, reason in ((STARVED_SLOS, PullReason.ON_TIME), (4.1, PullReason.STARVED)):
        new = task("new", 0.1, deadline_s=age_s + 1, created_s=age_s)
        decision = pull([old, new], work_s, now_s=age_s, speed=1.0, starved=paid)
        assert decision is not None
        assert decision.reason is reason


def test_a_starved_task_that_nobody_stands_against_costs_its_share_nothing() -> None:
    share = StarvedShare()
    old = task("old", 0.1, deadline_s=1.0)
    decision = pull([old], work_s, now_s=50.0, speed=1.0, starved=share)
    assert decision is not None
    assert decision.reason is PullReason.SHORTEST
    share.add(decision)
    assert share == StarvedShare(worked_s=0.1, starved_s=0.0)


@given(st.lists(TASKS, max_size=12), st.integers(0, 200))
def test_the_share_of_the_starved_is_never_exceeded(arrivals: list[list[Task]], late: int) -> None:
    share, now_s = StarvedShare(worked_s=late / 8), 0.0
    for tasks in arrivals:
        before = share.starved_s
        shifted = [one._replace(deadline_s=one.deadline_s + now_s) for one in tasks]
        ancient = [one._replace(deadline_s=1.0, task_id="ancient") for one in tasks[:1]]
        decision = pull(
            sorted(ancient + shifted), work_s, now_s=now_s + late, speed=1.0, starved=share
        )
        assert decision is not None
        share.add(decision)
        assert (share.starved_s > before) == (decision.reason is PullReason.STARVED)
        assert share.starved_s <= STARVED_SHARE * share.worked_s + 1e-9
        now_s += decision.predicted_s


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


def test_a_remote_finish_that_is_hardly_on_time_counts_as_none() -> None:
    own = [at_home("sure", 300), at_home("unsure", 300)]
    assert taken(own, {"sure": 0.5, "unsure": REMOTE_SHARE - 0.01}) == "sure"
    assert taken(own, {"sure": 0.5, "unsure": REMOTE_SHARE + 0.01}) == "unsure"
    # Its age counts: 0.45 s from now are 0.95 s after it came.
    first = at_home("sure", 100, created_s=-0.6, deadline_s=0.4)
    second = at_home("old", 300, created_s=-0.5, deadline_s=0.5)
    assert taken([first, second], {"sure": 0.25, "old": 0.35}) == "sure"
    assert taken([first, second], {"sure": 0.25, "old": 0.45}) == "old"


def at_home_with(batch: int, calibration: float = 1.0) -> tuple[str, float] | None:
    decision = take_home(
        [at_home("a", 300)],
        RemoteOutlook({}, 1),
        now_s=0.0,
        cost=COST,
        calibration=calibration,
        load=WorkerLoad(running_rounds=batch),
        itl_slo_s=0.05,
    )
    return decision and (decision.task.task_id, decision.local_s)


def test_a_home_counts_on_the_chunks_that_its_streams_bear() -> None:
    # 48.5 ms a step less its 10: 38 tokens beside the streams, 8 steps of 48 ms.
    assert at_home_with(0) == ("a", pytest.approx(0.3))
    assert at_home_with(4) == ("a", pytest.approx(8 * 0.048))
    assert at_home_with(4, calibration=2.0) == ("a", pytest.approx(16 * 0.048))
    assert at_home_with(4, calibration=2.5) is None


OWN = st.lists(
    st.tuples(
        st.integers(1, 1500),  # tokens
        st.integers(-8, 8),  # created
        st.sampled_from([4, 8, 16]),  # TTFT SLO
        st.one_of(st.none(), st.integers(0, 16)),  # remote finish
    ),
    max_size=6,
)


@given(OWN, st.integers(0, 1), st.sampled_from([0, 3, 30]), st.integers(0, 8))
def test_a_home_takes_what_its_rules_say(
    drawn: list[tuple[int, int, int, int | None]], workers: int, batch: int, queued: int
) -> None:
    own, finish_s = [], {}
    for index, (tokens, created, slo, finish) in enumerate(drawn):
        own.append(
            at_home(str(index), tokens, created_s=created / 8, deadline_s=(created + slo) / 8)
        )
        if finish is not None and workers:
            finish_s[str(index)] = 1.0 + finish / 8
    own.sort()
    now_s = 1.0
    load = WorkerLoad(queued_prefill_s=queued / 8, running_rounds=batch)
    decision = take_home(
        own,
        RemoteOutlook(finish_s, workers),
        now_s=now_s,
        cost=COST,
        calibration=1.5,
        load=load,
        itl_slo_s=0.05,
    )

    def local_s(one: Task) -> float:
        prefill_s = local_prefill_s(
            COST,
            history_tokens=0,
            increment_tokens=one.increment_tokens,
            batch=batch,
            context_tokens=0,
            itl_slo_s=0.05,
        )
        return queued / 8 + 1.5 * prefill_s

    def remote_s(one: Task) -> float:
        there_s = finish_s.get(one.task_id, inf)
        on_time = there_s - one.created_s <= REMOTE_SHARE * one.ttft_slo_s
        return there_s - now_s if on_time else inf

    def may_take(one: Task) -> bool:
        left_s = LOCAL_SHARE * one.ttft_slo_s - (now_s - one.created_s)
        return local_s(one) <= left_s and local_s(one) < remote_s(one)

    wanted = [one for one in own if may_take(one)]
    wanted.sort(key=lambda one: (remote_s(one) < inf, own.index(one)))
    if not wanted and not workers:
        wanted = sorted(own, key=local_s)
    if not wanted:
        assert decision is None
        return
    assert decision is not None
    assert decision.task == wanted[0]
    assert (decision.local_s, decision.remote_s) == (local_s(wanted[0]), remote_s(wanted[0]))


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


def test_the_mirror_reads_a_publication_once() -> None:
    mirror = TaskMirror(COST)
    first = home("h1", waiting("a", 0.2), age_s=0.1)
    (before,) = mirror.tasks([first], 5.0)
    # Its age now is off by what clocks and reads are off; a task does not move by that.
    (again,) = mirror.tasks([home_again(first, age_s=1.3)], 6.0)
    assert again is before
    renewed = home("h1", waiting("a", 0.2, age_s=1.0), age_s=0.0)
    (newer,) = mirror.tasks([renewed], 6.5)
    assert newer.created_s == 5.5


def test_the_mirror_knows_homes_only_as_long_as_they_are_there() -> None:
    mirror = TaskMirror(COST)
    leaving = view("h2", Role.DECODE, draining=True, waiting=(waiting("b", 0.1),))
    views = [home("h1", waiting("a", 0.2)), leaving]
    assert [one.home for one in mirror.tasks(views, 0.0)] == ["h1", "h2"]
    assert [one.home for one in mirror.tasks([leaving], 0.0)] == ["h2"]
    assert mirror.tasks([], 0.0) == []
    assert [one.home for one in mirror.tasks(views, 0.0)] == ["h1", "h2"]


def home_again(known: WorkerView, *, age_s: float) -> WorkerView:
    """The same publication, later."""
    return WorkerView(known.info, known.load, age_s)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["h1", "h2", "h3"]),
            st.one_of(
                st.none(),
                st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=4),
            ),
        ),
        max_size=6,
    )
)
def test_the_mirror_is_what_is_published(
    readings: list[dict[str, list[tuple[str, int]] | None]],
) -> None:
    """None: a home has published nothing new. Times are whole eighths of a second."""
    mirror = TaskMirror(COST)
    published: dict[str, tuple[WorkerView, float]] = {}
    for turn, reading in enumerate(readings):
        now_s = turn / 8
        for gone in published.keys() - reading.keys():
            del published[gone]
        for name, shown in reading.items():
            if shown is not None:
                tasks = (waiting(f"{name}{task_id}", 0.1, age_s=age / 8) for task_id, age in shown)
                published[name] = home(name, *tasks), now_s
        views = [home_again(known, age_s=now_s - at_s) for known, at_s in published.values()]
        expected = sorted(
            make_task(shown, known.info.worker_id, at_s, COST)
            for known, at_s in published.values()
            for shown in known.load.waiting
        )
        assert mirror.tasks([*views, view("p1", waiting=(waiting("x", 0.1),))], now_s) == expected


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
    assert remote_outlook([], [view("p1")], 0.0) == RemoteOutlook({}, 1)
    assert remote_outlook(tasks, [view("d", Role.DECODE)], 0.0) == RemoteOutlook({}, 0)
    assert remote_outlook(tasks, [view("p1", cost=None)], 0.0) == RemoteOutlook({}, 0)
    assert remote_outlook(tasks, [view("p1", draining=True)], 0.0) == RemoteOutlook({}, 0)


def test_a_task_is_expected_to_move_its_kv_and_to_take_as_long_as_the_last_ones_did() -> None:
    moving = replace(COST, kv=KvCost(token_s=1e-3))
    one = task("a", 0.2, deadline_s=2.0)._replace(history_tokens=100, increment_tokens=50)
    outlook = remote_outlook([one], [view("p1", cost=moving, calibration=1.5)], 0.0)
    assert outlook.finish_s == {"a": pytest.approx(1.5 * 0.2 + 0.15)}
    # What is queued has been worked on since it was published.
    busy = view("p1", queued_prefill_s=0.5, age_s=0.2)
    assert remote_outlook([one], [busy], 0.0).finish_s == {"a": pytest.approx(0.3 + 0.2)}
    late = remote_outlook([task("b", 0.2, deadline_s=0.1)], [view("p1")], 0.0)
    assert late == RemoteOutlook({}, 1)


def test_the_speed_of_all_is_told_in_units_of_ones_own() -> None:
    slow = view("p2", calibration=2.0)
    assert speed_of([view("p1"), slow, view("d", Role.DECODE)], COST, 1.0) == pytest.approx(1.5)
    assert speed_of([view("p1"), slow], COST, 2.0) == pytest.approx(3.0)
    assert speed_of([view("p1", draining=True)], COST, 1.0) == 0.0
    quick = view("p3", cost=COST.scaled(0.25))
    assert speed_of([view("p1"), quick], COST, 1.0) == pytest.approx(5.0)
    assert speed_of([view("p1"), quick], COST.scaled(0.25), 1.0) == pytest.approx(1.25)
    unknown = [view("p4", cost=None), view("p5", cost=CostModel())]
    assert speed_of([view("p1"), *unknown], COST, 1.0) == pytest.approx(1.0)


def test_a_home_with_a_long_decode_step_takes_no_more() -> None:
    slo = Slo(1.0, 0.05)
    # 47.5 ms are 37 streams.
    assert can_decode_more(COST, WorkerLoad(running_rounds=36), slo, 0)
    assert not can_decode_more(COST, WorkerLoad(running_rounds=36), slo, 1)
    assert not can_decode_more(COST, WorkerLoad(running_rounds=37), slo, 0)


def test_nobody_is_protected_where_nobody_is_or_can_be() -> None:
    slow = replace(COST, decode=DecodeCost(base_s=0.045, sequence_s=0.001))
    assert can_decode_more(slow, WorkerLoad(), Slo(1.0, 0.05), 0)
    hopeless = Slo(1.0, 0.04)
    assert can_decode_more(slow, WorkerLoad(running_rounds=99), hopeless, 99)
    long = replace(COST, decode=DecodeCost(base_s=0.01, context_token_s=1e-6))
    assert can_decode_more(long, WorkerLoad(running_context_tokens=10**6), Slo(1.0, 0.05), 0)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 10**5), st.integers(1, 200))
def test_more_streams_never_open_a_home(
    running: int, coming: int, context: int, itl_ms: int
) -> None:
    cost = replace(COST, decode=DecodeCost(0.01, 0.001, 1e-7))
    slo = Slo(1.0, itl_ms / 1000)

    def can(running: int, coming: int, context: int, slo: Slo = slo) -> bool:
        load = WorkerLoad(running_rounds=running, running_context_tokens=context)
        return can_decode_more(cost, load, slo, coming)

    if can(running + 1, coming, context) and running:
        assert can(running, coming, context)
        assert can(running, coming + 1, context)
    if can(running, coming, context + 1000):
        assert can(running, coming, context)
    if cost.t_dec(1, 0) <= DECODE_SHARE * slo.itl_s and can(running, coming, context):
        assert can(running, coming, context, Slo(1.0, slo.itl_s + 0.01))
