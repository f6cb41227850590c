"""An asyncio event loop on virtual time, with simulated processes that can be stopped dead.

When nothing is ready it jumps to its next timer, so an hour of waiting costs nothing, and a run
depends on its seed alone. Nothing ready, no timer and the main task not done is a deadlock, and
raises with the stacks of what waits. Sockets do not exist here; what would run in a thread runs
at once.

Every task belongs to the `SimProcess` of the context it was made in. A process that is frozen
takes no step: what happens to it waits until it thaws. To kill is to freeze for good: no
`finally` of it runs, as with SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import io
import itertools
from asyncio import base_events, events
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

MAX_STEPS_AT_ONE_INSTANT: Final = 200_000
"""More callbacks than this while time stands still: somebody spins."""

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Nobody can go on."""


class HangError(AssertionError):
    """The run has not ended by its time limit, or spins at one instant."""


class SimProcess:
    """An operating system process as the loop sees it: a name, a clock, and whether it steps."""

    def __init__(self, name: str, *, clock_offset_s: float = 0.0, wall_skew_s: float = 0.0) -> None:
        self.name = name
        self.clock_offset_s = clock_offset_s
        self.wall_skew_s = wall_skew_s
        self.frozen = False
        self._waiting: list[events.Handle] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def freeze(self) -> None:
        """Takes no step from now on."""
        self.frozen = True

    def thaw(self) -> None:
        """Goes on with all that happened meanwhile, in its order."""
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.put_back(waiting)

    def keep(self, handle: events.Handle) -> None:
        """For the thaw."""
        self._waiting.append(handle)

    @contextmanager
    def current(self) -> Generator[None, None, None]:
        """What the body starts belongs to this process."""
        token = PROCESS.set(self)
        try:
            yield
        finally:
            PROCESS.reset(token)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str = "") -> asyncio.Task[T]:
        """A task of this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        return asyncio.get_running_loop().create_task(
            work, name=f"{self.name}/{name}", context=context
        )


PROCESS: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("process", default=None)


class _SimTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its number: sets of tasks are walked in the same order every run."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_SimTask.numbers)
        context = kwargs.get("context")
        self.process = PROCESS.get() if context is None else context.get(PROCESS)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _SimFuture(asyncio.Future):  # type: ignore[type-arg]
    """The same for a future."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_SimTask.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


def _is_held(handle: events.Handle) -> bool:
    """Whether the handle's process is frozen: then it is kept for the thaw."""
    process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    if process is None or not process.frozen:
        return False
    process.keep(handle)
    return True


class _SimHandle(events.Handle):
    def _run(self) -> None:
        if not _is_held(self):
            super()._run()  # type: ignore[misc]


class _SimTimer(events.TimerHandle):
    def _run(self) -> None:
        if not _is_held(self):
            super()._run()  # type: ignore[misc]


class _NoIo:
    """Stands where the loop expects its selector: waiting is moving the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise DeadlockError(f"nobody can go on\n{self._loop.stacks()}")
        self._loop.advance(timeout)
        return []


class VirtualLoop(base_events.BaseEventLoop):
    """See the module. `limit_s`: virtual seconds after which the run counts as hung."""

    def __init__(self, *, limit_s: float = 3600.0) -> None:
        super().__init__()
        self.now_s = 0.0
        self.limit_s = limit_s
        self.steps = 0
        self.crashes: list[dict[str, Any]] = []
        self._steps_at_now = 0
        self._clock_resolution = 1e-9
        self._selector = _NoIo(self)
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _, context: self.crashes.append(context))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now_s

    def advance(self, timeout: float) -> None:
        """To the next timer, `timeout` away; 0: something is ready."""
        if timeout > 0:
            # Exactly its time: a sum would be off by a rounding, and time would seem to run back.
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
            self._steps_at_now = 0
            if self.now_s > self.limit_s:
                self.limit_s += 600.0  # for whoever cleans up
                raise HangError(f"not done after {self.now_s:.0f} s\n{self.stacks()}")

    def put_back(self, handles: list[events.Handle]) -> None:
        """Run them now, as if they had just become ready."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def create_future(self) -> asyncio.Future[Any]:
        """One of a fixed hash."""
        return _SimFuture(loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """No threads: it runs now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> events.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def stacks(self) -> str:
        """Where every task waits."""
        text = io.StringIO()
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            if not _is_frozen(task):
                task.print_stack(limit=6, file=text)
        return text.getvalue()

    def _call_soon(self, callback: Any, args: Any, context: Any) -> events.Handle:
        self.steps += 1
        self._steps_at_now += 1
        if self._steps_at_now > MAX_STEPS_AT_ONE_INSTANT:
            self._steps_at_now = 0
            raise HangError(f"time stands still at {self.now_s} s\n{self.stacks()}")
        handle = _SimHandle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> events.TimerHandle:
        """As any loop's."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = _SimTimer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _is_frozen(task: asyncio.Task[Any]) -> bool:
    process = task.process if isinstance(task, _SimTask) else None
    return process is not None and process.frozen


def _make_task(loop: Any, coro: Any, **kwargs: Any) -> _SimTask:
    return _SimTask(coro, loop=loop, **kwargs)


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Run a coroutine on a virtual-time loop of its own."""
    _SimTask.numbers = itertools.count()
    loop = VirtualLoop(limit_s=limit_s)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        _end_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _end_all(loop: VirtualLoop) -> None:
    """Cancel what is left, the frozen included, so that nothing dies in the garbage collector."""

    async def end() -> None:
        for task in asyncio.all_tasks(loop):
            if _is_frozen(task):
                task.process.thaw()
        rest = asyncio.all_tasks(loop) - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.wait(rest) if rest else None

    loop.set_exception_handler(lambda *_: None)
    loop.limit_s = loop.now_s + 3600.0
    loop.run_until_complete(end())
    loop.run_until_complete(loop.shutdown_asyncgens())
