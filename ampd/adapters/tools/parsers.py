"""The formats in which models write tool calls: built in, or registered by installed packages.

[project.entry-points."ampd.tool_call_parsers"]
my_format = "my_package.parsers:my_format"    # an ampd.core.tool_calls.ToolCallParser
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final

from ampd.core import tool_calls
from ampd.core.errors import invalid_field
from ampd.core.tool_calls import ToolCallParser

GROUP: Final = "ampd.tool_call_parsers"

BUILT_IN: Final[Mapping[str, ToolCallParser]] = {tool_calls.HERMES: tool_calls.hermes}


def load_parser(name: str) -> ToolCallParser:
    """The parser of that name. AmpdError INVALID_FIELD `tool_call_parser`: nobody has it, or it
    cannot be loaded."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    registered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in registered:
        known = ", ".join([*BUILT_IN, *sorted(registered)])
        raise invalid_field("tool_call_parser", f"{name!r} is none of {known}")
    try:
        parser: ToolCallParser = registered[name].load()
    except (ImportError, AttributeError) as error:
        raise invalid_field("tool_call_parser", f"{name!r} cannot be loaded: {error}") from error
    return parser
