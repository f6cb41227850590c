"""How a process lives: under uvloop, until a signal; then it drains, within a grace period.

    async def main(shutdown: Shutdown) -> None:
        async with GrpcServer(...) as server, background_tasks() as background:
            background.start("heartbeat", heartbeat.run())
            await shutdown.wait()
            await server.drain()
            ...

    sys.exit(run(main, grace_s=30))

The first SIGTERM or SIGINT sets `shutdown`; `main` has `grace_s` to return. The second one, or
the end of the grace period, cancels it. An operator's drain sets `shutdown` without a limit of
time. A crash of `main` or of a background task ends the process with exit code 1 and a log line.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Final

import structlog
import uvloop

log = structlog.get_logger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
FORCED_STOP_S: Final = 5.0
"""What a cancelled process gets to free what it holds, before it is ended without."""


class Shutdown:
    """Whether the process has been asked to stop."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Whether a signal has."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask it, as a signal does. Idempotent."""
        self._draining.set()
        self._asked.set()

    def drain(self) -> None:
        """Ask it to finish what it has, however long that takes. Idempotent."""
        self._draining.set()

    async def wait(self) -> None:
        """Returns when it has been asked, in either way."""
        await self._draining.wait()

    async def wait_asked(self) -> None:
        """Returns when a signal has asked it."""
        await self._asked.wait()


def run(main: Callable[[Shutdown], Coroutine[None, None, None]], *, grace_s: float) -> int:
    """Run a process's main coroutine; the exit code. See the module."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_supervise(main, grace_s))


async def _supervise(
    main: Callable[[Shutdown], Coroutine[None, None, None]], grace_s: float
) -> int:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown()
    at_once = asyncio.Event()

    def on_signal(name: str) -> None:
        if shutdown.asked:
            log.warning("stopping_at_once", signal=name)
            at_once.set()
        else:
            log.info("draining", signal=name, grace_s=grace_s)
            shutdown.ask()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal, number.name)
    running = loop.create_task(main(shutdown))
    patience = loop.create_task(_grace(shutdown, at_once, grace_s))
    try:
        await asyncio.wait({running, patience}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            _, stuck = await asyncio.wait({running}, timeout=FORCED_STOP_S)
            if stuck:
                log.error("stuck", seconds=FORCED_STOP_S)
                os._exit(EXIT_FAILED)
        return _exit_code(running)
    finally:
        patience.cancel()
        for number in signals:
            loop.remove_signal_handler(number)


async def _grace(shutdown: Shutdown, at_once: asyncio.Event, grace_s: float) -> None:
    """Returns when `main` has had its time."""
    await shutdown.wait_asked()
    try:
        async with asyncio.timeout(grace_s):
            await at_once.wait()
    except TimeoutError:
        log.warning("grace_period_over", grace_s=grace_s)


def _exit_code(main: asyncio.Task[None]) -> int:
    if main.cancelled():
        log.warning("stopped_undrained")
        return EXIT_FAILED
    error = main.exception()
    if error is None:
        log.info("stopped")
        return EXIT_OK
    if isinstance(error, ExceptionGroup):
        # A body inside other task groups: what their tasks failed with by themselves.
        error = error.split(BackgroundCrash)[1]
    if error is not None and not isinstance(error, BackgroundCrash):
        log.error("crashed", exc_info=error)
    return EXIT_FAILED


class BackgroundCrash(Exception):  # noqa: N818
    """A background task ended by itself; the log has said why."""


class Background:
    """Tasks that run as long as the process: heartbeats, pumps, sweeps."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Awaitable[None]) -> None:
        """Run `work`, which never returns by itself."""
        self._tasks.append(self._group.create_task(_watched(name, work), name=name))

    def stop(self) -> None:
        """Cancel them, last started first."""
        for task in reversed(self._tasks):
            task.cancel()


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[Background, None]:
    """The scope of background tasks: leaving it cancels them and waits for their end. When one
    crashes or returns, the body is cancelled and BackgroundCrash raised. The body's own error
    leaves the scope as it is, in no group."""
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            background = Background(group)
            try:
                yield background
            except Exception as error:  # noqa: BLE001 - raised below, not in a group
                failure = error
            background.stop()
    except ExceptionGroup as group_error:
        crashes = group_error.subgroup(BackgroundCrash)
        failure = failure or (crashes.exceptions[0] if crashes else group_error)
    if failure is not None:
        raise failure


async def _watched(name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except Exception as error:
        log.error("background_task_crashed", task=name, exc_info=error)
        raise BackgroundCrash(name) from error
    log.error("background_task_ended", task=name)
    raise BackgroundCrash(name)
