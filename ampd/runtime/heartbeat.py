"""The registration of a process in the shared store, renewed as long as it lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

import structlog

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PolicySpec, WorkerInfo, WorkerLoad
from ampd.ports import Clock, StateStore

log = structlog.get_logger(__name__)

INTERVAL_S: Final = 0.2
"""Routing decides by loads of this age."""
SOONEST_S: Final = 0.02
"""Beats that are asked for come no faster."""
LEASE_S: Final = 3.0
"""A worker that is silent for this long is gone."""
JITTER: Final = 0.1
"""Share by which an interval varies, so that workers do not beat in step."""
LOG_EVERY_S: Final = 30.0
"""Of an outage that lasts, one line in this time."""
DEREGISTER_TIMEOUT_S: Final = 1.0


class Heartbeat:
    """Registers a process, publishes its load, and brings back the policy in force.

    `load` is asked at every beat; `on_policy` is called when the policy's version or name
    changes; `on_store` with the life of the store after every beat, None when it did not
    answer. A store outage is survived: the lease runs out, and the next beat that gets
    through registers the process again. A newer life under the same name ends this one.
    """

    def __init__(
        self,
        store: StateStore,
        info: WorkerInfo,
        *,
        load: Callable[[], WorkerLoad],
        on_policy: Callable[[PolicySpec], None],
        clock: Clock,
        on_store: Callable[[str | None], None] = lambda _life: None,
        interval_s: float = INTERVAL_S,
        lease_s: float = LEASE_S,
    ) -> None:
        if lease_s < 2 * interval_s:
            raise ValueError(f"a lease of {lease_s} s needs beats more often than {interval_s} s")
        self._store = store
        self._info = info
        self._load = load
        self._on_policy = on_policy
        self._on_store = on_store
        self._clock = clock
        self._interval_s = interval_s
        self._lease_s = lease_s
        self._policy: PolicySpec | None = None
        self._registered = asyncio.Event()
        self._now = asyncio.Event()
        self._random = random.Random(info.incarnation)  # noqa: S311 - no secret
        self._failures = 0
        self._logged_s = 0.0

    async def run(self) -> None:
        """Beat until cancelled, then deregister."""
        try:
            while True:
                await self._beat()
                await self._pause()
        finally:
            await self._deregister()

    async def wait_registered(self) -> None:
        """Returns when the store has this process."""
        await self._registered.wait()

    def beat_now(self) -> None:
        """Publish without waiting for the interval's end: the load has changed in what others
        act upon. Asked for often, it is done every SOONEST_S."""
        self._now.set()

    async def _beat(self) -> None:
        try:
            policy = await self._store.heartbeat(self._info, self._load(), self._lease_s)
        except AmpdError as error:
            if error.reason is ErrorReason.STALE_INCARNATION:
                # A newer life has this worker's name: two of them must not serve under it.
                raise
            self._log_failure(error)
            self._on_store(None)
            return
        self._on_store(self._store.life)
        if self._failures:
            log.info("heartbeat_recovered", missed=self._failures)
            self._failures = 0
        self._registered.set()
        if policy is not None and policy != self._policy:
            self._policy = policy
            log.info("policy", name=policy.name, version=policy.version)
            self._on_policy(policy)

    async def _pause(self) -> None:
        begun_s = self._clock()
        seconds = self._interval_s * (1 + JITTER * (2 * self._random.random() - 1))
        try:
            async with asyncio.timeout(seconds):
                await self._now.wait()
        except TimeoutError:
            return
        await asyncio.sleep(begun_s + SOONEST_S - self._clock())
        self._now.clear()

    def _log_failure(self, error: AmpdError) -> None:
        self._failures += 1
        now_s = self._clock()
        if self._failures == 1 or now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("heartbeat_failed", missed=self._failures, error=str(error))

    async def _deregister(self) -> None:
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                await self._store.deregister(self._info.worker_id, self._info.incarnation)
        except (AmpdError, TimeoutError) as error:
            # The lease runs out by itself.
            log.warning("not_deregistered", error=str(error))
