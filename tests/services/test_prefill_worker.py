"""The prefill worker's queue and pump: the real worker, without a model."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from stepping_engine import SteppingEngine

from ampd.adapters.peers_loopback import LoopbackNetwork, LoopbackPeers
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PrefillTarget, PrefillTask, Slo
from ampd.core.policies import DEFAULT_POLICY, resolve
from ampd.ports import ClaimedTask, PrefillReport
from services.prefill.worker import TASKS_IN_ENGINE, PrefillWorker


def task(number: int) -> PrefillTask:
    return PrefillTask(
        task_id=f"d0/s/{number}",
        session_id="s",
        round_index=number,
        home="d0",
        history_tokens=0,
        increment_tokens=20,
        created_s=time.monotonic(),
        slo=Slo(10.0, 1.0),
    )


@dataclass
class Unhurried:
    """A home that gives every task, takes note of its result, and never reads it."""

    results: list[str] = field(default_factory=list)

    async def claim(self, _task_id: str, _worker_id: str, _claimer: object) -> ClaimedTask:
        return ClaimedTask(array("I", range(20)), None)

    async def complete(self, task_id: str, _worker_id: str, _report: PrefillReport) -> None:
        self.results.append(task_id)


@asynccontextmanager
async def pumping(
    network: LoopbackNetwork | None = None, engine: SteppingEngine | None = None
) -> AsyncIterator[PrefillWorker]:
    """Unless the network has it, its tasks' home does not exist: each ends at its claim."""
    peers = LoopbackPeers(network or LoopbackNetwork(), home_address="p0", home_incarnation=1)
    worker = PrefillWorker(
        me=PrefillTarget("p0", 1, "p0"),
        engine=engine or SteppingEngine(CostModel()),
        store=MemoryStateStore(),
        peers=peers,
        cost=CostModel(),
        policy=resolve(DEFAULT_POLICY),
        max_queued_tasks=8,
        clock=time.monotonic,
    )
    pump = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        pump.cancel()
        await asyncio.wait({pump})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


async def until_idle(worker: PrefillWorker) -> None:
    await until(lambda: not worker.busy)


@pytest.mark.parametrize("steps", range(4))
async def test_a_task_withdrawn_as_it_is_taken_gives_its_place_back(steps: int) -> None:
    async with pumping() as worker:
        await asyncio.sleep(0)
        for number in range(2 * TASKS_IN_ENGINE):
            await worker.offer(task(number), "d0", 1)
            for _ in range(steps):
                await asyncio.sleep(0)
            await worker.withdraw(task(number).task_id)
        await until_idle(worker)
        await worker.offer(task(99), "d0", 1)
        await until_idle(worker)
        assert worker.load().queued_tasks == 0


async def test_a_drain_finishes_what_was_accepted_and_takes_no_more() -> None:
    async with pumping() as worker:
        for number in range(4):
            await worker.offer(task(number), "d0", 1)
        worker.start_drain()
        status = worker.drain_status()
        assert (status.running, status.sessions) == (4, 0)
        with pytest.raises(AmpdError) as caught:
            await worker.offer(task(9), "d0", 1)
        assert caught.value.reason is ErrorReason.DRAINING
        assert worker.load().draining
        await until_idle(worker)
        assert worker.drain_status().running == 0


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_a_home_that_is_gone_has_not_read_is_free(restarted: bool) -> None:
    network, engine = LoopbackNetwork(), SteppingEngine(CostModel())
    homes: dict[str, Any] = {"d0": Unhurried(), "d1": Unhurried()}
    for name, home in homes.items():
        network.add(name, 1, decode=home)
    async with pumping(network, engine) as worker:
        for number, name in enumerate(["d0", "d1", "d0"]):
            await worker.offer(task(number), name, 1)
        await until(lambda: len(engine.pins) == 3 and not worker.busy)
        if restarted:
            network.add("d0", 2, decode=homes["d0"])
        else:
            network.lose("d0")
        await until(lambda: len(engine.pins) == 1)
        (unread,) = homes["d1"].results
        await worker.withdraw(unread)
        assert not engine.pins
    await engine.close()


async def test_results_are_watched_over_for_each_life_of_a_home() -> None:
    network, engine = LoopbackNetwork(), SteppingEngine(CostModel())
    home: Any = Unhurried()
    async with pumping(network, engine) as worker:
        for life in (1, 2, 3):
            network.add("d0", life, decode=home)
            await worker.offer(task(life), "d0", life)
            await until(lambda life=life: len(home.results) == life and not worker.busy)
            await until(lambda: len(engine.pins) == 1)
        network.lose("d0")
        await until(lambda: not engine.pins)
    await engine.close()
