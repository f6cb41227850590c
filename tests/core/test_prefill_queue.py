import pytest

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PrefillTask, Slo
from ampd.core.prefill_queue import PrefillQueue, QueueOrder

REORDER = QueueOrder(window=3, bound=3)


def task(name: str, *, created_s: float = 0.0, ttft_s: float = 10.0) -> PrefillTask:
    return PrefillTask(name, f"s-{name}", 0, "d0", 0, 100, created_s, Slo(ttft_s, 0.05))


def taken(queue: PrefillQueue, now_s: float = 0.0, busy_s: float = 0.0) -> str | None:
    entry = queue.take(now_s, busy_s)
    return entry.task.task_id if entry else None


def test_first_come_first_served() -> None:
    queue = PrefillQueue()
    for name in ("a", "b"):
        queue.add(task(name), now_s=0.0, compute_s=1.0)
    assert (len(queue), queue.total_s) == (2, 2.0)
    assert [taken(queue), taken(queue), taken(queue)] == ["a", "b", None]


def test_the_bound_refuses_with_a_retry_hint() -> None:
    queue = PrefillQueue(max_tasks=2)
    queue.add(task("a"), now_s=0.0, compute_s=3.0)
    queue.add(task("b"), now_s=0.0, compute_s=2.0)
    assert not queue.can_add()
    with pytest.raises(AmpdError) as caught:
        queue.add(task("c"), now_s=0.0, compute_s=1.0)
    assert caught.value.reason is ErrorReason.QUEUE_FULL
    assert caught.value.retry_after_s == 2.0
    queue.add(task("a"), now_s=0.0, compute_s=3.0)  # a repeated offer is no news
    assert len(queue) == 2


def test_void_tasks_leave_at_once_and_cost_nothing() -> None:
    queue = PrefillQueue()
    queue.add(task("a"), now_s=0.0, compute_s=1.0)
    queue.add(task("b"), now_s=0.0, compute_s=2.0)
    queue.add(task("c"), now_s=0.0, compute_s=4.0)
    assert queue.remove("b") is not None
    assert queue.remove("b") is None
    assert queue.remove("a") is not None
    assert queue.total_s == 4.0
    assert taken(queue) == "c"


def test_ages_count_from_creation_also_after_a_re_route() -> None:
    queue = PrefillQueue()
    assert queue.oldest_wait_s(9.0) == 0.0
    queue.add(task("a", created_s=4.0), now_s=8.0, compute_s=1.0)
    queue.add(task("b", created_s=2.0), now_s=8.5, compute_s=1.0)
    assert queue.oldest_wait_s(9.0) == 7.0
    assert queue.ages_s(9.0) == [5.0, 7.0]


def test_the_served_task_is_chosen_and_the_queue_stays_in_arrival_order() -> None:
    queue = PrefillQueue(order=REORDER)
    queue.add(task("slow", ttft_s=20.0), now_s=0.0, compute_s=10.0)
    queue.add(task("b", ttft_s=20.0), now_s=0.0, compute_s=1.0)
    queue.add(task("urgent", ttft_s=1.0), now_s=0.0, compute_s=1.0)
    assert taken(queue) == "urgent"
    assert [(e.task.task_id, e.postponed) for e in queue.waiting] == [("slow", 1), ("b", 1)]


def test_no_task_is_passed_more_than_w_times() -> None:
    queue = PrefillQueue(order=REORDER)
    queue.add(task("long", ttft_s=1000.0), now_s=0.0, compute_s=50.0)
    served = []
    for turn in range(6):
        queue.add(task(f"t{turn}", ttft_s=1.0 + turn), now_s=0.0, compute_s=1.0)
        served.append(taken(queue, float(turn)))
    assert served.index("long") == 3


def test_the_clock_starts_at_creation_but_for_the_papers_literal_policy() -> None:
    def filled(order: QueueOrder) -> PrefillQueue:
        queue = PrefillQueue(order=order)
        queue.add(task("new", created_s=9.0, ttft_s=5.0), now_s=9.0, compute_s=2.0)
        # Created long ago, here for no time: 1.5 s left, or 5 s.
        queue.add(task("rerouted", created_s=5.5, ttft_s=5.0), now_s=9.0, compute_s=1.0)
        return queue

    assert taken(filled(REORDER), 9.0) == "rerouted"
    assert taken(filled(QueueOrder(window=3, bound=3, by_arrival=True)), 9.0) == "new"


def test_predictions_include_the_read_that_is_not_hidden() -> None:
    def filled() -> PrefillQueue:
        queue = PrefillQueue(order=REORDER)
        queue.add(task("reads", ttft_s=4.0), now_s=0.0, compute_s=1.0, read_s=3.0)
        queue.add(task("b", ttft_s=3.0), now_s=0.0, compute_s=1.0)
        return queue

    # 1 + 2 unhidden seconds first would make b late; b first keeps both.
    assert taken(filled()) == "b"
    queue = PrefillQueue(order=REORDER)
    queue.add(task("computes", ttft_s=4.0), now_s=0.0, compute_s=1.0, read_s=1.0)
    queue.add(task("b", ttft_s=3.0), now_s=0.0, compute_s=1.0)
    assert taken(queue, busy_s=1.0) == "computes"  # hidden by the computation in progress


def test_what_computes_delays_every_completion() -> None:
    def filled() -> PrefillQueue:
        queue = PrefillQueue(order=REORDER)
        queue.add(task("a", ttft_s=6.0), now_s=0.0, compute_s=2.0)
        queue.add(task("b", ttft_s=5.0), now_s=0.0, compute_s=2.0)
        return queue

    assert taken(filled(), busy_s=1.0) == "a"
    assert taken(filled(), busy_s=2.0) == "b"


def test_exact_order_of_the_whole_queue() -> None:
    queue = PrefillQueue(order=QueueOrder(window=None, bound=10))
    for index in range(9):
        queue.add(task(f"t{index}", ttft_s=100.0), now_s=0.0, compute_s=2.0)
    queue.add(task("urgent", ttft_s=1.0), now_s=0.0, compute_s=1.0)
    assert taken(queue) == "urgent"
    assert {entry.postponed for entry in queue.waiting} == {1}
