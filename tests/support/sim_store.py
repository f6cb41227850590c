"""The shared store of a simulation: one `MemoryStateStore` behind a link that fails.

Every process has its own client. A write whose answer is lost was made; one whose caller was
cancelled is made all the same, as a command that is on the wire. A restart brings back what the
last snapshot held: with an append-only file synced every second, up to a second is lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from virtual_loop import PROCESS, SimProcess

from ampd.adapters.state_memory import MemoryStateStore, _Expiring, _Session
from ampd.core.errors import AmpdError, ErrorReason

TIMEOUT_S: Final = 1.0
"""Longest operation, as `ProcessSettings.store_timeout_s`."""
SNAPSHOT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """What may happen to operations, as shares of all."""

    latency_s: float = 0.0003
    slow_share: float = 0.0
    """Operations that take up to twice the client's patience."""
    refused_share: float = 0.0
    """Operations that fail and change nothing."""
    unanswered_share: float = 0.0
    """Operations that are carried out, and fail at the client."""


class SimStore:
    """The server: its state, whether it is up, and who cannot reach it."""

    def __init__(self, rng: random.Random, note: Callable[..., None], clock: Any) -> None:
        self.faults = StoreFaults()
        self.up = True
        self.cut_off: set[str] = set()
        """Names of processes that cannot reach it."""
        self._rng = rng
        self._note = note
        self._clock = clock
        self.state = MemoryStateStore(clock=clock)
        self._snapshots: list[tuple[float, MemoryStateStore]] = []
        self.lives = 1
        self.started_s = clock()
        self.on_write: Callable[[str, tuple[Any, ...], Any], None] = lambda *_: None

    def client(self, process: SimProcess) -> SimStoreClient:
        """What that process holds."""
        return SimStoreClient(self, process)

    def take_snapshot(self) -> None:
        """What a crash from now on cannot lose."""
        self._snapshots = [(self._clock(), _copied(self.state, self._clock))]

    def crash(self) -> None:
        """It answers nobody from now on."""
        self.up = False

    def restart(self, *, lose: bool) -> None:
        """It is back; with `lose` as of the last snapshot."""
        if lose and self._snapshots:
            taken_s, kept = self._snapshots[-1]
            self._note("store", "lost what is newer than", round(taken_s, 3))
            self.state = _copied(kept, self._clock)
        self.lives += 1
        self.started_s = self._clock()
        self.up = True

    def reaches(self, process: SimProcess) -> bool:
        """Whether an operation of that process gets here."""
        return self.up and process.name not in self.cut_off


class SimStoreClient:
    """`ampd.ports.StateStore` for one process."""

    def __init__(self, server: SimStore, process: SimProcess) -> None:
        self._server = server
        self._process = process
        self._life = ""
        self._age_s = float("inf")

    def __getattr__(self, name: str) -> Any:
        method = getattr(MemoryStateStore, name)
        if name.startswith("_") or not inspect.iscoroutinefunction(method):
            raise AttributeError(name)

        async def operation(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, args, kwargs)

        return operation

    @property
    def life(self) -> str:
        """See the port."""
        return self._life

    @property
    def age_s(self) -> float:
        """See the port; whole seconds, as a real server tells."""
        return self._age_s

    async def close(self) -> None:
        """Nothing is held."""

    async def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        server, loop = self._server, asyncio.get_running_loop()
        rng, faults = server._rng, server.faults
        answer: asyncio.Future[Any] = loop.create_future()
        there_s = rng.expovariate(1 / faults.latency_s)
        back_s = rng.expovariate(1 / faults.latency_s)
        if rng.random() < faults.slow_share:
            there_s += rng.random() * TIMEOUT_S
            back_s += rng.random() * TIMEOUT_S
        dice = rng.random()
        refused = dice < faults.refused_share
        unanswered = not refused and dice < faults.refused_share + faults.unanswered_share
        own, nobody = _in(self._process), _in(None)
        life, age_s = "", 0.0

        def reply(result: Any, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        def arrive() -> None:
            nonlocal life, age_s
            if refused or not server.up:
                loop.call_later(back_s, reply, None, _unavailable("refused"), context=own)
                return
            if not server.reaches(self._process):
                return  # silence: the client's patience ends it
            result, error = _now(getattr(server.state, name), args, kwargs)
            life = f"life {server.lives}"
            first = server.lives == 1
            age_s = float("inf") if first else float(int(server._clock() - server.started_s))
            if error is None:
                server.on_write(name, args, result)
            if not unanswered:
                loop.call_later(back_s, reply, result, error, context=own)

        loop.call_later(there_s, arrive, context=nobody)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await answer
        except TimeoutError:
            raise _unavailable("timed out") from None
        if name in ("heartbeat", "load_round", "ping"):
            self._life, self._age_s = life, age_s
        return result


def _now(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The operation in one step: no method of the memory store awaits anything."""
    work = method(*args, **kwargs)
    try:
        work.send(None)
    except StopIteration as done:
        return done.value, None
    except AmpdError as error:
        return None, error
    raise AssertionError("the memory store awaits something")


def _unavailable(why: str) -> AmpdError:
    return AmpdError(ErrorReason.STORE_UNAVAILABLE, f"the store: {why}")


def _in(process: SimProcess | None) -> contextvars.Context:
    context = contextvars.Context()
    context.run(PROCESS.set, process)
    return context


def _copied(store: MemoryStateStore, clock: Any) -> MemoryStateStore:
    """All that is in it, shared with nobody."""
    copy = MemoryStateStore(clock=clock)
    for name, value in vars(store).items():
        if isinstance(value, _Expiring):
            held = getattr(copy, name)
            held._entries = {key: (at, _own(v)) for key, (at, v) in value._entries.items()}
        elif isinstance(value, dict):
            setattr(copy, name, dict(value))
        elif name != "_clock":
            setattr(copy, name, value)
    return copy


def _own(value: Any) -> Any:
    if isinstance(value, _Session):
        return replace(value, tokens=value.tokens[:], rounds=dict(value.rounds))
    return value
