"""Signals, grace and crashes, on real processes."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable

import pytest

from ampd.runtime.lifecycle import BackgroundCrash, background_tasks

PROGRAM = """
import asyncio, sys
from ampd.runtime.lifecycle import Shutdown, background_tasks, run
from ampd.runtime.logging import configure_logging
configure_logging(style="json", level="info", service="test")

async def forever():
    await asyncio.Event().wait()

async def crash():
    await asyncio.sleep(0.05)
    raise RuntimeError("boom")

async def end():
    pass

async def main(shutdown: Shutdown) -> None:
    {body}

sys.exit(run(main, grace_s={grace_s}))
"""


def start(body: str, grace_s: float = 20.0) -> "subprocess.Popen[str]":
    body = "\n    ".join(body.splitlines())
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body, grace_s=grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def finish(process: "subprocess.Popen[str]") -> tuple[int, list[dict[str, object]]]:
    _, err = process.communicate(timeout=30)
    return process.returncode, [json.loads(line) for line in err.splitlines()]


def events(lines: list[dict[str, object]]) -> list[object]:
    return [line["event"] for line in lines]


READY = 'print("ready", flush=True)\n'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    process = start(READY + 'await shutdown.wait()\nprint("drained", flush=True)')
    wait_ready(process)
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "drained\n"
    code, lines = finish(process)
    assert code == 0
    assert events(lines) == ["draining", "stopped"]
    assert {line["service"] for line in lines} == {"test"}


def test_a_second_signal_stops_at_once() -> None:
    process = start(READY + "await shutdown.wait()\n" + READY + "await forever()")
    wait_ready(process)
    process.terminate()
    wait_ready(process)
    started_s = time.monotonic()
    process.terminate()
    code, lines = finish(process)
    assert time.monotonic() - started_s < 10
    assert code == 1
    assert events(lines) == ["draining", "stopping_at_once", "stopped_undrained"]


def test_the_grace_period_ends() -> None:
    process = start(READY + "await forever()", grace_s=0.1)
    wait_ready(process)
    process.terminate()
    code, lines = finish(process)
    assert code == 1
    assert events(lines) == ["draining", "grace_period_over", "stopped_undrained"]


def test_a_crash_of_main_is_logged() -> None:
    code, lines = finish(start('raise RuntimeError("boom")'))
    assert code == 1
    assert events(lines) == ["crashed"]
    assert "boom" in json.dumps(lines)


@pytest.mark.parametrize(
    ("work", "event"), [("crash", "background_task_crashed"), ("end", "background_task_ended")]
)
def test_a_background_task_that_ends_ends_the_process(work: str, event: str) -> None:
    body = (
        "async with background_tasks() as background:\n"
        f'    background.start("pump", {work}())\n'
        "    await forever()"
    )
    code, lines = finish(start(body))
    assert code == 1
    assert events(lines) == [event]
    assert lines[0]["task"] == "pump"


def test_background_tasks_are_stopped_on_the_way_out() -> None:
    body = READY + (
        "async with background_tasks() as background:\n"
        '    background.start("pump", forever())\n'
        "    await shutdown.wait()"
    )
    process = start(body)
    wait_ready(process)
    process.terminate()
    assert finish(process)[0] == 0


async def test_cancelling_the_scope_cancels_its_tasks() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def scope() -> None:
        async with background_tasks() as background:
            background.start("work", work())
            await asyncio.Event().wait()

    task = asyncio.ensure_future(scope())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def in_scope(work: Awaitable[None], body: Awaitable[object]) -> None:
    async with background_tasks() as background:
        background.start("work", work)
        await body


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(message: str) -> None:
    await asyncio.sleep(0)
    raise ValueError(message)


async def test_errors_leave_the_scope_in_no_group() -> None:
    with pytest.raises(ValueError, match="of the body"):
        await in_scope(forever(), fail("of the body"))
    with pytest.raises(BackgroundCrash):
        await in_scope(asyncio.sleep(0), forever())
    with pytest.raises(BackgroundCrash):
        await in_scope(fail("of the task"), forever())
