import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PolicySpec, Role, WorkerInfo, WorkerLoad
from ampd.runtime.heartbeat import Heartbeat

IDLE = WorkerLoad()
INFO = WorkerInfo("c0", Role.COORDINATOR, 7, "h:1", "h")


class FlakyStore(MemoryStateStore):
    """Down while `down`."""

    down = False
    beats = 0

    async def heartbeat(
        self, info: WorkerInfo, load: WorkerLoad, lease_s: float
    ) -> PolicySpec | None:
        self.beats += 1
        self._check()
        return await super().heartbeat(info, load, lease_s)

    async def deregister(self, worker_id: str, incarnation: int) -> None:
        self._check()
        await super().deregister(worker_id, incarnation)

    def _check(self) -> None:
        if self.down:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "down")


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


@asynccontextmanager
async def beating(heartbeat: Heartbeat) -> AsyncIterator[None]:
    task = asyncio.ensure_future(heartbeat.run())
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def make(
    store: FlakyStore,
    load: WorkerLoad = IDLE,
    policies: list[PolicySpec] | None = None,
    interval_s: float = 0.02,
) -> Heartbeat:
    return Heartbeat(
        store,
        INFO,
        load=lambda: load,
        on_policy=(policies if policies is not None else []).append,
        clock=time.monotonic,
        interval_s=interval_s,
        lease_s=5.0,
    )


async def until_beats(store: FlakyStore, count: int) -> None:
    count += store.beats
    async with asyncio.timeout(5):
        while store.beats < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_it_registers_publishes_and_deregisters(store: FlakyStore) -> None:
    heartbeat = make(store, WorkerLoad(running_rounds=3))
    async with beating(heartbeat):
        async with asyncio.timeout(5):
            await heartbeat.wait_registered()
        (view,) = await store.list_workers()
        assert (view.info, view.load.running_rounds) == (INFO, 3)
        await until_beats(store, 2)
    assert await store.list_workers() == ()


async def test_it_brings_every_change_of_policy_once(store: FlakyStore) -> None:
    policies: list[PolicySpec] = []
    first = PolicySpec("always-local", {}, 1)
    assert await store.set_policy(first, 0)
    async with beating(make(store, policies=policies)):
        await until_beats(store, 3)
        second = replace(first, name="always-remote", version=2)
        assert await store.set_policy(second, 1)
        await until_beats(store, 3)
    assert [policy.name for policy in policies] == ["always-local", "always-remote"]


async def test_it_survives_an_outage_with_two_log_lines(store: FlakyStore) -> None:
    with capture_logs() as logs:
        async with beating(make(store)):
            await until_beats(store, 2)
            store.down = True
            await until_beats(store, 5)
            store.down = False
            await until_beats(store, 2)
    names = [line["event"] for line in logs]
    assert names == ["heartbeat_failed", "heartbeat_recovered"]
    assert logs[1]["missed"] >= 4


async def test_it_ends_while_the_store_is_down(store: FlakyStore) -> None:
    store.down = True
    with capture_logs() as logs:
        async with beating(make(store)):
            await until_beats(store, 1)
    assert [line["event"] for line in logs] == ["heartbeat_failed", "not_deregistered"]


async def test_a_beat_can_be_had_now(store: FlakyStore) -> None:
    heartbeat = make(store, interval_s=2.0)
    async with beating(heartbeat):
        await heartbeat.wait_registered()
        heartbeat.beat_now()
        started_s = time.monotonic()
        await until_beats(store, 1)
        assert time.monotonic() - started_s < 1


async def test_a_lease_needs_more_than_one_beat(store: FlakyStore) -> None:
    with pytest.raises(ValueError, match="lease"):
        make(store, interval_s=3.0)
