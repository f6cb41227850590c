"""Scenarios in real time on a few clusters at once: while one waits another one works.

A lane starts a cluster for each shape and runs the scenarios of that shape on it, one after the
other. The tests only ask how theirs went.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest
from catalogue import Scenario
from driver import Driver, Shape
from scene import Scene


class SharedDriver(Driver, Protocol):
    """A driver whose cluster serves one scenario after the other."""

    async def restore(self) -> None:
        """Everything runs again, whatever a scenario has left."""
        ...


Start = Callable[[Shape], AbstractAsyncContextManager[SharedDriver]]


class Campaign:
    """The scenarios of a run, and how each went."""

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        self._ends: dict[str, asyncio.Future[None]] = {
            s.name: asyncio.get_running_loop().create_future() for s in scenarios
        }

    async def went(self, scenario: Scenario) -> None:
        """Returns when the scenario has gone well; raises what it failed with."""
        await self._ends[scenario.name]

    @property
    def is_over(self) -> bool:
        """Whether every scenario has ended: the lanes only stop their clusters now."""
        return all(end.done() for end in self._ends.values())

    async def lane(self, groups: list[list[Scenario]], start: Start) -> None:
        """Run groups of one shape each until none is left; lanes share the list."""
        while groups:
            group = groups.pop(0)
            try:
                async with start(group[0].shape) as driver:
                    for scenario in group:
                        await self._run(scenario, driver)
            except Exception as error:  # noqa: BLE001 - of a cluster: told by all of its tests
                for scenario in group:
                    if not self._ends[scenario.name].done():
                        self._ends[scenario.name].set_exception(error)

    async def _run(self, scenario: Scenario, driver: SharedDriver) -> None:
        end = self._ends[scenario.name]
        scene = Scene(scenario.name, driver)
        try:
            await driver.restore()
            await scene.ready()
            await scenario.body(scene)
            await scene.finish()
        except Exception as error:  # noqa: BLE001 - the test tells
            end.set_exception(error)
            await scene.abandon()
        else:
            end.set_result(None)
        finally:
            await scene.leave()


@asynccontextmanager
async def campaign(wanted: Sequence[Scenario], start: Start, lanes: int) -> AsyncIterator[Campaign]:
    """Run the scenarios on that many clusters at once."""
    shapes = {scenario.shape: None for scenario in wanted}
    groups = [[s for s in wanted if s.shape == shape] for shape in shapes]
    # The largest first: what is left over in the end is small.
    groups = [part for group in groups for part in _parts(group, -(-len(wanted) // lanes))]
    groups.sort(key=len, reverse=True)
    run = Campaign(wanted)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run.lane(groups, start)) for _ in range(lanes)]
        yield run
        if not run.is_over:
            for task in running:
                task.cancel()


def _parts(group: list[Scenario], most: int) -> list[list[Scenario]]:
    """Of a large group several clusters of its shape get a part."""
    count = -(-len(group) // most)
    return [group[index::count] for index in range(count)]


def selected(request: pytest.FixtureRequest, module: str) -> list[Scenario]:
    """The scenarios of that module's tests that this run has selected."""
    return [
        item.callspec.params["scenario"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module.__name__.endswith(module)
    ]
