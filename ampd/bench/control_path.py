"""What deciding costs: a route, alone and behind the store's read, and the next of a queue.

The cluster is made of values, drawn from a seed; functions, store and its adapter are those of
the product. Cells are measured in turns, some calls of each at a time, so that a slow spell of
the machine meets all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ampd.adapters.state_redis import RedisStateStore
from ampd.bench.provenance import Provenance, provenance
from ampd.bench.timing import Spread
from ampd.core.model import (
    PolicySpec,
    PrefillTask,
    Role,
    Slo,
    WorkerInfo,
    WorkerLoad,
    WorkerView,
)
from ampd.core.placements import Placement, RecentPlacements
from ampd.core.policies import AMPD, AMPD_PAPER, resolve
from ampd.core.prefill_queue import PrefillQueue, QueueOrder
from ampd.core.routing import RouteTask, route
from ampd.profiling.catalogue import open_profile
from ampd.runtime.embedded_store import EmbeddedStore

PROFILE: Final = "gpu:h20/Qwen3-32B/tp1"
WORKERS: Final = (4, 64, 256)
HISTORIES: Final = (0, 4_096, 32_768, 131_072)
"""Tokens: what a decision costs must not depend on them."""
BAR_WORKERS: Final = 64
DECISION_BAR_S: Final = 50e-6
READ_BAR_S: Final = 300e-6
WINDOW: Final = 3
WINDOW_BAR_S: Final = 20e-6
EXACT_TASKS: Final = 64
EXACT_BAR_S: Final = 100e-6

RECENT_PLACEMENTS: Final = 100
"""Of the coordinator, not yet shown by the loads."""
PLACEMENT_AGE_S: Final = 0.1
"""Of the oldest of them: younger than the loads."""
LOAD_AGE_S: Final = 0.15
HISTORY: Final = 10_000
INCREMENT: Final = 800
SLO: Final = Slo(ttft_s=3.0, itl_s=0.05)
LEASE_S: Final = 3600.0
STORE_TIMEOUT_S: Final = 10.0
"""A call that takes longer than the product allows is a long time, not an error."""
ROUNDS_OF_CELLS: Final = 10

_Times = Callable[[int], Awaitable[list[float]]]
"""The seconds of so many calls."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing that was measured, and its bar (p50, seconds) where it has one."""

    what: str
    policy: str
    prefill_workers: int
    history_tokens: int
    queue_tasks: int
    time: Spread
    bar_s: float | None

    @property
    def met(self) -> bool | None:
        """Whether it keeps its bar; None without one."""
        return None if self.bar_s is None else self.time.p50_s < self.bar_s


@dataclass(frozen=True, slots=True)
class ControlPathResult:
    """All cells of one run."""

    provenance: Provenance
    seed: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    what: str
    times: _Times
    policy: str = ""
    prefill_workers: int = 0
    history_tokens: int = 0
    queue_tasks: int = 0
    bar_s: float | None = None
    times_s: list[float] = field(default_factory=list)


async def measure_control_path(calls: int, seed: int = 0) -> ControlPathResult:
    """Measure every cell with about so many calls (at least one in each of ROUNDS_OF_CELLS)."""
    began = provenance()
    async with EmbeddedStore() as embedded:
        stores = [
            RedisStateStore(embedded.url, prefix=f"bench-{count}", timeout_s=STORE_TIMEOUT_S)
            for count in WORKERS
        ]
        try:
            measured = _decisions(seed) + _queues(seed)
            for count, store in zip(WORKERS, stores, strict=True):
                measured += await _reads(store, count, seed)
            for _ in range(ROUNDS_OF_CELLS):
                for cell in measured:
                    cell.times_s.extend(await cell.times(max(1, calls // ROUNDS_OF_CELLS)))
        finally:
            for store in stores:
                await store.close()
    cells = tuple(
        Cell(
            cell.what,
            cell.policy,
            cell.prefill_workers,
            cell.history_tokens,
            cell.queue_tasks,
            Spread.of(cell.times_s),
            cell.bar_s,
        )
        for cell in measured
    )
    return ControlPathResult(began, seed, cells)


# --- decisions ---------------------------------------------------------------------------------


def _decisions(seed: int) -> list[_Measured]:
    """Routing alone; and with the coordinator's own placements, as a coordinator does it."""
    cells = []
    for policy in (AMPD, AMPD_PAPER):
        spec = resolve(PolicySpec(policy))
        for count in WORKERS:
            for history in HISTORIES if count == BAR_WORKERS else (HISTORY,):
                home, *prefill = _views(count, seed)
                decide = _routing(home, prefill, history, spec)
                bar_s = DECISION_BAR_S if count == BAR_WORKERS else None
                cells.append(
                    _Measured("route", _timed(decide), policy, count, history, bar_s=bar_s)
                )
            place = _placing(_views(count, seed), spec, seed)
            cells.append(_Measured("placements, route", _timed(place), policy, count, HISTORY))
    return cells


async def _reads(store: RedisStateStore, count: int, seed: int) -> list[_Measured]:
    """All that a coordinator does to decide: read, add its own placements, route."""
    views = _views(count, seed)
    for view in views:
        await store.heartbeat(view.info, view.load, LEASE_S)
    spec = resolve(PolicySpec(AMPD))
    recent = _recent(views, seed)

    async def times(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            began_s = time.perf_counter()
            context = await store.load_round("session", "request")
            home = next(view for view in context.workers if view.info.role is Role.DECODE)
            prefill = [view for view in context.workers if view.info.role is Role.PREFILL]
            _decide(home, prefill, recent, spec)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    async def pings(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            began_s = time.perf_counter()
            await store.ping()
            seconds.append(time.perf_counter() - began_s)
        return seconds

    bar_s = READ_BAR_S if count == BAR_WORKERS else None
    cells = [_Measured("read, placements, route", times, AMPD, count, HISTORY, bar_s=bar_s)]
    if count == BAR_WORKERS:
        cells.append(_Measured("a round trip to the store alone", pings))
    return cells


def _routing(
    home: WorkerView, prefill: Sequence[WorkerView], history: int, policy: PolicySpec
) -> Callable[[], object]:
    task = RouteTask(history, INCREMENT, SLO, {"prefill-1": history // 2})
    return lambda: route(task, home=home, prefill_workers=prefill, policy=policy, tie_seed=0)


def _placing(views: Sequence[WorkerView], policy: PolicySpec, seed: int) -> Callable[[], object]:
    recent = _recent(views, seed)
    return lambda: _decide(views[0], views[1:], recent, policy)


def _decide(
    home: WorkerView, prefill: Sequence[WorkerView], recent: RecentPlacements, policy: PolicySpec
) -> None:
    task = RouteTask(HISTORY, INCREMENT, SLO, {"prefill-1": HISTORY // 2})
    home, *prefill = recent.shown_in((home, *prefill), PLACEMENT_AGE_S)
    route(task, home=home, prefill_workers=prefill, policy=policy, tie_seed=0)


def _recent(views: Sequence[WorkerView], seed: int) -> RecentPlacements:
    rng = random.Random(seed)  # noqa: S311 - a model, not a secret
    recent = RecentPlacements()
    for number in range(RECENT_PLACEMENTS):
        placed_s = PLACEMENT_AGE_S * number / RECENT_PLACEMENTS
        worker_id = rng.choice(views).info.worker_id
        recent.add(Placement(worker_id, placed_s, prefill_s=rng.uniform(0.02, 0.2)))
    return recent


def _views(prefill_workers: int, seed: int) -> list[WorkerView]:
    """The home, busy decoding, and prefill workers with queues, one in four of them idle."""
    rng = random.Random(seed)  # noqa: S311 - a model, not a secret
    cost = open_profile(PROFILE).cost
    views = []
    for index in range(prefill_workers + 1):
        role, number = (Role.PREFILL, index - 1) if index else (Role.DECODE, 0)
        info = WorkerInfo(
            worker_id=f"{role}-{number}",
            role=role,
            incarnation=1,
            address="10.0.0.1:7000",
            host="node",
            model="Qwen3-32B",
            kv_block_tokens=16,
            kv_capacity_tokens=500_000,
            kv_bytes_per_token=262_144,
            max_model_tokens=131_072,
            cost=cost,
        )
        if role is Role.DECODE:
            load = WorkerLoad(
                running_rounds=12, running_context_tokens=60_000, itl_window_s=0.03, sessions=20
            )
        else:
            tasks = rng.randrange(4)
            load = WorkerLoad(
                queued_tasks=tasks,
                queued_prefill_s=tasks * rng.uniform(0.05, 0.4),
                ttft_window_s=rng.uniform(0.1, 3.0),
            )
        views.append(WorkerView(info, load, LOAD_AGE_S))
    return views


# --- queues ------------------------------------------------------------------------------------


def _queues(seed: int) -> list[_Measured]:
    """The next task of a queue, by the paper's window and by the exact order."""
    cells = []
    for what, window, tasks, bar_s in (
        ("next of a window", WINDOW, WINDOW, WINDOW_BAR_S),
        ("next of a window", WINDOW, EXACT_TASKS, WINDOW_BAR_S),
        ("next in exact order", None, EXACT_TASKS, EXACT_BAR_S),
    ):
        times = _taking(window, tasks, seed)
        cells.append(_Measured(what, times, queue_tasks=tasks, bar_s=bar_s))
    return cells


def _taking(window: int | None, count: int, seed: int) -> _Times:
    """Queues that are late: some deadlines can be kept and some cannot."""
    rng = random.Random(seed)  # noqa: S311 - a model, not a secret
    order = QueueOrder(window=window, bound=count + 1, by_arrival=False)

    async def times(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            queue = PrefillQueue(order=order)
            for number in range(count):
                created_s = rng.uniform(-SLO.ttft_s, 0.0)
                task = PrefillTask(
                    f"t{number}", "s", 1, "decode-0", HISTORY, INCREMENT, created_s, SLO
                )
                compute_s = rng.uniform(0.5, 3.0) * SLO.ttft_s / count
                queue.add(task, now_s=0.0, compute_s=compute_s, read_s=compute_s / 3)
            began_s = time.perf_counter()
            queue.take(0.0, busy_s=SLO.ttft_s / count)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    return times


def _timed(call: Callable[[], object]) -> _Times:
    async def times(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            began_s = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began_s)
        return seconds

    return times
