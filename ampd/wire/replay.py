"""What is kept under a request_id: the answer of a finished round, or the output of one that
ended early. A repeated request gets it again, and goes on where it ended."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ampd.core.model import Finished, ResumedOutput, Route, RouteReason, SamplingParams
from ampd.ports import Tokens, TokensOut


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


@dataclass(frozen=True, slots=True)
class RoundPartial:
    """A round that ended early, as it was asked for and as far as it came. Durations in
    seconds from `created_unix_s`."""

    increment: list[int]
    keep_history_tokens: int
    sampling: SamplingParams
    created_unix_s: float
    token_ids: list[int]
    text: str
    first_token_after_s: float
    last_token_after_s: float
    gaps_s: list[float]

    @classmethod
    def of(
        cls,
        output: ResumedOutput,
        *,
        increment: Tokens,
        keep_history_tokens: int,
        sampling: SamplingParams,
        created_s: float,
        created_unix_s: float,
    ) -> RoundPartial:
        """`created_s` is on the clock of the output's times."""
        return cls(
            increment=increment.tolist(),
            keep_history_tokens=keep_history_tokens,
            sampling=sampling,
            created_unix_s=created_unix_s,
            token_ids=output.token_ids.tolist(),
            text=output.text,
            first_token_after_s=output.first_token_s - created_s,
            last_token_after_s=output.last_token_s - created_s,
            gaps_s=list(output.gaps_s),
        )

    def output(self, *, created_s: float) -> ResumedOutput:
        """The output on a clock by which the round was created at `created_s`."""
        return ResumedOutput(
            array("I", self.token_ids),
            self.text,
            created_s + self.first_token_after_s,
            created_s + self.last_token_after_s,
            tuple(self.gaps_s),
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    outcome: RoundOutcome | None = None
    partial: RoundPartial | None = None


def encode_outcome(outcome: RoundOutcome | RoundPartial) -> bytes:
    """For the shared store."""
    if isinstance(outcome, RoundOutcome):
        return msgspec.json.encode(_Stored(outcome=outcome))
    return msgspec.json.encode(_Stored(partial=outcome))


def decode_outcome(data: bytes) -> RoundOutcome | RoundPartial:
    """From the shared store."""
    stored = msgspec.json.decode(data, type=_Stored)
    outcome = stored.outcome or stored.partial
    if outcome is None:
        raise msgspec.ValidationError("neither an outcome nor a partial one")
    return outcome
