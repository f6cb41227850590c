"""Which token comes next, as a function of a digest of the KV and the sampling parameters."""

from __future__ import annotations

from typing import Final

from ampd.adapters.emulated_vocabulary import EOS_TOKEN_ID, FIRST_WORD_TOKEN_ID
from ampd.adapters.engine_emulated.digest import MASK, finish
from ampd.core.errors import invalid_field
from ampd.core.model import SamplingParams

FORCING_BIAS: Final = 50.0
"""A token with at least this bias is what comes; a smaller bias does nothing."""

_POSITION: Final = 0xA0761D6478BD642F
_SEED: Final = 0xE7037ED1A0B428DB


def check(sampling: SamplingParams, vocab_size: int) -> None:
    """AmpdError INVALID_FIELD `sampling...`: a value that vLLM would refuse as well."""
    s = sampling
    _require(s.max_tokens >= 1, "max_tokens", "at least 1")
    _require(0 <= s.min_tokens <= s.max_tokens, "min_tokens", "in 0..max_tokens")
    _require(s.temperature >= 0, "temperature", "at least 0")
    _require(0 < s.top_p <= 1, "top_p", "in (0, 1]")
    _require(s.top_k >= 0, "top_k", "at least 0")
    _require(0 <= s.min_p <= 1, "min_p", "in [0, 1]")
    _require(abs(s.presence_penalty) <= 2, "presence_penalty", "in [-2, 2]")
    _require(abs(s.frequency_penalty) <= 2, "frequency_penalty", "in [-2, 2]")
    _require(s.repetition_penalty > 0, "repetition_penalty", "positive")
    _require("" not in s.stop, "stop", "without an empty string")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(s, name):
            _require(0 <= token_id < vocab_size, name, f"of token ids below {vocab_size}")


def _require(holds: bool, name: str, range_: str) -> None:
    if not holds:
        raise invalid_field(f"sampling.{name}", f"must be {range_}")


class Chooser:
    """The choices of one request.

    `temperature` 0: a function of the digest alone. Otherwise of the seed and the place in the
    output as well. `allowed_token_ids`, `min_tokens` (no stop token before) and a forcing
    `logit_bias` hold; `top_p`, `top_k`, `min_p`, penalties and `bad_words` have no effect.
    Nothing below FIRST_WORD_TOKEN_ID comes unless it is allowed or forced by name.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int, own_seed: int) -> None:
        """`own_seed` is used where the parameters have none."""
        self._min_tokens = sampling.min_tokens
        self._allowed = sampling.allowed_token_ids
        self._size = len(self._allowed) or vocab_size - FIRST_WORD_TOKEN_ID
        self._seed: int | None = None
        if sampling.temperature > 0:
            seed = own_seed if sampling.seed is None else sampling.seed
            self._seed = finish((seed * _SEED) & MASK)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.add(EOS_TOKEN_ID)
        self._stops = stops
        forced = [
            (-bias, token_id)
            for token_id, bias in sampling.logit_bias.items()
            if bias >= FORCING_BIAS and (not self._allowed or token_id in self._allowed)
        ]
        self._forced = [token_id for _, token_id in sorted(forced)]

    def choose(self, digest: int, position: int, output_tokens: int) -> int:
        """The token at `position` of the sequence, number `output_tokens` of the output."""
        banned = self._stops if output_tokens < self._min_tokens else ()
        for token_id in self._forced:
            if token_id not in banned:
                return token_id
        value = finish((digest + (position + 1) * _POSITION) & MASK)
        if self._seed is not None:
            value = finish(value ^ finish((self._seed + output_tokens * _POSITION) & MASK))
        index = value * self._size >> 64
        token_id = self._token(index)
        if token_id in banned:
            # The next one that is no stop token; if all are, this one.
            for step in range(1, min(self._size, len(self._stops) + 1)):
                other = self._token((index + step) % self._size)
                if other not in banned:
                    return other
        return token_id

    def _token(self, index: int) -> int:
        return self._allowed[index] if self._allowed else FIRST_WORD_TOKEN_ID + index
