"""The prefill worker's queue and pump: the real worker, without a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from stepping_engine import SteppingEngine

from ampd.adapters.peers_loopback import LoopbackNetwork, LoopbackPeers
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PrefillTarget, PrefillTask, Slo
from ampd.core.policies import DEFAULT_POLICY, resolve
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


@asynccontextmanager
async def pumping() -> AsyncIterator[PrefillWorker]:
    """Its tasks' home does not exist: each ends at its claim."""
    worker = PrefillWorker(
        me=PrefillTarget("p0", 1, "p0"),
        engine=SteppingEngine(CostModel()),
        store=MemoryStateStore(),
        peers=LoopbackPeers(LoopbackNetwork(), home_address="p0", home_incarnation=1),
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


async def until_idle(worker: PrefillWorker) -> None:
    async with asyncio.timeout(2):
        while worker.busy:  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


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
