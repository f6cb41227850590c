"""Tokenizer of the emulated model: text is its UTF-8 bytes, chats have a fixed template.

A turn is `TURN role LF content EOS LF` (TURN and EOS: see `emulated_vocabulary`), and the next
assistant turn's prompt is `TURN assistant LF`. The model's answer ends that turn with EOS, so a
later increment begins with the LF behind it. Any role is taken. Control codes 1 and 2 in a text
are those tokens, as with real tokenizers the spelling of a special token is.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Final

from ampd.adapters.emulated_vocabulary import EOS_TOKEN_ID, TURN_TOKEN_ID, VOCAB_SIZE
from ampd.core.errors import invalid_field
from ampd.ports import ChatMessage, Tokens

MESSAGES_FIELD: Final = "increment.messages"
ASSISTANT: Final = "assistant"

_TURN: Final = chr(TURN_TOKEN_ID)
_EOS: Final = chr(EOS_TOKEN_ID)


class EmulatedTokenizer:
    """See `ampd.ports.Tokenizer`: no files, microseconds per KB."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return VOCAB_SIZE

    def encode_text(self, text: str, *, first: bool) -> Tokens:
        """The bytes of the text; the model has no start tokens."""
        return array("I", list(text.encode()))

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, first: bool, last_token_id: int | None
    ) -> Tokens:
        """The turns of the messages and the next assistant turn's prompt, behind the rest of
        the assistant's turn before them. AmpdError INVALID_FIELD when there are no messages."""
        if not messages:
            raise invalid_field(MESSAGES_FIELD, "empty")
        text = "" if first else "\n" if last_token_id == EOS_TOKEN_ID else f"{_EOS}\n"
        text += "".join(f"{_turn(message)}{_EOS}\n" for message in messages)
        return self.encode_text(f"{text}{_TURN}{ASSISTANT}\n", first=first)


def _turn(message: ChatMessage) -> str:
    """All of the message: what else it has stands beside its role, as JSON."""
    beside = {
        **message.extra,
        **({"name": message.name} if message.name else {}),
        **({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}),
    }
    role = f"{message.role} {json.dumps(beside, default=str)}" if beside else message.role
    return f"{_TURN}{role}\n{message.content}"
