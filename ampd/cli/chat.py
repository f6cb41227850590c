"""`ampdctl chat`: a multi-round session at the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer

from ampd.cli.console import say
from ampd.cli.lines import typed_lines
from ampd.cli.options import TENANT, Address, Tenant, connect
from ampd.cli.output import seconds
from ampd.cli.runner import run_async
from ampd.cli.views import reason_name, route_name
from ampd.client import AmpdClient
from ampd.core.errors import AmpdError
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_service_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    ToolCalled,
    ToolReturned,
)
from ampd.wire.times import duration_from_proto

MAX_RESULT_CHARS: Final = 500
"""Shown of a tool's result."""

_HELP: Final = "/undo takes the last round back, /quit or Ctrl-D ends the session"


def chat(
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    tools: Annotated[
        list[str] | None,
        typer.Option("--tool", help="A tool that the server may run; repeat it for more."),
    ] = None,
    address: Address = "",
    tenant: Tenant = TENANT,
) -> None:
    """Talk to the model in one session, a round per line."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)

    async def talk() -> None:
        async with connect(address, tenant) as client:
            session = await client.create_session(labels={"client": "ampdctl chat"})
            say(f"session {session.session_id}: {_HELP}")
            try:
                await _Conversation(client, session.session_id, sampling, system, tools or []).run()
            finally:
                await client.close_session(session.session_id)

    run_async(talk())


@dataclass(slots=True)
class _Conversation:
    client: AmpdClient
    session_id: str
    sampling: SamplingParams
    system: str
    tools: list[str]
    lengths: list[int] = field(default_factory=lambda: [0])
    """History tokens before the first line and after the rounds of each: where /undo goes back
    to."""

    async def run(self) -> None:
        self._prompt()
        async for line in typed_lines():
            if line == "/quit":
                return
            if line == "/undo":
                self._undo()
            elif line.startswith("/"):
                say(_HELP)
            elif line.strip():
                await self._round(line)
            self._prompt()

    async def _round(self, line: str) -> None:
        messages = [ChatMessage(role="user", content=line)]
        if self.system and self.lengths[-1] == 0:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        request = GenerateRequest(
            session_id=self.session_id,
            messages=ChatMessages(messages=messages),
            keep_history_tokens=self.lengths[-1],
            sampling=self.sampling,
            server_tools=self.tools,
        )
        placed = RoundPlaced()
        try:
            async for event in self.client.generate(request):
                match event:
                    case RoundPlaced():
                        placed = event
                    case TokenBatch():
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                    case RoundFinished():
                        if not event.continues:
                            self.lengths.append(event.history_tokens)
                        sys.stdout.write("\n")
                        say(_summary(placed, event))
                    case ToolCalled():
                        say(f"[call {event.name or '(unreadable)'} {event.arguments}]")
                    case ToolReturned():
                        say(_returned(event))
        except AmpdError as error:
            if not sys.stdin.isatty():
                # A script's next lines build on this answer, and it reads the exit code.
                raise
            # The history is what it was: the conversation can go on.
            say(f"error: {error.message}")

    def _undo(self) -> None:
        if len(self.lengths) == 1:
            say("there is no round to take back")
        else:
            self.lengths.pop()
            say(f"the next round goes on from {self.lengths[-1]} tokens")

    def _prompt(self) -> None:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()


def _returned(event: ToolReturned) -> str:
    """A tool's result, cut to a few lines."""
    shown = event.content[:MAX_RESULT_CHARS]
    more = "" if len(shown) == len(event.content) else " ..."
    took = seconds(duration_from_proto(event.duration))
    return f"[{event.name} {'failed' if event.failed else 'returned'} after {took}: {shown}{more}]"


def _summary(placed: RoundPlaced, finished: RoundFinished) -> str:
    usage, timings = finished.usage, finished.timings
    return (
        f"[{route_name(placed.route)}: {reason_name(placed.reason)}; "
        f"{usage.history_tokens} + {usage.increment_tokens} + {usage.output_tokens} tokens; "
        f"TTFT {seconds(duration_from_proto(timings.ttft))}, "
        f"ITL {seconds(duration_from_proto(timings.itl_mean))}; "
        f"SLO {'met' if finished.attained else 'missed'}]"
    )
