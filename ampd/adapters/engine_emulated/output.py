"""The output of one request: when it ends, its text, and how much of it is kept."""

from __future__ import annotations

from ampd.adapters.emulated_vocabulary import EOS_TOKEN_ID, detokenise
from ampd.core.model import FinishReason, SamplingParams


class Output:
    """Takes tokens one by one until it has ended; the rules are vLLM's."""

    def __init__(
        self, sampling: SamplingParams, *, context_left_tokens: int, text_chars: int = 0
    ) -> None:
        """`text_chars` is what of the text is known already."""
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        """None: not ended."""
        self.stop_reason = ""
        self._sampling = sampling
        self._most_tokens = min(sampling.max_tokens, context_left_tokens)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._text = ""
        self._known_chars = text_chars
        self._ends: list[int] = []
        """Characters of the text behind each token."""
        held_back = bool(sampling.stop) and not sampling.include_stop_str_in_output
        self._held_chars = max(map(len, sampling.stop)) - 1 if held_back else 0

    def add(self, token_id: int) -> None:
        """The next token; nothing after the end."""
        if self.finish_reason is not None:
            return
        sampling = self._sampling
        self.tokens += 1
        if self.tokens >= self._most_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.tokens >= sampling.min_tokens:
            if token_id == EOS_TOKEN_ID and not sampling.ignore_eos:
                self.finish_reason = FinishReason.STOP
            elif token_id in self._stop_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, str(token_id)
        if self.finish_reason is not FinishReason.STOP or sampling.include_stop_str_in_output:
            self._text += detokenise(token_id, skip_special_tokens=sampling.skip_special_tokens)
        if sampling.stop:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(len(self._text))
            if self.tokens > sampling.min_tokens and len(self._text) > before:
                self._find_stop(before)

    def _find_stop(self, before: int) -> None:
        """Cut at the stop string that ends first in the text behind `before`."""
        found = []
        for order, stop in enumerate(self._sampling.stop):
            start = self._text.find(stop, max(0, before + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), order, stop))
        if not found:
            return
        end, _, stop = min(found)
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        if not self._sampling.include_stop_str_in_output:
            end -= len(stop)
        self._text = self._text[:end]

    def take_text(self) -> str:
        """The text that may be told and was not. What may be the beginning of a stop string is
        told when it turns out to be none, or at the end."""
        end = len(self._text)
        if self.finish_reason is None:
            end -= self._held_chars
        start, self._known_chars = self._known_chars, max(self._known_chars, end)
        return self._text[start : max(start, end)]

    @property
    def kept_tokens(self) -> int:
        """The tokens less those that a stop string cut off: all that reach beyond what is left
        of the text, and those without text before them."""
        if not self._ends or self._ends[-1] <= len(self._text):
            return self.tokens
        kept = kept_chars = 0
        for count, chars in enumerate(self._ends, 1):
            if chars > len(self._text):
                break
            if chars > kept_chars:
                kept, kept_chars = count, chars
        return kept
