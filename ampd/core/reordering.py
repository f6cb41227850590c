"""Which waiting prefill is served next (spec 5; paper, the prefill reordering).

The queue stays in arrival order, only the served task is chosen. Serving task j moves back
every task ahead of j, once each; a task moved back `bound` times is passed no more: nothing
behind it may be served. So counters never rise along the queue, and a bound that was reached
was reached by the first task.

Times are seconds on one clock. Completion is the running sum of `seconds` from `start_s` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heappushpop
from itertools import permutations
from typing import NamedTuple


class Job(NamedTuple):
    """A waiting prefill: latest instant of its first token, predicted seconds, and how often
    it was moved back."""

    deadline_s: float
    seconds: float
    postponed: int = 0


def select_enumerated(jobs: Sequence[Job], start_s: float, w: int) -> int:
    """The paper's rule: the index of the task to serve, of the first `w` in arrival order.

    Enumerates their orders and serves the first task of one with the most on-time tasks;
    of several such, the one that arrived first.
    """
    window = jobs[:w]
    best_index, best_count = 0, _on_time(window, start_s)
    if best_count == len(window):
        return 0
    # Permutations come in lexicographic order of positions: the earliest arrival first.
    for order in permutations(range(len(window))):
        first = order[0]
        if first and jobs[first - 1].postponed >= w:
            break
        count = _on_time([window[index] for index in order], start_s)
        if count > best_count:
            best_index, best_count = first, count
    return best_index


def select_moore_hodgson(jobs: Sequence[Job], start_s: float, bound: int) -> int:
    """The index of a task whose service keeps the most of all `jobs` on time, in O(n log n).

    `1 || sum U_j` is solved exactly by Moore and Hodgson, so the count is that of the
    enumeration over the whole queue. The first task is served when that costs nothing or when
    it was moved back `bound` times, else the kept task with the earliest deadline.
    """
    if any(job.postponed >= bound for job in jobs):
        return 0
    # Reordered queues are not in deadline order. Of equal deadlines the first that arrived.
    by_deadline = sorted(
        [(deadline_s, index, seconds) for index, (deadline_s, seconds, _) in enumerate(jobs)]
    )
    kept = _kept(by_deadline, start_s)
    first = next((index for _, index, _ in by_deadline if index in kept), 0)
    if first == 0:
        return 0
    head_end_s = start_s + jobs[0].seconds
    head_on_time = head_end_s <= jobs[0].deadline_s
    rest = _kept([task for task in by_deadline if task[1]], head_end_s)
    return 0 if head_on_time + len(rest) == len(kept) else first


def _kept(by_deadline: Sequence[tuple[float, int, float]], start_s: float) -> set[int]:
    """The largest set that can be on time, of (deadline, index, seconds): add each task; when
    one would be late, drop the longest so far."""
    longest: list[tuple[float, int]] = []
    now_s = start_s
    for deadline_s, index, seconds in by_deadline:
        now_s += seconds
        if now_s <= deadline_s:
            heappush(longest, (-seconds, index))
        else:
            now_s += heappushpop(longest, (-seconds, index))[0]
    return {index for _, index in longest}


def _on_time(order: Sequence[Job], start_s: float) -> int:
    count = 0
    now_s = start_s
    for job in order:
        now_s += job.seconds
        count += now_s <= job.deadline_s
    return count
