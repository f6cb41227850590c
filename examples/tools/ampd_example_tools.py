"""A server-side tool, and a parser that calls it for models that cannot."""

from __future__ import annotations

import json

from ampd.core.tool_calls import ParsedCall


def word_count(text: str) -> dict[str, int]:
    """How long a text is. It runs in a process of its own, and may be async."""
    return {"words": len(text.split()), "characters": len(text)}


def count_answers(text: str) -> list[ParsedCall]:
    """Takes every answer of the model as a call of `word_count` with it: to see tools at work
    without a model that calls any."""
    return [ParsedCall("word_count", json.dumps({"text": text}))]
