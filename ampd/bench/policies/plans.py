"""Plans: what to run next, given what the runs before came to. Pure.

A plan is a generator: it yields runs, is sent their outcomes in the same order, and returns
what it found out. Who drives it (`drive`) decides where runs happen and which are known already.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from ampd.bench.policies.runs import Outcome, Run

T = TypeVar("T")

Plan = Generator[Sequence[Run], Sequence[Outcome], T]


def together(plans: Sequence[Plan[T]]) -> Plan[list[T]]:
    """Several plans in step: the runs that each wants next are wanted at once."""
    results: dict[int, T] = {}
    answers: dict[int, Sequence[Outcome] | None] = dict.fromkeys(range(len(plans)))
    while answers:
        wanted: dict[int, Sequence[Run]] = {}
        for index, answer in answers.items():
            try:
                plan = plans[index]
                wanted[index] = next(plan) if answer is None else plan.send(answer)
            except StopIteration as end:
                results[index] = end.value
        if not wanted:
            break
        outcomes = yield [run for runs in wanted.values() for run in runs]
        answers, start = {}, 0
        for index, runs in wanted.items():
            answers[index] = outcomes[start : start + len(runs)]
            start += len(runs)
    return [results[index] for index in range(len(plans))]
