"""A whole cluster under virtual time: the real composition roots of coordinators and workers
(`services.*.main.serve`) on a simulated network, a simulated store and emulated engines.

Only the edges are replaced: sockets (`virtual_grpc`), the store's server (`sim_store`), clocks,
randomness, and the engine's start. What runs is what `ampd-coordinator`, `ampd-prefill` and
`ampd-decode` run, message by message. Each process can be killed, paused, restarted under its
address, drained, slowed and cut off, at any step.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
import time
import traceback
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import grpc
import structlog
from sim_engine import SimEngines
from sim_store import SNAPSHOT_S, SimStore
from sim_tools import SimTokenizer, SimTools, parse
from virtual_grpc import VirtualNetwork
from virtual_loop import PROCESS, SimProcess, VirtualLoop

from ampd.adapters.engine_emulated import blocks as engine_blocks
from ampd.adapters.engine_emulated import pins as engine_pins
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import Role
from ampd.core.prefill_queue import PrefillQueue, QueuedPrefill
from ampd.runtime.lifecycle import BackgroundCrash, Shutdown
from ampd.runtime.process import ProcessSettings
from services.coordinator import main as coordinator_main
from services.coordinator.settings import CoordinatorSettings
from services.decode import main as decode_main
from services.decode.settings import DecodeSettings
from services.prefill import main as prefill_main
from services.prefill.settings import PrefillSettings

UNIX_S: Final = 1_700_000_000.0
"""Wall clock at virtual second 0."""
LOG_LINES: Final = 400
"""The last events of a run that a failure shows."""
MAX_LOANS: Final = 64
"""Of an engine at a time: within reach."""
GRACE_S: Final = 8.0
"""From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class SimShape:
    """What the cluster consists of."""

    coordinators: int = 2
    prefill: int = 2
    decode: int = 2
    policy: str = "ampd"
    kv_tokens: int = 4096
    """KV memory of each worker."""
    block_tokens: int = 16
    max_model_tokens: int = 2048
    heartbeat_s: float = 0.5
    lease_s: float = 3.0
    kv_lease_s: float = 2.0
    session_ttl_s: float = 60.0
    result_lease_s: float = 60.0
    max_sessions: int = 4096
    """Of a home."""
    tenant_sessions: int = 100_000
    max_queued_tasks: int = 64
    max_running_rounds: int = 1024
    max_running_requests: int = 64
    claim_timeout_s: float = 20.0
    prefill_timeout_s: float = 20.0


@dataclass(eq=False)
class Life:
    """One life of a process: from its start to its end."""

    name: str
    role: Role
    number: int
    process: SimProcess
    shutdown: Shutdown
    task: asyncio.Task[None] | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    """What its composition root has made: home, worker, coordinator, engine."""
    dead: bool = False
    ended_well: bool | None = None

    @property
    def alive(self) -> bool:
        """Neither killed nor ended; it may be paused."""
        return not self.dead and self.ended_well is None

    @property
    def address(self) -> str:
        """host:port of its server."""
        return f"{self.name}:7000"


class SimCluster:
    """Make it and use it inside `run_virtual`, within `installed()`."""

    def __init__(self, seed: int, shape: SimShape, *, lines: int = LOG_LINES) -> None:
        self.shape = shape
        self.rng = random.Random(f"cluster {seed}")
        self.log: deque[str] = deque(maxlen=lines)
        self.digest = 0
        self.violations: list[str] = []
        self.lives: dict[str, Life] = {}
        self.past: list[Life] = []
        self.sessions: list[str] = []
        """Those that clients have created."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.network = VirtualNetwork(random.Random(f"network {seed}"), self.note)
        self.store = SimStore(random.Random(f"store {seed}"), self.note, loop.time)
        self.engines = SimEngines(random.Random(f"engines {seed}"), shape, self.note, self.violate)
        self.clients = SimProcess("clients")
        self.on_take: Callable[[PrefillQueue, list[QueuedPrefill], QueuedPrefill], None] = (
            lambda *_: None
        )
        self._uuids = random.Random(f"uuids {seed}")
        self._tool_times = random.Random(f"tools {seed}")
        self._numbers = 0

    # --- the log ---------------------------------------------------------------------------

    def note(self, *what: object) -> None:
        """An event of the run: shown when it fails, and part of what two runs are compared by."""
        process = PROCESS.get()
        line = f"{self.loop.time():10.4f} {process.name if process else '-':12} " + " ".join(
            map(str, what)
        )
        self.digest = hash_line(self.digest, line)
        self.log.append(line)

    def violate(self, what: str) -> None:
        """A promise is broken: the run fails."""
        self.note("VIOLATION", what)
        self.violations.append(f"{self.loop.time():.4f} s: {what}")

    # --- processes ---------------------------------------------------------------------------

    def start_all(self) -> None:
        """Every process of the shape."""
        for role, count in (
            (Role.DECODE, self.shape.decode),
            (Role.PREFILL, self.shape.prefill),
            (Role.COORDINATOR, self.shape.coordinators),
        ):
            for index in range(count):
                self.start(f"{role.value}-{index}", role)

    def start(self, name: str, role: Role) -> Life:
        """A new life of that process; the one before must have ended."""
        before = self.lives.get(name)
        assert before is None or not before.alive, name
        self._numbers += 1
        process = SimProcess(
            name,
            clock_offset_s=self.rng.uniform(0, 1e6),
            # A host's clock is wrong for all lives on it: a later one has a later time.
            wall_skew_s=before.process.wall_skew_s if before else self.rng.uniform(-2.0, 2.0),
        )
        life = Life(name, role, self._numbers, process, Shutdown())
        if before is not None:
            self.past.append(before)
        self.lives[name] = life
        self.note("start", name, self._numbers)
        life.task = process.spawn(self._live(life), name="main")
        return life

    async def _live(self, life: Life) -> None:
        try:
            await self._serve(life)
            life.ended_well = True
        except asyncio.CancelledError:
            life.ended_well = False
            raise
        except Exception as error:  # noqa: BLE001 - a finding
            life.ended_well = False
            if _is_background(error):
                # A defect, or a newer life under the same name: `_log_line` has seen which.
                self.note("crashed", life.name)
                return
            self.violate(f"{life.name} crashed: {'; '.join(_leaves(error))}")
        finally:
            life.process.freeze()
            self.network.process_died(life.process, silent=False)
            self.engines.process_died(life.process)

    async def _serve(self, life: Life) -> None:
        shape = self.shape
        common = {
            "worker_id": life.name,
            "listen": life.address,
            "model": "emulated",
            "store_url": "unix:///simulated",
            "heartbeat_s": shape.heartbeat_s,
            "lease_s": shape.lease_s,
            "log_level": "debug",
        }
        match life.role:
            case Role.COORDINATOR:
                settings = CoordinatorSettings(
                    policy=shape.policy,
                    max_running_rounds=shape.max_running_rounds,
                    max_sessions=shape.tenant_sessions,
                    **common,
                )
                policy = settings.default_policy()
                await coordinator_main.serve(settings, policy, parse, life.shutdown)
            case Role.PREFILL:
                await prefill_main.serve(
                    PrefillSettings(max_queued_tasks=shape.max_queued_tasks, **common),
                    life.shutdown,
                )
            case Role.DECODE:
                decode_settings = DecodeSettings(
                    max_sessions=shape.max_sessions,
                    session_kv_lease_s=shape.kv_lease_s,
                    session_ttl_s=shape.session_ttl_s,
                    claim_timeout_s=shape.claim_timeout_s,
                    prefill_timeout_s=shape.prefill_timeout_s,
                    **common,
                )
                tools: Any = SimTools(self._tool_times)
                await decode_main.serve(decode_settings, tools, life.shutdown)

    def kill(self, name: str, *, silent: bool = False) -> None:
        """SIGKILL (or, silent: the host is gone without a word): it takes no further step."""
        life = self.lives[name]
        if not life.alive:
            return
        self.note("kill", name, "silently" if silent else "")
        life.dead = True
        life.process.freeze()
        self.network.process_died(life.process, silent=silent)
        self.engines.process_died(life.process)

    def pause(self, name: str) -> None:
        """SIGSTOP, or a host that swaps: nothing of it steps until `resume`."""
        life = self.lives[name]
        if life.alive and not life.process.frozen:
            self.note("pause", name)
            life.process.freeze()
            self.network.process_paused(life.process)

    def resume(self, name: str) -> None:
        """It goes on, and does not know what it has missed."""
        life = self.lives[name]
        if life.alive and life.process.frozen:
            self.note("resume", name)
            life.process.thaw()

    async def terminate(self, name: str) -> None:
        """SIGTERM, and SIGKILL when it has not ended within its grace."""
        life = self.lives[name]
        if not life.alive or life.task is None:
            return
        self.note("terminate", name)
        life.process.spawn(_ask(life.shutdown), name="signal")
        await asyncio.wait([life.task], timeout=GRACE_S)
        if self.lives[name] is life:
            self.kill(name)

    def of(self, role: Role) -> list[Life]:
        """The newest life of each process of a role."""
        return [life for life in self.lives.values() if life.role is role]

    def alive(self, role: Role) -> list[Life]:
        """Those that have not ended."""
        return [life for life in self.of(role) if life.alive]

    async def snapshots(self) -> None:
        """Until cancelled: what the store has on disk."""
        while True:
            self.store.take_snapshot()
            await asyncio.sleep(SNAPSHOT_S)

    # --- the edges -----------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        """The edges are the simulation's inside."""
        with ExitStack() as stack:

            def put(target: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(target, name, value))

            put(grpc.aio, "insecure_channel", self.network.channel)
            put(grpc.aio, "server", self.network.make_server)
            put(time, "monotonic", self._monotonic)
            put(time, "time", self._unix)
            put(time, "time_ns", lambda: int(self._unix() * 1e9))
            put(uuid, "uuid4", lambda: uuid.UUID(int=self._uuids.getrandbits(128), version=4))
            put(secrets, "token_hex", lambda n=16: f"{self._uuids.getrandbits(8 * n):0{2 * n}x}")
            state = random.getstate()
            stack.callback(random.setstate, state)
            random.seed(self._uuids.getrandbits(64))
            put(ProcessSettings, "open_store", self._open_store)
            put(coordinator_main, "_tokenizer", lambda _: SimTokenizer())
            for limits in (engine_blocks, engine_pins):
                put(limits, "MAX_LOANS", MAX_LOANS)
            for module in (prefill_main, decode_main):
                put(module, "start_engine", self._start_engine)
                put(module, "cost_model", self._cost_model)
            self._keep(put, coordinator_main, "Coordinator", "coordinator")
            self._keep(put, prefill_main, "PrefillWorker", "worker")
            self._keep(put, decode_main, "Home", "home")
            self._keep(put, decode_main, "PrefillTasks", "tasks")
            self._keep(put, decode_main, "SessionMover", "mover")
            self._keep(put, decode_main, "ToolBox", "toolbox")
            put(PrefillQueue, "take", _observed(PrefillQueue.take, self))
            before = structlog.get_config()
            stack.callback(lambda: structlog.configure(**before))
            structlog.configure(
                processors=[self._log_line],
                wrapper_class=structlog.make_filtering_bound_logger(10),
                cache_logger_on_first_use=False,
            )
            yield

    def _monotonic(self) -> float:
        process = PROCESS.get()
        return self.loop.time() + (process.clock_offset_s if process else 0.0)

    def _unix(self) -> float:
        process = PROCESS.get()
        return UNIX_S + self.loop.time() + (process.wall_skew_s if process else 0.0)

    def _open_store(self, _settings: ProcessSettings | None = None) -> Any:
        process = PROCESS.get()
        assert process is not None
        return self.store.client(process)

    def _life(self) -> Life:
        """The one that is running."""
        process = PROCESS.get()
        return next(life for life in self.lives.values() if life.process is process)

    async def _start_engine(
        self, settings: Any, role: Role, incarnation: int, *args: Any, **kwargs: Any
    ) -> Any:
        life = self._life()
        engine = await self.engines.start(life.process, settings.worker_id, incarnation)
        life.parts["engine"] = engine
        return engine

    async def _cost_model(self, *_: Any) -> Any:
        return self.engines.cost

    def _keep(self, put: Callable[..., None], module: Any, name: str, part: str) -> None:
        """Remember what the composition root makes of a class."""
        made = getattr(module, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            thing = made(*args, **kwargs)
            self._life().parts[part] = thing
            return thing

        put(module, name, make)

    def _log_line(self, _logger: Any, method: str, event: Mapping[str, Any]) -> Any:
        fields = {k: v for k, v in event.items() if k not in ("event", "exc_info", "seconds")}
        if event.get("event") != "call":
            self.note("log", method, event.get("event"), fields)
        error = event.get("exc_info")
        replaced = isinstance(error, AmpdError) and error.reason is ErrorReason.STALE_INCARNATION
        if method == "error" and isinstance(error, BaseException) and not replaced:
            self.violate(f"logged {event.get('event')}: {type(error).__name__}: {error}")
        raise structlog.DropEvent


def _is_background(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_background(inner) for inner in error.exceptions)
    return isinstance(error, BackgroundCrash)


def _leaves(error: BaseException) -> list[str]:
    """What a group of errors consists of, and where each was raised."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return [f"{type(error).__name__}: {error} ({where})"]


async def _ask(shutdown: Shutdown) -> None:
    shutdown.ask()


def _observed(take: Any, cluster: SimCluster) -> Any:
    @functools.wraps(take)
    def observed(queue: PrefillQueue, *args: Any, **kwargs: Any) -> QueuedPrefill | None:
        before = list(queue.waiting)
        taken: QueuedPrefill | None = take(queue, *args, **kwargs)
        if taken is not None:
            cluster.on_take(queue, before, taken)
        return taken

    return observed


def hash_line(digest: int, line: str) -> int:
    """A running digest that no hash seed changes."""
    return zlib.crc32(line.encode(), digest)
