"""Server-side tools on a cluster of real processes: registered ones, and a service of the test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import tool_package

from ampd.cli.cluster import ClusterSpec, EngineKind, LocalCluster
from ampd.client import AmpdClient, RoundEvent
from ampd.core.errors import AmpdError, ErrorReason
from ampd.v1 import tool_service_pb2, tool_service_pb2_grpc
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_service_pb2 import (
    GenerateRequest,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    ToolCalled,
    ToolReturned,
)
from ampd.v1.worker_pb2 import WORKER_ROLE_DECODE

SOON_S = 10.0


@dataclass
class Jobs(tool_service_pb2_grpc.ToolServiceServicer):
    """A tool service in this process, with one tool `job`."""

    calls: list[tool_service_pb2.RunToolRequest] = field(default_factory=list)
    hang: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def ListTools(self, request: Any, context: Any) -> Any:  # noqa: N802
        return tool_service_pb2.ListToolsResponse(tools=[tool_service_pb2.Tool(name="job")])

    async def RunTool(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(request)
        if self.hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return tool_service_pb2.RunToolResponse(content="no", failed=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[tuple[Jobs, str]]:
    server, jobs = grpc.aio.server(), Jobs()
    tool_service_pb2_grpc.add_ToolServiceServicer_to_server(jobs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield jobs, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    service: tuple[Jobs, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        tool_package.install(tmp_path_factory.mktemp("packages"), patch)
        patch.setenv("AMPD_TOOLS", '["echo"]')
        patch.setenv("AMPD_TOOL_SERVICES", f'["{service[1]}"]')
        patch.setenv("AMPD_TOOL_CALL_PARSER", "every_round")
        # Two homes, and no KV to move.
        patch.setenv("AMPD_KV_TRANSPORT", "inproc")
        spec = ClusterSpec(model="emulated", engine=EngineKind.EMULATED, prefill=0, decode=2)
        async with LocalCluster(spec, tmp_path_factory.mktemp("cluster")) as started:
            yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster, service: tuple[Jobs, str]) -> AsyncIterator[AmpdClient]:
    service[0].calls.clear()
    async with AmpdClient(cluster.address) as client, asyncio.timeout(60):
        # The service is asked for its tools, and the answer published, within seconds.
        while [list(t) async for t in tools_of_workers(client)] != [["echo", "job"]] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        yield client


async def tools_of_workers(client: AmpdClient) -> AsyncIterator[Sequence[str]]:
    async for worker in client.list_workers(WORKER_ROLE_DECODE):
        yield worker.load.tools


async def wanted(client: AmpdClient, *tools: str) -> GenerateRequest:
    session = await client.create_session()
    return GenerateRequest(
        session_id=session.session_id,
        request_id="r",
        text="Count the words.",
        server_tools=tools,
        max_tool_rounds=2,
        sampling=SamplingParams(max_tokens=6, temperature=0.0),
    )


async def collect(client: AmpdClient, request: GenerateRequest) -> list[RoundEvent]:
    async with aclosing(client.generate(request)) as events:
        return [event async for event in events]


def tokens(events: list[RoundEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokenBatch) for t in event.token_ids]


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_of_both_kinds_run_and_the_stream_goes_on(
    client: AmpdClient, service: tuple[Jobs, str]
) -> None:
    request = await wanted(client, "echo", "job")
    events = await collect(client, request)
    ends = [event for event in events if isinstance(event, RoundFinished)]
    assert [end.continues for end in ends] == [True, True, False]
    assert [e.round_index for e in events if isinstance(e, RoundPlaced)] == [0, 1, 2]
    called = [event for event in events if isinstance(event, ToolCalled)]
    assert [call.name for call in called] == ["echo", "job"] * 2
    returned = {e.call_id: e for e in events if isinstance(e, ToolReturned)}
    assert list(returned) != []
    assert {call.call_id for call in called} == set(returned)
    said = "".join(e.text for e in events[: events.index(ends[0])] if isinstance(e, TokenBatch))
    assert (returned[called[0].call_id].content, returned[called[0].call_id].failed) == (
        said,
        False,
    )
    assert (returned[called[1].call_id].content, returned[called[1].call_id].failed) == ("no", True)
    assert returned[called[0].call_id].duration.ToNanoseconds() > 0
    assert [call.call_id for call in service[0].calls] == [c.call_id for c in called[1::2]]
    session = await client.get_session(request.session_id)
    assert (session.round_count, session.history_tokens) == (3, ends[-1].history_tokens)

    # Repeated: the same stream, and no tool is run.
    again = await collect(client, request)
    assert tokens(again) == tokens(events)
    assert len(service[0].calls) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_stream_ends_the_tool_and_may_go_on(
    client: AmpdClient, service: tuple[Jobs, str]
) -> None:
    jobs, _ = service
    jobs.hang = True
    request = await wanted(client, "echo", "job")
    stream = client.generate(request)
    async for event in stream:
        if isinstance(event, ToolReturned):
            assert event.name == "echo"
            break
    await stream.aclose()
    async with asyncio.timeout(SOON_S):
        await jobs.cancelled.wait()
    jobs.hang = False
    events = await collect(client, request)
    assert not events[-1].continues  # type: ignore[union-attr]
    assert jobs.calls[0] == jobs.calls[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_of_tools_that_were_not_named_are_the_clients(
    client: AmpdClient, service: tuple[Jobs, str]
) -> None:
    events = await collect(client, await wanted(client, "echo"))
    assert isinstance(events[-1], RoundFinished)
    assert not events[-1].continues
    assert service[0].calls == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tool_that_nobody_has_is_a_wrong_field(client: AmpdClient) -> None:
    with pytest.raises(AmpdError) as caught:
        await collect(client, await wanted(client, "echo", "nothing"))
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert caught.value.violations[0].field == "server_tools[1]"


@pytest.mark.asyncio(loop_scope="module")
async def test_chat_shows_calls_and_results(client: AmpdClient, cluster: LocalCluster) -> None:
    ampdctl = Path(sys.executable).parent / "ampdctl"
    chat = await asyncio.create_subprocess_exec(
        *(ampdctl, "chat", "--address", cluster.address, "--max-tokens", "4"),
        *("--tool", "echo", "--tool", "job"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, shown = await chat.communicate(b"Hello\n/undo\n")
    assert chat.returncode == 0
    lines = shown.decode()
    # Eight rounds follow the first, and /undo takes all of them back.
    assert lines.count("[call echo {") == 8
    assert lines.count("[echo returned after ") == 8
    assert lines.count("[job failed after ") == 8
    assert "goes on from 0 tokens" in lines
