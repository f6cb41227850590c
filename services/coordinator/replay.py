"""The answer of a finished round, kept so that a repeated request_id gets it again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ampd.core.model import Finished, Route, RouteReason
from ampd.ports import TokensOut


@dataclass(frozen=True, slots=True)
class RoundPlaced:
    """Where the round is prefilled and why (`ampd.v1.RoundPlaced`)."""

    round_index: int
    route: Route
    reason: RouteReason
    prefill_worker: str | None
    decode_worker: str
    history_tokens: int
    increment_tokens: int
    history_rebuilt: bool


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """All that a finished round's stream said, its tokens in one batch."""

    placed: RoundPlaced
    token_ids: list[int]
    text: str
    finished: Finished

    def events(self) -> Iterator[RoundPlaced | TokensOut | Finished]:
        """The stream again."""
        yield self.placed
        if self.token_ids:
            yield TokensOut(array("I", self.token_ids), self.text)
        yield self.finished


def encode_outcome(outcome: RoundOutcome) -> bytes:
    """For the shared store."""
    return msgspec.json.encode(outcome)


def decode_outcome(data: bytes) -> RoundOutcome:
    """From the shared store."""
    return msgspec.json.decode(data, type=RoundOutcome)
