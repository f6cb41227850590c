"""Runs a command's coroutine so that every way to stop it cleans up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(
    main: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """`asyncio.run`, but SIGTERM and SIGHUP cancel as Ctrl-C does.

    A command that was stopped raises KeyboardInterrupt after its cleanup; a second Ctrl-C cuts
    the cleanup short.
    """

    async def stoppable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101
        for signum in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, task.cancel)
        return await main

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(stoppable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
