"""A client's request for a round, and the events it is answered with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ampd.core.errors import AmpdError, invalid_field
from ampd.core.model import Finished, TokensOut, ToolCall, ToolReturn
from ampd.ports import ChatMessage, Tokens
from ampd.v1 import session_service_pb2
from ampd.wire import enums, names, round, times, tokens  # noqa: A004
from ampd.wire.order import batch_to_proto
from ampd.wire.replay import RoundPlaced
from ampd.wire.sampling import SamplingRequest, sampling_from_proto

MAX_TEXT_BYTES: Final = 4 * 1024 * 1024
"""Of one text: the increment's, a message's, a tool result's."""
MAX_MESSAGES: Final = 256
MAX_ROLE_CHARS: Final = 32
MAX_SERVER_TOOLS: Final = 64
MAX_TOOL_ROUNDS: Final = 64
DEFAULT_TOOL_ROUNDS: Final = 8
MAX_REQUEST_ID_CHARS_WITH_TOOLS: Final = 60
"""The rounds that follow have request_ids derived from the client's, which must be ids too."""

TOOL_ROLE: Final = "tool"

_MAX_UTF8_BYTES: Final = 4
"""Of one character."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A valid request for a round. Of `text`, `messages` and `token_ids` exactly one is there;
    tool results are messages of role "tool"."""

    session_id: str
    request_id: str
    """Empty: none."""
    text: str | None
    messages: tuple[ChatMessage, ...]
    token_ids: Tokens | None
    keep_history_tokens: int | None
    """None: all."""
    sampling: SamplingRequest
    server_tools: tuple[str, ...] = ()
    """Tools that the server runs when the model calls them."""
    max_tool_rounds: int = DEFAULT_TOOL_ROUNDS
    """Rounds that may follow the first one in its stream."""


def round_request_from_proto(
    request: session_service_pb2.GenerateRequest, *, vocab_size: int
) -> RoundRequest:
    """All that can be said of the request by itself; AmpdError INVALID_FIELD names the field."""
    text: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    token_ids: Tokens | None = None
    match request.WhichOneof("increment"):
        case "text":
            text = _text(request.text, "increment.text")
            if not text:
                raise _empty("increment.text")
        case "messages":
            messages = _messages(request.messages)
        case "tool_results":
            messages = _tool_results(request.tool_results)
        case "token_ids":
            token_ids = array("I", request.token_ids.ids)
            if not token_ids:
                raise _empty("increment.token_ids")
            tokens.check_vocabulary(token_ids, "increment.token_ids", vocab_size=vocab_size)
        case _:
            raise invalid_field("increment", "required: text, messages, tool_results or token_ids")
    server_tools = _server_tools(request.server_tools)
    request_id = names.optional_id(request.request_id, "request_id")
    if server_tools and len(request_id) > MAX_REQUEST_ID_CHARS_WITH_TOOLS:
        raise invalid_field(
            "request_id",
            f"at most {MAX_REQUEST_ID_CHARS_WITH_TOOLS} characters with server_tools",
        )
    if request.max_tool_rounds > MAX_TOOL_ROUNDS:
        raise invalid_field("max_tool_rounds", f"beyond the range 0 to {MAX_TOOL_ROUNDS}")
    return RoundRequest(
        session_id=names.required_id(request.session_id, "session_id"),
        request_id=request_id,
        text=text,
        messages=messages,
        token_ids=token_ids,
        keep_history_tokens=(
            request.keep_history_tokens if request.HasField("keep_history_tokens") else None
        ),
        sampling=sampling_from_proto(request.sampling, vocab_size=vocab_size),
        server_tools=server_tools,
        max_tool_rounds=request.max_tool_rounds or DEFAULT_TOOL_ROUNDS,
    )


def placed_response(placed: RoundPlaced) -> session_service_pb2.GenerateResponse:
    """Where the round is prefilled, for the client."""
    return session_service_pb2.GenerateResponse(
        placed=session_service_pb2.RoundPlaced(
            round_index=placed.round_index,
            route=enums.ROUTE.to_proto(placed.route),
            reason=enums.ROUTE_REASON.to_proto(placed.reason),
            prefill_worker=placed.prefill_worker or "",
            decode_worker=placed.decode_worker,
            history_tokens=placed.history_tokens,
            increment_tokens=placed.increment_tokens,
            history_rebuilt=placed.history_rebuilt,
        )
    )


def tokens_response(event: TokensOut) -> session_service_pb2.GenerateResponse:
    """New output tokens, for the client."""
    return session_service_pb2.GenerateResponse(tokens=batch_to_proto(event))


def finished_response(
    event: Finished, *, continues: bool = False
) -> session_service_pb2.GenerateResponse:
    """The end of the round, for the client; `continues`: the stream goes on behind it."""
    finished = round.finished_to_proto(event)
    finished.continues = continues
    return session_service_pb2.GenerateResponse(finished=finished)


def tool_called_response(call: ToolCall) -> session_service_pb2.GenerateResponse:
    """The round called a tool that the server runs, for the client."""
    return session_service_pb2.GenerateResponse(
        tool_called=session_service_pb2.ToolCalled(
            call_id=call.call_id, name=call.name, arguments=call.arguments
        )
    )


def tool_returned_response(
    call: ToolCall, returned: ToolReturn
) -> session_service_pb2.GenerateResponse:
    """What that tool returned, for the client."""
    return session_service_pb2.GenerateResponse(
        tool_returned=session_service_pb2.ToolReturned(
            call_id=call.call_id,
            name=call.name,
            content=returned.content,
            failed=returned.failed,
            truncated=returned.truncated,
            duration=times.duration_to_proto(returned.seconds),
        )
    )


def _messages(chat: session_service_pb2.ChatMessages) -> tuple[ChatMessage, ...]:
    path = "increment.messages"
    _check_count(len(chat.messages), path)
    return tuple(
        ChatMessage(
            role=_role(message.role, f"{path}[{index}].role"),
            content=_text(message.content, f"{path}[{index}].content"),
            name=names.short_text(message.name, f"{path}[{index}].name"),
        )
        for index, message in enumerate(chat.messages)
    )


def _tool_results(tools: session_service_pb2.ToolResults) -> tuple[ChatMessage, ...]:
    path = "increment.tool_results"
    _check_count(len(tools.results), path)
    return tuple(
        ChatMessage(
            role=TOOL_ROLE,
            content=_text(result.content, f"{path}[{index}].content"),
            name=names.short_text(result.name, f"{path}[{index}].name"),
            tool_call_id=names.short_text(result.tool_call_id, f"{path}[{index}].tool_call_id"),
        )
        for index, result in enumerate(tools.results)
    )


def _server_tools(tools: Sequence[str]) -> tuple[str, ...]:
    if len(tools) > MAX_SERVER_TOOLS:
        raise invalid_field(
            "server_tools", f"{len(tools)} names, at most {MAX_SERVER_TOOLS} are allowed"
        )
    for index, name in enumerate(tools):
        names.required_id(name, f"server_tools[{index}]")
        if name in tools[:index]:
            raise invalid_field(f"server_tools[{index}]", f"{name} is there twice")
    return tuple(tools)


def _check_count(count: int, path: str) -> None:
    if count == 0:
        raise _empty(path)
    if count > MAX_MESSAGES:
        raise invalid_field(path, f"{count} entries, at most {MAX_MESSAGES} are allowed")


def _role(role: str, path: str) -> str:
    if not role:
        raise invalid_field(path, "required")
    return names.short_text(role, path, max_chars=MAX_ROLE_CHARS)


def _text(text: str, path: str) -> str:
    # Short texts, nearly all, are not encoded to be counted.
    if len(text) * _MAX_UTF8_BYTES > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
        raise invalid_field(path, f"at most {MAX_TEXT_BYTES} bytes of UTF-8 are allowed")
    return text


def _empty(path: str) -> AmpdError:
    return invalid_field(path, "an increment must not be empty")
