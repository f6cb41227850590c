"""What a prefill worker still has of the sessions that it has computed for: least recently used
goes first. Kept per session, not per block: sessions share nothing."""

from __future__ import annotations


class PrefixCache:
    """Leading tokens by session, `capacity_tokens` in all."""

    __slots__ = ("_capacity_tokens", "_held_tokens", "_tokens")

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._held_tokens = 0
        self._tokens: dict[str, int] = {}

    def use(self, session_id: str, prefix_tokens: int) -> int:
        """How many of the session's first `prefix_tokens` are here; it is used now."""
        tokens = self._tokens.pop(session_id, 0)
        if not tokens:
            return 0
        self._tokens[session_id] = tokens
        return min(tokens, prefix_tokens)

    def tokens(self, session_id: str) -> int:
        """How many of the session's tokens are here; not a use."""
        return self._tokens.get(session_id, 0)

    def put(self, session_id: str, tokens: int) -> None:
        """The session's first `tokens` are here now, and no others of it. What alone is larger
        than the cache is not kept."""
        self.drop(session_id)
        if tokens > self._capacity_tokens:
            return
        self._tokens[session_id] = tokens
        self._held_tokens += tokens
        while self._held_tokens > self._capacity_tokens:
            self.drop(next(iter(self._tokens)))

    def drop(self, session_id: str) -> None:
        """Forget a session, known or not."""
        self._held_tokens -= self._tokens.pop(session_id, 0)
