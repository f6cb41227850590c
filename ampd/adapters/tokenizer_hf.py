"""Tokenizer over a model's own Hugging Face folder: tokenizer.json and its chat template.

Text that spells a special token (a user who types `<|im_end|>`) becomes that token: the
tokenizer's own behaviour, and that of vLLM's chat endpoint; it reaches only that user's session.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jinja2

# Not AutoTokenizer: that imports torch where it is installed (5 s, 400 MB). Both read the same
# tokenizer.json.
from transformers import PreTrainedTokenizerFast

from ampd.core.errors import AmpdError, invalid_field
from ampd.ports import ChatMessage, Tokens

MESSAGES_FIELD: Final = "increment.messages"

_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What a model's template raises, on purpose (TemplateError) or by stumbling."""

_MAX_SPACES_BEFORE_STOP: Final = 2
"""White-space tokens that a template may put between the answer and its stop token."""


class HfTokenizer:
    """See `ampd.ports.Tokenizer`. Reads local files only; every call is synchronous CPU work,
    1 to 2 s per MB of text.

    `folder` holds tokenizer.json, tokenizer_config.json and, for chat, the template. AmpdError
    INVALID_FIELD `model` when it does not.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise invalid_field("model", f"{folder} holds no tokenizer.json")
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True
        )
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_ids = frozenset(self._tokenizer.added_tokens_decoder)
        # Random: no message can contain them.
        self._answer = f"answer{secrets.token_hex(8)}"
        self._mark = f"mark{secrets.token_hex(8)}"
        self._anchor: str | None = None
        eos_id = self._tokenizer.eos_token_id
        if eos_id is not None and self._encode(self._tokenizer.eos_token) == [eos_id]:
            self._anchor = self._tokenizer.eos_token

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self._tokenizer)

    def encode_text(self, text: str, *, first: bool) -> Tokens:
        """Raw text; with `first` the model's own start tokens go in front."""
        if first:
            return array("I", self._backend.encode(text, add_special_tokens=True).ids)
        return array("I", self._encode_inside(text))

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, first: bool, last_token_id: int | None
    ) -> Tokens:
        """The template applied to the new messages, and the next assistant turn's prompt behind.

        Not `first`: they are rendered behind a short made-up exchange, and what follows its
        answer is taken: the end of the assistant's turn, then the messages, and no second
        system prompt. AmpdError INVALID_FIELD when the template refuses a message
        (`increment.messages[i].role`) or leaves it out, or when the model has no template.
        """
        if not messages:
            raise invalid_field(MESSAGES_FIELD, "empty")
        if self._tokenizer.chat_template is None:
            raise invalid_field(
                MESSAGES_FIELD, "the model has no chat template: send text or token ids"
            )
        try:
            text = self._render(messages, first=first)
        except _TEMPLATE_ERRORS as error:
            raise self._refusal(messages, error, first=first) from error
        self._require_all_shown(messages, first=first)
        if first:
            return array("I", self._encode(text))
        return array("I", self._without_stop(self._encode_inside(text), last_token_id))

    def _render(self, messages: Sequence[ChatMessage], *, first: bool) -> str:
        conversation = [_as_mapping(message) for message in messages]
        if first:
            return self._apply_template(conversation)
        before: list[dict[str, object]] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": self._answer},
        ]
        _, found, tail = self._apply_template(before + conversation).rpartition(self._answer)
        if not found:
            raise jinja2.TemplateError("it does not show the assistant's earlier turns")
        return tail

    def _apply_template(self, conversation: list[dict[str, object]]) -> str:
        text = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)  # noqa: S101
        return text

    def _refusal(
        self, messages: Sequence[ChatMessage], error: Exception, *, first: bool
    ) -> AmpdError:
        """INVALID_FIELD for the first message that the template does not take."""
        short = [replace(message, content="m") for message in messages]

        def refused(count: int) -> bool:
            try:
                self._render(short[:count], first=first)
            except _TEMPLATE_ERRORS:
                return True
            return False

        counts = range(1, len(short) + 1)
        index = bisect_left(counts, True, key=refused)
        said = f"the model's chat template does not take it: {error}"
        if index == len(short):
            return invalid_field(MESSAGES_FIELD, said)
        return invalid_field(f"{MESSAGES_FIELD}[{index}].role", said)

    def _require_all_shown(self, messages: Sequence[ChatMessage], *, first: bool) -> None:
        """Templates skip roles that they do not know, or move them to the front, out of the
        tail: either way the model would never see the message. Marks in place of the contents
        tell, also where a template rewrites contents (trims them, or writes them as JSON)."""
        marks = [f"{self._mark}-{index}-" if m.content else "" for index, m in enumerate(messages)]
        marked = [replace(m, content=mark) for m, mark in zip(messages, marks, strict=True)]
        try:
            text = self._render(marked, first=first)
        except _TEMPLATE_ERRORS:
            return  # the template reads the contents, and it took the real ones
        for index, mark in enumerate(marks):
            if mark not in text:
                raise invalid_field(
                    f"{MESSAGES_FIELD}[{index}].role",
                    f"the model's chat template leaves out a {messages[index].role!r} message here",
                )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        """Text that goes on from other text: some tokenizers put a space before the start of a
        text, which this one must not get. So it is encoded behind a special token."""
        if self._anchor is None:
            return self._encode(text)
        return self._encode(self._anchor + text)[1:]

    def _without_stop(self, ids: list[int], last_token_id: int | None) -> list[int]:
        """The tail's ids less its leading stop token, where the model has emitted that."""
        if last_token_id in self._special_ids:
            for index, token_id in enumerate(ids[: _MAX_SPACES_BEFORE_STOP + 1]):
                if token_id == last_token_id:
                    return ids[index + 1 :]
                if self._tokenizer.decode([token_id]).strip():
                    break
        return ids


def _as_mapping(message: ChatMessage) -> dict[str, object]:
    conversation: dict[str, object] = {
        **message.extra,
        "role": message.role,
        "content": message.content,
    }
    if message.name:
        conversation["name"] = message.name
    if message.tool_call_id:
        conversation["tool_call_id"] = message.tool_call_id
    return conversation
