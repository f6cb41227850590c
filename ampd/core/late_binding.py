"""Late binding: a prefill waits at its home until a worker can begin it (design of `ampd`).

The home owns the task and publishes it; whoever reaches a boundary takes the one that helps most:

- a *prefill worker* that is free takes the head of the largest set of waiting tasks that can
  still be on time (Moore-Hodgson over all prefill workers as one fast machine). What cannot
  be on time goes last;
- the *home*, when its own prefill backlog is nearly empty, takes a task that it can finish on
  time and sooner than the prefill workers would.

Times are seconds on the caller's clock; sizes are tokens. Nothing here knows how long an
output will be or when a tool comes back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

from ampd.core.cost_model import CostModel
from ampd.core.local_prefill import local_prefill_s
from ampd.core.model import Role, Slo, WaitingPrefill, WorkerLoad, WorkerView

MAX_SHOWN_TASKS: Final = 64
"""Waiting tasks that a home publishes, the earliest deadlines first."""
HOME_BACKLOG_TOKENS: Final = 256
"""A home looks for its next task when it has fewer prompt tokens left to compute."""
DECODE_SHARE: Final = 0.95
"""Share of the ITL SLO that a decode step may take: a home beyond it admits no prefill."""
REMOTE_SHARE: Final = 0.9
"""Share of the TTFT SLO within which a remote finish counts as on time for the home."""
LOCAL_SHARE: Final = 0.9
"""Share of the TTFT SLO within which the home must finish what it takes."""
WAIT_SHARE: Final = 0.4
"""A first task is left to its home rather than to an idle prefill worker only if that one would
take more than this share of the TTFT SLO."""
AHEAD_S: Final = 0.2
"""A prefill worker looks for its next task when the present one has so much left to compute."""
CLAIM_S: Final = 0.005
"""What a claim takes: so long before the end of the present computation the next task is claimed,
or the read of its history longer."""
STARVED_SLOS: Final = 4.0
"""A task older than so many TTFT SLOs may use the share of the starved."""
STARVED_SHARE: Final = 0.03
"""Share of a prefill worker's time for starved tasks, the oldest first."""


class Task(NamedTuple):
    """A waiting task on the reader's clock."""

    deadline_s: float
    """The latest instant of its first token within the TTFT SLO."""
    task_id: str
    session_id: str
    home: str
    history_tokens: int
    increment_tokens: int
    created_s: float
    ttft_slo_s: float
    grace_s: float
    compute_s: float
    """Predicted computation on a prefill worker of the cost model it was read with."""


class PullReason(StrEnum):
    """Why a prefill worker takes a task."""

    ON_TIME = "on_time"
    """The earliest deadline of those that can be met."""
    SESSION_MEAN = "session_mean"
    """None can be on time; its session's mean TTFT can still be kept."""
    SHORTEST = "shortest"
    """None can be on time, nor any session's mean be kept: the least work."""
    STARVED = "starved"
    """The oldest, out of the share of the starved."""


@dataclass(frozen=True, slots=True)
class PullDecision:
    """A prefill worker's next task. `predicted_s`: read that is not hidden, computation, return;
    `on_time`, `late`: how many of the waiting tasks can be on time, how many cannot."""

    task: Task
    reason: PullReason
    predicted_s: float
    on_time: int
    late: int


@dataclass(frozen=True, slots=True)
class TakeDecision:
    """A task that its home begins itself. `local_s`, `remote_s`: predicted times from now to its
    first token here and at the prefill workers (infinite: not on time there)."""

    task: Task
    local_s: float
    remote_s: float


@dataclass(slots=True)
class StarvedShare:
    """A prefill worker's account of the time it gave to starved tasks (s)."""

    worked_s: float = 0.0
    starved_s: float = 0.0

    def can_pay(self, seconds: float) -> bool:
        """Whether so much more for starved tasks keeps within the share."""
        return self.starved_s + seconds <= STARVED_SHARE * (self.worked_s + seconds)

    def add(self, decision: PullDecision) -> None:
        """A task was taken."""
        self.worked_s += decision.predicted_s
        if decision.reason is PullReason.STARVED:
            self.starved_s += decision.predicted_s


@dataclass(frozen=True, slots=True)
class OnTimeSet:
    """The largest set of tasks that one machine `speed` times as fast can finish on time.

    `kept` and `late` are indices into the tasks, by deadline; `finish_s` is the instant at which
    each kept task ends.
    """

    kept: tuple[int, ...]
    late: tuple[int, ...]
    finish_s: tuple[float, ...]


class TaskMirror:
    """What homes have published, as tasks by deadline. Each publication is read once."""

    def __init__(self, cost: CostModel) -> None:
        """`cost`: of the prefill worker that reads, or that a home expects to serve it."""
        self._cost = cost
        self._read: dict[str, tuple[WorkerLoad, list[Task]]] = {}
        self._tasks: list[Task] = []

    def tasks(self, views: Iterable[WorkerView], now_s: float) -> list[Task]:
        """Those of all homes among `views`, draining ones included; not to be changed."""
        read, changed = {}, False
        for view in views:
            if view.info.role is not Role.DECODE:
                continue
            home, load = view.info.worker_id, view.load
            known = self._read.get(home)
            if known is None or known[0] is not load:
                published_s = now_s - view.age_s
                tasks = [task(shown, home, published_s, self._cost) for shown in load.waiting]
                changed |= bool(tasks or (known and known[1]))
                known = load, tasks
            read[home] = known
        if changed or self._read.keys() - read.keys():
            self._tasks = sorted(task_ for _, tasks in read.values() for task_ in tasks)
        self._read = read
        return self._tasks


def task(shown: WaitingPrefill, home: str, published_s: float, cost: CostModel) -> Task:
    """A published task as its reader sees it."""
    created_s = published_s - shown.age_s
    return Task(
        created_s + shown.ttft_slo_s,
        shown.task_id,
        shown.session_id,
        home,
        shown.history_tokens,
        shown.increment_tokens,
        created_s,
        shown.ttft_slo_s,
        shown.grace_s,
        cost.t_pre(shown.history_tokens, shown.increment_tokens),
    )


def can_decode_more(cost: CostModel, load: WorkerLoad, slo: Slo, coming: int) -> bool:
    """Whether a home's decode step stays within the ITL SLO with one more round than run there
    and are `coming` from prefills already. An SLO that not even one round keeps forbids nothing,
    nor does anything while there is nobody to protect."""
    batch, limit_s = load.running_rounds + coming, DECODE_SHARE * slo.itl_s
    if not batch or cost.t_dec(1, 0) > limit_s:
        return True
    return cost.t_dec(batch + 1, load.running_context_tokens) <= limit_s


def speed_of(workers: Iterable[WorkerView], own: CostModel, own_calibration: float) -> float:
    """How fast the prefill workers that take work are together, the caller being 1."""
    own_s = own_calibration * _reference_s(own)
    return sum(
        own_s / (view.load.calibration * _reference_s(view.info.cost))
        for view in workers
        if view.info.role is Role.PREFILL
        and not view.load.draining
        and view.info.cost is not None
        and _reference_s(view.info.cost) > 0
    )


def _reference_s(cost: CostModel) -> float:
    return cost.t_pre(0, 1024)


def on_time_set(
    tasks: Sequence[Task], work_s: Callable[[Task], float], *, start_s: float, speed: float
) -> OnTimeSet:
    """Moore-Hodgson over `tasks` by deadline; `work_s` is what each takes at speed 1."""
    overdue = bisect_left(tasks, (start_s,))
    shares_s: dict[int, float] = {}
    dropped = set(range(overdue))
    longest: list[tuple[float, int]] = []
    end_s = start_s
    for index in range(overdue, len(tasks)):
        seconds, deadline_s = work_s(tasks[index]), tasks[index].deadline_s
        if start_s + seconds > deadline_s:
            dropped.add(index)  # no worker alone can do it
            continue
        shares_s[index] = share_s = seconds / speed
        heappush(longest, (-share_s, index))
        end_s += share_s
        if end_s > deadline_s:
            negative_s, out = heappop(longest)
            end_s += negative_s
            dropped.add(out)
            del shares_s[out]
    finish_s = []
    now_s = start_s
    for share_s in shares_s.values():
        now_s += share_s
        finish_s.append(now_s)
    return OnTimeSet(tuple(shares_s), tuple(sorted(dropped)), tuple(finish_s))


def pull(
    tasks: Sequence[Task],
    work_s: Callable[[Task], float],
    *,
    now_s: float,
    speed: float,
    starved: StarvedShare,
) -> PullDecision | None:
    """What a prefill worker that is free takes of `tasks` (by deadline); None: there is none.

    `work_s`: what each takes this worker; `speed`: all prefill workers together, this one
    being 1 (see `speed_of`).
    """
    if not tasks:
        return None
    plan = on_time_set(tasks, work_s, start_s=now_s, speed=max(1.0, speed))

    def decide(index: int, reason: PullReason) -> PullDecision:
        chosen = tasks[index]
        return PullDecision(chosen, reason, work_s(chosen), len(plan.kept), len(plan.late))

    if plan.late:
        overdue = tasks[plan.late[0]]
        age_s = now_s - overdue.created_s
        if age_s > STARVED_SLOS * overdue.ttft_slo_s and starved.can_pay(work_s(overdue)):
            return decide(plan.late[0], PullReason.STARVED)
        if not plan.kept:
            return decide(*_best_late(tasks, work_s, plan.late, now_s))
    return decide(plan.kept[0], PullReason.ON_TIME)


def _best_late(
    tasks: Sequence[Task], work_s: Callable[[Task], float], late: Sequence[int], now_s: float
) -> tuple[int, PullReason]:
    """Of tasks that are late anyway the one with the least work, those first whose session's mean
    TTFT can still be kept."""
    ranked = []
    for index in late:
        task_ = tasks[index]
        seconds = work_s(task_)
        lost = now_s + seconds > task_.deadline_s + task_.grace_s
        ranked.append((lost, seconds, task_.task_id, index))
    lost, _, _, best = min(ranked)
    return best, PullReason.SHORTEST if lost else PullReason.SESSION_MEAN


@dataclass(frozen=True, slots=True)
class RemoteOutlook:
    """When the prefill workers would finish what waits now: instants by task id, on-time tasks
    only."""

    finish_s: Mapping[str, float]
    workers: int
    """Prefill workers that take work; 0: whatever waits is the home's."""


def remote_outlook(
    tasks: Sequence[Task], workers: Sequence[WorkerView], now_s: float
) -> RemoteOutlook:
    """How the prefill workers among `workers` would serve `tasks` (by deadline) from now on."""
    views = [
        view
        for view in workers
        if view.info.role is Role.PREFILL and not view.load.draining and view.info.cost is not None
    ]
    if not views:
        return RemoteOutlook({}, 0)
    first = views[0]
    cost, calibration = first.info.cost, first.load.calibration
    assert cost is not None  # noqa: S101 - filtered above
    speed = max(1.0, speed_of(views, cost, calibration))
    rest_s = sum(max(0.0, view.load.queued_prefill_s - view.age_s) for view in views) / speed

    def work_s(task_: Task) -> float:
        moved_s = cost.t_kv(task_.history_tokens) + cost.t_kv(task_.increment_tokens)
        return calibration * task_.compute_s + moved_s

    plan = on_time_set(tasks, work_s, start_s=now_s + rest_s, speed=speed)
    finish_s = {
        # On its own worker a task takes its whole time, however many work beside it.
        tasks[index].task_id: end_s + work_s(tasks[index]) * (1 - 1 / speed)
        for index, end_s in zip(plan.kept, plan.finish_s, strict=True)
    }
    return RemoteOutlook(finish_s, len(views))


def take_home(
    own: Iterable[Task],
    outlook: RemoteOutlook,
    *,
    now_s: float,
    cost: CostModel,
    calibration: float,
    load: WorkerLoad,
    itl_slo_s: float,
) -> TakeDecision | None:
    """What a home begins itself of its `own` waiting tasks (by deadline), with less than
    HOME_BACKLOG_TOKENS left of what it began before; None: nothing.

    It takes what it can finish within LOCAL_SHARE of the TTFT SLO and sooner than the prefill
    workers: what these cannot do on time first, then by deadline. Without any prefill worker
    it takes the earliest deadline that it can meet, else the least work.
    """
    sooner: TakeDecision | None = None
    least: TakeDecision | None = None
    for task_ in own:
        age_s = now_s - task_.created_s
        in_time_s = LOCAL_SHARE * task_.ttft_slo_s - age_s
        if in_time_s <= 0 and outlook.workers:
            continue
        finish_s = outlook.finish_s.get(task_.task_id, inf)
        remote_s = finish_s - now_s
        if age_s + remote_s > REMOTE_SHARE * task_.ttft_slo_s:
            remote_s = inf
        elif sooner is not None:
            continue
        local_s = load.queued_prefill_s + calibration * local_prefill_s(
            cost,
            history_tokens=task_.history_tokens,
            increment_tokens=task_.increment_tokens,
            batch=load.running_rounds,
            context_tokens=load.running_context_tokens,
            itl_slo_s=itl_slo_s,
        )
        decision = TakeDecision(task_, local_s, remote_s)
        if local_s <= in_time_s and local_s < remote_s:
            if remote_s == inf:
                return decision
            sooner = decision
        elif not outlook.workers and (least is None or local_s < least.local_s):
            least = decision
    return sooner or least
