from dataclasses import replace

import pytest
from msgspec import structs

from ampd.core.binding import FootprintEstimate, bind
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import Role, WorkerInfo, WorkerLoad, WorkerView

NOTHING = FootprintEstimate()


def worker(
    name: str,
    *,
    capacity: int = 10_000,
    reserved: int = 0,
    running: int = 0,
    draining: bool = False,
    role: Role = Role.DECODE,
) -> WorkerView:
    return WorkerView(
        WorkerInfo(
            worker_id=name,
            role=role,
            incarnation=1,
            address="",
            host="",
            kv_block_tokens=32,
            kv_capacity_tokens=capacity,
        ),
        WorkerLoad(draining=draining, kv_reserved_tokens=reserved, kv_running_tokens=running),
    )


def names(*workers: WorkerView, prompt: int = 100, output: int = 100) -> list[str]:
    decisions = bind(workers, prompt_tokens=prompt, max_tokens=output, footprint=NOTHING)
    return [decision.worker_id for decision in decisions]


def refusal(*workers: WorkerView, prompt: int = 100, output: int = 100) -> AmpdError:
    with pytest.raises(AmpdError) as caught:
        names(*workers, prompt=prompt, output=output)
    return caught.value


def test_most_unreserved_kv_first() -> None:
    found = bind(
        [worker("a", reserved=9000), worker("b", reserved=100), worker("c", capacity=9950)],
        prompt_tokens=100,
        max_tokens=50,
        footprint=FootprintEstimate(1, 1000.0),
    )
    assert [(d.worker_id, d.free_kv_tokens) for d in found] == [
        ("c", 9950),
        ("b", 9900),
        ("a", 1000),
    ]
    assert found[0].footprint_tokens == 1000


def test_ties_break_by_id_whatever_the_order() -> None:
    assert names(worker("b"), worker("a"), worker("c")) == ["a", "b", "c"]


def test_an_overbooked_worker_is_last_but_not_out() -> None:
    # Reservations are estimates; paused sessions can be evicted.
    assert names(worker("a", reserved=20_000), worker("b", reserved=9_999)) == ["b", "a"]


def test_draining_and_small_workers_are_left_out_and_full_ones_come_last() -> None:
    assert names(
        worker("draining", draining=True),
        worker("prefill", role=Role.PREFILL),
        worker("small", capacity=191),  # 200 tokens are 7 blocks, 224 tokens
        worker("full", running=9_800),
        worker("good", reserved=5_000),
    ) == ["good", "full"]


def test_no_worker() -> None:
    for workers in ((), (worker("a", draining=True),), (worker("p", role=Role.PREFILL),)):
        error = refusal(*workers)
        assert error.reason is ErrorReason.NO_DECODE_WORKER
        assert error.retry_after_s is not None


def test_too_long_for_every_worker_is_said_with_the_limit_and_no_retry() -> None:
    error = refusal(worker("a", capacity=1024), worker("b", capacity=2048), prompt=2000)
    assert error.reason is ErrorReason.KV_TOO_SMALL
    assert error.metadata["kv_capacity_tokens"] == "2048"
    assert error.retry_after_s is None


def test_footprint_is_the_mean_but_at_least_the_first_round() -> None:
    assert NOTHING.tokens(300) == 300
    estimate = FootprintEstimate(3, 300.0)
    assert estimate.tokens(50) == 300
    assert estimate.tokens(500) == 500


def test_block_size_one_worker_of_unknown_blocks() -> None:
    view = worker("a")
    exact = structs.replace(
        view, info=replace(view.info, kv_block_tokens=1, kv_capacity_tokens=200)
    )
    assert names(exact) == ["a"]
