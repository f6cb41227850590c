"""Scenarios as real processes: console scripts, signals, NIXL, Valkey, and emulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from driver import KV_BYTES_PER_TOKEN, Ability, KvTrouble, Shape, names_of
from scenario_client import Client
from sim_engine import COST

from ampd.cli.cluster import ClusterSpec, EngineKind, LocalCluster
from ampd.core.errors import AmpdError
from ampd.core.model import Role
from ampd.ports import EngineStats
from ampd.profiling.profile_file import Profile, write_profile

ABILITIES: Final = frozenset({Ability.FREEZE, Ability.HASH_SEEDS})
REGISTERED_WITHIN_S: Final = 5.0
POLL_S: Final = 0.05


class Processes:
    """`driver.Driver`; `running` makes one."""

    def __init__(self, shape: Shape, cluster: LocalCluster) -> None:
        self.shape = shape
        self.slack_s = 0.75
        self._cluster = cluster

    def client(self, coordinator: int = 0, tenant: str = "default") -> Client:
        """See the protocol."""
        name = self.shape.names(Role.COORDINATOR)[coordinator]
        return Client(self._cluster.service(name).address, tenant)

    async def kill(self, name: str) -> None:
        """See the protocol."""
        await self._cluster.kill(name)

    async def restart(self, name: str) -> None:
        """See the protocol."""
        before = await self._incarnation(name)
        await self._cluster.restart(name)
        async with asyncio.timeout(REGISTERED_WITHIN_S):
            while await self._incarnation(name) in {None, before}:  # noqa: ASYNC110 - remote
                await asyncio.sleep(POLL_S)

    async def _incarnation(self, name: str) -> int | None:
        """As a living coordinator knows it; None: not at all."""
        for coordinator in self.shape.names(Role.COORDINATOR):
            service = self._cluster.service(coordinator)
            if not service.is_running:
                continue
            client = Client(service.address, "default")
            try:
                workers = await client.workers()
            except AmpdError:
                continue
            finally:
                await client.leave()
            return next((w.incarnation for w in workers if w.worker_id == name), None)
        return None

    async def terminate(self, name: str) -> bool:
        """See the protocol."""
        return await self._cluster.terminate(name) == 0

    async def ended(self, name: str, within_s: float) -> bool:
        """See the protocol."""
        process = self._cluster.service(name).process
        try:
            async with asyncio.timeout(within_s):
                return await process.wait() == 0
        except TimeoutError:
            return False

    async def freeze(self, name: str) -> None:
        """See the protocol."""
        self._cluster.freeze(name)

    async def thaw(self, name: str) -> None:
        """See the protocol."""
        self._cluster.thaw(name)

    async def stop_store(self) -> None:
        """See the protocol."""
        await self._cluster.kill_store()

    async def start_store(self, *, lose: bool = False) -> None:
        """See the protocol."""
        if lose:
            raise NotImplementedError(Ability.LOSE_STORE_WRITES)
        await self._cluster.restart_store()

    def trouble_kv(self, trouble: KvTrouble) -> None:
        """See the protocol."""
        raise NotImplementedError(Ability.BREAK_KV)

    def refuse_next(self, worker: str, error: AmpdError) -> None:
        """See the protocol."""
        raise NotImplementedError(Ability.REFUSE)

    def engine(self, worker: str) -> EngineStats:
        """See the protocol."""
        raise LookupError(worker)

    def check_books(self) -> None:
        """Nobody can look into a process."""

    async def restore(self) -> None:
        """Everything runs again, whatever a scenario has left."""
        await self._cluster.restart_store()
        for name in names_of(self.shape):
            if self._cluster.service(name).is_running:
                self._cluster.thaw(name)
            else:
                await self.restart(name)


@asynccontextmanager
async def running(shape: Shape, folder: Path) -> AsyncIterator[Processes]:
    """A cluster of that shape."""
    profile = folder / "cost.yaml"
    write_profile(
        profile,
        Profile("emulated", "none", "emulated", COST, kv_bytes_per_token=KV_BYTES_PER_TOKEN),
    )
    settings = {key: value for role in Role for key, value in shape.settings(role).items()}
    spec = ClusterSpec(
        model="emulated",
        engine=EngineKind.EMULATED,
        prefill=shape.prefill,
        decode=shape.decode,
        coordinators=shape.coordinators,
        kv_cache_bytes=shape.kv_tokens * KV_BYTES_PER_TOKEN,
        max_model_tokens=shape.max_model_tokens,
        profile=str(profile),
        environment={
            # A seed for each interpreter.
            "PYTHONHASHSEED": "random",
            **{f"AMPD_{key.upper()}": str(value) for key, value in settings.items()},
        },
    )
    async with LocalCluster(spec, folder / "run") as cluster:
        yield Processes(shape, cluster)
