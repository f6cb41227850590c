"""Where a prefill is executed (spec 4): a pure function of the task and the published loads.

`ampd` leaves the choice to whoever is free first (`ampd.core.late_binding`).

`ampd-paper` with `literal` is the paper's algorithm 1; without it (its default) it keeps the
paper's three steps and mends what a prototype measured to be wrong with them:

- a prefill worker is held to the larger of its windowed TTFT and the TTFT *predicted* for this
  task (queue + read + compute + return): the window lags, the prediction does not;
- among the acceptable prefill workers the one with the least predicted TTFT takes it;
- the home is held to what its running streams will see *while* this prefill is mixed into
  their steps, and to the TTFT SLO; its prefill runs at the ITL-safe rate (or in fixed chunks,
  by a setting), and is predicted so;
- reading the history costs what the prefill worker lacks of it, less what its queue hides;
- ties break by (value, worker id).

Predicted times are seconds. The cost is O(workers): plain loops, few objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import fixed_prefill
from ampd.core.late_binding import WAIT_SHARE
from ampd.core.local_prefill import MIN_CHUNK_TOKENS, TARGET
from ampd.core.model import (
    PolicySpec,
    Route,
    RouteCandidate,
    RouteDecision,
    RouteReason,
    Slo,
    WorkerView,
)
from ampd.core.policies import (
    ALWAYS_LOCAL,
    AMPD,
    AMPD_PAPER,
    CHEAPEST,
    COLOCATED,
    COLOCATED_SESSION_PRIORITY,
    FIRST_REMOTE,
    FIXED,
    ROUND_ROBIN,
    THRESHOLD,
    number,
)

MAX_CANDIDATES: Final = 8
"""Remote candidates a decision keeps, best first: it is stored with every round."""
MAX_FALLBACKS: Final = 8
"""Other prefill workers a decision names."""


@dataclass(frozen=True, slots=True)
class RouteTask:
    """The numbers of one prefill. `cached_tokens`: by prefill worker, how many leading tokens
    of the session it holds in its own prefix cache (absent: none)."""

    history_tokens: int
    increment_tokens: int
    slo: Slo
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


_LOCAL_ONLY: Final = frozenset({ALWAYS_LOCAL, COLOCATED, COLOCATED_SESSION_PRIORITY})
_MASK_64: Final = (1 << 64) - 1

_Remote = tuple[float, str, float, float, float, float, float]
"""A prefill worker under consideration: (rank, worker id, queue, read, compute, return,
statistic), seconds but for the id. Tuples sort as they should and cost next to nothing."""
_WORKER_ID: Final = itemgetter(1)
_QUEUE_AND_WORKER_ID: Final = itemgetter(2, 1)


def route(
    task: RouteTask,
    *,
    home: WorkerView,
    prefill_workers: Sequence[WorkerView],
    policy: PolicySpec,
    tie_seed: int,
) -> RouteDecision:
    """Choose home or one of `prefill_workers` for a task, under a resolved `policy`.

    `tie_seed` (>= 0): a random value, from which the visiting order of the literal policy is
    drawn, or a counter, by which round robin turns. Draining workers and those whose KV cannot
    hold the task are left out; without any left the prefill is local, NO_PREFILL_WORKER.
    """
    paper = policy.name == AMPD_PAPER
    literal = paper and bool(policy.settings["literal"])
    budget_tokens = 0
    if policy.settings.get("chunk") == FIXED:
        budget_tokens = int(number(policy, "chunk_tokens"))
    local = _local(task, home, literal=literal, budget_tokens=budget_tokens)
    if policy.name in _LOCAL_ONLY:
        return _to_home(local, RouteReason.ALWAYS_LOCAL, policy, [], home.age_s)
    remotes, age_s = _remotes(task, home, prefill_workers, literal=literal)
    if not remotes:
        return _to_home(local, RouteReason.NO_PREFILL_WORKER, policy, [], age_s)
    if paper:
        if literal:
            remotes.sort(key=_WORKER_ID)
            remotes = _shuffled(remotes, tie_seed)
        else:
            remotes.sort()
        return _paper(task, local, remotes, policy, age_s)
    if policy.name == AMPD:
        remotes.sort()
        return _late_bound(task, local, remotes, policy, age_s)
    if policy.name == CHEAPEST:
        remotes.sort()
        return _cheapest(local, remotes, policy, age_s)
    if policy.name == FIRST_REMOTE and task.history_tokens:
        remotes.sort()
        return _to_home(local, RouteReason.LATER_ROUND, policy, remotes, age_s)
    if policy.name == THRESHOLD and _mostly_cached(task, home, policy):
        remotes.sort()
        return _to_home(local, RouteReason.MOSTLY_CACHED, policy, remotes, age_s)
    if policy.settings.get("choice") == ROUND_ROBIN:
        remotes.sort(key=_WORKER_ID)
        turn = tie_seed % len(remotes)
        remotes = remotes[turn:] + remotes[:turn]
        return _to_prefill(0, RouteReason.ROUND_ROBIN, policy, local, remotes, age_s)
    remotes.sort(key=_QUEUE_AND_WORKER_ID)
    return _to_prefill(0, RouteReason.LEAST_LOADED, policy, local, remotes, age_s)


def _paper(
    task: RouteTask,
    local: RouteCandidate,
    remotes: list[_Remote],
    policy: PolicySpec,
    age_s: float,
) -> RouteDecision:
    """Algorithm 1 over prefill workers in visiting order: random (literal), or best first."""
    limit_s = number(policy, "alpha") * task.slo.ttft_s
    for index, remote in enumerate(remotes):
        if remote[6] <= limit_s:
            reason = RouteReason.PREFILL_WITHIN_TTFT
            return _to_prefill(index, reason, policy, local, remotes, age_s)
    itl_kept = local.statistic_s <= number(policy, "beta") * task.slo.itl_s
    if itl_kept and (policy.settings["literal"] or local.total_s <= task.slo.ttft_s):
        return _to_home(local, RouteReason.DECODE_WITHIN_ITL, policy, remotes, age_s)
    return _cheapest(local, remotes, policy, age_s)


def _late_bound(
    task: RouteTask,
    local: RouteCandidate,
    remotes: list[_Remote],
    policy: PolicySpec,
    age_s: float,
) -> RouteDecision:
    """The best prefill worker that is idle is told at once; else, or when the home would be
    sooner and that one too slow, the task waits at home for whoever can begin it."""
    idle = next((index for index, remote in enumerate(remotes) if not remote[2]), None)
    if idle is not None:
        idle_s = remotes[idle][0]
        if idle_s <= local.total_s or idle_s <= WAIT_SHARE * task.slo.ttft_s:
            reason = RouteReason.IDLE_PREFILL_WORKER
            return _to_prefill(idle, reason, policy, local, remotes, age_s)
    return _to_home(local, RouteReason.LATE_BINDING, policy, remotes, age_s)


def _cheapest(
    local: RouteCandidate, remotes: list[_Remote], policy: PolicySpec, age_s: float
) -> RouteDecision:
    """The smallest predicted TTFT of all places."""
    cheapest = min(remotes)
    if (local.total_s, local.worker_id) <= cheapest[:2]:
        return _to_home(local, RouteReason.CHEAPEST_LOCAL, policy, remotes, age_s)
    index = remotes.index(cheapest)
    return _to_prefill(index, RouteReason.CHEAPEST_REMOTE, policy, local, remotes, age_s)


def _mostly_cached(task: RouteTask, home: WorkerView, policy: PolicySpec) -> bool:
    """Whether `threshold` leaves the task at home: the rule of Dynamo's conditional
    disaggregation (uncached tokens and their share) and of llm-d's prefix-based decider (uncached
    tokens), with a guard for a home whose memory is full of running rounds."""
    uncached = task.increment_tokens
    prompt = task.history_tokens + uncached
    running, capacity = home.load.kv_running_tokens, home.info.kv_capacity_tokens
    return (
        uncached <= number(policy, "tokens")
        and uncached <= number(policy, "ratio") * prompt
        and running <= number(policy, "busy_kv") * capacity
    )


def _remotes(
    task: RouteTask, home: WorkerView, workers: Sequence[WorkerView], *, literal: bool
) -> tuple[list[_Remote], float]:
    """The workers that can take the task, ranked by predicted TTFT, with its parts; and the age
    of the oldest load. The hot loop of a decision."""
    history, increment = task.history_tokens, task.increment_tokens
    needed, cached_tokens = history + increment, task.cached_tokens
    return_s = _cost(home).t_kv(increment)
    remotes: list[_Remote] = []
    known_cost: CostModel | None = None
    compute_s = history_s = 0.0
    age_s = home.age_s
    for view in workers:
        info, load = view.info, view.load
        if age_s < view.age_s:
            age_s = view.age_s
        cost, name = info.cost, info.worker_id
        if cost is None or load.draining or 0 < info.kv_capacity_tokens < needed:
            continue
        if cost is not known_cost:  # workers of one kind may share one object
            known_cost = cost
            compute_s, history_s = cost.t_pre(history, increment), cost.t_kv(history)
        queue_s, read_s, statistic_s = load.queued_prefill_s, history_s, load.ttft_window_s
        if not literal:
            if name in cached_tokens:
                read_s = cost.t_kv(max(0, history - cached_tokens[name]))
            # The read overlaps the computation of what is queued before.
            read_s = read_s - queue_s if read_s > queue_s else 0.0
        total_s = compute_s + read_s + return_s + queue_s
        if statistic_s < total_s and not literal:
            statistic_s = total_s
        remotes.append((total_s, name, queue_s, read_s, compute_s, return_s, statistic_s))
    return remotes, age_s


def _local(
    task: RouteTask, home: WorkerView, *, literal: bool, budget_tokens: int
) -> RouteCandidate:
    """The home: at the speed of a prefill worker (literal), at that of steps with a fixed budget,
    or (0) at the ITL-safe rate."""
    cost, load = _cost(home), home.load
    history, increment = task.history_tokens, task.increment_tokens
    compute_s = cost.t_pre(history, increment)
    statistic_s = load.itl_window_s
    if not literal:
        batch, context = load.running_rounds, load.running_context_tokens
        if batch and budget_tokens:
            compute_s, step_s = fixed_prefill(
                cost,
                history_tokens=history,
                increment_tokens=increment,
                batch=batch,
                context_tokens=context,
                budget_tokens=budget_tokens,
            )
            statistic_s = max(statistic_s, step_s)
        elif batch:
            middle = history + increment // 2
            limit_s = TARGET * task.slo.itl_s
            chunk = cost.mixed_chunk(limit_s, middle, batch, context, increment)
            chunk = min(max(MIN_CHUNK_TOKENS, chunk), increment)
            steps = -(-increment // chunk)
            compute_s = max(compute_s, steps * cost.t_mixed(chunk, middle, batch, context))
            smallest_s = cost.t_mixed(min(MIN_CHUNK_TOKENS, increment), middle, batch, context)
            statistic_s = max(statistic_s, smallest_s)
        else:
            statistic_s = 0.0  # nobody is decoding: nobody can be hurt
    return RouteCandidate(
        home.info.worker_id, Route.LOCAL, load.queued_prefill_s, 0.0, compute_s, 0.0, statistic_s
    )


def _to_home(
    local: RouteCandidate,
    reason: RouteReason,
    policy: PolicySpec,
    remotes: list[_Remote],
    age_s: float,
) -> RouteDecision:
    return RouteDecision(
        Route.LOCAL,
        None,
        reason,
        policy.name,
        local.total_s,
        (local, *_candidates(remotes[:MAX_CANDIDATES])),
        (),
        age_s,
    )


def _to_prefill(
    index: int,
    reason: RouteReason,
    policy: PolicySpec,
    local: RouteCandidate,
    remotes: list[_Remote],
    age_s: float,
) -> RouteDecision:
    """To `remotes[index]`; the others are its fallbacks in their order."""
    chosen = remotes[index]
    others = remotes[:index] + remotes[index + 1 :]
    (first,) = _candidates((chosen,))
    return RouteDecision(
        Route.REMOTE,
        first.worker_id,
        reason,
        policy.name,
        first.total_s,
        (first, local, *_candidates(others[: MAX_CANDIDATES - 1])),
        tuple(other[1] for other in others[:MAX_FALLBACKS]),
        age_s,
    )


def _candidates(remotes: Sequence[_Remote]) -> list[RouteCandidate]:
    route_ = Route.REMOTE
    return [
        RouteCandidate(name, route_, queue_s, read_s, compute_s, return_s, statistic_s)
        for _, name, queue_s, read_s, compute_s, return_s, statistic_s in remotes
    ]


def _shuffled(remotes: list[_Remote], seed: int) -> list[_Remote]:
    """A permutation drawn from the seed by Fisher and Yates, their random numbers being the
    SplitMix64 sequence: the same everywhere, and much cheaper than seeding `random.Random`."""
    state = seed
    for last in range(len(remotes) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
        pick = (mixed ^ (mixed >> 31)) % (last + 1)
        remotes[last], remotes[pick] = remotes[pick], remotes[last]
    return remotes


def _cost(home: WorkerView) -> CostModel:
    if home.info.cost is None:
        raise AmpdError(
            ErrorReason.INTERNAL, f"worker {home.info.worker_id} published no cost model"
        )
    return home.info.cost
