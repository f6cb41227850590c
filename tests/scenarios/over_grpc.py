"""Scenarios over real gRPC servers in one process, with a real Valkey and real time: the same
composition roots, KV moved between emulated engines in process.

To kill a process here is to cut its calls off, take the store away from it and cancel it; its
`finally` clauses run, which is what a real kill does not do.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from driver import Ability, KvTrouble, Shape, engine_settings, names_of, refuse_once, role_of, serve
from scenario_client import Client
from sim_engine import COST

from ampd.adapters.engine_emulated import EmulatedEngine
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.adapters.state_redis import RedisStateStore
from ampd.cli.cluster import free_ports
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import Role
from ampd.ports import EngineStats, KvPiece
from ampd.runtime.embedded_store import EmbeddedStore
from ampd.runtime.lifecycle import Shutdown
from ampd.runtime.process import ProcessSettings
from services.coordinator import main as coordinator_main
from services.decode import main as decode_main
from services.prefill import main as prefill_main

ABILITIES: Final = frozenset({Ability.BREAK_KV, Ability.REFUSE, Ability.BOOKS})
READY_WITHIN_S: Final = 30.0
ENDS_WITHIN_S: Final = 20.0
POLL_S: Final = 0.02

T = TypeVar("T")


@dataclass(eq=False)
class _Life:
    """From a start to its end."""

    name: str
    cluster: OverGrpc
    shutdown: Shutdown = field(default_factory=Shutdown)
    task: asyncio.Task[None] | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    """What its composition root has made: engine, home, server, store."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.task is not None and not self.task.done()


_LIFE: ContextVar[_Life] = ContextVar("life")


class _Store:
    """A life's way to the store, which its death cuts."""

    def __init__(self, store: RedisStateStore) -> None:
        self._store = store
        self.is_cut = False

    @property
    def life(self) -> str:
        """See the port."""
        return self._store.life

    @property
    def age_s(self) -> float:
        return self._store.age_s

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def operation(*args: Any, **kwargs: Any) -> Any:
            if self.is_cut and name != "close":
                raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "the store is out of reach")
            return await method(*args, **kwargs)

        return operation


class _Transport(InprocKvTransport):
    """Reads can be troubled."""

    def __init__(self, cluster: OverGrpc, network: InprocKvNetwork, name: str, life: int) -> None:
        super().__init__(network, name, life)
        self._cluster = cluster

    async def read(self, locator: bytes, pieces: Sequence[KvPiece], timeout_s: float) -> None:
        """See the port."""
        if self._cluster.kv_trouble is KvTrouble.STUCK:
            await asyncio.sleep(timeout_s)
        if self._cluster.kv_trouble is not KvTrouble.NONE:
            raise AmpdError(ErrorReason.WORKER_UNAVAILABLE, "the read has failed")
        await super().read(locator, pieces, timeout_s)


class OverGrpc:
    """`driver.Driver`; `running` makes one."""

    def __init__(self, shape: Shape, store: EmbeddedStore) -> None:
        self.shape = shape
        self.slack_s = 0.5
        self.kv_trouble = KvTrouble.NONE
        self._store = store
        self._kv = InprocKvNetwork()
        self._lives: dict[str, _Life] = {}
        names = names_of(shape)
        ports = free_ports(len(names))
        self._addresses = {n: f"127.0.0.1:{p}" for n, p in zip(names, ports, strict=True)}

    # --- lives -----------------------------------------------------------------------------

    async def start_all(self) -> None:
        """Every process of the shape."""
        for name in names_of(self.shape):
            self._start(name)
        await self._registered(names_of(self.shape))

    def _start(self, name: str) -> None:
        life = _Life(name, self)
        settings = {
            "worker_id": name,
            "listen": self._addresses[name],
            "model": "emulated",
            "store_url": self._store.url,
        } | self.shape.settings(role_of(name))
        if role_of(name) is Role.COORDINATOR:
            settings["tokenizer"] = "emulated"
        else:
            settings["engine"] = "emulated"
        token = _LIFE.set(life)
        try:
            life.task = asyncio.create_task(
                serve(role_of(name), settings, life.shutdown), name=name
            )
        finally:
            _LIFE.reset(token)
        self._lives[name] = life

    async def _registered(self, names: Sequence[str]) -> None:
        """Their newest lives serve and are known to the store."""
        store = RedisStateStore(self._store.url, prefix="ampd")
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while True:
                    for name in names:
                        life = self._lives[name]
                        if not life.alive and life.task is not None:
                            await life.task
                    known = {v.info.worker_id: v.info for v in await store.list_workers()}
                    fresh = [n for n in names if self._is_known(n, known.get(n))]
                    if len(fresh) == len(names):
                        return
                    await asyncio.sleep(POLL_S)
        finally:
            await store.close()

    def _is_known(self, name: str, info: Any) -> bool:
        server = self._lives[name].parts.get("server")
        return info is not None and server is not None and info.incarnation == server._incarnation

    async def stop_all(self) -> None:
        """The end."""
        for life in self._lives.values():
            if life.alive and life.task is not None:
                await self.kill(life.name)

    async def restore(self) -> None:
        """Everything runs again, whatever a scenario has left."""
        self.kv_trouble = KvTrouble.NONE
        await self.start_store()
        for name, life in self._lives.items():
            draining = life.alive and life.shutdown._draining.is_set()
            if draining:
                await self.kill(name)
            if not life.alive or draining:
                await self.restart(name)

    # --- the protocol ------------------------------------------------------------------------

    def client(self, coordinator: int = 0, tenant: str = "default") -> Client:
        """See the protocol."""
        name = self.shape.names(Role.COORDINATOR)[coordinator]
        return Client(self._addresses[name], tenant)

    async def kill(self, name: str) -> None:
        """See the protocol."""
        life = self._lives[name]
        if not life.alive or life.task is None:
            return
        life.parts["store"].is_cut = True
        if "server" in life.parts:  # else it died before it served
            await life.parts["server"].grpc.stop(None)
        life.task.cancel()
        # Not awaited itself: a cancellation of the caller would cancel it a second time.
        await asyncio.wait([life.task])

    async def restart(self, name: str) -> None:
        """See the protocol."""
        await self.kill(name)
        self._start(name)
        await self._registered([name])

    async def terminate(self, name: str) -> bool:
        """See the protocol."""
        self._lives[name].shutdown.ask()
        return await self.ended(name, ENDS_WITHIN_S)

    async def ended(self, name: str, within_s: float) -> bool:
        """See the protocol."""
        task = self._lives[name].task
        assert task is not None
        await asyncio.wait([task], timeout=within_s)
        return task.done() and not task.cancelled() and task.exception() is None

    async def freeze(self, name: str) -> None:
        """See the protocol."""
        raise NotImplementedError(Ability.FREEZE)

    async def thaw(self, name: str) -> None:
        """See the protocol."""
        raise NotImplementedError(Ability.FREEZE)

    async def stop_store(self) -> None:
        """See the protocol."""
        assert self._store.pid is not None
        os.kill(self._store.pid, signal.SIGKILL)

    async def start_store(self, *, lose: bool = False) -> None:
        """See the protocol. What the file lacks of the last second is lost."""
        await self._store.start()

    def trouble_kv(self, trouble: KvTrouble) -> None:
        """See the protocol."""
        self.kv_trouble = trouble

    def refuse_next(self, worker: str, error: AmpdError) -> None:
        """See the protocol."""
        refuse_once(self._lives[worker].parts["engine"], error)

    def engine(self, worker: str) -> EngineStats:
        """See the protocol."""
        life = self._lives[worker]
        if not life.alive:
            raise LookupError(worker)
        stats: EngineStats = life.parts["engine"].stats()
        return stats

    def check_books(self) -> None:
        """See the protocol."""
        for life in self._lives.values():
            if life.alive and "engine" in life.parts:
                life.parts["engine"].check()
                if "home" in life.parts:
                    life.parts["home"]._ledger.check()

    async def start_engine(self, worker_id: str, incarnation: int) -> EmulatedEngine:
        """One of the scenario's shape."""
        return EmulatedEngine(
            engine_settings(self.shape),
            worker_id=worker_id,
            incarnation=incarnation,
            transport=_Transport(self, self._kv, worker_id, incarnation),
        )


# --- the edges: engines with a common KV network, and an eye on the parts of a life ---------------


@contextmanager
def edges() -> Iterator[None]:
    """For all clusters of this process."""
    patch = mock.patch.object
    with ExitStack() as stack:
        for module in (prefill_main, decode_main):
            stack.enter_context(patch(module, "start_engine", _start_engine))
            stack.enter_context(patch(module, "cost_model", _cost_model))
        for module, name, part in (
            (decode_main, "Home", "home"),
            (decode_main, "GrpcServer", "server"),
            (prefill_main, "GrpcServer", "server"),
            (coordinator_main, "GrpcServer", "server"),
        ):
            stack.enter_context(patch(module, name, _kept(getattr(module, name), part)))
        opened = ProcessSettings.open_store
        open_store = _kept(lambda settings: _Store(opened(settings)), "store")
        stack.enter_context(patch(ProcessSettings, "open_store", open_store))
        yield


async def _start_engine(
    settings: Any, role: Role, incarnation: int, *_: Any, **__: Any
) -> EmulatedEngine:
    life = _LIFE.get()
    engine = await life.cluster.start_engine(settings.worker_id, incarnation)
    life.parts["engine"] = engine
    return engine


async def _cost_model(*_: Any) -> CostModel:
    return COST


def _kept(make: Callable[..., T], part: str) -> Callable[..., T]:
    """Remember what the composition root of the running life makes."""

    def made(*args: Any, **kwargs: Any) -> T:
        thing = make(*args, **kwargs)
        _LIFE.get().parts[part] = thing
        return thing

    return made


@asynccontextmanager
async def running(shape: Shape, folder: Path) -> AsyncIterator[OverGrpc]:
    """A cluster of that shape, within `edges`."""
    async with EmbeddedStore(appendonly_dir=folder) as store:
        cluster = OverGrpc(shape, store)
        try:
            await cluster.start_all()
            yield cluster
        finally:
            await cluster.stop_all()
