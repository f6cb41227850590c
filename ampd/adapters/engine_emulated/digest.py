"""The arithmetic of the emulated model: KV of tokens, and a digest of KV. All modulo 2^64.

    F(0) = 0                              the digest of no KV
    c(p) = mix(token, p) + A F(p)         the key of position p: KV depends on all KV before it
    word(p, j) = c(p) M[j]                its stored words, every M[j] odd
    F(n) = sum of P[p] W[j] word(p, j)    over the stored words of all p < n; P, W odd

Every word has an odd weight, so no change of a single word leaves F as it was. Since
sum(W[j] M[j]) = 2, F(p+1) = F(p) (1 + 2 A P[p]) + 2 P[p] mix(token, p): a linear recurrence,
which numpy solves for a whole chunk by one running sum (`keys`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MASK: Final = (1 << 64) - 1
KEY_SUM: Final = 2
"""What M and W come to. Even, as a sum of an even number of odd products must be: so tokens
do not depend on how many bytes are stored of each."""
STATE_WEIGHT: Final = 0xD1B54A32D192ED03
"""A."""
TABLE_STEP: Final = 4096
"""Tables hold a multiple of so many positions."""

_TOKEN: Final = 0x9E3779B97F4A7C15
_POSITION: Final = 0xC2B2AE3D27D4EB4F
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_WEIGHT_SALT: Final = 0x5851F42D4C957F2D


def finish(value: int) -> int:
    """A good mixture of the bits of a 64-bit number (the last step of splitmix64)."""
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK
    return value ^ (value >> 31)


def mix(token: int, position: int) -> int:
    """What a token at a position brings to its own key."""
    return finish((token * _TOKEN + (position + 1) * _POSITION) & MASK)


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What depends on positions alone, for positions below `size`."""

    size: int
    positions: Words
    weights: Words
    """P."""
    growth: Words
    """Product of the (1 + 2 A P) of all positions before; one more than `size`."""
    shrink: Words
    """Their inverses."""
    steps: Words
    """2 P[p] / growth[p + 1]."""


def tables(positions: int) -> Tables:
    """Tables for at least so many positions."""
    return _tables(-(-max(positions, 1) // TABLE_STEP))


@lru_cache(maxsize=8)
def _tables(steps: int) -> Tables:
    size = steps * TABLE_STEP
    index = np.arange(1, size + 1, dtype=np.uint64)
    positions = index * np.uint64(_POSITION)
    weights = _finish(positions + np.uint64(_WEIGHT_SALT)) | np.uint64(1)
    factors = np.ones(size + 1, dtype=np.uint64)
    factors[1:] += weights * np.uint64((2 * STATE_WEIGHT) & MASK)
    growth = np.cumprod(factors, dtype=np.uint64)
    shrink = growth.copy()
    for _ in range(6):  # Newton's iteration doubles the right bits: 3, 6, ... 192
        shrink *= np.uint64(2) - growth * shrink
    return Tables(size, positions, weights, growth, shrink, weights * np.uint64(2) * shrink[1:])


@lru_cache(maxsize=8)
def multipliers(words: int) -> tuple[Words, Words]:
    """M and W of so many words per token, an even number."""
    index = np.arange(1, words + 1, dtype=np.uint64)
    spread = _finish(index * np.uint64(_TOKEN)) | np.uint64(1)
    weights = _finish(index * np.uint64(_MIX_1)) | np.uint64(1)
    rest = (KEY_SUM - int(np.dot(weights[:-1], spread[:-1]))) & MASK
    weights[-1] = rest * pow(int(spread[-1]), -1, 1 << 64) & MASK
    return spread, weights


@lru_cache(maxsize=8)
def word_weights(positions: int, words: int) -> Words:
    """P[p] W[j] of at least so many positions, flat."""
    _, weights = multipliers(words)
    return np.outer(tables(positions).weights, weights).ravel()


def keys(tokens: NDArray[np.uint32], start: int, state: int) -> tuple[Words, int]:
    """The keys of `tokens` at the positions from `start` on, `state` being F(start), and F
    behind them."""
    end = start + len(tokens)
    table = tables(end)
    mixed = tokens * np.uint64(_TOKEN)
    mixed += table.positions[start:end]
    mixed = _finish(mixed)
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    (table.steps[start:end] * mixed).cumsum(out=sums[1:])
    sums += np.uint64(state * int(table.shrink[start]) & MASK)
    sums *= table.growth[start : end + 1]
    return mixed + sums[:-1] * np.uint64(STATE_WEIGHT), int(sums[-1])


def next_key(token: int, position: int, state: int, table: Tables) -> tuple[int, int]:
    """`keys` of one token, with a table that has its position: its key, and F behind it."""
    key = (mix(token, position) + STATE_WEIGHT * state) & MASK
    return key, (state + 2 * key * int(table.weights[position])) & MASK


def _finish(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
