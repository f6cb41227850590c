"""Drains of workers, and a start that is called off."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import DrainStatus, PolicySpec, WorkerLoad
from ampd.runtime.drain import WorkerDrain
from ampd.runtime.lifecycle import Shutdown
from ampd.runtime.process import STORE_RETRY_S, first_policy

DEFAULT = PolicySpec("always-local")


@dataclass
class Worker:
    """What a drain asks."""

    started: int = 0
    status_: DrainStatus = DrainStatus(2, 5, 1.5, 0.0)

    def start(self) -> None:
        self.started += 1

    def status(self) -> DrainStatus:
        return self.status_

    def load(self) -> WorkerLoad:
        return WorkerLoad(draining=self.started > 0, sessions=5)


@dataclass
class Draining:
    worker: Worker
    shutdown: Shutdown
    drain: WorkerDrain
    now_s: float = 100.0


def draining() -> Draining:
    worker, shutdown = Worker(), Shutdown()
    made = Draining(worker, shutdown, drain=None)  # type: ignore[arg-type]
    made.drain = WorkerDrain(
        shutdown=shutdown,
        start=worker.start,
        status=worker.status,
        load=worker.load,
        clock=lambda: made.now_s,
    )
    return made


async def test_an_operators_drain_has_no_limit_of_time() -> None:
    d = draining()
    assert d.drain.load() == WorkerLoad(sessions=5)
    assert await d.drain.drain() == DrainStatus(2, 5, 1.5, 0.0)
    async with asyncio.timeout(1):
        await d.shutdown.wait()
    assert not d.shutdown.asked
    assert d.drain.load() == WorkerLoad(draining=True, sessions=5, drain_estimate_s=1.5)
    d.now_s += 3.0
    d.worker.status_ = DrainStatus(1, 2, 0.5, 0.0)
    assert await d.drain.drain() == DrainStatus(1, 2, 0.5, 3.0)
    assert d.worker.started == 1


async def test_a_signal_may_follow_an_operators_drain() -> None:
    d = draining()
    await d.drain.drain()
    grace = asyncio.ensure_future(d.shutdown.wait_asked())
    await asyncio.sleep(0)
    assert not grace.done()
    d.shutdown.ask()
    async with asyncio.timeout(1):
        await grace
    assert d.drain.begin() == DrainStatus(2, 5, 1.5, 0.0)
    assert d.worker.started == 1


class DownStore(MemoryStateStore):
    down = True

    async def get_policy(self) -> PolicySpec | None:
        if self.down:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "down")
        return await super().get_policy()


async def test_a_start_without_a_store_is_called_off_at_once() -> None:
    shutdown = Shutdown()
    waiting = asyncio.ensure_future(first_policy(DownStore(), DEFAULT, shutdown))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    asked_s = time.monotonic()
    shutdown.ask()
    assert await waiting is None
    assert time.monotonic() - asked_s < STORE_RETRY_S / 2


@pytest.mark.parametrize("down", [False, True])
async def test_a_start_gets_the_policy_when_the_store_answers(down: bool) -> None:
    store = DownStore()
    store.down = down
    waiting = asyncio.ensure_future(first_policy(store, DEFAULT, Shutdown()))
    await asyncio.sleep(0.01)
    store.down = False
    policy = await waiting
    assert policy is not None
    assert (policy.name, policy.version) == ("always-local", 1)
