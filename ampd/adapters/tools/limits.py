"""What a tool may take, whatever runs it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The bounds of one call."""

    timeout_s: float = 30.0
    """Longest run; then it is ended and has failed."""
    max_output_bytes: int = 64 * 1024
    """Of UTF-8; what is longer is cut."""


def cut(content: bytes, max_bytes: int) -> tuple[str, bool]:
    """The content as text of at most `max_bytes` of UTF-8, and whether it was longer. What is no
    UTF-8 becomes replacement characters; a character that the cut splits is left out."""
    longer = len(content) > max_bytes
    decoder = getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content[:max_bytes], final=not longer)
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text, longer
    # Replacement characters are longer than the bytes that they stand for.
    return encoded[:max_bytes].decode(errors="ignore"), True
