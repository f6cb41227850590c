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
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        self._ignore_eos = sampling.ignore_eos
        self._most_tokens = min(sampling.max_tokens, context_left_tokens)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._skip_special = sampling.skip_special_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._text = ""
        """All of it with stop strings; otherwise what was not told."""
        self._unknown_from = text_chars
        """Where in `_text` the text begins that was not told."""
        self._ends: list[int] = []
        """Characters of the text behind each token; only with stop strings."""
        held_back = bool(sampling.stop) and not sampling.include_stop_str_in_output
        self._held_chars = max(map(len, sampling.stop)) - 1 if held_back else 0

    def add(self, token_id: int) -> None:
        """The next token; nothing after the end."""
        if self.finish_reason is not None:
            return
        self.tokens += 1
        if self.tokens >= self._most_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.tokens >= self._min_tokens:
            if token_id == EOS_TOKEN_ID and not self._ignore_eos:
                self.finish_reason = FinishReason.STOP
            elif token_id in self._stop_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, str(token_id)
        if self.finish_reason is not FinishReason.STOP or self._include_stop:
            self._text += detokenise(token_id, skip_special_tokens=self._skip_special)
        if self._stop:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(len(self._text))
            if self.tokens > self._min_tokens and len(self._text) > before:
                self._find_stop(before)

    def _find_stop(self, before: int) -> None:
        """Cut at the stop string that ends first in the text behind `before`."""
        found = []
        for order, stop in enumerate(self._stop):
            start = self._text.find(stop, max(0, before + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), order, stop))
        if not found:
            return
        end, _, stop = min(found)
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        if not self._include_stop:
            end -= len(stop)
        self._text = self._text[:end]

    def take_text(self) -> str:
        """The text that may be told and was not. What may be the beginning of a stop string is
        told when it turns out to be none, or at the end."""
        start, end = self._unknown_from, len(self._text)
        if self.finish_reason is None:
            end -= self._held_chars
        if end <= start:
            return ""
        text = self._text[start:end]
        if self._stop:
            self._unknown_from = end
        else:
            self._text, self._unknown_from = "", 0
        return text

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
