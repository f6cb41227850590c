"""What must hold whatever is done to a cluster of processes. Nothing here acts: it is told what
clients saw, compares it with the oracle, and keeps count.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from chaos_oracles import Expected, Oracle

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import SamplingParams
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.session_pb2 import Session
from ampd.wire.enums import FINISH_REASON

RETRIABLE: Final = frozenset(
    {
        ErrorReason.NO_DECODE_WORKER,
        ErrorReason.WORKER_UNAVAILABLE,
        ErrorReason.STORE_UNAVAILABLE,
        ErrorReason.DRAINING,
        ErrorReason.SESSION_CONFLICT,
    }
)
"""What faults may show a client: UNAVAILABLE, and ABORTED."""
FULL: Final = frozenset({ErrorReason.KV_EXHAUSTED, ErrorReason.QUEUE_FULL})
"""RESOURCE_EXHAUSTED: only with a hint."""
MAX_VIOLATIONS: Final = 50
"""More say nothing new."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One round as its client wants it."""

    session: str
    request_id: str
    increment: tuple[int, ...]
    keep: int | None
    sampling: SamplingParams

    def prompt(self, history: list[int]) -> list[int]:
        """History and increment."""
        return [*self.kept(history), *self.increment]

    def kept(self, history: list[int]) -> list[int]:
        """What it keeps of the history."""
        return history if self.keep is None else history[: self.keep]


@dataclass(slots=True)
class Seen:
    """What one Generate call told."""

    at: str
    """The coordinator's address."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    placed: list[pb.RoundPlaced] = field(default_factory=list)
    placed_behind_tokens: int = 0
    finished: pb.RoundFinished | None = None
    error: AmpdError | None = None
    dropped: str = ""
    """Why the client broke it off."""
    after_end: int = 0
    """Events behind the end."""

    @property
    def end(self) -> str:
        """How it ended, in a word."""
        if self.finished is not None:
            return "finished"
        return self.error.reason.value if self.error is not None else self.dropped or "silence"


class Judge:
    """Every token and every end that a client sees."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._expected: dict[tuple[str, int], Expected] = {}
        self._started_s = time.monotonic()
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_s

    def violate(self, what: str) -> None:
        """A promise is broken."""
        line = f"{self.elapsed_s:7.2f} s: {what}"
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(line)
        print(f"  BROKEN {line}", flush=True)

    async def expected(self, ask: Ask, history: list[int]) -> Expected:
        """The round's whole output over that history."""
        key = (ask.request_id, len(history))
        if key not in self._expected:
            self._expected[key] = await self._oracle.expect(ask.prompt(history), ask.sampling)
        return self._expected[key]

    def forget(self, ask: Ask) -> None:
        """The round is over for good."""
        for key in [key for key in self._expected if key[0] == ask.request_id]:
            del self._expected[key]

    async def after(self, ask: Ask, history: list[int]) -> list[int]:
        """The history behind the round."""
        expected = await self.expected(ask, history)
        return ask.prompt(history) + expected.tokens[: expected.kept_output_tokens]

    async def saw(self, ask: Ask, histories: list[list[int]], seen: Seen) -> list[list[int]]:
        """One call has ended. Those of the histories that agree with what it told."""
        self.counts["rebuilt"] += any(placed.history_rebuilt for placed in seen.placed)
        self.counts["resumed_in_stream"] += seen.placed_behind_tokens
        if seen.after_end:
            self._broken(ask, seen, f"{seen.after_end} events behind the end")
        if seen.error is None and seen.finished is None and not seen.dropped:
            self._broken(ask, seen, "the stream ended without a word")
        if not seen.placed:
            if seen.tokens or seen.finished is not None:
                self._broken(ask, seen, "tokens without a placement")
            return histories
        agree = [h for h in histories if await self._agrees(ask, h, seen)]
        if not agree:
            await self._explain(ask, histories, seen)
            return histories
        if seen.finished is not None:
            await self._judge_finished(ask, agree[0], seen)
        return agree

    def told(
        self, what: str, error: AmpdError, *, allowed: frozenset[ErrorReason] = RETRIABLE
    ) -> None:
        """A call was refused: one of those that a client may retry, or it is a violation."""
        self.errors[error.reason.value] += 1
        if error.reason in FULL:
            if error.retry_after_s is None:
                self.violate(f"{what}: {error.reason} without a hint when to try again")
        elif error.reason not in allowed:
            self.violate(f"{what}: {error.reason}: {error.message}")

    def found(self, session: Session, histories: list[list[int]]) -> None:
        """A session as it is told between two rounds."""
        lengths = sorted({len(history) for history in histories})
        if session.history_tokens not in lengths:
            self.violate(
                f"session {session.session_id} has {session.history_tokens} tokens of history, "
                f"its client knows of {lengths}"
            )

    # --- how ---------------------------------------------------------------------------------

    async def _agrees(self, ask: Ask, history: list[int], seen: Seen) -> bool:
        kept = len(ask.kept(history))
        told = {(placed.history_tokens, placed.increment_tokens) for placed in seen.placed}
        if told != {(kept, len(ask.increment))}:
            return False
        expected = (await self.expected(ask, history)).tokens
        if seen.finished is not None:
            return seen.tokens == expected
        return seen.tokens == expected[: len(seen.tokens)]

    async def _judge_finished(self, ask: Ask, history: list[int], seen: Seen) -> None:
        finished = seen.finished
        assert finished is not None
        expected = await self.expected(ask, history)
        usage = finished.usage
        told = {
            "history": usage.history_tokens,
            "increment": usage.increment_tokens,
            "output": usage.output_tokens,
            "kept output": usage.kept_output_tokens,
            "history behind it": finished.history_tokens,
            "reason": finished.finish_reason,
        }
        kept = len(ask.kept(history))
        right = {
            "history": kept,
            "increment": len(ask.increment),
            "output": len(expected.tokens),
            "kept output": expected.kept_output_tokens,
            "history behind it": kept + len(ask.increment) + expected.kept_output_tokens,
            "reason": FINISH_REASON.to_proto(expected.finish_reason),
        }
        if told != right:
            self._broken(ask, seen, f"told {told}, not {right}")
        if expected.text is not None and seen.text != expected.text:
            self._broken(ask, seen, f"the text {seen.text!r}, not {expected.text!r}")

    async def _explain(self, ask: Ask, histories: list[list[int]], seen: Seen) -> None:
        """What is wrong with a stream that agrees with no history."""
        told = sorted({(p.history_tokens, p.increment_tokens) for p in seen.placed})
        lines = []
        for history in histories:
            expected = (await self.expected(ask, history)).tokens
            same = _common(seen.tokens, expected)
            lines.append(
                f"{len(ask.kept(history))} of {len(history)} tokens kept: {same} of "
                f"{len(seen.tokens)} told tokens right, {len(expected)} expected; told from there "
                f"{seen.tokens[same : same + 8]}, not {expected[same : same + 8]}"
            )
        homes = [f"{p.decode_worker}<-{p.prefill_worker or 'itself'}" for p in seen.placed]
        self._broken(
            ask,
            seen,
            f"told (history, increment) {told} at {homes}, increment {len(ask.increment)}, keep "
            f"{ask.keep}, {ask.sampling}; known: {'; or '.join(lines)}",
        )

    def _broken(self, ask: Ask, seen: Seen, what: str) -> None:
        self.violate(f"{ask.request_id} of {ask.session} at {seen.at} ({seen.end}): {what}")


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
