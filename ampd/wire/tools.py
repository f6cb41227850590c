"""Calls of server-side tools between coordinators and decode workers."""

from __future__ import annotations

from ampd.core.model import ToolCall, ToolReturn
from ampd.wire import names, times
from ampd.worker.v1 import decode_service_pb2


def call_to_proto(call: ToolCall, *, incarnation: int) -> decode_service_pb2.RunToolRequest:
    """`incarnation`: the life of the worker that is meant."""
    return decode_service_pb2.RunToolRequest(
        incarnation=incarnation,
        session_id=call.session_id,
        call_id=call.call_id,
        name=call.name,
        arguments=call.arguments,
    )


def call_from_proto(message: decode_service_pb2.RunToolRequest) -> ToolCall:
    """The call; AmpdError INVALID_FIELD. What the arguments are worth is the tool's matter."""
    return ToolCall(
        session_id=names.required_id(message.session_id, "session_id"),
        call_id=names.required_id(message.call_id, "call_id"),
        name=names.required_id(message.name, "name"),
        arguments=message.arguments,
    )


def return_to_proto(returned: ToolReturn) -> decode_service_pb2.RunToolResponse:
    """What the tool returned."""
    return decode_service_pb2.RunToolResponse(
        content=returned.content,
        failed=returned.failed,
        truncated=returned.truncated,
        duration=times.duration_to_proto(returned.seconds),
    )


def return_from_proto(message: decode_service_pb2.RunToolResponse) -> ToolReturn:
    """What the tool returned."""
    return ToolReturn(
        content=message.content,
        failed=message.failed,
        truncated=message.truncated,
        seconds=times.duration_from_proto(message.duration),
    )
