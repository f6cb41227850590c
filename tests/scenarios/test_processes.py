"""The scenarios whose faults only real processes have: signals, restarts, sockets, NIXL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

import pytest
import pytest_asyncio
from bodies import SCENARIOS
from campaign import Campaign, campaign, selected
from catalogue import Scenario
from driver import Shape
from processes import ABILITIES, Processes, running

LANES: Final = 3

PROCESSES = [s for s in SCENARIOS.values() if s.real and s.needs <= ABILITIES]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Campaign]:
    def start(shape: Shape) -> AbstractAsyncContextManager[Processes]:
        return running(shape, tmp_path_factory.mktemp("processes"))

    async with campaign(selected(request, "test_processes"), start, LANES) as started:
        yield started


@pytest.mark.parametrize("scenario", PROCESSES, ids=lambda scenario: scenario.name)
async def test_processes(scenario: Scenario, run: Campaign) -> None:
    await run.went(scenario)
