"""Admission: a round is promised its KV at once, or waits its turn for a bounded time (spec 2)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.kv_ledger import KvLedger, RoundDemand
from ampd.ports import Clock

LEASE_SLACK_S: Final = 0.001
"""Asked just behind a lease's end, not just before it."""


@dataclass(slots=True, eq=False)
class _Waiter:
    demand: RoundDemand
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """Promises KV in the order of arrival, first to sessions that live here, then to new ones:
    a large round is not passed over by small ones for ever, and new sessions do not take what
    those that are here need to end. At most `max_waiting` rounds wait; one more is refused at
    once."""

    def __init__(
        self,
        ledger: KvLedger,
        *,
        evict: Callable[[str], None],
        max_waiting: int,
        clock: Clock,
    ) -> None:
        """`evict`: called for every session that loses its KV to an admitted round."""
        self._ledger = ledger
        self._evict = evict
        self._max_waiting = max_waiting
        self._clock = clock
        self._known: deque[_Waiter] = deque()
        """Of sessions that live here."""
        self._new: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """Rounds that wait."""
        return len(self._known) + len(self._new)

    async def admit(self, demand: RoundDemand, wait_s: float) -> None:
        """Returns when the ledger has promised the round its KV. KV_TOO_SMALL; KV_EXHAUSTED
        with a retry hint after `wait_s`, or at once when too many wait."""
        known = self._ledger.is_bound(demand.session_id)
        if not (self._known if known else self.waiting):
            try:
                self._promise(demand)
                return
            except AmpdError as error:
                if error.reason is not ErrorReason.KV_EXHAUSTED or wait_s <= 0:
                    raise
        else:
            self._ledger.require_fits(demand)
        if wait_s <= 0 or self.waiting >= self._max_waiting:
            raise self._ledger.exhausted(demand, self._clock())
        waiter = _Waiter(demand)
        queue = self._known if known else self._new
        queue.append(waiter)
        try:
            await self._wait(waiter, self._clock() + wait_s)
        finally:
            queue.remove(waiter)
            self.poke()

    def poke(self) -> None:
        """KV may have become free: the first that waits looks again."""
        if self.waiting:
            self._first().woken.set()

    def _first(self) -> _Waiter:
        return (self._known or self._new)[0]

    async def _wait(self, waiter: _Waiter, give_up_s: float) -> None:
        while True:
            now_s = self._clock()
            if self._first() is waiter:
                try:
                    self._promise(waiter.demand)
                    return
                except AmpdError as error:
                    if error.reason is not ErrorReason.KV_EXHAUSTED or now_s >= give_up_s:
                        raise
            elif now_s >= give_up_s:
                raise self._ledger.exhausted(waiter.demand, now_s)
            lease_end_s = self._ledger.next_lease_end_s(now_s)
            next_s = give_up_s if lease_end_s is None else min(give_up_s, lease_end_s)
            waiter.woken.clear()
            try:
                async with asyncio.timeout(max(0.0, next_s - now_s) + LEASE_SLACK_S):
                    await waiter.woken.wait()
            except TimeoutError:
                continue

    def _promise(self, demand: RoundDemand) -> None:
        for session_id in self._ledger.admit(demand, self._clock()):
            self._evict(session_id)
