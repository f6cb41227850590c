"""Cost model (spec 3): predicted seconds of prefills, decode steps, mixed steps and KV moves.

Each function is a sum of non-negative coefficients times features that never fall as sizes
grow, so no prediction is negative or non-monotone, inside the fitted range or beyond it. A
*hinge* `(at, slope)` adds `slope * max(0, x - at)`: the function is a continuous chain of
lines, the last of which extrapolates. Fitting lives in `ampd.profiling.fit`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from math import isfinite, sqrt
from typing import Final

Hinges = tuple[tuple[float, float], ...]
"""(size in tokens or sequences, extra seconds per unit beyond it), sizes ascending."""

MAX_MIXED_CHUNK_TOKENS: Final = 1 << 20
"""What `mixed_chunk` answers where a chunk costs nothing at all."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """base + token x increment + history_token x history
    + attention_pair x increment x (history + increment/2) + hinges(increment), in seconds."""

    base_s: float = 0.0
    token_s: float = 0.0
    history_token_s: float = 0.0
    attention_pair_s: float = 0.0
    hinges: Hinges = ()

    def __post_init__(self) -> None:
        _check(astuple(self)[:-1], self.hinges)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """base + sequence x batch + context_token x context + hinges(batch), in seconds."""

    base_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    hinges: Hinges = ()

    def __post_init__(self) -> None:
        _check(astuple(self)[:-1], self.hinges)


@dataclass(frozen=True, slots=True)
class MixedCost:
    """base + token x chunk + sequence x batch + context_token x context
    + attention_pair x chunk x (history + chunk/2) + hinges(chunk), in seconds."""

    base_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    attention_pair_s: float = 0.0
    hinges: Hinges = ()

    def __post_init__(self) -> None:
        _check(astuple(self)[:-1], self.hinges)


@dataclass(frozen=True, slots=True)
class KvCost:
    """base + token x tokens, in seconds (alpha-beta); moving nothing takes no time."""

    base_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        _check(astuple(self), ())


@dataclass(frozen=True, slots=True)
class CostModel:
    """The four functions of one (model, device, TP degree). The default costs nothing."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    decode: DecodeCost = field(default_factory=DecodeCost)
    mixed: MixedCost = field(default_factory=MixedCost)
    kv: KvCost = field(default_factory=KvCost)

    def t_pre(self, history_tokens: int, increment_tokens: int) -> float:
        """Seconds to prefill `increment_tokens` over `history_tokens` cached ones."""
        c = self.prefill
        seconds = (
            c.base_s
            + c.token_s * increment_tokens
            + c.history_token_s * history_tokens
            + c.attention_pair_s * increment_tokens * (history_tokens + increment_tokens / 2)
        )
        return seconds + _hinged(c.hinges, increment_tokens) if c.hinges else seconds

    def t_dec(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` sequences with `context_tokens` in all."""
        c = self.decode
        seconds = c.base_s + c.sequence_s * batch + c.context_token_s * context_tokens
        return seconds + _hinged(c.hinges, batch) if c.hinges else seconds

    def t_mixed(
        self, chunk_tokens: int, chunk_history_tokens: int, batch: int, context_tokens: int
    ) -> float:
        """Seconds of one step that decodes a batch and prefills a chunk."""
        c = self.mixed
        seconds = (
            c.base_s
            + c.token_s * chunk_tokens
            + c.sequence_s * batch
            + c.context_token_s * context_tokens
            + c.attention_pair_s * chunk_tokens * (chunk_history_tokens + chunk_tokens / 2)
        )
        return seconds + _hinged(c.hinges, chunk_tokens) if c.hinges else seconds

    def mixed_chunk(
        self, limit_s: float, chunk_history_tokens: int, batch: int, context_tokens: int
    ) -> int:
        """The most chunk tokens whose mixed step stays within `limit_s` (0: none).

        The exact inverse of `t_mixed`: the result fits and one token more does not, up to
        MAX_MIXED_CHUNK_TOKENS.
        """
        if limit_s >= self.t_mixed(
            MAX_MIXED_CHUNK_TOKENS, chunk_history_tokens, batch, context_tokens
        ):
            return MAX_MIXED_CHUNK_TOKENS
        c = self.mixed
        slack = limit_s - self.t_mixed(0, chunk_history_tokens, batch, context_tokens)
        if slack < 0:
            return 0
        # On the segment behind the hinges passed so far the time is
        # offset + slope x chunk + q x chunk^2: solve it, and go on while the root lies
        # beyond the next hinge.
        slope = c.token_s + c.attention_pair_s * chunk_history_tokens
        offset = 0.0
        root = _root(slack, slope, c.attention_pair_s / 2)
        for at, extra in c.hinges:
            if root <= at:
                break
            slope += extra
            offset -= extra * at
            root = _root(slack - offset, slope, c.attention_pair_s / 2)
        chunk = int(min(root, MAX_MIXED_CHUNK_TOKENS))
        # The root is off by rounding alone: at most a token.
        while self.t_mixed(chunk + 1, chunk_history_tokens, batch, context_tokens) <= limit_s:
            chunk += 1
        while chunk and self.t_mixed(chunk, chunk_history_tokens, batch, context_tokens) > limit_s:
            chunk -= 1
        return chunk

    def t_kv(self, tokens: int) -> float:
        """Seconds to move the KV of that many tokens between two workers."""
        return self.kv.base_s + self.kv.token_s * tokens if tokens else 0.0


def _root(slack: float, slope: float, q: float) -> float:
    """The x >= 0 with slope x + q x^2 = slack, in the form that does not cancel."""
    divisor = slope + sqrt(slope * slope + 4 * q * slack)
    return 2 * slack / divisor if divisor > 0 else float(MAX_MIXED_CHUNK_TOKENS)


def _hinged(hinges: Hinges, size: int) -> float:
    seconds = 0.0
    for at, slope in hinges:
        if size <= at:
            break
        seconds += slope * (size - at)
    return seconds


def _check(coefficients: tuple[float, ...], hinges: Hinges) -> None:
    """ValueError unless the function is finite, non-negative and monotone everywhere."""
    for value in (*coefficients, *(value for hinge in hinges for value in hinge)):
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"a cost must be finite and not negative, not {value}")
    places = [at for at, _ in hinges]
    if places != sorted(set(places)):
        raise ValueError(f"hinges must ascend: {places}")
