from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from ampd.core.reordering import Job, select_enumerated, select_moore_hodgson

# Whole numbers: sums are exact whatever their order, as the two algorithms add in theirs.
jobs_of = st.builds(
    Job,
    deadline_s=st.integers(0, 60).map(float),
    seconds=st.integers(0, 20).map(float),
    postponed=st.just(0),
)


def best_count(jobs: list[Job], first: int, start_s: float = 0.0) -> int:
    """The most on-time tasks over all orders that begin with `first`."""
    best = 0
    rest = [index for index in range(len(jobs)) if index != first]
    for order in permutations(rest):
        now_s, count = start_s, 0
        for index in (first, *order):
            now_s += jobs[index].seconds
            count += now_s <= jobs[index].deadline_s
        best = max(best, count)
    return best


def test_single_task_and_empty_window() -> None:
    assert select_enumerated([Job(0.0, 5.0)], 100.0, 3) == 0
    assert select_moore_hodgson([Job(0.0, 5.0)], 100.0, 3) == 0


def test_all_on_time_window_is_left_alone() -> None:
    jobs = [Job(30.0, 10.0), Job(31.0, 10.0), Job(30.0, 10.0)]
    assert select_enumerated(jobs, 0.0, 3) == 0
    assert select_moore_hodgson(jobs, 0.0, 3) == 0


def test_hopeless_window_is_left_alone() -> None:
    jobs = [Job(1.0, 10.0), Job(1.0, 9.0)]
    assert select_enumerated(jobs, 5.0, 3) == 0
    assert select_moore_hodgson(jobs, 5.0, 3) == 0


def test_later_limit_first_in_queue_is_passed_when_both_can_be_on_time() -> None:
    """Case deadline-order-is-fifo: 5 s and 0.1 s left, the later limit first."""
    jobs = [Job(5.0, 0.5), Job(0.1, 0.05)]
    assert select_enumerated(jobs, 0.0, 3) == 1
    assert select_moore_hodgson(jobs, 0.0, 3) == 1


def test_ties_go_to_the_served_task_that_arrived_first() -> None:
    # Any of the last two first gives two on time; the second arrived before the third.
    jobs = [Job(1.0, 10.0), Job(20.0, 1.0), Job(20.0, 1.0)]
    assert select_enumerated(jobs, 0.0, 3) == 0  # the head is late anyway, and costs nobody
    jobs = [Job(1.0, 10.0), Job(5.0, 1.0), Job(5.0, 1.0)]
    assert select_enumerated(jobs, 0.0, 3) == 1


def test_only_the_window_is_looked_at() -> None:
    jobs = [Job(9.0, 9.0), Job(18.0, 9.0), Job(27.0, 9.0), Job(0.5, 0.1)]
    assert select_enumerated(jobs, 0.0, 3) == 0


def test_a_task_at_its_bound_is_served() -> None:
    jobs = [Job(1.0, 10.0, postponed=3), Job(5.0, 1.0), Job(5.0, 1.0)]
    assert select_enumerated(jobs, 0.0, 3) == 0
    assert select_moore_hodgson(jobs, 0.0, 3) == 0


def test_nothing_behind_a_task_at_its_bound_is_served() -> None:
    jobs = [Job(1.0, 10.0, postponed=0), Job(5.0, 1.0, postponed=3), Job(2.0, 1.0)]
    assert select_enumerated(jobs, 0.0, 3) == 1


@given(st.lists(jobs_of, min_size=1, max_size=3))
def test_enumeration_serves_the_earliest_of_the_best(jobs: list[Job]) -> None:
    counts = [best_count(jobs, first) for first in range(len(jobs))]
    assert select_enumerated(jobs, 0.0, 3) == counts.index(max(counts))


@given(st.lists(jobs_of, min_size=1, max_size=6), st.integers(0, 10))
def test_moore_hodgson_reaches_the_count_of_the_enumeration(jobs: list[Job], start_s: int) -> None:
    enumerated = select_enumerated(jobs, float(start_s), len(jobs))
    fast = select_moore_hodgson(jobs, float(start_s), len(jobs))
    assert best_count(jobs, fast, start_s) == best_count(jobs, enumerated, start_s)


@given(st.lists(jobs_of, min_size=1, max_size=12), st.integers(1, 4), st.booleans())
def test_no_task_is_passed_more_than_the_bound(arrivals: list[Job], w: int, exact: bool) -> None:
    """Serve to the end, a new task arriving after each: the counters stay within w, and never
    rise along the queue."""
    waiting = arrivals[:4]
    coming = arrivals[4:]
    now_s = 0.0
    while waiting:
        select = select_moore_hodgson if exact else select_enumerated
        index = select(waiting, now_s, w)
        assert exact or index < w
        waiting = [
            job._replace(postponed=job.postponed + 1) if place < index else job
            for place, job in enumerate(waiting)
        ]
        counters = [job.postponed for job in waiting]
        assert all(counter <= w for counter in counters)
        now_s += waiting.pop(index).seconds
        rest = [job.postponed for job in waiting]
        assert rest == sorted(rest, reverse=True)
        if coming:
            waiting.append(coming.pop())


def plain_moore_hodgson(jobs: list[Job], start_s: float) -> int:
    """As its docstring reads, kept in lists."""

    def kept(indices: list[int], now_s: float) -> list[int]:
        taken: list[int] = []
        for index in indices:
            taken.append(index)
            if now_s + sum(jobs[i].seconds for i in taken) > jobs[index].deadline_s:
                taken.remove(max(taken, key=lambda i: (jobs[i].seconds, -i)))
        return taken

    by_deadline = sorted(range(len(jobs)), key=lambda index: jobs[index].deadline_s)
    best = kept(by_deadline, start_s)
    head_end_s = start_s + jobs[0].seconds
    behind_head = kept([index for index in by_deadline if index], head_end_s)
    with_head = (head_end_s <= jobs[0].deadline_s) + len(behind_head)
    return best[0] if best and with_head < len(best) else 0


@given(st.lists(jobs_of, min_size=1, max_size=40), st.integers(0, 10))
def test_the_exact_choice_is_that_of_the_plain_algorithm(jobs: list[Job], start_s: int) -> None:
    start = float(start_s)
    assert select_moore_hodgson(jobs, start, bound=1) == plain_moore_hodgson(jobs, start)
