"""Finding the tool calls in what a model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

HERMES: Final = "hermes"
"""The default format, that of Hermes and Qwen models."""

_BLOCK: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as the model wrote it. With `problem` it could not be read: the name is empty,
    `arguments` is what the model wrote, and the problem is what the model is told of it."""

    name: str
    arguments: str
    """A JSON object."""
    problem: str = ""


ToolCallParser = Callable[[str], Sequence[ParsedCall]]
"""The calls in the whole text of a round, in its order. A pure function: a repeated request
parses the same text again and must find the same calls. It raises nothing."""


def hermes(text: str) -> list[ParsedCall]:
    """`<tool_call>{"name": "...", "arguments": {...}}</tool_call>`, any number of them.

    A block that the text's end cuts off counts as well (a stop string may have taken its closing
    tag). A block that cannot be read is a call with a `problem`, so that the model can write
    it again. Arguments may be left out (none), or be a string that holds the JSON object.
    """
    return [_read(block.strip()) for block in _BLOCK.findall(text)]


def _read(block: str) -> ParsedCall:
    try:
        call = _json_object(block, "the call")
        name = call.get("name")
        if not (isinstance(name, str) and name):
            raise ValueError('its "name" must be the name of a tool')
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            arguments = _json_object(arguments, '"arguments"')
        if not isinstance(arguments, dict | None):
            raise ValueError('its "arguments" must be a JSON object')
    except (ValueError, RecursionError) as error:
        return ParsedCall("", block, f"This tool call cannot be read: {error}.")
    return ParsedCall(name, json.dumps(arguments or {}))


def _json_object(text: str, what: str) -> dict[str, object]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
