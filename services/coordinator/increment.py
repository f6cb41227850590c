"""An increment becomes tokens, once and for good (spec 2: tokens in, tokens out)."""

from __future__ import annotations

import asyncio
from functools import partial

from ampd.core.errors import invalid_field
from ampd.core.lifecycle import SessionRecord
from ampd.ports import StateStore, Tokenizer, Tokens
from ampd.wire.generate import RoundRequest


class Increments:
    """Tokenises increments; one longer than `inline_chars` off the event loop, where it would
    stall every stream."""

    def __init__(self, tokenizer: Tokenizer, store: StateStore, *, inline_chars: int) -> None:
        self._tokenizer = tokenizer
        self._store = store
        self._inline_chars = inline_chars

    async def tokens(self, session: SessionRecord, request: RoundRequest, keep: int) -> Tokens:
        """The tokens behind the first `keep` of the session's history.

        Raises INVALID_FIELD when there are none, or when the model's template does not take
        the messages. Reads one token of the history where it is cut, nothing otherwise.
        """
        if request.token_ids is not None:
            return request.token_ids
        if request.text is not None:
            size = len(request.text)
            encode = partial(self._tokenizer.encode_text, request.text, first=keep == 0)
        else:
            size = sum(len(message.content) for message in request.messages)
            encode = partial(
                self._tokenizer.encode_messages,
                request.messages,
                first=keep == 0,
                last_token_id=await self._last_token_id(session, keep),
            )
        tokens = await asyncio.to_thread(encode) if size > self._inline_chars else encode()
        if not tokens:
            raise invalid_field("increment", "it has no tokens")
        return tokens

    async def _last_token_id(self, session: SessionRecord, keep: int) -> int | None:
        if keep == 0:
            return None
        if keep >= session.history_tokens:
            return session.last_token_id
        return (await self._store.read_history(session.session_id, keep - 1, keep))[0]
