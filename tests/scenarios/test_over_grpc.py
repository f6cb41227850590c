"""Every scenario that can be carried out over real gRPC in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from bodies import SCENARIOS
from catalogue import Scenario
from over_grpc import ABILITIES, OverGrpc, running
from scene import Scene

OVER_GRPC = [s for s in SCENARIOS.values() if s.needs <= ABILITIES and "over_grpc" not in s.not_on]
SHAPES = list({scenario.shape: None for scenario in OVER_GRPC})
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[OverGrpc]:
    async with running(request.param, tmp_path_factory.mktemp("store")) as started:
        yield started


@pytest.mark.parametrize(
    ("cluster", "scenario"),
    [
        pytest.param(scenario.shape, scenario, id=scenario.name)
        for shape in SHAPES
        for scenario in OVER_GRPC
        if scenario.shape == shape
    ],
    indirect=["cluster"],
)
async def test_over_grpc(scenario: Scenario, cluster: OverGrpc) -> None:
    scene = Scene(scenario.name, cluster)
    await cluster.restore()
    await scene.ready()
    try:
        await scenario.body(scene)
        await scene.finish()
    finally:
        await scene.leave()
