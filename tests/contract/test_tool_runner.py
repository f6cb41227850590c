"""The contract of ToolRunner: entry points and a remote service, and the box around them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tomllib
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import psutil
import pytest
import tool_package
import uvloop
from tool_package import NAMES, ToolServer, all_dead, pids_in, serve_tools

from ampd.adapters.tools.entry_points import EntryPointTools
from ampd.adapters.tools.limits import ToolLimits, cut
from ampd.adapters.tools.parsers import load_parser
from ampd.adapters.tools.remote import RemoteTools
from ampd.adapters.tools.toolbox import ToolBox
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import ToolCall
from ampd.core.tool_calls import hermes
from ampd.ports import ToolRunner

Make = Callable[[ToolLimits], Awaitable[ToolRunner]]

LIMITS = ToolLimits(timeout_s=30.0, max_output_bytes=1000)
SHORT = ToolLimits(timeout_s=1.0, max_output_bytes=1000)


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    tool_package.install(folder, monkeypatch)


@pytest.fixture(params=["entry_points", "remote"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Either of them in the box that a worker has them in."""
    async with AsyncExitStack() as stack:

        async def make(limits: ToolLimits) -> ToolRunner:
            local = EntryPointTools(NAMES, limits)
            if request.param == "entry_points":
                return ToolBox([local], max_running=64)
            # The service has no limits of its own: those of this side must do.
            loose = EntryPointTools(NAMES, ToolLimits(60.0, 1 << 21))
            address, _ = await stack.enter_async_context(serve_tools(loose))
            remote = RemoteTools(address, limits)
            stack.push_async_callback(remote.close)
            await remote.list_tools()
            return ToolBox([EntryPointTools((), limits), remote], max_running=64)

        yield make


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall("s1", "s1-0-0", name, json.dumps(arguments))


async def refused(runner: ToolRunner, wanted: ToolCall) -> AmpdError:
    with pytest.raises(AmpdError) as caught:
        await runner.run(wanted)
    return caught.value


# --- what a tool returns ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "content"),
    [
        (call("echo", text="a\nb é"), "a\nb é"),
        (call("echo", text=""), ""),
        (call("echo", text="\ud800"), "?"),
        (call("echo_later", text="later", after_s=0.01), "later"),
        (call("numbers", count=3), '{"numbers": [0, 1, 2], "é": null}'),
        (call("numbers"), '{"numbers": [0, 1], "é": null}'),
        (call("noisy"), "quiet"),
    ],
)
async def test_a_result(make: Make, wanted: ToolCall, content: str) -> None:
    returned = await (await make(LIMITS)).run(wanted)
    assert (returned.content, returned.failed, returned.truncated) == (content, False, False)
    assert 0 < returned.seconds < 30


async def test_names(make: Make) -> None:
    assert (await make(LIMITS)).names() == NAMES


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (call("fail", message="out of order"), "RuntimeError: out of order"),
        (call("leave", code=3), "SystemExit: 3"),
        (call("die", signum=signal.SIGSEGV), "signal 11"),
        (call("unreadable"), "not JSON serializable"),
        (call("echo"), "missing 1 required positional argument: 'text'"),
        (call("echo", text="a", volume=11), "unexpected keyword argument 'volume'"),
        (ToolCall("s", "c", "echo", "{"), "not JSON"),
        (ToolCall("s", "c", "echo", ""), "not JSON"),
        (ToolCall("s", "c", "echo", "[" * 100_000), "not JSON"),
        (ToolCall("s", "c", "echo", '["a"]'), "not a JSON object"),
    ],
)
async def test_what_a_tool_does_wrong_is_an_answer(make: Make, wanted: ToolCall, said: str) -> None:
    returned = await (await make(LIMITS)).run(wanted)
    assert returned.failed
    assert said in returned.content


async def test_an_unknown_tool(make: Make) -> None:
    error = await refused(await make(LIMITS), call("nothing"))
    assert error.reason is ErrorReason.TOOL_NOT_FOUND


@pytest.mark.parametrize(
    ("count", "character", "kept"),
    [(1000, "x", 1000), (1001, "x", 1000), (1_000_000, "x", 1000), (500, "é", 500)],
)
async def test_output_is_cut(make: Make, count: int, character: str, kept: int) -> None:
    wanted = call("long", count=count, character=character)
    returned = await (await make(LIMITS)).run(wanted)
    assert returned.content == character * kept
    assert returned.truncated == (count > kept)
    assert not returned.failed


async def test_output_is_not_cut_inside_a_character(make: Make) -> None:
    returned = await (await make(LIMITS)).run(call("long", count=600, character="€"))
    assert (returned.content, returned.truncated) == ("€" * 333, True)


async def test_binary_output_becomes_text(make: Make) -> None:
    returned = await (await make(LIMITS)).run(call("binary"))
    assert returned.content == bytes(range(256)).decode(errors="replace")
    assert not returned.failed


# --- ending a tool ------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["sleep", "sleep_stubbornly", "sleep_with_a_child"])
async def test_a_tool_that_takes_too_long_is_killed(make: Make, tool: str, tmp_path: Path) -> None:
    runner, pids = await make(SHORT), tmp_path / "pids"
    returned = await runner.run(call(tool, pids=str(pids)))
    assert returned.failed
    assert "longer than 1 s" in returned.content
    assert await all_dead(await pids_in(pids))


@pytest.mark.parametrize("tool", ["sleep", "sleep_stubbornly", "sleep_with_a_child"])
async def test_cancelling_kills_the_tool(make: Make, tool: str, tmp_path: Path) -> None:
    runner, pids = await make(LIMITS), tmp_path / "pids"
    running = asyncio.create_task(runner.run(call(tool, pids=str(pids))))
    noted = await pids_in(pids)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await all_dead(noted)


async def test_cancelling_at_any_moment_leaves_no_process(make: Make, tmp_path: Path) -> None:
    runner = await make(LIMITS)
    for number in range(12):
        running = asyncio.create_task(runner.run(call("sleep", pids=str(tmp_path / "pids"))))
        await asyncio.sleep(0.008 * number)
        running.cancel()
        while number % 2 and not running.done():  # again, while the process is being ended
            await asyncio.sleep(0)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    gc.collect()  # one that nobody has waited for warns, which fails the test
    async with asyncio.timeout(2.0):
        while tool_processes():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def tool_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and any("ampd.adapters.tools" in part for part in child.cmdline())
    ]


@pytest.mark.parametrize(
    ("tool", "said", "failed"),
    [("leave_a_fork", "left one", False), ("die_with_a_fork", "exit code 7", True)],
)
async def test_nothing_that_a_tool_has_started_outlives_it(
    make: Make, tool: str, said: str, failed: bool, tmp_path: Path
) -> None:
    runner, pids = await make(LIMITS), tmp_path / "pids"
    async with asyncio.timeout(10):
        returned = await runner.run(call(tool, pids=str(pids)))
    assert (said in returned.content, returned.failed) == (True, failed)
    assert await all_dead(await pids_in(pids))


async def test_calls_run_at_the_same_time(make: Make) -> None:
    runner = await make(LIMITS)
    calls = [call("echo_later", text=str(n), after_s=0.7) for n in range(4)]
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    returned = await asyncio.gather(*map(runner.run, calls))
    assert [r.content for r in returned] == ["0", "1", "2", "3"]
    assert loop.time() - started_s < 4 * 0.7


# --- entry points alone -------------------------------------------------------------------


def test_a_tool_that_no_package_registers() -> None:
    with pytest.raises(AmpdError) as caught:
        EntryPointTools(["echo", "nothing"], LIMITS)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert caught.value.violations[0].field == "tools"
    assert "echo_later" in caught.value.message


async def test_a_registered_tool_that_is_not_there() -> None:
    returned = await EntryPointTools(["nowhere"], LIMITS).run(call("nowhere"))
    assert returned.failed
    assert "AttributeError" in returned.content


async def test_only_enabled_tools_run_and_extras_do_not_matter() -> None:
    runner = EntryPointTools(["with_extra"], LIMITS)
    assert (await runner.run(call("with_extra", text="a"))).content == "a"
    assert (await refused(runner, call("echo"))).reason is ErrorReason.TOOL_NOT_FOUND


async def test_a_tool_ends_with_its_worker(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import asyncio, sys\n"
        "from ampd.adapters.tools.entry_points import EntryPointTools\n"
        "from ampd.adapters.tools.limits import ToolLimits\n"
        "from ampd.core.model import ToolCall\n"
        "runner = EntryPointTools(['sleep'], ToolLimits())\n"
        "asyncio.run(runner.run(ToolCall('s', 'c', 'sleep', sys.argv[1])))\n"
    )
    arguments = json.dumps({"pids": str(pids)})
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, arguments, stderr=DEVNULL, env=dict(os.environ)
    )
    noted = await pids_in(pids)
    worker.kill()
    await worker.wait()
    assert await all_dead(noted)


def test_under_the_event_loop_of_the_services(tmp_path: Path) -> None:
    async def run() -> None:
        runner, pids = EntryPointTools(NAMES, SHORT), tmp_path / "pids"
        assert (await runner.run(call("echo", text="a"))).content == "a"
        assert (await runner.run(call("die", signum=9))).content.count("signal 9") == 1
        returned = await runner.run(call("sleep_with_a_child", pids=str(pids)))
        assert "longer than" in returned.content
        assert await all_dead(await pids_in(pids))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(run())


@pytest.mark.parametrize(
    ("content", "limit", "text", "longer"),
    [
        (b"", 4, "", False),
        ("aé€".encode(), 6, "aé€", False),
        ("aé€".encode(), 5, "aé", True),
        (b"ab\xe2\x82", 4, "ab", True),
        (b"\xff\xff", 100, "\ufffd\ufffd", False),
    ],
)
def test_cut(content: bytes, limit: int, text: str, longer: bool) -> None:
    assert cut(content, limit) == (text, longer)


# --- a remote service alone ---------------------------------------------------------------


@pytest.fixture
async def remote() -> AsyncIterator[tuple[RemoteTools, ToolServer]]:
    async with serve_tools(EntryPointTools(("echo",), LIMITS)) as (address, server):
        remote = RemoteTools(address, LIMITS)
        yield remote, server
        await remote.close()


async def test_tools_are_known_once_they_are_listed(
    remote: tuple[RemoteTools, ToolServer],
) -> None:
    runner, server = remote
    assert runner.names() == ()
    await runner.list_tools()
    assert runner.names() == ("echo",)
    server.runner = EntryPointTools(("fail",), LIMITS)
    assert (await refused(runner, call("echo", text="a"))).reason is ErrorReason.TOOL_NOT_FOUND
    await runner.list_tools()
    assert runner.names() == ("fail",)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_service_that_fails_is_a_tool_that_fails(
    remote: tuple[RemoteTools, ToolServer], code: grpc.StatusCode
) -> None:
    runner, server = remote
    server.error = code
    returned = await runner.run(call("echo", text="a"))
    assert returned.failed
    assert code.name in returned.content


async def test_an_answer_without_end_is_refused(remote: tuple[RemoteTools, ToolServer]) -> None:
    runner, server = remote
    server.runner = EntryPointTools(("long",), ToolLimits(30.0, 10 << 20))
    returned = await runner.run(call("long", count=9 << 20))
    assert returned.failed
    assert len(returned.content) < 2000


async def test_a_service_that_is_not_there() -> None:
    async with serve_tools(EntryPointTools(("echo",), LIMITS)) as (address, _):
        remote = RemoteTools(address, LIMITS)
        await remote.list_tools()
        assert remote.names() == ("echo",)
    await remote.list_tools()
    assert remote.names() == ()
    returned = await remote.run(call("echo", text="a"))
    assert returned.failed
    assert "UNAVAILABLE" in returned.content
    await remote.close()


# --- the box alone ------------------------------------------------------------------------


async def test_running_tools_are_bounded(tmp_path: Path) -> None:
    box = ToolBox([EntryPointTools(NAMES, LIMITS)], max_running=2)
    paths = [tmp_path / "pids0", tmp_path / "pids1"]
    running = [asyncio.create_task(box.run(call("sleep", pids=str(path)))) for path in paths]
    for path in paths:
        await pids_in(path)
    error = await refused(box, call("echo", text="a"))
    assert error.reason is ErrorReason.QUEUE_FULL
    assert error.retry_after_s
    running[0].cancel()
    await asyncio.gather(running[0], return_exceptions=True)
    assert (await box.run(call("echo", text="a"))).content == "a"
    running[1].cancel()
    await asyncio.gather(running[1], return_exceptions=True)
    assert box.running == 0


async def test_a_draining_worker_takes_no_call() -> None:
    box = ToolBox([EntryPointTools(NAMES, LIMITS)], max_running=2, draining=lambda: True)
    assert (await refused(box, call("echo", text="a"))).reason is ErrorReason.DRAINING


async def test_of_two_tools_of_one_name_the_first_runs(
    remote: tuple[RemoteTools, ToolServer],
) -> None:
    runner, server = remote
    await runner.list_tools()
    server.error = grpc.StatusCode.INTERNAL
    box = ToolBox([EntryPointTools(("echo",), LIMITS), runner], max_running=2)
    assert box.names() == ("echo",)
    assert (await box.run(call("echo", text="a"))).content == "a"


# --- the example --------------------------------------------------------------------------


async def test_the_example_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "examples" / "tools"
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    info = tmp_path / "example-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    for folder in (tmp_path, example):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(example))
    (parsed,) = load_parser("count_answers")("some words said")
    returned = await EntryPointTools([parsed.name], LIMITS).run(
        ToolCall("s", "c", parsed.name, parsed.arguments)
    )
    assert json.loads(returned.content) == {"words": 3, "characters": 15}
    assert not returned.failed


# --- parsers ------------------------------------------------------------------------------


def test_parsers_are_built_in_or_registered() -> None:
    assert load_parser("hermes") is hermes
    assert [call.name for call in load_parser("every_round")("text")] == ["echo", "job"]
    for name in ("nothing", "broken"):
        with pytest.raises(AmpdError) as caught:
            load_parser(name)
        assert caught.value.violations[0].field == "tool_call_parser"
