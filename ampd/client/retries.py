"""Which failures of one call are tried again, and when: bounded in count and time (spec 7)."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import grpc

from ampd.core.errors import AmpdError
from ampd.wire.errors import STATUS_CODES

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0


class Retries:
    """UNAVAILABLE with backoff, RESOURCE_EXHAUSTED after the time that the server names."""

    def __init__(self, *, max_attempts: int, max_outage_s: float, timeout_s: float) -> None:
        """`max_attempts`: of the call in all; 1: nothing is tried again. `max_outage_s`: from a
        failure to the last attempt behind it, unless `progressed` is told in between.
        `timeout_s`: the call's own deadline."""
        self._left = max_attempts - 1
        self._max_outage_s = max_outage_s
        self._deadline_s = _now_s() + timeout_s
        self._backoff_s = BACKOFF_FIRST_S
        self._failing_since_s: float | None = None

    def remaining_s(self) -> float:
        """Until the deadline."""
        return max(0.0, self._deadline_s - _now_s())

    def progressed(self) -> None:
        """The call goes on: its next failure is a new one."""
        self._failing_since_s = None
        self._backoff_s = BACKOFF_FIRST_S

    async def wait_or_raise(self, error: AmpdError) -> None:
        """Return when it is time to try again; raise `error` if it is not to be."""
        code = STATUS_CODES[error.reason]
        if code is grpc.StatusCode.UNAVAILABLE:
            # Half of it random, so that clients who failed together do not come together.
            wait_s = error.retry_after_s or self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
            wait_s = error.retry_after_s
        else:
            raise error
        now_s = _now_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        too_long = now_s + wait_s - self._failing_since_s > self._max_outage_s
        if self._left <= 0 or too_long or wait_s >= self.remaining_s():
            raise error
        self._left -= 1
        await asyncio.sleep(wait_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
