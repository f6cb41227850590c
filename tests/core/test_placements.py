"""A burst between two heartbeats spreads, and nothing is counted twice."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from ampd.core.model import Role, WorkerInfo, WorkerLoad, WorkerView
from ampd.core.placements import MAX_PLACEMENTS, SETTLE_S, Placement, RecentPlacements

INFO = WorkerInfo("w", Role.DECODE, 1, "h:1", "h")


def view(age_s: float, worker_id: str = "w") -> WorkerView:
    return WorkerView(replace(INFO, worker_id=worker_id), WorkerLoad(), age_s)


def test_placements_newer_than_the_load_count() -> None:
    recent = RecentPlacements()
    recent.add(Placement("w", 10.0, prefill_s=0.5))
    recent.add(Placement("w", 10.1, reserved_tokens=300))
    (seen,) = recent.shown_in([view(age_s=0.2)], 10.15)
    assert seen.load.queued_prefill_s == 0.5
    assert seen.load.queued_tasks == 1
    assert seen.load.kv_reserved_tokens == 300


def test_a_load_published_later_shows_them_itself() -> None:
    recent = RecentPlacements()
    recent.add(Placement("w", 10.0, prefill_s=0.5))
    assert recent.shown_in([view(age_s=0.1)], 10.3) == (view(age_s=0.1),)


def test_only_the_worker_that_was_chosen() -> None:
    recent = RecentPlacements()
    recent.add(Placement("other", 10.0, prefill_s=0.5))
    views = (view(0.2), view(0.2, "other"))
    seen = recent.shown_in(views, 10.0)
    assert [v.load.queued_prefill_s for v in seen] == [0.0, 0.5]


def test_memory_is_bounded() -> None:
    recent = RecentPlacements()
    for index in range(MAX_PLACEMENTS + 10):
        recent.add(Placement("w", float(index), reserved_tokens=1))
    (seen,) = recent.shown_in([view(age_s=1e9)], float(MAX_PLACEMENTS + 10))
    assert seen.load.kv_reserved_tokens == MAX_PLACEMENTS


def test_all_else_of_a_load_is_kept() -> None:
    values = {
        field.name: (f"tool-{number}",) if field.name == "tools" else number
        for number, field in enumerate(fields(WorkerLoad), start=1)
    }
    loaded = WorkerView(INFO, WorkerLoad(**values), age_s=0.3)  # type: ignore[arg-type]
    recent = RecentPlacements()
    recent.add(Placement("w", 10.0, prefill_s=0.5, reserved_tokens=7))
    (shown,) = recent.shown_in([loaded], 10.0)
    changed = {"queued_tasks": 1, "queued_prefill_s": 0.5, "kv_reserved_tokens": 7}
    for name, value in values.items():
        assert getattr(shown.load, name) == (value + changed[name] if name in changed else value)
    assert (shown.info, shown.age_s) == (loaded.info, 0.3)


def test_a_load_that_is_published_again_unchanged_shows_them_too() -> None:
    recent = RecentPlacements()
    recent.add(Placement("w", 10.0, prefill_s=0.5))
    load = WorkerLoad()
    (before,) = recent.shown_in([WorkerView(INFO, load, 0.1)], 10.1)
    (after,) = recent.shown_in([WorkerView(INFO, load, 0.1)], 10.3)
    assert (before.load.queued_tasks, after.load.queued_tasks) == (1, 0)


def test_another_workers_news_make_nobody_forget() -> None:
    recent = RecentPlacements()
    recent.add(Placement("silent", 10.0, prefill_s=0.5))
    recent.shown_in([view(0.0, "w")], 10.4)
    (silent,) = recent.shown_in([view(0.5, "silent")], 10.4)
    assert silent.load.queued_tasks == 1


AGE_S = st.sampled_from([0.0, 0.01, 0.2, 0.5])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("uvw"), AGE_S, st.sampled_from([0, 3, 50])),
            st.lists(
                st.tuples(st.sampled_from("uvw"), AGE_S, st.booleans()),
                max_size=3,
                unique_by=lambda v: v[0],
            ),
        ),
        max_size=30,
    )
)
def test_what_is_shown_is_what_was_placed_since(
    steps: list[tuple[str, float, int] | list[tuple[str, float, bool]]],
) -> None:
    """Whatever was shown before: every load with all placements since it was published."""
    recent, placed, now_s = RecentPlacements(), [], 100.0
    loads = [WorkerLoad(), WorkerLoad(queued_tasks=2, queued_prefill_s=0.25, kv_reserved_tokens=9)]
    for step in steps:
        if isinstance(step, tuple):
            worker_id, later_s, tokens = step
            now_s += later_s
            placed.append(Placement(worker_id, now_s, 0.0 if tokens else 0.1, tokens))
            recent.add(placed[-1])
            continue
        views = [
            WorkerView(replace(INFO, worker_id=worker_id), loads[busy], age_s)
            for worker_id, age_s, busy in step
        ]
        for before, after in zip(views, recent.shown_in(views, now_s), strict=True):
            published_s = now_s - before.age_s - SETTLE_S
            own = [p for p in placed if p.worker_id == before.info.worker_id]
            since = [p for p in own if p.placed_s >= published_s]
            old = before.load
            assert (after.info, after.age_s) == (before.info, before.age_s)
            assert after.load == replace(
                old,
                queued_tasks=old.queued_tasks + sum(p.prefill_s > 0 for p in since),
                queued_prefill_s=old.queued_prefill_s + sum(p.prefill_s for p in since),
                kv_reserved_tokens=old.kv_reserved_tokens + sum(p.reserved_tokens for p in since),
            )
