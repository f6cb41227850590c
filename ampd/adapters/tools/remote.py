"""Tools of a remote `ampd.v1.ToolService`, in whatever language it is written."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import grpc
import structlog

from ampd.adapters.tools.limits import ToolLimits, cut
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import ToolCall, ToolReturn
from ampd.v1.tool_service_pb2 import ListToolsRequest, RunToolRequest
from ampd.v1.tool_service_pb2_grpc import ToolServiceStub
from ampd.wire import names

log = structlog.get_logger(__name__)

MAX_TOOLS: Final = 256
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024 + 64 * 1024
"""The longest content (see the proto), and what is around it."""
MAX_PROBLEM_CHARS: Final = 1000
LIST_EVERY_S: Final = 5.0
LIST_TIMEOUT_S: Final = 2.0

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


class RemoteTools:
    """`ampd.ports.ToolRunner` over the service at `address` (host:port). It knows the tools that
    the last `list_tools` brought. It owns its connection: close it."""

    def __init__(self, address: str, limits: ToolLimits) -> None:
        self._address = address
        self._limits = limits
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = ToolServiceStub(self._channel)
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """The tools that the service had when it was asked last; none while it cannot be."""
        return self._names

    async def list_tools(self) -> None:
        """Ask the service for its tools."""
        try:
            answer = await self._stub.ListTools(ListToolsRequest(), timeout=LIST_TIMEOUT_S)
            listed = tuple(tool.name for tool in answer.tools[:MAX_TOOLS] if names.is_id(tool.name))
        except grpc.aio.AioRpcError as failure:
            listed = ()
            if self._names:
                log.warning("tools_lost", service=self._address, error=failure.code().name)
        if listed and listed != self._names:
            log.info("tools_found", service=self._address, tools=listed)
        self._names = listed

    async def keep_listing(self) -> None:
        """Ask it again and again, forever."""
        while True:
            await self.list_tools()
            await asyncio.sleep(LIST_EVERY_S)

    async def run(self, call: ToolCall) -> ToolReturn:
        """Run the call there."""
        request = RunToolRequest(
            session_id=call.session_id,
            call_id=call.call_id,
            name=call.name,
            arguments=call.arguments,
        )
        started_s = time.monotonic()
        try:
            answer = await self._stub.RunTool(request, timeout=self._limits.timeout_s)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                raise AmpdError(
                    ErrorReason.TOOL_NOT_FOUND, f"no tool {call.name!r} at {self._address}"
                ) from failure
            return ToolReturn(
                self._problem(failure), failed=True, seconds=time.monotonic() - started_s
            )
        content, truncated = cut(answer.content.encode(), self._limits.max_output_bytes)
        return ToolReturn(
            content, answer.failed, answer.truncated or truncated, time.monotonic() - started_s
        )

    async def close(self) -> None:
        """Close the connection; calls in flight fail. Idempotent."""
        await self._channel.close()

    def _problem(self, failure: grpc.aio.AioRpcError) -> str:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"The tool took longer than {self._limits.timeout_s:g} s and was ended."
        said = f"{failure.code().name}: {failure.details() or 'no details'}"
        return f"The tool's service failed ({said})"[:MAX_PROBLEM_CHARS]
