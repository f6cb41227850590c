"""The output of a round while it grows: tokens, text and times, on whichever side watches it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ampd.core.model import ResumedOutput


@dataclass(slots=True)
class RoundOutput:
    """What a round has said. It can be carried on elsewhere (`resumed`) and taken up again."""

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    pieces: list[str] = field(default_factory=list)
    """Its text in pieces, as far as it was streamed."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between successive tokens."""
    first_token_s: float | None = None
    last_token_s: float | None = None

    @classmethod
    def of(cls, resumed: ResumedOutput | None) -> RoundOutput:
        """What was said elsewhere or before; nothing yet for None."""
        if resumed is None:
            return cls()
        return cls(
            array("I", resumed.token_ids),
            [resumed.text],
            list(resumed.gaps_s),
            resumed.first_token_s,
            resumed.last_token_s,
        )

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.pieces)

    def add(self, token_ids: Sequence[int], text: str, now_s: float) -> float | None:
        """New tokens and text at `now_s`; the gap to the token before, if there was one.

        Tokens of one step arrive at once: no time lies between them.
        """
        gap_s = None
        if text:
            self.pieces.append(text)
        if not token_ids:
            return None
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            gap_s = max(0.0, now_s - self.last_token_s)
            self.gaps_s.append(gap_s)
        self.gaps_s.extend([0.0] * (len(token_ids) - 1))
        self.last_token_s = now_s
        self.token_ids.extend(token_ids)
        return gap_s

    def resumed(self) -> ResumedOutput | None:
        """What another home has to know to go on; None before the first token."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return ResumedOutput(
            array("I", self.token_ids),
            self.text,
            self.first_token_s,
            self.last_token_s,
            tuple(self.gaps_s),
        )
