"""Cost model (spec 3): predicted seconds of prefills, decode steps, mixed steps and KV moves.

Each function is a sum of non-negative coefficients times features that never fall as sizes
grow, so no prediction is negative or non-monotone, inside the fitted range or beyond it. A
*hinge* `(at, slope)` adds `slope * max(0, x - at)`: the function is a continuous chain of
lines, the last of which extrapolates. A hinge may take slope away (experts that are loaded
once, whatever the batch), but never so much that a line falls. Fitting lives in
`ampd.profiling.fit`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from math import inf, isfinite, sqrt
from typing import Final

Hinges = tuple[tuple[float, float], ...]
"""(size in tokens or sequences, change of the slope there in seconds per unit), sizes
ascending; no slope is negative."""

MAX_MIXED_CHUNK_TOKENS: Final = 1 << 20
"""What `mixed_chunk` answers where a chunk costs nothing at all."""


class Link(StrEnum):
    """What lies between two workers: the class of link that KV takes."""

    SAME_HOST = "same_host"
    CROSS_HOST = "cross_host"


def link_between(host: str, other_host: str) -> Link:
    """The link between workers on these hosts; a host without a name is none of the others."""
    return Link.SAME_HOST if host and host == other_host else Link.CROSS_HOST


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
        _check(astuple(self)[:-1], self.token_s, self.hinges)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """base + sequence x batch + context_token x context + hinges(batch), in seconds."""

    base_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    hinges: Hinges = ()

    def __post_init__(self) -> None:
        _check(astuple(self)[:-1], self.sequence_s, self.hinges)


@dataclass(frozen=True, slots=True)
class MixedCost:
    """base + token x tokens + sequence x batch + context_token x context
    + attention_pair x chunk x (history + chunk/2) + hinges(tokens), in seconds.

    `tokens` is the chunk; with `batch_counts` chunk + batch: all that goes through the linear
    layers, where the step turns from reading weights to computing."""

    base_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    attention_pair_s: float = 0.0
    hinges: Hinges = ()
    batch_counts: bool = False

    def __post_init__(self) -> None:
        _check(astuple(self)[:-2], self.token_s, self.hinges)


@dataclass(frozen=True, slots=True)
class KvCost:
    """base + token x tokens, in seconds (alpha-beta); moving nothing takes no time."""

    base_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        _check(astuple(self))

    def scaled(self, factor: float) -> KvCost:
        """Every time multiplied by `factor`."""
        return KvCost(self.base_s * factor, self.token_s * factor)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The four functions of one (model, device, TP degree). The default costs nothing."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    decode: DecodeCost = field(default_factory=DecodeCost)
    mixed: MixedCost = field(default_factory=MixedCost)
    kv: KvCost = field(default_factory=KvCost)
    """Between two hosts; and within one, where no other line is known."""
    kv_same_host: KvCost | None = None
    """Within one host; None: as between two."""

    def t_pre(self, history_tokens: int, increment_tokens: int) -> float:
        """Seconds to prefill `increment_tokens` over `history_tokens` cached ones."""
        c = self.prefill
        return (
            c.base_s
            + _line(c.token_s, c.hinges, increment_tokens)
            + c.history_token_s * history_tokens
            + c.attention_pair_s * increment_tokens * (history_tokens + increment_tokens / 2)
        )

    def t_dec(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` sequences with `context_tokens` in all."""
        c = self.decode
        return c.base_s + _line(c.sequence_s, c.hinges, batch) + c.context_token_s * context_tokens

    def t_mixed(
        self, chunk_tokens: int, chunk_history_tokens: int, batch: int, context_tokens: int
    ) -> float:
        """Seconds of one step that decodes a batch and prefills a chunk."""
        c = self.mixed
        return (
            c.base_s
            + _line(c.token_s, c.hinges, chunk_tokens + batch * c.batch_counts)
            + c.sequence_s * batch
            + c.context_token_s * context_tokens
            + c.attention_pair_s * chunk_tokens * (chunk_history_tokens + chunk_tokens / 2)
        )

    def mixed_chunk(
        self,
        limit_s: float,
        chunk_history_tokens: int,
        batch: int,
        context_tokens: int,
        most_tokens: int = MAX_MIXED_CHUNK_TOKENS,
    ) -> int:
        """The most chunk tokens whose mixed step stays within `limit_s` (0: none).

        The exact inverse of `t_mixed`: the result fits and one token more does not, up to
        `most_tokens`.
        """

        def step_s(chunk: int) -> float:
            return self.t_mixed(chunk, chunk_history_tokens, batch, context_tokens)

        # Solved for the chunk, which rounding may miss by one; then by bisection.
        before = batch * self.mixed.batch_counts
        guess = self._mixed_chunk(limit_s - step_s(0), chunk_history_tokens, before)
        if guess >= most_tokens:
            if step_s(most_tokens) <= limit_s:
                return most_tokens
        elif guess >= 1:
            chunk = int(guess)
            if step_s(chunk) <= limit_s < step_s(chunk + 1):
                return chunk
        return bisect_right(range(1, most_tokens + 1), limit_s, key=step_s)

    def _mixed_chunk(self, spare_s: float, history_tokens: int, before: int) -> float:
        """The chunk that takes `spare_s` more than none does, `before` being what the chain of
        lines counts without it: the root of a quadratic on the segment where it lies."""
        c = self.mixed
        pair_s = c.attention_pair_s
        slope, start = c.token_s, 0.0
        for place, change in c.hinges:
            at = place - before
            if at <= 0:
                slope += change
                continue
            there_s = slope * (at - start) + pair_s * (
                at * (history_tokens + at / 2) - start * (history_tokens + start / 2)
            )
            if there_s >= spare_s:
                break
            spare_s -= there_s
            start = at
            slope += change
        linear = slope + pair_s * (history_tokens + start)
        root = linear * linear + 2 * pair_s * spare_s
        if root <= 0 or spare_s < 0:
            return inf if spare_s >= 0 else 0.0
        return start + 2 * spare_s / (linear + sqrt(root))

    def t_kv(self, tokens: int, link: Link = Link.CROSS_HOST) -> float:
        """Seconds to move the KV of that many tokens between two workers over that link."""
        line = self.kv_line(link)
        return line.base_s + line.token_s * tokens if tokens else 0.0

    def kv_line(self, link: Link) -> KvCost:
        """The line of T_kv over that link."""
        if link is Link.SAME_HOST and self.kv_same_host is not None:
            return self.kv_same_host
        return self.kv

    def scaled(self, factor: float) -> CostModel:
        """Every time multiplied by `factor` (0: all is free)."""
        p, d, m = self.prefill, self.decode, self.mixed
        return CostModel(
            PrefillCost(
                p.base_s * factor,
                p.token_s * factor,
                p.history_token_s * factor,
                p.attention_pair_s * factor,
                _scaled(p.token_s, p.hinges, factor),
            ),
            DecodeCost(
                d.base_s * factor,
                d.sequence_s * factor,
                d.context_token_s * factor,
                _scaled(d.sequence_s, d.hinges, factor),
            ),
            MixedCost(
                m.base_s * factor,
                m.token_s * factor,
                m.sequence_s * factor,
                m.context_token_s * factor,
                m.attention_pair_s * factor,
                _scaled(m.token_s, m.hinges, factor),
                m.batch_counts,
            ),
            self.kv.scaled(factor),
            None if self.kv_same_host is None else self.kv_same_host.scaled(factor),
        )


def _line(slope: float, hinges: Hinges, size: int) -> float:
    """Seconds of a chain of lines from 0 to `size`, segment by segment: no rounding of what one
    segment costs can make a larger size cheaper."""
    seconds, start = 0.0, 0.0
    for at, change in hinges:
        if size <= at:
            break
        seconds += slope * (at - start)
        start = at
        slope += change
    return seconds + slope * (size - start)


def _scaled(slope: float, hinges: Hinges, factor: float) -> Hinges:
    """By the slopes behind the hinges: rounding leaves no flat line falling."""
    scaled, now = [], slope * factor
    for at, change in hinges:
        slope += change
        scaled.append((at, slope * factor - now))
        now += scaled[-1][1]
    return tuple(scaled)


def _check(coefficients: tuple[float, ...], slope: float = 0.0, hinges: Hinges = ()) -> None:
    """ValueError unless the function is finite, non-negative and monotone everywhere; `slope`
    is that of its first line."""
    for value in coefficients:
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"a cost must be finite and not negative, not {value}")
    places = [at for at, _ in hinges]
    if places != sorted(set(places)):
        raise ValueError(f"hinges must ascend: {places}")
    for at, change in hinges:
        slope += change
        if not (isfinite(at) and at >= 0 and isfinite(slope) and slope >= 0):
            raise ValueError(f"the slope must stay finite and not negative: {slope} behind {at}")
