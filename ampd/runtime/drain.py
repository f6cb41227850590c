"""The drain of a worker: begun by a signal or by an operator, and told in its load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from ampd.core.model import DrainStatus, WorkerLoad
from ampd.ports import Clock
from ampd.runtime.lifecycle import Shutdown

log = structlog.get_logger(__name__)


class WorkerDrain:
    """`ampd.ports.WorkerHandler` of prefill and decode workers.

    `start` makes the worker refuse new work; `status` tells what it still has (its `elapsed_s`
    does not count).
    """

    def __init__(
        self,
        *,
        shutdown: Shutdown,
        start: Callable[[], None],
        status: Callable[[], DrainStatus],
        load: Callable[[], WorkerLoad],
        clock: Clock,
    ) -> None:
        self._shutdown = shutdown
        self._start = start
        self._status = status
        self._load = load
        self._clock = clock
        self._since_s: float | None = None

    async def drain(self) -> DrainStatus:
        """Take no new work from now on, finish what there is, and end; how far that is."""
        self._shutdown.drain()
        return self.begin()

    def begin(self) -> DrainStatus:
        """Take no new work from now on; how far the drain is. Idempotent."""
        if self._since_s is None:
            self._since_s = self._clock()
            self._start()
            log.info("drain", estimated_s=round(self._status().estimated_s, 3))
        return replace(self._status(), elapsed_s=self._clock() - self._since_s)

    def load(self) -> WorkerLoad:
        """The worker's load, with the drain's estimate."""
        load = self._load()
        if self._since_s is None:
            return load
        return replace(load, drain_estimate_s=self._status().estimated_s)
