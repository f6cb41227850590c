"""Cost model (spec 3): predicted seconds of prefills, decode steps, mixed steps and KV moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    def t_pre(self, history_tokens: int, increment_tokens: int) -> float:
        """Seconds to prefill `increment_tokens` over `history_tokens` cached ones."""
        raise NotImplementedError

    def t_dec(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` sequences with `context_tokens` in all."""
        raise NotImplementedError

    def t_mixed(
        self, chunk_tokens: int, chunk_history_tokens: int, batch: int, context_tokens: int
    ) -> float:
        """Seconds of one step that decodes a batch and prefills a chunk."""
        raise NotImplementedError

    def mixed_chunk(
        self, limit_s: float, chunk_history_tokens: int, batch: int, context_tokens: int
    ) -> int:
        """The most chunk tokens whose mixed step stays within `limit_s` (0: none)."""
        raise NotImplementedError

    def t_kv(self, tokens: int) -> float:
        """Seconds to move the KV of that many tokens between two workers."""
        raise NotImplementedError
