"""The live workers as a process knows them: what the shared store has answered last."""

from __future__ import annotations

from math import inf

import structlog

from ampd.core.errors import AmpdError
from ampd.core.model import WorkerView
from ampd.ports import Clock, StateStore

log = structlog.get_logger(__name__)


class KnownWorkers:
    """Asked for when they are wanted, never in the background: it costs nothing while nobody
    does."""

    def __init__(self, store: StateStore, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.views: tuple[WorkerView, ...] = ()
        """Their loads' ages are those at `read_s`."""
        self.read_s = -inf
        """When the store was asked for them."""
        self.asked_s = -inf
        """When it was asked last, answer or not."""

    async def read(self) -> bool:
        """Ask the store; False when it does not answer within its own timeout: what was known
        stays."""
        self.asked_s = asked_s = self._clock()
        try:
            self.views = await self._store.list_workers()
        except AmpdError as error:
            log.info("workers_not_read", error=error.message)
            return False
        self.read_s = asked_s
        return True
