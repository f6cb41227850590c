"""DecodeService: from the wire to the home's handler."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from ampd.core.errors import invalid_field
from ampd.ports import Clock, DecodeHandler, MoveHandler, ToolRunner
from ampd.wire import moving, names, tools, worker_protocol
from ampd.wire.order import event_to_proto, order_from_proto
from ampd.worker.v1 import decode_service_pb2, decode_service_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """Checks requests and whom they are meant for; `clock` is the handler's."""

    def __init__(
        self,
        handler: DecodeHandler,
        mover: MoveHandler,
        tools: ToolRunner,
        *,
        incarnation: int,
        clock: Clock,
    ) -> None:
        self._handler = handler
        self._mover = mover
        self._tools = tools
        self._incarnation = incarnation
        self._clock = clock

    async def RunRound(  # noqa: N802
        self, request: decode_service_pb2.RunRoundRequest, context: Context
    ) -> AsyncGenerator[decode_service_pb2.RunRoundResponse, None]:
        """Run a round; a cancelled call closes the handler's generator, in the same task."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        order = order_from_proto(request, now_s=self._clock())
        async with aclosing(self._handler.run_round(order)) as events:
            async for event in events:
                yield event_to_proto(event, now_s=self._clock())

    async def Claim(  # noqa: N802
        self, request: decode_service_pb2.ClaimRequest, context: Context
    ) -> decode_service_pb2.ClaimResponse:
        """Give a task to the prefill worker that asks for it."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        claimed = await self._handler.claim(
            names.required_id(request.task_id, "task_id"),
            names.required_id(request.worker_id, "worker_id"),
            worker_protocol.target_from_proto(request.claimer, "claimer")
            if request.HasField("claimer")
            else None,
        )
        return worker_protocol.claimed_to_proto(claimed)

    async def Complete(  # noqa: N802
        self, request: decode_service_pb2.CompleteRequest, context: Context
    ) -> decode_service_pb2.CompleteResponse:
        """Take a task's result, or the news that there is none."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        task_id = names.required_id(request.task_id, "task_id")
        worker_id = names.required_id(request.worker_id, "worker_id")
        match request.WhichOneof("outcome"):
            case "result":
                report = worker_protocol.report_from_proto(request.result)
                await self._handler.complete(task_id, worker_id, report)
            case "failure":
                message = request.failure[: worker_protocol.MAX_FAILURE_CHARS]
                await self._handler.fail(task_id, worker_id, message)
            case _:
                raise invalid_field("outcome", "required: result or failure")
        return decode_service_pb2.CompleteResponse()

    async def Release(  # noqa: N802
        self, request: decode_service_pb2.ReleaseRequest, context: Context
    ) -> decode_service_pb2.ReleaseResponse:
        """Free a session."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        await self._handler.release(
            names.required_id(request.session_id, "session_id"),
            paused_after=request.paused_after if request.HasField("paused_after") else None,
        )
        return decode_service_pb2.ReleaseResponse()

    async def Move(  # noqa: N802
        self, request: decode_service_pb2.MoveRequest, context: Context
    ) -> decode_service_pb2.MoveResponse:
        """Hand a session over to another home."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        moved = await self._mover.move(
            names.required_id(request.session_id, "session_id"),
            names.optional_id(request.target_worker_id, "target_worker_id"),
        )
        return moving.moved_to_proto(moved)

    async def Adopt(  # noqa: N802
        self, request: decode_service_pb2.AdoptRequest, context: Context
    ) -> decode_service_pb2.AdoptResponse:
        """Take a session over from another home."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        adopted = await self._mover.adopt(moving.adopt_from_proto(request))
        return moving.adopted_to_proto(adopted)

    async def RunTool(  # noqa: N802
        self, request: decode_service_pb2.RunToolRequest, context: Context
    ) -> decode_service_pb2.RunToolResponse:
        """Run a server-side tool; a cancelled call ends it."""
        worker_protocol.require_incarnation(request.incarnation, self._incarnation)
        returned = await self._tools.run(tools.call_from_proto(request))
        return tools.return_to_proto(returned)
