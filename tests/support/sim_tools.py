"""Server-side tools of a simulated cluster. All about them follows from texts: which tools a model
calls from what it wrote, what a tool returns from its arguments, and the increment from that; so
clients know the rounds that follow without running anything.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Sequence
from typing import Final

from ampd.core.model import ToolCall, ToolReturn
from ampd.core.tool_calls import ParsedCall
from ampd.ports import ChatMessage, Tokens
from ampd.wire.generate import TOOL_ROLE

TOOLS: Final = ("search", "build")
CLIENTS_TOOL: Final = "ask_the_user"
"""One that the server has not: a round that calls it ends the stream."""
MEAN_S: Final = 0.3
MAX_MESSAGE_TOKENS: Final = 24
MAX_CALLS: Final = 2
"""Of one round."""
TOOL_ROUNDS: Final = 2
"""Rounds that may follow the first one."""


def parse(text: str) -> list[ParsedCall]:
    """What the model calls: it is its text's checksum that says so."""
    dice = random.Random(zlib.crc32(text.encode()))
    calls = []
    for number in range(dice.choice((0, 1, 1, MAX_CALLS))):
        kind = dice.random()
        arguments = f'{{"n": {dice.randrange(1000)}}}'
        if kind < 0.1:
            calls.append(ParsedCall("", arguments, f"call {number} cannot be read"))
        else:
            name = CLIENTS_TOOL if kind < 0.15 else dice.choice(TOOLS)
            calls.append(ParsedCall(name, arguments))
    return calls


def server_calls(text: str) -> list[ParsedCall]:
    """Those that the server runs: all or none."""
    calls = parse(text)
    clients = any(not call.problem and call.name not in TOOLS for call in calls)
    return [] if clients else calls


def returned(call: ParsedCall) -> ToolReturn:
    """What the model is told."""
    if call.problem:
        return ToolReturn(call.problem, failed=True)
    return _result(call.name, call.arguments)


def _result(name: str, arguments: str) -> ToolReturn:
    number = zlib.crc32(f"{name} {arguments}".encode())
    return ToolReturn(f"{name} found {number}", failed=number % 5 == 0)


def increment(calls: Sequence[ParsedCall]) -> list[int]:
    """The round behind these calls."""
    messages = [ChatMessage(TOOL_ROLE, returned(call).content, call.name) for call in calls]
    return list(SimTokenizer().encode_messages(messages, first=False, last_token_id=None))


class SimTokenizer:
    """Clients of the simulation send token ids; only what tools return is tokenised."""

    vocab_size = 1 << 16

    def encode_text(self, text: str, *, first: bool) -> Tokens:
        """Not used."""
        raise NotImplementedError

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, first: bool, last_token_id: int | None
    ) -> Tokens:
        """Some tokens, by role, name and content."""
        tokens = array("I")
        for message in messages:
            said = f"{message.role} {message.name} {message.content}"
            dice = random.Random(zlib.crc32(said.encode()))
            count = dice.randint(1, MAX_MESSAGE_TOKENS)
            tokens.extend(dice.randrange(300, 60_000) for _ in range(count))
        return tokens


class SimTools:
    """`ampd.ports.ToolRunner`: tools that take a while."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def names(self) -> tuple[str, ...]:
        """See the port."""
        return TOOLS

    async def run(self, call: ToolCall) -> ToolReturn:
        """See the port."""
        await asyncio.sleep(self._rng.expovariate(1 / MEAN_S))
        return _result(call.name, call.arguments)

    async def close(self) -> None:
        """Nothing is held."""
