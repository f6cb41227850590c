"""A package that registers the functions of tools_for_tests, as an installer would leave it."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tools_for_tests

from ampd.core.errors import AmpdError
from ampd.core.model import ToolCall
from ampd.ports import ToolRunner
from ampd.v1 import tool_service_pb2, tool_service_pb2_grpc

NAMES = tuple(
    name
    for name, _ in inspect.getmembers(tools_for_tests, inspect.isfunction)
    if not name.startswith("_")
)


def install(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the package visible to this process and to those that it starts."""
    info = folder / "tools_for_tests-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tools-for-tests\nVersion: 1\n")
    lines = [f"{name} = tools_for_tests:{name}" for name in NAMES]
    lines += ["nowhere = tools_for_tests:nowhere", "with_extra = tools_for_tests:echo [extra]"]
    parsers = (
        "[ampd.tool_call_parsers]\n"
        "every_round = tools_for_tests:_every_round\n"
        "broken = tools_for_tests:no"
    )
    (info / "entry_points.txt").write_text("[ampd.tools]\n" + "\n".join([*lines, parsers]) + "\n")
    patch.syspath_prepend(str(folder))
    modules = str(Path(tools_for_tests.__file__).parent)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), modules]))


def is_alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


async def pids_in(path: Path, *, within_s: float = 10.0) -> list[int]:
    """What a tool has noted there, once it has."""
    async with asyncio.timeout(within_s):
        while not path.exists():  # noqa: ASYNC110, ASYNC240 - of another process
            await asyncio.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]  # noqa: ASYNC240


async def all_dead(pids: list[int], *, within_s: float = 2.0) -> bool:
    """Whether they have ended by then."""
    assert pids
    try:
        async with asyncio.timeout(within_s):
            while any(map(is_alive, pids)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False
    return True


class ToolServer(tool_service_pb2_grpc.ToolServiceServicer):
    """A ToolService over a runner."""

    def __init__(self, runner: ToolRunner) -> None:
        self.runner = runner
        self.error: grpc.StatusCode | None = None

    async def ListTools(self, request: Any, context: Any) -> Any:  # noqa: N802
        names = (*self.runner.names(), "not a name", "x" * 65)
        return tool_service_pb2.ListToolsResponse(
            tools=[tool_service_pb2.Tool(name=name) for name in names]
        )

    async def RunTool(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.error is not None:
            await context.abort(self.error, "as told")
        call = ToolCall(request.session_id, request.call_id, request.name, request.arguments)
        try:
            returned = await self.runner.run(call)
        except AmpdError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.message)
        return tool_service_pb2.RunToolResponse(
            content=returned.content, failed=returned.failed, truncated=returned.truncated
        )


@asynccontextmanager
async def serve_tools(runner: ToolRunner) -> AsyncIterator[tuple[str, ToolServer]]:
    server, servicer = grpc.aio.server(), ToolServer(runner)
    tool_service_pb2_grpc.add_ToolServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(None)
