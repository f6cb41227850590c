"""Every scenario that can be carried out in one process, under virtual time."""

from __future__ import annotations

import pytest
from bodies import SCENARIOS
from catalogue import Scenario
from in_process import ABILITIES, InProcess, run_in_process
from scene import Scene

IN_PROCESS = [s for s in SCENARIOS.values() if s.needs <= ABILITIES]


@pytest.mark.parametrize("scenario", IN_PROCESS, ids=lambda scenario: scenario.name)
def test_in_process(scenario: Scenario) -> None:
    async def body(driver: InProcess) -> None:
        scene = Scene(scenario.name, driver)
        await scenario.body(scene)
        await scene.finish()
        await scene.leave()

    run_in_process(scenario.shape, body)
