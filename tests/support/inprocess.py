"""Real coordinators and homes in one process: a store in memory, loopback peers, and an engine
of known steps instead of a model. For faults and races; streams are checked on real engines."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stepping_engine import SteppingEngine

from ampd.adapters.homes_loopback import LoopbackHomes
from ampd.adapters.peers_loopback import LoopbackNetwork, LoopbackPeers
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.cost_model import CostModel, MixedCost
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import (
    Finished,
    PolicySpec,
    Role,
    SamplingParams,
    Slo,
    TokensOut,
    WorkerInfo,
    WorkerLoad,
)
from ampd.core.policies import resolve
from ampd.ports import ToolRunner
from ampd.wire.generate import RoundRequest
from ampd.wire.replay import RoundPlaced
from ampd.wire.sampling import SamplingRequest
from services.coordinator.coordinator import Coordinator, Identity, RoundStreamEvent
from services.coordinator.sessions import Sessions
from services.coordinator.settings import RoundLimits
from services.coordinator.shared_state import SharedState
from services.decode.home import Home
from services.decode.late_tasks import LateTasks
from services.decode.moving import SessionMover
from services.decode.settings import HomeLimits
from services.decode.tasks import PrefillTasks

STEP = CostModel(mixed=MixedCost(base_s=0.002))
LEASE_S = 60.0


class NoTokenizer:
    """Token ids need none."""

    vocab_size = 1000


@dataclass
class LocalHome:
    """One life of a decode worker."""

    worker_id: str
    incarnation: int
    home: Home
    mover: SessionMover
    engine: Any
    """A SteppingEngine, unless the test brings another."""
    info: WorkerInfo
    tools: ToolRunner | None = None

    def load(self) -> WorkerLoad:
        """What it publishes."""
        return replace(self.home.load(), tools=self.tools.names() if self.tools else ())


@dataclass
class InProcess:
    """A cluster; `async with in_process()` makes one."""

    chores: asyncio.TaskGroup
    store: MemoryStateStore = field(default_factory=MemoryStateStore)
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    homes: dict[str, LocalHome] = field(default_factory=dict)
    coordinators: list[Coordinator] = field(default_factory=list)
    states: list[SharedState] = field(default_factory=list)
    """Of the coordinators."""
    tokenizer: Any = field(default_factory=NoTokenizer)
    policy: str = "always-local"
    write_backs: list[asyncio.Task[None]] = field(default_factory=list)

    async def add_home(
        self,
        worker_id: str,
        *,
        incarnation: int = 1,
        capacity: int = 4096,
        limits: HomeLimits | None = None,
        engine: Any = None,
        tools: ToolRunner | None = None,
        cost: CostModel | None = None,
    ) -> LocalHome:
        """Start a decode worker, in place of an earlier life of that name; `engine`: another
        one than a SteppingEngine; `cost`: what it predicts, nothing by default."""
        cost = cost or CostModel()
        engine = engine or SteppingEngine(STEP, capacity=capacity)
        limits = limits or HomeLimits(kv_lease_s=0.0)
        peers = LoopbackPeers(self.network, home_address=worker_id, home_incarnation=incarnation)
        late = LateTasks(
            worker_id=worker_id,
            store=self.store,
            cost=cost,
            chores=self.chores,
            clock=time.monotonic,
        )
        tasks = PrefillTasks(
            worker_id=worker_id,
            engine=engine,
            peers=peers,
            late=late,
            limits=limits,
            chores=self.chores,
        )
        home = Home(
            worker_id=worker_id,
            engine=engine,
            tasks=tasks,
            cost=cost,
            limits=limits,
            chores=self.chores,
            clock=time.monotonic,
        )
        info = WorkerInfo(
            worker_id=worker_id,
            role=Role.DECODE,
            incarnation=incarnation,
            address=worker_id,
            host="here",
            kv_block_tokens=engine.info.block_tokens,
            kv_capacity_tokens=engine.info.kv_capacity_tokens,
            max_model_tokens=engine.info.max_model_tokens,
            cost=cost,
        )
        mover = SessionMover(
            info=info,
            home=home,
            engine=engine,
            store=self.store,
            homes=LoopbackHomes(self.network),
            chores=self.chores,
            clock=time.monotonic,
        )
        self.network.add(worker_id, incarnation, decode=home, mover=mover, tools=tools)
        self.homes[worker_id] = LocalHome(worker_id, incarnation, home, mover, engine, info, tools)
        await self.beat()
        return self.homes[worker_id]

    async def lose_home(self, worker_id: str) -> None:
        """The worker dies, and its lease is gone."""
        self.network.lose(worker_id)
        lost = self.homes.pop(worker_id)
        await self.store.deregister(worker_id, lost.incarnation)

    async def add_coordinator(self) -> Coordinator:
        """One more replica."""
        identity = Identity(f"c{len(self.coordinators)}", 1)
        state = SharedState(
            store=self.store,
            clock=time.monotonic,
            wall_clock=time.time,
            max_state_age_s=10.0,
            lease_s=0.0,
        )
        self.write_backs.append(self.chores.create_task(state.run()))
        coordinator = Coordinator(
            identity=identity,
            store=self.store,
            state=state,
            homes=LoopbackHomes(self.network),
            tokenizer=self.tokenizer,
            limits=RoundLimits(),
            default_policy=resolve(PolicySpec(self.policy)),
            clock=time.monotonic,
            wall_clock=time.time,
            tie_seed=lambda: 0,
        )
        self.coordinators.append(coordinator)
        self.states.append(state)
        info = WorkerInfo(identity.worker_id, Role.COORDINATOR, 1, "c", "here")
        await self.store.heartbeat(info, WorkerLoad(), LEASE_S)
        return coordinator

    async def beat(self) -> None:
        """Every home publishes its load."""
        for local in self.homes.values():
            await self.store.heartbeat(local.info, local.load(), LEASE_S)
            local.home.heard(self.store.life)

    def sessions(self) -> Sessions:
        """The use case beside the rounds."""
        state = SharedState(
            store=self.store,
            clock=time.monotonic,
            wall_clock=time.time,
            max_state_age_s=10.0,
            lease_s=0.0,
        )
        return Sessions(
            store=self.store,
            state=state,
            homes=LoopbackHomes(self.network),
            model="m",
            default_slo=Slo(10.0, 1.0),
            wall_clock=time.time,
        )

    async def new_session(self) -> str:
        """An open session of tenant "t"."""
        record = await self.sessions().create("t", request_id="", slo=Slo(10.0, 1.0), labels={})
        return record.session_id

    async def record(self, session_id: str) -> SessionRecord:
        """As it stands in the store."""
        record = await self.store.get_session(session_id)
        assert record is not None
        return record


@dataclass
class Outcome:
    events: list[RoundStreamEvent]

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def placed(self) -> RoundPlaced:
        return next(e for e in reversed(self.events) if isinstance(e, RoundPlaced))

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.events if isinstance(e, TokensOut) for t in e.token_ids]


def request(
    session_id: str,
    increment: int | Sequence[int] = 20,
    *,
    max_tokens: int = 4,
    request_id: str = "",
    keep: int | None = None,
) -> RoundRequest:
    ids = range(1, increment + 1) if isinstance(increment, int) else increment
    return RoundRequest(
        session_id=session_id,
        request_id=request_id,
        text=None,
        messages=(),
        token_ids=array("I", ids),
        keep_history_tokens=keep,
        sampling=SamplingRequest(SamplingParams(max_tokens=max_tokens), max_tokens),
    )


async def run(
    coordinator: Coordinator, wanted: RoundRequest, timeout_s: float | None = None
) -> Outcome:
    async with aclosing(coordinator.run_round("t", wanted, timeout_s)) as events:
        return Outcome([event async for event in events])


@asynccontextmanager
async def in_process(*home_ids: str, coordinators: int = 1) -> AsyncIterator[InProcess]:
    async with asyncio.TaskGroup() as chores:
        cluster = InProcess(chores)
        for home_id in home_ids:
            await cluster.add_home(home_id)
        for _ in range(coordinators):
            await cluster.add_coordinator()
        yield cluster
        for task in cluster.write_backs:
            task.cancel()
        for local in cluster.homes.values():
            await local.engine.close()
