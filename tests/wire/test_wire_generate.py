from array import array
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.errors import AmpdError, ErrorReason
from ampd.ports import ChatMessage
from ampd.v1.session_service_pb2 import ChatMessage as Message
from ampd.v1.session_service_pb2 import (
    ChatMessages,
    GenerateRequest,
    TokenIds,
    ToolResult,
    ToolResults,
)
from ampd.wire.generate import MAX_TEXT_BYTES, RoundRequest, round_request_from_proto

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
