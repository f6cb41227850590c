from array import array
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    Finished,
    FinishReason,
    RoundTimings,
    RoundUsage,
    ToolCall,
    ToolReturn,
)
from ampd.ports import ChatMessage
from ampd.v1.session_service_pb2 import ChatMessage as Message
from ampd.v1.session_service_pb2 import (
    ChatMessages,
    GenerateRequest,
    TokenIds,
    ToolCalled,
    ToolResult,
    ToolResults,
)
from ampd.wire.generate import (
    MAX_TEXT_BYTES,
    RoundRequest,
    finished_response,
    round_request_from_proto,
    tool_called_response,
    tool_returned_response,
)

VOCAB = 1000


def parse(request: GenerateRequest) -> RoundRequest:
    return round_request_from_proto(request, vocab_size=VOCAB)


def refused_field(request: GenerateRequest) -> str:
    with pytest.raises(AmpdError) as caught:
        parse(request)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    return caught.value.violations[0].field


def chat(*messages: Message) -> GenerateRequest:
    return GenerateRequest(session_id="s", messages=ChatMessages(messages=messages))


def tools(*results: ToolResult) -> GenerateRequest:
    return GenerateRequest(session_id="s", tool_results=ToolResults(results=results))


def test_text() -> None:
    request = parse(GenerateRequest(session_id="s", request_id="r", text="hello"))
    assert (request.session_id, request.request_id) == ("s", "r")
    assert (request.text, request.messages, request.token_ids) == ("hello", (), None)
    assert request.keep_history_tokens is None
    assert request.sampling.max_tokens is None


def test_messages_and_tool_results_are_messages() -> None:
    said = parse(chat(Message(role="user", content="hi", name="ann"), Message(role="system")))
    assert said.messages == (ChatMessage("user", "hi", "ann"), ChatMessage("system", ""))
    done = parse(tools(ToolResult(tool_call_id="c", name="ls", content="a")))
    assert done.messages == (ChatMessage("tool", "a", "ls", "c"),)
    assert (said.text, said.token_ids) == (None, None)


def test_token_ids_and_keep() -> None:
    request = parse(
        GenerateRequest(session_id="s", token_ids=TokenIds(ids=[0, 999]), keep_history_tokens=0)
    )
    assert request.token_ids == array("I", [0, 999])
    assert request.keep_history_tokens == 0


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (GenerateRequest(session_id="s"), "increment"),
        (GenerateRequest(session_id="s", text=""), "increment.text"),
        (chat(), "increment.messages"),
        (tools(), "increment.tool_results"),
        (GenerateRequest(session_id="s", token_ids=TokenIds()), "increment.token_ids"),
    ],
)
def test_an_empty_increment_of_every_kind(request_: GenerateRequest, path: str) -> None:
    assert refused_field(request_) == path


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (GenerateRequest(text="x"), "session_id"),
        (GenerateRequest(session_id="a b", text="x"), "session_id"),
        (GenerateRequest(session_id="s" * 65, text="x"), "session_id"),
        (GenerateRequest(session_id="s", request_id="r" * 65, text="x"), "request_id"),
        (GenerateRequest(session_id="s", request_id="\u00e9", text="x"), "request_id"),
        (GenerateRequest(session_id="s", request_id="a\nb", text="x"), "request_id"),
        (
            chat(Message(role="user"), Message(role="user"), Message(role="", content="x")),
            "increment.messages[2].role",
        ),
        (chat(Message(role="r" * 33)), "increment.messages[0].role"),
        (chat(Message(role="user", name="n" * 65)), "increment.messages[0].name"),
        (chat(*[Message(role="user")] * 257), "increment.messages"),
        (tools(ToolResult(name="n" * 65)), "increment.tool_results[0].name"),
        (tools(ToolResult(tool_call_id="n" * 65)), "increment.tool_results[0].tool_call_id"),
        (tools(*[ToolResult()] * 257), "increment.tool_results"),
        (
            GenerateRequest(session_id="s", token_ids=TokenIds(ids=[1, VOCAB, 2**32 - 1])),
            "increment.token_ids[1]",
        ),
    ],
)
def test_a_wrong_field_is_named(request_: GenerateRequest, path: str) -> None:
    assert refused_field(request_) == path


@pytest.mark.parametrize("character", ["a", "\u20ac"])
def test_texts_are_bounded_in_bytes(character: str) -> None:
    fits = MAX_TEXT_BYTES // len(character.encode())
    text = character * fits
    assert parse(GenerateRequest(session_id="s", text=text)).text == text
    over = text + character
    assert refused_field(GenerateRequest(session_id="s", text=over)) == "increment.text"
    message = Message(role="user", content=over)
    assert refused_field(chat(message)) == "increment.messages[0].content"
    assert refused_field(tools(ToolResult(content=over))) == "increment.tool_results[0].content"


def test_server_tools() -> None:
    none = parse(GenerateRequest(session_id="s", text="x"))
    assert (none.server_tools, none.max_tool_rounds) == ((), 8)
    names = [f"t{number}" for number in range(64)]
    asked = GenerateRequest(
        session_id="s", request_id="r" * 60, text="x", server_tools=names, max_tool_rounds=64
    )
    request = parse(asked)
    assert (request.server_tools, request.max_tool_rounds) == (tuple(names), 64)
    assert parse(GenerateRequest(session_id="s", request_id="r" * 64, text="x")).request_id


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (GenerateRequest(server_tools=["a", ""]), "server_tools[1]"),
        (GenerateRequest(server_tools=["a", "b", "a"]), "server_tools[2]"),
        (GenerateRequest(server_tools=["n" * 65]), "server_tools[0]"),
        (GenerateRequest(server_tools=["a b"]), "server_tools[0]"),
        (GenerateRequest(server_tools=[f"t{n}" for n in range(65)]), "server_tools"),
        (GenerateRequest(server_tools=["a"], request_id="r" * 61), "request_id"),
        (GenerateRequest(server_tools=["a"], max_tool_rounds=65), "max_tool_rounds"),
    ],
)
def test_wrong_server_tools_are_named(request_: GenerateRequest, path: str) -> None:
    request_.session_id, request_.text = "s", "x"
    assert refused_field(request_) == path


def test_events_of_tools() -> None:
    call = ToolCall("s", "s-0-0", "count", "{}")
    assert tool_called_response(call).tool_called == ToolCalled(
        call_id="s-0-0", name="count", arguments="{}"
    )
    returned = tool_returned_response(call, ToolReturn("3", True, True, 0.5)).tool_returned
    assert (returned.call_id, returned.name, returned.content) == ("s-0-0", "count", "3")
    assert (returned.failed, returned.truncated) == (True, True)
    assert returned.duration.ToNanoseconds() == 500_000_000


@pytest.mark.parametrize("continues", [True, False])
def test_an_end_tells_whether_the_stream_goes_on(continues: bool) -> None:
    finished = Finished(FinishReason.STOP, "", RoundUsage(), RoundTimings(), True, 7)
    response = finished_response(finished, continues=continues)
    assert response.finished.continues == continues
    assert response.finished.history_tokens == 7


def test_sampling_is_checked_too() -> None:
    request = GenerateRequest(session_id="s", text="x")
    request.sampling.top_p = 2
    assert refused_field(request) == "sampling.top_p"


@given(st.binary(max_size=200))
def test_any_parsable_bytes_are_taken_or_refused_by_field(data: bytes) -> None:
    request = GenerateRequest(session_id="s", text="x")
    with suppress(DecodeError):
        request.MergeFromString(data)
    refusal = None
    try:
        parse(request)
    except AmpdError as error:
        refusal = error
    assert refusal is None or refusal.violations
