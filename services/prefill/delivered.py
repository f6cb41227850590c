"""Results that their homes have yet to read: kept under a lease, free sooner when a home withdraws
one or is gone.

The engine frees a result when it was read, which nobody tells the worker. What a home that died
would have read nobody withdraws, so each home with results is watched until their leases end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import structlog

from ampd.core.errors import AmpdError
from ampd.core.model import KvHandle
from ampd.ports import Clock, Engine, Peers

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HomeLife:
    """One life of a home."""

    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class DeliveredResult:
    """A result that its home may still read, or withdraw."""

    home: HomeLife
    kv: KvHandle
    until_s: float


class DeliveredResults:
    """The handles of all results that may still be held: no more than fit the engine in the time
    of a lease."""

    def __init__(self, *, engine: Engine, peers: Peers, clock: Clock) -> None:
        self._engine = engine
        self._peers = peers
        self._clock = clock
        self._results: dict[str, DeliveredResult] = {}
        self._watched: set[HomeLife] = set()
        self._added = asyncio.Event()

    def add(self, task_id: str, kv: KvHandle, home: HomeLife) -> None:
        """The home has the result's handle: keep it as long as the engine keeps the KV."""
        now_s = self._clock()
        self._results = {
            name: result for name, result in self._results.items() if result.until_s > now_s
        }
        self._results[task_id] = DeliveredResult(home, kv, now_s + kv.lease_s)
        self._added.set()

    async def withdraw(self, task_id: str) -> None:
        """Free the result, if there is one. Idempotent."""
        delivered = self._results.pop(task_id, None)
        if delivered is not None:
            await self._engine.release(delivered.kv)

    async def run(self) -> None:
        """Free what homes that are gone have not read, until cancelled."""
        async with asyncio.TaskGroup() as watches:
            while True:
                await self._added.wait()
                self._added.clear()
                for result in self._results.values():
                    if result.home not in self._watched:
                        self._watched.add(result.home)
                        watches.create_task(self._watch(result.home), name="watch home")

    async def _watch(self, home: HomeLife) -> None:
        """As long as the home may still read something."""
        peer = self._peers.decode(home.address, home.incarnation)
        try:
            while (left_s := self._until_s(home) - self._clock()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await peer.lost()
                    await self._free(home)
        except AmpdError as error:
            # It cannot be watched for want of a connection: the leases end all the same.
            log.warning("home_not_watched", home=home.address, reason=error.reason)
        finally:
            self._watched.discard(home)

    def _until_s(self, home: HomeLife) -> float:
        """When the last lease of the home's results ends."""
        return max((r.until_s for r in self._results.values() if r.home == home), default=0.0)

    async def _free(self, home: HomeLife) -> None:
        unread = [task_id for task_id, r in self._results.items() if r.home == home]
        log.info("home_lost", home=home.address, incarnation=home.incarnation)
        for task_id in unread:
            await self.withdraw(task_id)
