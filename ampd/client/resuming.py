"""A stream that was lost is asked for again by its request_id, and comes from its beginning:
what of it is new to the caller (protos/ampd/v1/session_service.proto, GenerateRequest)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ampd.core.errors import AmpdError, ErrorReason
from ampd.v1.session_service_pb2 import (
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    ToolCalled,
    ToolReturned,
)

RoundEvent = RoundPlaced | TokenBatch | RoundFinished | ToolCalled | ToolReturned
"""RoundPlaced (again when the prefill or the home moves), TokenBatch ..., RoundFinished. Where
that has `continues`: ToolCalled ..., ToolReturned ..., and the events of a further round."""


@dataclass(slots=True)
class _Round:
    """What was delivered of a round."""

    placed: RoundPlaced | None = None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    pieces: list[str] = field(default_factory=list)
    """Its text."""
    finished: RoundFinished | None = None


class Delivered:
    """What the caller of one request has had.

    Every event of every attempt passes `new_of`. Tokens, text, ends of rounds and calls are
    delivered once. A placement comes again when it differs from the last one, and so does the
    result of a call: one that was lost before it was kept came of a tool that runs again, and
    only the last result is what the model is told.

    All that is kept for the comparison is bounded by the request: rounds of at most max_tokens,
    and the calls of at most max_tool_rounds of them.
    """

    def __init__(self) -> None:
        self.ended = False
        """The last event was delivered: nothing can be lost any more."""
        self._rounds: list[_Round] = []
        self._calls: dict[str, ToolCalled] = {}
        self._returns: dict[str, ToolReturned] = {}
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """The stream comes from its beginning."""
        self._enter(0)

    def new_of(self, event: RoundEvent) -> RoundEvent | None:
        """The event, or the part of it that the caller has not had; None: nothing of it is new.

        Raises AmpdError when this is not the stream that was delivered: SESSION_CONFLICT if
        other rounds of the session have settled meanwhile, INTERNAL if it says something else.
        """
        match event:
            case RoundPlaced():
                return self._placed(event)
            case TokenBatch():
                return self._tokens(event)
            case RoundFinished():
                return self._finished(event)
            case ToolCalled():
                return self._called(event)
            case ToolReturned():
                return self._returned(event)

    def _enter(self, index: int) -> None:
        if index == len(self._rounds):
            self._rounds.append(_Round())
        self._index = index
        self._round = self._rounds[index]
        # What this attempt has still to repeat of the round.
        self._token_ids = self._round.token_ids[:]
        self._text = "".join(self._round.pieces)

    def _placed(self, event: RoundPlaced) -> RoundPlaced | None:
        last = self._round.placed
        if last is not None and event.round_index != last.round_index:
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT,
                f"round {last.round_index} was lost, and another round of its session has "
                f"settled since: the request would be round {event.round_index}",
            )
        if event == last or self._round.finished is not None:
            return None
        self._round.placed = event
        return event

    def _tokens(self, batch: TokenBatch) -> TokenBatch | None:
        tokens = min(len(batch.token_ids), len(self._token_ids))
        chars = min(len(batch.text), len(self._text))
        said = zip(batch.token_ids[:tokens], self._token_ids[:tokens], strict=True)
        for token_id, delivered in said:
            if token_id != delivered:
                raise self._differs(f"token {delivered} is {token_id} now")
        if batch.text[:chars] != self._text[:chars]:
            raise self._differs("its text is another")
        new = batch
        if tokens or chars:
            self._token_ids, self._text = self._token_ids[tokens:], self._text[chars:]
            new = TokenBatch()
            new.CopyFrom(batch)
            del new.token_ids[:tokens]
            new.text = batch.text[chars:]
            if not new.token_ids and not new.text:
                return None
        if self._round.finished is not None:
            raise self._differs("it had ended, and goes on now")
        self._round.token_ids.extend(new.token_ids)
        if new.text:
            self._round.pieces.append(new.text)
        return new

    def _finished(self, event: RoundFinished) -> RoundFinished | None:
        if self._token_ids or self._text:
            raise self._differs("it ends earlier now")
        delivered = self._round.finished
        if delivered is not None and (
            (event.history_tokens, event.continues)
            != (delivered.history_tokens, delivered.continues)
        ):
            raise self._differs("it ends in another way now")
        self._round.finished = event
        if event.continues:
            self._enter(self._index + 1)
        else:
            self.ended = True
        return event if delivered is None else None

    def _called(self, event: ToolCalled) -> ToolCalled | None:
        delivered = self._calls.setdefault(event.call_id, event)
        if delivered is event:
            return event
        if delivered != event:
            raise self._differs(f"call {event.call_id} is another now")
        return None

    def _returned(self, event: ToolReturned) -> ToolReturned | None:
        delivered = self._returns.get(event.call_id)
        if delivered is not None and _result(delivered) == _result(event):
            return None
        self._returns[event.call_id] = event
        return event

    def _differs(self, how: str) -> AmpdError:
        """The contract rules it out, unless all that knew of the round's output has died."""
        return AmpdError(
            ErrorReason.INTERNAL,
            f"the lost stream cannot go on: repeated, its round {self._index} is not what was "
            f"delivered: {how}",
        )


def _result(event: ToolReturned) -> tuple[str, bool, bool]:
    """Without how long it took."""
    return event.content, event.failed, event.truncated
