"""Increments of the emulated model: bytes in, words out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.adapters.emulated_vocabulary import (
    EOS_TOKEN_ID,
    FIRST_WORD_TOKEN_ID,
    SPECIAL_TOKEN_IDS,
    TURN_TOKEN_ID,
    VOCAB_SIZE,
    detokenise,
)
from ampd.adapters.tokenizer_emulated import EmulatedTokenizer
from ampd.core.errors import AmpdError, ErrorReason
from ampd.ports import ChatMessage

TOKENIZER = EmulatedTokenizer()
TURN, EOS = chr(TURN_TOKEN_ID), chr(EOS_TOKEN_ID)


def shown(ids: Iterable[int]) -> str:
    return bytes(list(ids)).decode()


def user(content: str) -> ChatMessage:
    return ChatMessage("user", content)


@given(st.text())
def test_text_is_its_bytes(text: str) -> None:
    for first in (True, False):
        ids = TOKENIZER.encode_text(text, first=first)
        assert shown(ids) == text
        assert ids.itemsize == 4
        assert all(token_id < FIRST_WORD_TOKEN_ID < TOKENIZER.vocab_size for token_id in ids)


def test_every_word_has_its_own_text() -> None:
    words = {detokenise(token_id) for token_id in range(FIRST_WORD_TOKEN_ID, VOCAB_SIZE)}
    assert len(words) == VOCAB_SIZE - FIRST_WORD_TOKEN_ID
    assert all(len(word) == 6 and word[0] == " " and word[1:].isalpha() for word in words)


def test_bytes_are_characters_and_specials_are_skipped() -> None:
    assert "".join(map(detokenise, b"ab\n")) == "ab\n"
    for token_id in SPECIAL_TOKEN_IDS:
        assert detokenise(token_id) == ""
        assert detokenise(token_id, skip_special_tokens=False) == chr(token_id)
    assert detokenise("é".encode()[0]) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_other_numbers_are_no_tokens(token_id: int) -> None:
    with pytest.raises(IndexError, match=str(token_id)):
        detokenise(token_id)


@pytest.mark.parametrize("stopped", [True, False])
def test_increments_add_up_to_the_rendered_conversation(stopped: bool) -> None:
    """Whether the model ended its turn itself or was cut off."""
    turns = [
        [ChatMessage("system", "Count."), user("one")],
        [user("naïve 雪")],
        [ChatMessage("tool", '{"n": 5}', name="add", tool_call_id="7"), user("go\n\non")],
    ]
    history: list[int] = []
    whole = ""
    for messages in turns:
        history += TOKENIZER.encode_messages(
            messages, first=not history, last_token_id=history[-1] if history else None
        )
        for m in messages:
            named = ' {"name": "add", "tool_call_id": "7"}' if m.name else ""
            whole += f"{TURN}{m.role}{named}\n{m.content}{EOS}\n"
        whole += f"{TURN}assistant\n"
        assert shown(history) == whole
        history += [*b"said"] + ([EOS_TOKEN_ID] if stopped else [])
        whole += f"said{EOS}\n"


def test_what_a_message_has_besides_is_shown() -> None:
    call = ChatMessage("assistant", "", extra={"tool_calls": [{"name": "add"}]})
    assert '"tool_calls": [{"name": "add"}]' in shown(
        TOKENIZER.encode_messages([call], first=True, last_token_id=None)
    )


def test_no_messages_are_refused() -> None:
    with pytest.raises(AmpdError) as caught:
        TOKENIZER.encode_messages([], first=True, last_token_id=None)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert caught.value.violations[0].field == "increment.messages"
