"""Scenarios in one process under virtual time: simulated network, store and KV transport, a new
cluster for each. Times are exact, and a process can be stopped at any step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cluster_sim import Life, SimCluster, SimShape
from driver import (
    BLOCK,
    LEASE_S,
    Ability,
    KvTrouble,
    Shape,
    engine_settings,
    names_of,
    refuse_once,
    role_of,
    serve,
)
from scenario_client import Client
from sim_engine import KvFaults, SimKvTransport
from virtual_loop import run_virtual

from ampd.adapters.engine_emulated import EmulatedEngine
from ampd.core.errors import AmpdError
from ampd.core.model import Role
from ampd.ports import EngineStats

ABILITIES: Final = frozenset(Ability) - {Ability.HASH_SEEDS}
LIMIT_S: Final = 300.0
REGISTERED_WITHIN_S: Final = 5.0


class _Cluster(SimCluster):
    """With all the settings of a scenario's shape."""

    def __init__(self, shape: Shape) -> None:
        self.scenario_shape = shape
        super().__init__(
            0,
            SimShape(
                coordinators=shape.coordinators,
                prefill=shape.prefill,
                decode=shape.decode,
                kv_tokens=shape.kv_tokens,
                block_tokens=BLOCK,
                max_model_tokens=shape.max_model_tokens,
                lease_s=LEASE_S,
                kv_lease_s=shape.kv_lease_s,
            ),
        )

    async def _serve(self, life: Life) -> None:
        settings = {
            "worker_id": life.name,
            "listen": life.address,
            "model": "emulated",
            "store_url": "unix:///simulated",
            "log_level": "debug",
        } | self.scenario_shape.settings(life.role)
        await serve(life.role, settings, life.shutdown)

    async def _start_engine(
        self, settings: Any, role: Role, incarnation: int, *_: Any, **__: Any
    ) -> EmulatedEngine:
        life = self._life()
        locator = f"{settings.worker_id}/{incarnation}".encode()
        engine = EmulatedEngine(
            engine_settings(self.scenario_shape),
            worker_id=settings.worker_id,
            incarnation=incarnation,
            transport=SimKvTransport(self.engines, life.process, locator),
            clock=time.monotonic,
        )
        life.parts["engine"] = engine
        return engine


class InProcess:
    """`driver.Driver`."""

    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster
        self.shape = cluster.scenario_shape
        self.slack_s = 0.0

    def client(self, coordinator: int = 0, tenant: str = "default") -> Client:
        """See the protocol."""
        name = self.shape.names(Role.COORDINATOR)[coordinator]
        return Client(self._cluster.lives[name].address, tenant)

    async def kill(self, name: str) -> None:
        """See the protocol."""
        self._cluster.kill(name)

    async def restart(self, name: str) -> None:
        """See the protocol."""
        before = await self._incarnation(name)
        self._cluster.start(name, role_of(name))
        async with asyncio.timeout(REGISTERED_WITHIN_S):
            while await self._incarnation(name) in {None, before}:  # noqa: ASYNC110 - a store
                await asyncio.sleep(0.01)

    async def registered(self) -> None:
        """Every process of the shape is known."""
        async with asyncio.timeout(REGISTERED_WITHIN_S):
            for name in names_of(self.shape):
                while await self._incarnation(name) is None:  # noqa: ASYNC110 - a store
                    await asyncio.sleep(0.01)

    async def _incarnation(self, name: str) -> int | None:
        views = await self._cluster.store.state.list_workers()
        return next((v.info.incarnation for v in views if v.info.worker_id == name), None)

    async def terminate(self, name: str) -> bool:
        """See the protocol."""
        await self._cluster.terminate(name)
        return bool(self._cluster.lives[name].ended_well)

    async def ended(self, name: str, within_s: float) -> bool:
        """See the protocol."""
        life = self._cluster.lives[name]
        assert life.task is not None
        await asyncio.wait([life.task], timeout=within_s)
        return bool(life.ended_well)

    async def freeze(self, name: str) -> None:
        """See the protocol."""
        self._cluster.pause(name)

    async def thaw(self, name: str) -> None:
        """See the protocol."""
        self._cluster.resume(name)

    async def stop_store(self) -> None:
        """See the protocol."""
        self._cluster.store.crash()

    async def start_store(self, *, lose: bool = False) -> None:
        """See the protocol."""
        self._cluster.store.restart(lose=lose)

    def trouble_kv(self, trouble: KvTrouble) -> None:
        """See the protocol."""
        self._cluster.engines.faults = {
            KvTrouble.NONE: KvFaults(),
            KvTrouble.STUCK: KvFaults(stuck_share=1.0),
            KvTrouble.FAILED: KvFaults(failed_share=1.0),
        }[trouble]

    def refuse_next(self, worker: str, error: AmpdError) -> None:
        """See the protocol."""
        refuse_once(self._cluster.lives[worker].parts["engine"], error)

    def engine(self, worker: str) -> EngineStats:
        """See the protocol. LookupError for one that does not live."""
        life = self._cluster.lives[worker]
        if not life.alive:
            raise LookupError(worker)
        with life.process.current():
            stats: EngineStats = life.parts["engine"].stats()
        return stats

    def check_books(self) -> None:
        """See the protocol."""
        for life in self._cluster.lives.values():
            if life.alive and "engine" in life.parts:
                with life.process.current():
                    life.parts["engine"].check()
                    if "home" in life.parts:
                        life.parts["home"]._ledger.check()


def run_in_process(shape: Shape, body: Callable[[InProcess], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario on a cluster of that shape, from its start to its end."""
    run_virtual(_run(shape, body), limit_s=LIMIT_S)


async def _run(shape: Shape, body: Callable[[InProcess], Coroutine[Any, Any, None]]) -> None:
    cluster = _Cluster(shape)
    with cluster.installed():
        cluster.start_all()
        driver = InProcess(cluster)
        await driver.registered()
        snapshots = cluster.clients.spawn(cluster.snapshots(), name="snapshots")
        try:
            await cluster.clients.spawn(body(driver), name="scenario")
        except BaseException as error:
            error.add_note("\n".join(cluster.log))
            raise
        finally:
            snapshots.cancel()
    assert cluster.violations == [], "\n".join((*cluster.log, *cluster.violations))
