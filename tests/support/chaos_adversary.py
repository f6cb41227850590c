"""Kills, freezes, drains and starts again what a cluster consists of, at moments that a seed
chooses, and keeps the books of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from ampd.cli.cluster import LocalCluster
from ampd.cli.errors import CliError
from ampd.core.model import Role

SEVERAL: Final = 3
START_ATTEMPTS: Final = 3
"""Of a restart: another process may hold the port for a moment."""

KILL, FREEZE, TERMINATE, TWICE = "kill", "freeze", "terminate", "freeze then kill"
STORE: Final = "store"


@dataclass(frozen=True, slots=True)
class FaultShape:
    """How bad it gets. Times in seconds."""

    every_s: float = 2.0
    """Between two faults, on average."""
    frozen_s: tuple[float, float] = (2.0, 8.0)
    gone_s: tuple[float, float] = (0.0, 3.0)
    """From the end of a process to its next start."""
    store_gone_s: tuple[float, float] = (0.1, 3.0)
    kinds: dict[str, float] = field(
        default_factory=lambda: {KILL: 4.0, FREEZE: 2.0, TERMINATE: 2.0, TWICE: 1.0}
    )
    targets: dict[str, float] = field(
        default_factory=lambda: {
            Role.DECODE: 4.0,
            Role.PREFILL: 3.0,
            Role.COORDINATOR: 2.0,
            STORE: 1.0,
        }
    )
    several_share: float = 0.2
    """Of faults: not one but SEVERAL in one instant."""
    spared: tuple[str, ...] = (Role.DECODE, Role.COORDINATOR)
    """Of these roles one is always left alone."""


class Adversary:
    """`run` breaks things until cancelled; `mend` ends with everything running again."""

    def __init__(
        self,
        cluster: LocalCluster,
        seed: int,
        shape: FaultShape,
        violate: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"adversary {seed}")
        self._shape = shape
        self._violate = violate
        self._say = say
        self._broken: dict[str, asyncio.Task[None]] = {}
        self.faults: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._shape.every_s))
            several = self._rng.random() < self._shape.several_share
            for _ in range(SEVERAL if several else 1):
                self._strike()

    async def mend(self) -> None:
        """Returns when every fault has run its course."""
        while self._broken:
            await asyncio.wait(self._broken.values())
        for service in self._cluster.services:
            if not service.is_running:
                # Nobody's doing: it ended by itself.
                self._violate(f"{service.name} ended with {service.process.returncode}")
                await self._restart(service.name)

    def is_whole(self, name: str) -> bool:
        """Whether nothing is being done to that service."""
        return name not in self._broken

    def look(self) -> None:
        """Whether a process has ended that nothing was done to."""
        for service in self._cluster.services:
            if not service.is_running and service.name not in self._broken:
                self._violate(
                    f"{service.name} ended by itself with {service.process.returncode}; its log "
                    f"is {service.log}"
                )
                self._begin(service.name, self._restart(service.name))

    def _strike(self) -> None:
        rng, shape = self._rng, self._shape
        role = rng.choices(list(shape.targets), list(shape.targets.values()))[0]
        kind = rng.choices(list(shape.kinds), list(shape.kinds.values()))[0]
        # Drawn in any case: what can be done now depends on time, the plan must not.
        frozen_s, gone_s = rng.uniform(*shape.frozen_s), rng.uniform(*shape.gone_s)
        store_gone_s, pick = rng.uniform(*shape.store_gone_s), rng.random()
        if role == STORE:
            if STORE not in self._broken:
                work = self._freeze_store if kind == FREEZE else self._kill_store
                self._strike_at(STORE, KILL if kind != FREEZE else kind, work(store_gone_s))
            return
        all_names = [s.name for s in self._cluster.services if s.role == role]
        names = [name for name in all_names if name not in self._broken]
        if not names or (role in shape.spared and len(names) == 1):
            return
        name = names[int(pick * len(names))]
        match kind:
            case "kill":
                work_ = self._kill(name, gone_s)
            case "freeze":
                work_ = self._freeze(name, frozen_s)
            case "terminate":
                work_ = self._terminate(name, gone_s)
            case _:
                work_ = self._freeze_then_kill(name, frozen_s, gone_s)
        self._strike_at(name, kind, work_)

    def _strike_at(self, name: str, kind: str, work: Awaitable[None]) -> None:
        self.faults[f"{kind} {name.rpartition('-')[0] or name}"] += 1
        self._say(f"{kind} {name}")
        self._begin(name, work)

    def _begin(self, name: str, work: Awaitable[None]) -> None:
        self._broken[name] = asyncio.ensure_future(self._whole(name, work))

    async def _whole(self, name: str, work: Awaitable[None]) -> None:
        try:
            await work
            self._say(f"{name} is back")
        except CliError as error:
            self._violate(f"{name}: {error}")
        finally:
            del self._broken[name]

    # --- faults ------------------------------------------------------------------------------

    async def _kill(self, name: str, gone_s: float) -> None:
        await self._cluster.kill(name)
        await asyncio.sleep(gone_s)
        await self._restart(name)

    async def _freeze(self, name: str, frozen_s: float) -> None:
        self._cluster.freeze(name)
        await asyncio.sleep(frozen_s)
        self._cluster.thaw(name)

    async def _freeze_then_kill(self, name: str, frozen_s: float, gone_s: float) -> None:
        self._cluster.freeze(name)
        await asyncio.sleep(frozen_s)
        await self._kill(name, gone_s)

    async def _terminate(self, name: str, gone_s: float) -> None:
        code = await self._cluster.terminate(name)
        if code != 0:
            self._violate(f"{name} was asked to drain and ended with {code}")
        await asyncio.sleep(gone_s)
        await self._restart(name)

    async def _kill_store(self, gone_s: float) -> None:
        await self._cluster.kill_store()
        await asyncio.sleep(gone_s)
        await self._cluster.restart_store()

    async def _freeze_store(self, frozen_s: float) -> None:
        self._cluster.freeze_store()
        await asyncio.sleep(frozen_s)
        self._cluster.thaw_store()

    async def _restart(self, name: str) -> None:
        for attempt in range(START_ATTEMPTS):
            try:
                await self._cluster.restart(name)
            except CliError as error:
                self._say(f"{name} did not start: {error}")
                if attempt == START_ATTEMPTS - 1:
                    raise
            else:
                self.restarts[name.rpartition("-")[0]] += 1
                return
