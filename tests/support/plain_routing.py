"""`ampd.core.routing.route` as its rules read, without a thought for speed: what it is held to."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.core.late_binding import WAIT_SHARE
from ampd.core.local_prefill import MIN_CHUNK_TOKENS, TARGET
from ampd.core.model import (
    PolicySpec,
    Route,
    RouteCandidate,
    RouteDecision,
    RouteReason,
    WorkerView,
)
from ampd.core.routing import MAX_CANDIDATES, MAX_FALLBACKS, RouteTask

LOCAL_ONLY = ("always-local", "colocated", "colocated-session-priority")


def plain_route(
    task: RouteTask,
    *,
    home: WorkerView,
    prefill_workers: Sequence[WorkerView],
    policy: PolicySpec,
    tie_seed: int,
) -> RouteDecision:
    """The same decision."""
    literal = policy.name == "ampd-paper" and policy.settings["literal"] is True
    local = _local(task, home, policy, literal=literal)
    able = [view for view in prefill_workers if _can_take(task, view)]
    remotes = [_remote(task, home, view, literal=literal) for view in able]
    local_only = policy.name in LOCAL_ONLY
    everybody = [home] if local_only else [home, *prefill_workers]
    age_s = max(view.age_s for view in everybody)

    def at_home(reason: RouteReason) -> RouteDecision:
        return RouteDecision(
            Route.LOCAL,
            None,
            reason,
            policy.name,
            local.total_s,
            (local, *remotes[:MAX_CANDIDATES]),
            (),
            age_s,
        )

    def at(chosen: RouteCandidate, reason: RouteReason) -> RouteDecision:
        others = [remote for remote in remotes if remote is not chosen]
        return RouteDecision(
            Route.REMOTE,
            chosen.worker_id,
            reason,
            policy.name,
            chosen.total_s,
            (chosen, local, *others[: MAX_CANDIDATES - 1]),
            tuple(other.worker_id for other in others[:MAX_FALLBACKS]),
            age_s,
        )

    def cheapest() -> RouteDecision:
        best = min([*remotes, local], key=_by_total)
        if best is local:
            return at_home(RouteReason.CHEAPEST_LOCAL)
        return at(best, RouteReason.CHEAPEST_REMOTE)

    if local_only:
        remotes = []
        return at_home(RouteReason.ALWAYS_LOCAL)
    if not remotes:
        return at_home(RouteReason.NO_PREFILL_WORKER)
    remotes.sort(key=_by_total)
    if policy.name == "ampd-paper":
        if literal:
            remotes = _shuffled(sorted(remotes, key=_by_id), tie_seed)
        for remote in remotes:
            if remote.statistic_s <= _number(policy, "alpha") * task.slo.ttft_s:
                return at(remote, RouteReason.PREFILL_WITHIN_TTFT)
        itl_kept = local.statistic_s <= _number(policy, "beta") * task.slo.itl_s
        if itl_kept and (literal or local.total_s <= task.slo.ttft_s):
            return at_home(RouteReason.DECODE_WITHIN_ITL)
        return cheapest()
    if policy.name == "ampd":
        for idle in remotes:
            if idle.queue_s == 0:
                idle_s = _by_total(idle)[0]
                if idle_s <= max(local.total_s, WAIT_SHARE * task.slo.ttft_s):
                    return at(idle, RouteReason.IDLE_PREFILL_WORKER)
                break
        return at_home(RouteReason.LATE_BINDING)
    if policy.name == "cheapest":
        return cheapest()
    if policy.name == "first-remote-then-local" and task.history_tokens > 0:
        return at_home(RouteReason.LATER_ROUND)
    if policy.name == "threshold":
        uncached, prompt = task.increment_tokens, task.history_tokens + task.increment_tokens
        busy = home.load.kv_running_tokens > (
            _number(policy, "busy_kv") * home.info.kv_capacity_tokens
        )
        few = uncached <= _number(policy, "tokens")
        if few and uncached <= _number(policy, "ratio") * prompt and not busy:
            return at_home(RouteReason.MOSTLY_CACHED)
    if policy.settings.get("choice") == "round-robin":
        remotes.sort(key=_by_id)
        turn = tie_seed % len(remotes)
        remotes = remotes[turn:] + remotes[:turn]
        return at(remotes[0], RouteReason.ROUND_ROBIN)
    remotes.sort(key=lambda remote: (remote.queue_s, remote.worker_id))
    return at(remotes[0], RouteReason.LEAST_LOADED)


def _can_take(task: RouteTask, view: WorkerView) -> bool:
    """It has a cost model, does not drain, and its KV memory (0: unknown) holds the task."""
    capacity = view.info.kv_capacity_tokens
    fits = capacity == 0 or capacity >= task.history_tokens + task.increment_tokens
    return view.info.cost is not None and not view.load.draining and fits


def _remote(
    task: RouteTask, home: WorkerView, view: WorkerView, *, literal: bool
) -> RouteCandidate:
    cost, home_cost = view.info.cost, home.info.cost
    assert cost is not None
    assert home_cost is not None
    queue_s = view.load.queued_prefill_s
    if literal:
        read_s = cost.t_kv(task.history_tokens)
    else:
        lacks = max(0, task.history_tokens - task.cached_tokens.get(view.info.worker_id, 0))
        read_s = max(0.0, cost.t_kv(lacks) - queue_s)
    compute_s = cost.t_pre(task.history_tokens, task.increment_tokens)
    return_s = home_cost.t_kv(task.increment_tokens)
    statistic_s = view.load.ttft_window_s
    if not literal:
        statistic_s = max(statistic_s, compute_s + read_s + return_s + queue_s)
    return RouteCandidate(
        view.info.worker_id, Route.REMOTE, queue_s, read_s, compute_s, return_s, statistic_s
    )


def _local(
    task: RouteTask, home: WorkerView, policy: PolicySpec, *, literal: bool
) -> RouteCandidate:
    cost, load, increment = home.info.cost, home.load, task.increment_tokens
    assert cost is not None
    compute_s = cost.t_pre(task.history_tokens, increment)
    statistic_s = load.itl_window_s
    if not literal and not load.running_rounds:
        statistic_s = 0.0
    elif not literal:
        middle = task.history_tokens + increment // 2

        def step_s(chunk: int) -> float:
            return cost.t_mixed(chunk, middle, load.running_rounds, load.running_context_tokens)

        if policy.settings.get("chunk") == "fixed":
            spare = int(_number(policy, "chunk_tokens")) - load.running_rounds
            chunk = smallest = min(max(spare, 1), increment)
        else:
            chunk = cost.mixed_chunk(
                TARGET * task.slo.itl_s, middle, load.running_rounds, load.running_context_tokens
            )
            chunk = min(max(chunk, MIN_CHUNK_TOKENS), increment)
            smallest = min(MIN_CHUNK_TOKENS, increment)
        compute_s = max(compute_s, -(-increment // chunk) * step_s(chunk))
        statistic_s = max(statistic_s, step_s(smallest))
    return RouteCandidate(
        home.info.worker_id, Route.LOCAL, load.queued_prefill_s, 0.0, compute_s, 0.0, statistic_s
    )


def _shuffled(remotes: list[RouteCandidate], seed: int) -> list[RouteCandidate]:
    """By Fisher and Yates, with the numbers of SplitMix64."""
    mask = (1 << 64) - 1
    for last in reversed(range(1, len(remotes))):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        mixed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        pick = (mixed ^ (mixed >> 31)) % (last + 1)
        remotes[last], remotes[pick] = remotes[pick], remotes[last]
    return remotes


def _by_total(candidate: RouteCandidate) -> tuple[float, str]:
    """Rank by predicted TTFT; ties break by id."""
    if candidate.route is Route.LOCAL:
        return candidate.total_s, candidate.worker_id
    # Summed as `route` sums it: in another order the last bit may break a tie.
    parts = candidate.compute_s, candidate.read_s, candidate.return_s, candidate.queue_s
    return sum(parts[1:], parts[0]), candidate.worker_id


def _by_id(candidate: RouteCandidate) -> str:
    return candidate.worker_id


def _number(policy: PolicySpec, name: str) -> float:
    value = policy.settings[name]
    assert not isinstance(value, str)
    return value
