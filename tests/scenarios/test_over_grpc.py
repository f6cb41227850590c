"""Every scenario that can be carried out over real gRPC in one process."""

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
from over_grpc import ABILITIES, OverGrpc, edges, running

LANES: Final = 4

OVER_GRPC = [s for s in SCENARIOS.values() if s.needs <= ABILITIES]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Campaign]:
    def start(shape: Shape) -> AbstractAsyncContextManager[OverGrpc]:
        return running(shape, tmp_path_factory.mktemp("store"))

    with edges():
        async with campaign(selected(request, "test_over_grpc"), start, LANES) as started:
            yield started


@pytest.mark.parametrize("scenario", OVER_GRPC, ids=lambda scenario: scenario.name)
async def test_over_grpc(scenario: Scenario, run: Campaign) -> None:
    await run.went(scenario)
