"""Brings plans and runs together: what a plan wants is looked up or simulated, in processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ampd.bench.policies.execute import execute
from ampd.bench.policies.journal import Journal
from ampd.bench.policies.plans import Plan
from ampd.bench.policies.runs import Outcome, Run

T = TypeVar("T")

SUBMITTED_A_JOB: Final = 2
"""Runs that are handed to a process ahead, so that none waits for the next."""


@dataclass(slots=True)
class Progress:
    """So far. `rounds` and `simulated_s` of this call's own runs: simulated rounds, and seconds
    that processes spent on them."""

    runs: int = 0
    known: int = 0
    """Runs that were in the journal."""
    rounds: int = 0
    simulated_s: float = 0.0
    plans_done: int = 0
    started_s: float = 0.0
    """On this process's clock."""


Submit = Callable[[Run], Future[Outcome]]


def _inline(code: str) -> Submit:
    """Runs in this process, at once."""

    def submit(run: Run) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(execute(run, code))
        return future

    return submit


@dataclass(slots=True)
class _Wanted(Generic[T]):
    """What a plan waits for."""

    plan: Plan[T]
    runs: Sequence[Run]
    outcomes: dict[Run, Outcome]
    missing: int = 0


def drive(
    plans: Sequence[Plan[T]],
    journal: Journal,
    *,
    code: str,
    jobs: int,
    told: Callable[[Progress], None],
) -> list[T]:
    """What the plans return, in their order. All their runs are in the journal in the end, and
    until there as far as it got. `told` hears of every run, and of the end.

    Raises what a run or a plan raises (the first of it), and OSError of the journal.
    """
    if jobs == 1:
        return _Driver(plans, journal, _inline(code), 1, told).results()
    # Not forked: a child must not inherit what other libraries of this process hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:

            def submit(run: Run) -> Future[Outcome]:
                return pool.submit(execute, run, code)

            return _Driver(plans, journal, submit, jobs * SUBMITTED_A_JOB, told).results()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Driver(Generic[T]):
    def __init__(
        self,
        plans: Sequence[Plan[T]],
        journal: Journal,
        submit: Submit,
        at_once: int,
        told: Callable[[Progress], None],
    ) -> None:
        self._plans, self._journal, self._submit = plans, journal, submit
        self._at_once, self._told = at_once, told
        self._progress = Progress(started_s=time.monotonic())
        self._results: dict[int, T] = {}
        self._wanted: dict[int, _Wanted[T]] = {}
        self._waiting: dict[Run, list[int]] = {}
        """Plans by the run that they wait for."""
        self._backlog: deque[Run] = deque()
        self._running: dict[Future[Outcome], Run] = {}
        self._seen: set[Run] = set()

    def results(self) -> list[T]:
        for index, plan in enumerate(self._plans):
            self._advance(index, plan, None)
        while self._waiting:
            while self._backlog and len(self._running) < self._at_once:
                run = self._backlog.popleft()
                self._running[self._submit(run)] = run
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                self._ran(self._running.pop(future), future.result())
        self._told(self._progress)
        return [self._results[index] for index in range(len(self._plans))]

    def _ran(self, run: Run, outcome: Outcome) -> None:
        self._journal.add(run, outcome)
        self._seen.add(run)
        progress = self._progress
        progress.runs += 1
        progress.rounds += outcome.rounds
        progress.simulated_s += outcome.wall_s
        for index in self._waiting.pop(run):
            wanted = self._wanted[index]
            wanted.outcomes[run] = outcome
            wanted.missing -= 1
            if not wanted.missing:
                answer = [wanted.outcomes[r] for r in wanted.runs]
                self._advance(index, wanted.plan, answer)
        self._told(progress)

    def _advance(self, index: int, plan: Plan[T], answer: Sequence[Outcome] | None) -> None:
        """Go on with the plan until it wants a run that nobody knows."""
        while True:
            try:
                runs = next(plan) if answer is None else plan.send(answer)
            except StopIteration as end:
                self._results[index] = end.value
                self._wanted.pop(index, None)
                self._progress.plans_done += 1
                return
            wanted = _Wanted(plan, runs, {})
            for run in dict.fromkeys(runs):
                outcome = self._journal.get(run)
                if outcome is not None:
                    self._progress.known += run not in self._seen
                    self._seen.add(run)
                    wanted.outcomes[run] = outcome
                    continue
                wanted.missing += 1
                if run not in self._waiting:
                    self._waiting[run] = []
                    self._backlog.append(run)
                self._waiting[run].append(index)
            if wanted.missing:
                self._wanted[index] = wanted
                return
            answer = [wanted.outcomes[run] for run in runs]
