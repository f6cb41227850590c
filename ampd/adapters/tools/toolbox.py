"""All tools of a worker: several runners as one, found by name, and a bound on what runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import ToolCall, ToolReturn
from ampd.ports import ToolRunner

FULL_RETRY_S: Final = 1.0
"""When to ask again at a worker that runs all the tools it may."""


class ToolBox:
    """`ampd.ports.ToolRunner` over others; of two that have a tool the first one runs it."""

    def __init__(
        self,
        runners: Sequence[ToolRunner],
        *,
        max_running: int,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runners = tuple(runners)
        self._max_running = max_running
        self._draining = draining
        self.running = 0

    def names(self) -> tuple[str, ...]:
        """The tools of all."""
        return tuple(dict.fromkeys(name for runner in self._runners for name in runner.names()))

    async def run(self, call: ToolCall) -> ToolReturn:
        """Run the call where its tool is."""
        if self._draining():
            raise AmpdError(ErrorReason.DRAINING, "this worker is shutting down")
        for runner in self._runners:
            if call.name in runner.names():
                return await self._run(runner, call)
        raise AmpdError(ErrorReason.TOOL_NOT_FOUND, f"no tool {call.name!r} here")

    async def _run(self, runner: ToolRunner, call: ToolCall) -> ToolReturn:
        if self.running >= self._max_running:
            raise AmpdError(
                ErrorReason.QUEUE_FULL,
                f"this worker runs {self.running} tools already",
                retry_after_s=FULL_RETRY_S,
            )
        self.running += 1
        try:
            return await runner.run(call)
        finally:
            self.running -= 1

    async def close(self) -> None:
        """Close them all."""
        for runner in self._runners:
            await runner.close()
