"""A burst between two heartbeats spreads, and nothing is counted twice."""

from dataclasses import fields, replace

from ampd.core.model import Role, WorkerInfo, WorkerLoad, WorkerView
from ampd.core.placements import MAX_PLACEMENTS, Placement, RecentPlacements

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
