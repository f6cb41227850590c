"""Tasks that wait at their homes, as a prefill worker sees them: which one it takes next, and when
it looks for one (late binding, spec 4).

It looks when it is about to be free and while it is, and reads the shared store for that. What to
take is `ampd.core.late_binding.pull`; whether the task is still to be had, its home says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from math import inf
from typing import Final

from ampd.core.cost_model import CostModel
from ampd.core.late_binding import (
    AHEAD_S,
    CLAIM_S,
    PullDecision,
    StarvedShare,
    Task,
    TaskMirror,
    pull,
    speed_of,
)
from ampd.core.prefix_cache import PrefixCache
from ampd.ports import Clock, StateStore
from ampd.runtime.known_workers import KnownWorkers

LOOK_S: Final = 0.05
"""How soon the worker looks again while it is free and something waits, and how old a list may be
that it takes from."""
IDLE_LOOK_S: Final = 0.2
"""How soon while nothing waits."""
QUIET_LOOK_S: Final = 1.0
"""How soon while nothing has waited for QUIET_S, nor was computed: an idle worker is told of tasks
anyway."""
QUIET_S: Final = 2.0
SHORTEST_S: Final = 0.001
"""No wait is shorter: one that ends a rounding error too soon would begin again and again."""
SHUN_S: Final = 1.0
"""How long a home that could not be reached is left alone."""


@dataclass(frozen=True, slots=True)
class LateChoice:
    """A task to claim, and where."""

    decision: PullDecision
    home_address: str
    home_incarnation: int


class LateTasks:
    """What waits at all homes."""

    def __init__(
        self,
        *,
        store: StateStore,
        cost: CostModel,
        cache: PrefixCache,
        capacity_tokens: int,
        clock: Clock,
    ) -> None:
        """`cache`: what the worker has itself; `capacity_tokens`: a longer task is not for it."""
        self._cost = cost
        self._cache = cache
        self._capacity_tokens = capacity_tokens
        self._clock = clock
        self._known = KnownWorkers(store, clock=clock)
        self._mirror = TaskMirror(cost)
        self._starved = StarvedShare()
        self._homes: dict[str, tuple[str, int]] = {}
        self._tasks: list[Task] = []
        """As read last, without those that were tried already or are too long; by deadline."""
        self._tried: set[str] = set()
        """Of those that are still shown."""
        self._shunned: dict[tuple[str, int], float] = {}
        self._asked = asyncio.Event()
        self._active_s = -inf
        self._soon = False
        self._claim_in_s = inf
        """From the last choice on: until the present computation is near enough to its end."""
        self.enabled = False
        """Whether tasks wait at homes under the policy in force. What was listed before it came
        into force is taken all the same."""

    async def run(self, wake: Callable[[], None]) -> None:
        """Read the store when asked to, until cancelled; `wake` is called after every answer."""
        while True:
            await self._asked.wait()
            if await self._known.read():
                self._update()
            self._asked.clear()
            wake()

    def look_soon(self) -> None:
        """The worker is free, or a new policy is in force: whatever it knew is old."""
        self._soon = True
        self._active_s = self._clock()

    def wait_s(self, now_s: float, rest_s: float) -> float | None:
        """Ask the store if it is time to, and say how long to wait before choosing again; None:
        until something happens. `rest_s`: of the present computation."""
        if self._asked.is_set() or not (self.enabled or self._tasks or self._soon):
            return None
        if rest_s > AHEAD_S:
            return max(SHORTEST_S, rest_s - AHEAD_S)
        if self._tasks or self._soon:
            every_s = LOOK_S
        else:
            every_s = IDLE_LOOK_S if now_s - self._active_s < QUIET_S else QUIET_LOOK_S
        due_in_s = self._known.asked_s + every_s - now_s
        if due_in_s <= 0:
            self._soon = False
            self._asked.set()
            return None
        return max(SHORTEST_S, min(due_in_s, self._claim_in_s))

    def choose(
        self, now_s: float, *, rest_s: float, calibration: float, held: Container[str]
    ) -> LateChoice | None:
        """The task to claim now; None: nothing is known to wait, or the present computation
        (`rest_s`) goes on for longer than the claim takes. `held`: tasks that the worker has
        already, having been told of them."""
        self._claim_in_s = inf
        if not self._tasks or rest_s > AHEAD_S or now_s - self._known.read_s > LOOK_S:
            return None
        tasks = [
            t
            for t in self._tasks
            if t.task_id not in held and not self._is_shunned(self._homes[t.home], now_s)
        ]

        def work_s(task: Task) -> float:
            # The present computation hides the read.
            read_s = self.read_s(task.session_id, task.history_tokens)
            return calibration * task.compute_s + max(0.0, read_s - rest_s)

        speed = speed_of(self._known.views, self._cost, calibration)
        decision = pull(tasks, work_s, now_s=now_s + rest_s, speed=speed, starved=self._starved)
        if decision is None:
            return None
        task = decision.task
        ahead_s = CLAIM_S + self.read_s(task.session_id, task.history_tokens)
        if rest_s > ahead_s:
            self._claim_in_s = rest_s - ahead_s
            return None
        self._tried.add(task.task_id)
        self._tasks.remove(task)
        return LateChoice(decision, *self._homes[task.home])

    def read_s(self, session_id: str, history_tokens: int) -> float:
        """Predicted read of the history that the worker does not have itself (s)."""
        missing = max(0, history_tokens - self._cache.tokens(session_id))
        return self._cost.t_kv(missing)

    def claimed(self, decision: PullDecision) -> None:
        """The home has given it."""
        self._starved.add(decision)

    def shun(self, home_address: str, home_incarnation: int) -> None:
        """That home could not be reached."""
        now_s = self._clock()
        self._shunned = {home: s for home, s in self._shunned.items() if s > now_s}
        self._shunned[home_address, home_incarnation] = now_s + SHUN_S

    def _is_shunned(self, home: tuple[str, int], now_s: float) -> bool:
        return self._shunned.get(home, -inf) > now_s

    def _update(self) -> None:
        known = self._known
        self._homes = {
            view.info.worker_id: (view.info.address, view.info.incarnation) for view in known.views
        }
        shown = self._mirror.tasks(known.views, known.read_s)
        self._tried.intersection_update([task.task_id for task in shown])
        self._tasks = [
            task
            for task in shown
            if task.task_id not in self._tried
            and task.history_tokens + task.increment_tokens <= self._capacity_tokens
        ]
        if shown:
            self._active_s = self._clock()
