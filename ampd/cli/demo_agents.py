"""The demo's agents: a scripted loop of rounds, with a real tool call before each of them.

The script decides which tool is called, whatever a small model writes; the tool really runs
and its result is the next round's increment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final

from ampd.cli.demo_report import RoundRow, round_row
from ampd.cli.demo_tools import Retriever, ToolError, calculate
from ampd.client import AmpdClient
from ampd.core.errors import AmpdError, ErrorReason
from ampd.v1.policy_pb2 import Policy
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_pb2 import Slo
from ampd.v1.session_service_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    ToolResult,
    ToolResults,
)
from ampd.wire.times import duration_from_proto

Progress = Callable[[str], None]

SEARCH: Final = "search"
CALCULATOR: Final = "calculator"

SYSTEM: Final = (
    "You are a research assistant. You answer questions about AMPD, a serving system for large "
    "language models, from the passages that the search tool finds in its documentation, and "
    "use the calculator for numbers. Answer in one short sentence."
)


@dataclass(frozen=True, slots=True)
class Topic:
    """What one agent looks into: its question and what it searches for, round by round."""

    question: str
    queries: tuple[str, ...]


TOPICS: Final = (
    Topic(
        "Where is a prefill executed, and who decides it?",
        ("where is a prefill routed", "local or remote prefill reason", "routing policy settings"),
    ),
    Topic(
        "How does the KV cache of a session move between workers?",
        ("KV transfer between workers", "history KV lazy read", "KV lease and release"),
    ),
    Topic(
        "What happens when a worker dies?",
        ("prefill worker dies", "decode worker failure rebuild", "coordinator dies shared store"),
    ),
    Topic(
        "How are the latency objectives measured?",
        ("time to first token SLO", "inter-token latency", "SLO attainment of sessions"),
    ),
    Topic(
        "How do I run AMPD on my machine?",
        ("make demo install", "ampdctl up local cluster", "settings flags environment"),
    ),
    Topic(
        "In what order does a prefill worker take its tasks?",
        ("prefill queue order", "reordering postponed tasks", "bounded queue full"),
    ),
    Topic(
        "What is kept in the shared store?",
        ("shared store keys", "session state compare and set", "worker heartbeat lease"),
    ),
    Topic(
        "How does a client talk to the coordinator?",
        ("session service Generate stream", "tool results increment", "error status retry"),
    ),
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool and what came of it."""

    tool: str
    argument: str
    result: str

    def __str__(self) -> str:
        return f"{self.tool}({self.argument!r})"


class Tools:
    """What the agents can call."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    def search(self, query: str, limit: int) -> ToolCall:
        """Passages of the documentation."""
        found = self._retriever.search(query, limit)
        return ToolCall(SEARCH, query, "\n\n".join(map(str, found)) or "nothing found")

    def calculate(self, expression: str) -> ToolCall:
        """The value of an arithmetic expression."""
        try:
            result = f"{expression} = {calculate(expression)}"
        except ToolError as error:
            result = f"error: {error}"
        return ToolCall(CALCULATOR, expression, result)


@dataclass(frozen=True, slots=True)
class Script:
    """What every agent of a run does."""

    rounds: int
    max_tokens: int
    kv_bytes_per_token: int
    """Of the model that is served: the calculator has something true to work out."""
    longest_pause_s: float = 0.0
    """Before a later round an agent takes up to this long: they do not stay in step."""

    def sampling(self) -> SamplingParams:
        """Greedy, so that runs can be compared."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """How a typical round goes while nothing else runs, in seconds: what the demo's SLO is a
    multiple of."""

    ttft_s: float
    predicted_ttft_s: float
    """By the home's cost model, which was measured at another time."""
    itl_s: float


class Agent:
    """One session, worked through by its script."""

    def __init__(
        self, client: AmpdClient, tools: Tools, script: Script, number: int, say: Progress
    ) -> None:
        self._client = client
        self._tools = tools
        self._script = script
        self._number = number
        self._name = f"agent-{number}"
        self._topic = TOPICS[number % len(TOPICS)]
        self._say = say
        self._random = random.Random(number)  # noqa: S311

    async def run(self, slo: Slo) -> tuple[list[RoundRow], AmpdError | None]:
        """All rounds one after the other, and what ended them early, if anything did."""
        rows: list[RoundRow] = []
        try:
            session = await self._client.create_session(slo=slo, labels={"agent": self._name})
            history_tokens = 0
            for index in range(self._script.rounds):
                if index:
                    await asyncio.sleep(self._random.uniform(0.0, self._script.longest_pause_s))
                call = self._call_tool(index, history_tokens)
                request = self._request(session.session_id, index, call)
                row, history_tokens = await self._round(index, request)
                rows.append(row)
                self._tell(row, call)
            await self._client.close_session(session.session_id)
        except AmpdError as error:
            self._say(f"{self._name} round {len(rows)} failed: {error}")
            return rows, error
        return rows, None

    def _call_tool(self, round_index: int, history_tokens: int) -> ToolCall:
        """Two searches, then a calculation, and again."""
        if round_index % 3 == 2:
            expression = f"{history_tokens} * {self._script.kv_bytes_per_token} / 2 ** 20"
            return self._tools.calculate(expression)
        query = next(islice(cycle(self._topic.queries), round_index, None))
        return self._tools.search(query, limit=1 + self._number % 2)

    def _request(self, session_id: str, round_index: int, call: ToolCall) -> GenerateRequest:
        sampling = self._script.sampling()
        if round_index == 0:
            question = f"{self._topic.question}\n\n{call.result}"
            opening = ChatMessages(
                messages=[
                    ChatMessage(role="system", content=SYSTEM),
                    ChatMessage(role="user", content=question),
                ]
            )
            return GenerateRequest(session_id=session_id, messages=opening, sampling=sampling)
        results = ToolResults(results=[ToolResult(name=call.tool, content=call.result)])
        return GenerateRequest(session_id=session_id, tool_results=results, sampling=sampling)

    async def _round(self, index: int, request: GenerateRequest) -> tuple[RoundRow, int]:
        placed, finished = await run_round(self._client, request)
        return round_row(self._name, index, placed, finished), finished.history_tokens

    def _tell(self, row: RoundRow, call: ToolCall) -> None:
        self._say(
            f"{row.session} round {row.round} after {call}: {row.route} "
            f"on {row.prefill_worker or row.decode_worker} ({row.reason})"
        )


async def run_round(
    client: AmpdClient, request: GenerateRequest
) -> tuple[RoundPlaced, RoundFinished]:
    """One round to its end: where it was prefilled at last, and how it went."""
    placed, finished = None, None
    async for event in client.generate(request):
        match event:
            case RoundPlaced():
                placed = event
            case RoundFinished():
                finished = event
            case TokenBatch():
                pass
    if placed is None or finished is None:
        raise AmpdError(ErrorReason.INTERNAL, "the stream ended before the round did")
    return placed, finished


async def calibrate(client: AmpdClient, tools: Tools, script: Script, policy: str) -> Unloaded:
    """Run a few typical rounds while nothing else runs; `policy` is in force afterwards.

    They run on the home, so that the prefill worker's statistics start empty: what the policy
    then decides comes from the agents' load alone.
    """
    await client.set_policy(Policy(name="always-local"))
    session = await client.create_session(labels={"agent": "calibration"})
    for query in _CALIBRATION_QUERIES:
        call = tools.search(query, limit=2)
        results = ToolResults(results=[ToolResult(name=call.tool, content=call.result)])
        request = GenerateRequest(
            session_id=session.session_id, tool_results=results, sampling=script.sampling()
        )
        await run_round(client, request)
    # The first round has warmed everything up.
    warm = (await client.explain(session.session_id))[1:]
    await client.close_session(session.session_id)
    await client.set_policy(Policy(name=policy))
    # The least is what the machine can do: whatever else it was busy with made the rest longer.
    return Unloaded(
        ttft_s=min(duration_from_proto(record.timings.ttft) for record in warm),
        predicted_ttft_s=min(
            duration_from_proto(record.decision.predicted_ttft) for record in warm
        ),
        itl_s=min(duration_from_proto(record.timings.itl_mean) for record in warm),
    )


_CALIBRATION_QUERIES: Final = tuple(topic.queries[-1] for topic in TOPICS[-4:])
