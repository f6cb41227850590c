"""The faults of a simulated cluster: a seeded stream of them, by profile.

Nothing is scripted: which process, which moment, how long and what on top of it are drawn. All
stops at the end of the faulty time: links heal, the paused go on, the dead are started again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import grpc
from cluster_sim import Life, SimCluster, SimShape
from sim_engine import KvFaults
from sim_store import StoreFaults
from sim_workload import WorkShape
from virtual_grpc import NetworkFaults

from ampd.core.model import Role
from ampd.v1 import admin_service_pb2 as admin_pb
from ampd.v1.admin_service_pb2_grpc import AdminServiceStub
from ampd.v1.policy_pb2 import Policy

RESTART_WITHIN_S: Final = 6.0
PAUSE_WITHIN_S: Final = 10.0
CUT_WITHIN_S: Final = 12.0
OUTAGE_WITHIN_S: Final = 8.0
DRAIN_WITHIN_S: Final = 15.0
ADMIN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A class of faults. `weights`: how often each action is drawn; `every_s`: mean time between
    two of them, while the faulty time of `faulty_s` lasts."""

    weights: dict[str, float] = field(default_factory=dict)
    every_s: float = 1.5
    faulty_s: float = 15.0
    network: NetworkFaults = NetworkFaults()
    kv: KvFaults = KvFaults()
    store: StoreFaults = StoreFaults()
    comes_back_s: float = 15.0
    """All KV is free again so long after the last close, if every fault was over then: when a
    transfer in flight ends (6 s), a home that could not be told of the close has asked the store
    (5 s), or a client that vanished is noticed (15 s). No lease of a session or result is as
    short."""
    frees_within_s: float = 20.0
    """How long anything of a round may outlive it on a worker that lives."""
    work: WorkShape = WorkShape()
    shape: SimShape = SimShape()


CATCH_UP_S: Final = 4.0
"""What a store that was down takes to know again what has ended."""


class Nemesis:
    """Does the damage, and undoes it in the end."""

    def __init__(
        self,
        cluster: SimCluster,
        seed: int,
        profile: Profile,
        flood: Callable[[], Awaitable[None]],
    ) -> None:
        """`flood`: many new clients at once."""
        self._cluster = cluster
        self._rng = random.Random(f"nemesis {seed}")
        self._profile = profile
        self._troubles = 0
        self._trouble_start_s = self._trouble_end_s = self._last_death_s = float("-inf")
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill_decode": lambda: self._kill(Role.DECODE),
            "kill_prefill": lambda: self._kill(Role.PREFILL),
            "kill_coordinator": lambda: self._kill(Role.COORDINATOR),
            "pause": self._pause,
            "terminate": self._terminate,
            "slow": self._slow,
            "cut": self._cut,
            "cut_store": self._cut_store,
            "store_outage": self._store_outage,
            "store_crash": self._store_crash,
            "blackout": self._blackout,
            "drain": self._drain,
            "move": self._move,
            "policy": self._policy,
            "evict": self._evict,
            "flood": flood,
        }

    async def run(self) -> None:
        """The faulty time; what was begun in it is over when this returns."""
        profile, rng = self._profile, self._rng
        cluster = self._cluster
        cluster.network.faults, cluster.store.faults = profile.network, profile.store
        cluster.engines.faults = profile.kv
        names = list(profile.weights)
        async with asyncio.TaskGroup() as damage:
            end_s = cluster.loop.time() + profile.faulty_s
            while names:
                await asyncio.sleep(rng.expovariate(1 / profile.every_s))
                if cluster.loop.time() > end_s:
                    break
                (name,) = rng.choices(names, list(profile.weights.values()))
                damage.create_task(self._actions[name]())
            if not names:
                await asyncio.sleep(profile.faulty_s)
        self.stop()

    def stop(self) -> None:
        """All is well again."""
        cluster = self._cluster
        calm = Profile()
        cluster.note("the faults stop")
        cluster.network.faults, cluster.store.faults = calm.network, calm.store
        cluster.engines.faults = calm.kv
        cluster.network.heal_all()
        cluster.store.cut_off.clear()
        if not cluster.store.up:
            cluster.store.restart(lose=False)
        for life in list(cluster.lives.values()):
            cluster.resume(life.name)
            cluster.engines.slow(life.name, 1.0)
            if not life.alive:
                cluster.start(life.name, life.role)

    # --- what is promised ----------------------------------------------------------------------

    @contextmanager
    def _store_in_trouble(self) -> Iterator[None]:
        """While the store lacks what has ended, only a round's home and its coordinator know it:
        one of the two may die, not both (docs/reliability.md)."""
        clock = self._cluster.loop.time
        if self._troubles == 0 and clock() > self._trouble_end_s:
            self._trouble_start_s = clock()
        self._troubles += 1
        try:
            yield
        finally:
            self._troubles -= 1
            self._trouble_end_s = clock() + CATCH_UP_S

    def _may_die(self, role: Role) -> bool:
        """Whether a process of that role may die now; it is taken to do so."""
        if role is Role.PREFILL:
            return True
        now_s = self._cluster.loop.time()
        trouble = self._troubles > 0 or now_s <= self._trouble_end_s
        if trouble and self._last_death_s > self._trouble_start_s - CATCH_UP_S:
            return False
        self._last_death_s = now_s
        return True

    # --- actions -------------------------------------------------------------------------------

    async def _kill(self, role: Role) -> None:
        living = self._cluster.alive(role)
        if not living or not self._may_die(role):
            return
        name = self._rng.choice(living).name
        self._cluster.kill(name, silent=self._rng.random() < 0.3)
        await self._restart(name, role)

    async def _restart(self, name: str, role: Role) -> None:
        # At once, as a supervisor does, or after some time.
        if self._rng.random() < 0.7:
            await asyncio.sleep(self._rng.random() * RESTART_WITHIN_S)
        if not self._cluster.lives[name].alive:
            self._cluster.start(name, role)

    async def _terminate(self) -> None:
        life = self._any()
        if life is not None and self._may_die(life.role):
            await self._cluster.terminate(life.name)
            await self._restart(life.name, life.role)

    async def _pause(self) -> None:
        life = self._any()
        if life is not None:
            self._cluster.pause(life.name)
            await asyncio.sleep(self._rng.random() ** 2 * PAUSE_WITHIN_S)
            if self._cluster.lives[life.name] is life:
                self._cluster.resume(life.name)

    async def _slow(self) -> None:
        life = self._any(Role.PREFILL, Role.DECODE)
        if life is not None:
            factor = self._rng.choice((3.0, 20.0, 200.0))
            self._cluster.note("slow", life.name, factor)
            self._cluster.engines.slow(life.name, factor)
            await asyncio.sleep(self._rng.random() * PAUSE_WITHIN_S)
            self._cluster.engines.slow(life.name, 1.0)

    async def _cut(self) -> None:
        lives = [life for role in Role for life in self._cluster.alive(role)]
        if len(lives) < 2:
            return
        one, other = (life.process for life in self._rng.sample(lives, 2))
        if self._rng.random() < 0.15:
            other = self._cluster.clients
        self._cluster.note("cut", one, other)
        self._cluster.network.cut(one, other)
        await asyncio.sleep(self._rng.random() * CUT_WITHIN_S)
        self._cluster.note("heal", one, other)
        self._cluster.network.heal(one, other)

    async def _cut_store(self) -> None:
        life = self._any(*Role)
        if life is not None:
            store, name = self._cluster.store, life.name
            with self._store_in_trouble():
                self._cluster.note("cut from the store", name)
                store.cut_off.add(name)
                await asyncio.sleep(self._rng.random() * CUT_WITHIN_S)
                store.cut_off.discard(name)
                self._cluster.note("back at the store", name)

    async def _store_outage(self) -> None:
        await self._store_down(lose=False)

    async def _store_crash(self) -> None:
        await self._store_down(lose=True)

    async def _store_down(self, *, lose: bool) -> None:
        store = self._cluster.store
        if not store.up:
            return
        with self._store_in_trouble():
            self._cluster.note("store down")
            store.crash()
            await asyncio.sleep(self._rng.random() ** 2 * OUTAGE_WITHIN_S)
            if not store.up:
                store.restart(lose=lose)
                self._cluster.note("store up")

    async def _blackout(self) -> None:
        """Everything of one role at once."""
        role = self._rng.choice(list(Role))
        if not self._may_die(role):
            return
        for life in self._cluster.alive(role):
            self._cluster.kill(life.name)
        await asyncio.sleep(self._rng.random() * RESTART_WITHIN_S)
        for life in self._cluster.of(role):
            if not life.alive:
                self._cluster.start(life.name, role)

    # --- what operators do -------------------------------------------------------------------

    async def _drain(self) -> None:
        """A worker is drained by an operator, ends by itself, and comes back."""
        life = self._any(Role.PREFILL, Role.DECODE)
        if life is None or life.task is None or not self._may_die(life.role):
            return
        await self._admin("DrainWorker", admin_pb.DrainWorkerRequest(worker_id=life.name))
        await asyncio.wait([life.task], timeout=DRAIN_WITHIN_S)
        # One that has heard of it ends, however slow it is, unless it is killed before.
        while life.alive and life.shutdown._draining.is_set():
            await asyncio.wait([life.task], timeout=DRAIN_WITHIN_S)
        if life.ended_well is not None or not life.alive:
            await self._restart(life.name, life.role)

    async def _move(self) -> None:
        """A session, whatever it does at the moment, anywhere or to a worker of its own choice."""
        if not self._cluster.sessions:
            return
        target = self._rng.choice(["", *(life.name for life in self._cluster.of(Role.DECODE))])
        session = self._rng.choice(self._cluster.sessions)
        await self._admin(
            "MoveSession", admin_pb.MoveSessionRequest(session_id=session, target_worker_id=target)
        )

    async def _policy(self) -> None:
        name = self._rng.choice(["ampd", "ampd-paper", "always-remote", "always-local"])
        await self._admin("SetPolicy", admin_pb.SetPolicyRequest(policy=Policy(name=name)))

    async def _evict(self) -> None:
        """A worker forgets all cached KV that nobody holds."""
        life = self._any(Role.PREFILL, Role.DECODE)
        if life is not None and (engine := life.parts.get("engine")) is not None:
            engine.evict()

    async def _admin(self, method: str, request: object) -> None:
        """One call at any coordinator; how it ends is its caller's business."""
        life = self._any(Role.COORDINATOR)
        if life is None:
            return

        async def call() -> None:
            stub = AdminServiceStub(grpc.aio.insecure_channel(life.address))
            try:
                await getattr(stub, method)(request, timeout=ADMIN_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._cluster.note(method, error.code().name, (error.details() or "")[:100])
                if error.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}:
                    self._cluster.violate(f"{method}: {error.code().name} {error.details()}")
            else:
                self._cluster.note(method, "done")

        await self._cluster.clients.spawn(call(), name=method)

    def _any(self, *roles: Role) -> Life | None:
        living = [life for role in roles or tuple(Role) for life in self._cluster.alive(role)]
        return self._rng.choice(living) if living else None
