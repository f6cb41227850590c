"""What every process of a cluster has: an address, a name, a life number, the shared store."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Final

import structlog
from pydantic import AfterValidator, Field, PositiveFloat
from pydantic_core import PydanticCustomError

from ampd.adapters.state_limits import DEFAULT_IDLE_TTL_S
from ampd.adapters.state_redis import RedisStateStore
from ampd.core.errors import AmpdError
from ampd.core.model import PolicySpec
from ampd.ports import StateStore
from ampd.runtime.heartbeat import INTERVAL_S, LEASE_S
from ampd.runtime.lifecycle import Shutdown
from ampd.runtime.settings import ServiceSettings

log = structlog.get_logger(__name__)

MAX_PORT: Final = 65535
WORKER_ID: Final = r"^[!-~]{1,64}$"
STORE_URL: Final = r"^(redis|rediss|unix)://."
STORE_RETRY_S: Final = 0.5
DRAIN_POLL_S: Final = 0.05


def _host_and_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > MAX_PORT:
        raise PydanticCustomError(
            "host_port", "must be host:port, the port in 1..{largest}", {"largest": MAX_PORT}
        )
    return address


HostPort = Annotated[str, AfterValidator(_host_and_port)]
"""An address as a setting."""


class ProcessSettings(ServiceSettings):
    """Common to all services."""

    worker_id: str = Field(pattern=WORKER_ID)
    """Unique name in the cluster."""
    listen: HostPort
    """host:port of the gRPC server."""
    advertise: HostPort | None = None
    """host:port that others reach it by; default: that of `listen`."""
    model: str
    """Folder of the model; for an emulated engine and its coordinator: any name."""
    store_url: str = Field(pattern=STORE_URL)
    """Shared store: redis://, rediss:// or unix:// URL of a Valkey or Redis."""
    store_prefix: str = "ampd"
    """In front of every key: clusters with different prefixes may share a store."""
    store_timeout_s: PositiveFloat = 1.0
    """Longest store operation in seconds."""
    store_session_ttl_s: PositiveFloat = DEFAULT_IDLE_TTL_S
    """Seconds that an unused session stays in the store."""
    heartbeat_s: PositiveFloat = INTERVAL_S
    """Seconds between two publications of the load."""
    lease_s: PositiveFloat = LEASE_S
    """Seconds of silence after which the process counts as gone."""
    drain_s: float = Field(30.0, ge=0)
    """Seconds that running rounds, and moves of sessions, may take after SIGTERM."""

    @property
    def address(self) -> str:
        """host:port that others reach this process by."""
        return self.advertise or self.listen

    def open_store(self) -> RedisStateStore:
        """The store; the caller closes it."""
        return RedisStateStore(
            self.store_url,
            prefix=self.store_prefix,
            timeout_s=self.store_timeout_s,
            idle_ttl_s=self.store_session_ttl_s,
        )


def new_incarnation() -> int:
    """The number of this process's life: later lives have larger ones."""
    return time.time_ns()


async def until_idle(busy: Callable[[], bool]) -> None:
    """Returns when nothing runs any more; the caller's grace period bounds it."""
    while busy():  # noqa: ASYNC110 - only while draining, and there is no event to wait for
        await asyncio.sleep(DRAIN_POLL_S)


async def first_policy(
    store: StateStore, default: PolicySpec, shutdown: Shutdown
) -> PolicySpec | None:
    """The policy in force when a process starts: the store's, which gets `default` if it has
    none, so that coordinators and workers act by one. Waits for a store that is down; None when
    the process is to stop before it has one."""
    while not shutdown.asked:
        try:
            policy = await store.get_policy()
            if policy is not None:
                return policy
            await store.set_policy(replace(default, version=1), 0)
        except AmpdError as error:
            log.warning("waiting_for_store", error=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(STORE_RETRY_S):
                    await shutdown.wait()
    return None
