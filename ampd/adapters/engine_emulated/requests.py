"""One request of an emulated engine, from its arrival to its last output."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ampd.adapters.engine_emulated.output import Output
from ampd.adapters.engine_emulated.pins import Pin
from ampd.adapters.engine_emulated.sampling import Chooser
from ampd.core.errors import AmpdError
from ampd.core.model import PrefillStats, Slo
from ampd.ports import EngineEvent, GenerateDone, PrefillResult, TokensOut

Outcome = EngineEvent | PrefillResult | AmpdError
_LAST: Final = (GenerateDone, PrefillResult, AmpdError)


class Mailbox:
    """A request's outputs on their way to its one reader; at most its tokens and two more."""

    def __init__(self) -> None:
        self._outcomes: deque[Outcome] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.ended = False
        """The reader has the last output."""

    def put(self, outcome: Outcome) -> None:
        """One more output."""
        self._outcomes.append(outcome)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> EngineEvent | PrefillResult:
        """The next output; raises an error that is one."""
        while not self._outcomes:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        outcome = self._outcomes.popleft()
        if not isinstance(outcome, TokensOut):
            self.ended = isinstance(outcome, _LAST)
        if isinstance(outcome, AmpdError):
            raise outcome
        return outcome


@dataclass(slots=True, eq=False)
class Decoding:
    """What a generation has that a prefill has not."""

    output: Output
    chooser: Chooser
    slo: Slo


@dataclass(slots=True, eq=False)
class Request:
    """Instants on the engine's clock; 0.0: not yet."""

    turn: int
    """Prefills are computed in this order: the arrival number, and 0 when it has begun. Under a
    rule that goes by sessions, those that have not begun go by `session_began_s` first."""
    tokens: array[int]
    """The prompt, an output that came with it included, and what was generated since."""
    most_blocks: int
    """What it may come to hold."""
    decoding: Decoding | None
    """None: a prefill, whose result is lent."""
    hashes: list[bytes]
    """Of the whole blocks of `tokens`, as far as they were needed."""
    session_began_s: float = 0.0
    mailbox: Mailbox = field(default_factory=Mailbox)
    prompt_tokens: int = 0
    own_output_tokens: int = 0
    """Of the prompt: output that came with the request."""
    admitted: bool = False
    """It holds blocks."""
    blocks: list[int] = field(default_factory=list)
    places: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """`blocks`, for numpy."""
    promised_blocks: int = 0
    """Blocks that it may still take: nobody else gets them."""
    kv_tokens: int = 0
    """Leading tokens whose KV is there."""
    cached_blocks: int = 0
    """Leading blocks that the prefix cache has been told of."""
    cached_tokens: int = 0
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    read_start_s: float = 0.0
    read_end_s: float = 0.0
    compute_start_s: float = 0.0
    first_token_s: float = 0.0
    pin: Pin | None = None
    """Of the finished request: dropped again if its reader does not take it."""

    @property
    def left_tokens(self) -> int:
        """Prompt tokens to compute."""
        return self.prompt_tokens - self.kv_tokens

    @property
    def history_tokens(self) -> int:
        """KV that it did not have to compute."""
        return self.cached_tokens + self.pulled_tokens

    def prefill_stats(self) -> PrefillStats:
        """Once the prompt is in."""
        return PrefillStats(
            computed_tokens=self.prompt_tokens - self.history_tokens,
            cached_tokens=self.cached_tokens,
            pulled_tokens=self.pulled_tokens,
            pulled_bytes=self.pulled_bytes,
            read_start_s=self.read_start_s,
            read_end_s=self.read_end_s,
            compute_start_s=self.compute_start_s,
            compute_end_s=self.first_token_s,
        )
