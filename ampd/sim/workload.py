"""What sessions do: the rounds of each, drawn from distributions or read from a trace.

A workload is drawn ahead of any decision, from a seed: all policies see the very same sessions.
Lengths are tokens, times seconds.
"""

from __future__ import annotations

import csv
import gzip
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import exp, floor, log
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from ampd.core.errors import invalid_field
from ampd.core.model import Slo

PREFILL_SIGMA: Final = 0.8
DECODE_SIGMA: Final = 0.6
NEGATIVE_BINOMIAL_SUCCESSES: Final = 3
AGENT_SLO: Final = Slo(ttft_s=3.0, itl_s=0.05)
MAX_AGENT_CONTEXT_TOKENS: Final = 131_072
"""Recorded agent rounds that are longer are cut to it."""
NOMINAL_TOKEN_S: Final = 0.03
"""How long an output token is taken to need where a session's length in time is estimated."""
MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens of one hash id in Mooncake's traces."""
MAX_TRACE_BYTES: Final = 1 << 30
AGENT_SESSIONS: Final = "agent-sessions"
DATA: Final = files("ampd.sim") / "data"


class RoundPlan(NamedTuple):
    """One round: it begins `think_s` after the round before it has ended, and not before
    `earliest_s`. `keep_tokens`: history that it keeps (None: all of it)."""

    think_s: float
    increment_tokens: int
    output_tokens: int
    keep_tokens: int | None = None
    earliest_s: float = 0.0


class SessionPlan(NamedTuple):
    """A session: its first round begins at `arrival_s`. One that is `alive` is in the middle of
    its life at the start, with so much history, resident where there is room."""

    session_id: str
    arrival_s: float
    rounds: tuple[RoundPlan, ...]
    history_tokens: int = 0
    alive: bool = False


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A length or time by its mean; `sigma` is that of its logarithm (0: fixed)."""

    mean: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return self.mean * exp(rng.gauss(-self.sigma * self.sigma / 2, self.sigma))

    def tokens(self, rng: random.Random) -> int:
        """One value as a length of at least one token."""
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True)
class Workload(ABC):
    """Sessions by name; `sessions` draws them."""

    name: str
    slo: Slo

    steady = False
    """Whether it starts in the middle of its sessions' lives: what is counted is then rounds
    of an interval, not whole sessions that arrived in it."""

    @abstractmethod
    def sessions(self, *, rate: float, horizon_s: float, seed: int) -> Iterator[SessionPlan]:
        """First those that are alive at the start, then those that arrive before `horizon_s`,
        `rate` a second, in the order of arrival. INVALID_FIELD for a rate of 0, but of a trace."""


@dataclass(frozen=True, slots=True)
class DrawnWorkload(Workload):
    """Sessions with independent rounds and Poisson arrivals. The lengths of the rounds add up
    to the means per session."""

    mean_rounds: float
    fixed_rounds: bool
    initial: LogNormal
    increment: LogNormal
    output: LogNormal
    think: LogNormal

    def sessions(self, *, rate: float, horizon_s: float, seed: int) -> Iterator[SessionPlan]:
        """See `Workload.sessions`."""
        rng = random.Random(seed)  # noqa: S311 - a model, not a secret
        for number, arrival_s in enumerate(_poisson(rng, rate, horizon_s)):
            rounds = [RoundPlan(0.0, self.initial.tokens(rng), self.output.tokens(rng))]
            for _ in range(self._round_count(rng) - 1):
                think_s = self.think.draw(rng)
                rounds.append(
                    RoundPlan(think_s, self.increment.tokens(rng), self.output.tokens(rng))
                )
            yield SessionPlan(f"s{number}", arrival_s, tuple(rounds))

    def _round_count(self, rng: random.Random) -> int:
        if self.fixed_rounds:
            return round(self.mean_rounds)
        # One round, and a negative binomial number of further ones: a sum of geometrics.
        odds = (self.mean_rounds - 1) / NEGATIVE_BINOMIAL_SUCCESSES
        if odds <= 0:
            return 1
        scale = log(odds / (1 + odds))
        return 1 + sum(
            floor(log(1.0 - rng.random()) / scale) for _ in range(NEGATIVE_BINOMIAL_SUCCESSES)
        )


@dataclass(frozen=True, slots=True)
class RecordedSessions(Workload):
    """Recorded sessions, drawn with replacement, with Poisson arrivals, in steady state: at the
    start as many are alive as the rate implies, each at a random point of its life."""

    recorded: tuple[tuple[RoundPlan, ...], ...]
    clipped_rounds: int
    """Rounds that were cut to the longest context."""

    steady = True

    def sessions(self, *, rate: float, horizon_s: float, seed: int) -> Iterator[SessionPlan]:
        """See `Workload.sessions`."""
        rng = random.Random(seed)  # noqa: S311 - a model, not a secret
        lives_s = [_life_s(rounds) for rounds in self.recorded]
        alive = round(rate * sum(lives_s) / len(lives_s))
        for number in range(alive):
            # One that is found alive is long-lived the more likely.
            (index,) = rng.choices(range(len(lives_s)), lives_s)
            yield self._resumed(f"w{number}", self.recorded[index], rng.random() * lives_s[index])
        for number, arrival_s in enumerate(_poisson(rng, rate, horizon_s)):
            yield SessionPlan(f"s{number}", arrival_s, rng.choice(self.recorded))

    @staticmethod
    def _resumed(session_id: str, rounds: tuple[RoundPlan, ...], age_s: float) -> SessionPlan:
        """The session from its first round on that begins after `age_s` of its life."""
        history, begins_s = 0, 0.0
        for index, plan in enumerate(rounds):
            begins_s += plan.think_s
            # The last round is what is left of a session that is in it.
            if begins_s >= age_s or index == len(rounds) - 1:
                arrival_s = max(0.0, begins_s - age_s)
                return SessionPlan(session_id, arrival_s, rounds[index:], history, alive=True)
            kept = history if plan.keep_tokens is None else plan.keep_tokens
            history = kept + plan.increment_tokens + plan.output_tokens
            begins_s += plan.output_tokens * NOMINAL_TOKEN_S
        raise ValueError("a session has rounds")


@dataclass(frozen=True, slots=True)
class TimedTrace(Workload):
    """Sessions with their recorded instants; a rate above 0 compresses or stretches time so
    that as many sessions arrive a second."""

    recorded: tuple[SessionPlan, ...]

    def sessions(self, *, rate: float, horizon_s: float, seed: int) -> Iterator[SessionPlan]:
        """See `Workload.sessions`; nothing is random."""
        factor = 1.0
        last_s = self.recorded[-1].arrival_s
        if rate > 0 and last_s > 0:
            factor = len(self.recorded) / (rate * last_s)
        for plan in self.recorded:
            arrival_s = plan.arrival_s * factor
            if arrival_s >= horizon_s:
                break
            rounds = tuple(
                item._replace(earliest_s=item.earliest_s * factor) for item in plan.rounds
            )
            yield plan._replace(arrival_s=arrival_s, rounds=rounds)


def workload_names() -> tuple[str, ...]:
    """The built-in workloads."""
    return (*_traces(), AGENT_SESSIONS)


def open_workload(source: str, *, slo: Slo | None = None) -> Workload:
    """The built-in workload of that name, or the trace in that file (`.jsonl`: Mooncake's
    format; `.csv` or `.csv.gz`: recorded sessions), with its own SLO unless one is given.

    Raises INVALID_FIELD naming what is wrong, and OSError where a file cannot be read.
    """
    if source in _traces():
        workload: Workload = _drawn(source, _traces()[source])
    elif source == AGENT_SESSIONS:
        workload = _agent_sessions()
    elif source.endswith(".jsonl"):
        workload = _mooncake(Path(source))
    elif source.endswith((".csv", ".csv.gz")):
        workload = _recorded(source, Path(source).read_bytes(), source.endswith(".gz"))
    else:
        known = ", ".join(workload_names())
        raise invalid_field(source, f"no such workload; known: {known}, or a .jsonl or .csv file")
    return workload if slo is None else replace(workload, slo=slo)


def _poisson(rng: random.Random, rate: float, horizon_s: float) -> Iterator[float]:
    if rate <= 0:
        raise invalid_field("rate", "must be above 0 sessions a second")
    now_s = rng.expovariate(rate)
    while now_s < horizon_s:
        yield now_s
        now_s += rng.expovariate(rate)


# --- the paper's workloads ----------------------------------------------------------------


@cache
def _traces() -> dict[str, Any]:
    traces: dict[str, Any] = yaml.safe_load((DATA / "traces.yaml").read_text(encoding="utf-8"))
    return traces


def _given(value: Any) -> Any:
    """What is assumed counts like what is known."""
    return value["assumed"] if isinstance(value, dict) and "assumed" in value else value


def _drawn(name: str, trace: dict[str, Any]) -> DrawnWorkload:
    rounds, think, slo = _given(trace["rounds"]), _given(trace["think_s"]), _given(trace["slo"])
    fixed = "fixed" in rounds
    mean_rounds = float(rounds["fixed"] if fixed else rounds["mean"])
    prefill, share = _given(trace["prefill_tokens"]), _given(trace["initial_share"])
    return DrawnWorkload(
        name=name,
        slo=Slo(ttft_s=slo["ttft_s"], itl_s=slo["itl_s"]),
        mean_rounds=mean_rounds,
        fixed_rounds=fixed,
        initial=LogNormal(prefill * share, PREFILL_SIGMA),
        increment=LogNormal(prefill * (1 - share) / (mean_rounds - 1), PREFILL_SIGMA),
        output=LogNormal(_given(trace["decode_tokens"]) / mean_rounds, DECODE_SIGMA),
        think=LogNormal(think["mean"], think["sigma"]),
    )


# --- recorded sessions --------------------------------------------------------------------

_COLUMNS: Final = ("session", "round", "input_tokens", "reusable_prefix_tokens", "output_tokens")


@cache
def _agent_sessions() -> RecordedSessions:
    packed = (DATA / "agent_sessions.csv.gz").read_bytes()
    return _recorded(AGENT_SESSIONS, packed, compressed=True)


def _recorded(name: str, content: bytes, compressed: bool) -> RecordedSessions:
    """Sessions of a CSV file with `_COLUMNS` and `gap_s` (empty: none), rounds in order. A
    reusable prefix that is shorter than the history is a rewind."""
    try:
        text = (gzip.decompress(content) if compressed else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise invalid_field(name, str(error)) from error
    reader = csv.DictReader(text.splitlines())
    sessions: dict[str, list[RoundPlan]] = {}
    histories: dict[str, int] = {}
    clipped = 0
    for line, row in enumerate(reader, start=2):
        try:
            session, given, reusable, output = (
                row["session"],
                int(row["input_tokens"]),
                int(row["reusable_prefix_tokens"]),
                max(1, int(row["output_tokens"])),
            )
            # A round that began before the one before it had ended comes at once.
            gap_s = max(0.0, float(row.get("gap_s") or 0.0))
        except (KeyError, TypeError, ValueError) as error:
            needed = ", ".join(_COLUMNS)
            raise invalid_field(f"{name}: line {line}", f"needs {needed} ({error})") from error
        if given < 1 or reusable < 0:
            raise invalid_field(
                f"{name}: line {line}", "lengths are not negative, inputs not empty"
            )
        output = min(output, MAX_AGENT_CONTEXT_TOKENS // 2)
        prompt = min(given, MAX_AGENT_CONTEXT_TOKENS - output)
        clipped += prompt < given
        history = histories.get(session, 0)
        keep = min(reusable, history, prompt - 1)
        plan = RoundPlan(gap_s, prompt - keep, output, None if keep == history else keep)
        sessions.setdefault(session, []).append(plan)
        histories[session] = prompt + output
    if not sessions:
        raise invalid_field(name, "holds no session")
    recorded = tuple(tuple(rounds) for rounds in sessions.values())
    return RecordedSessions(name, AGENT_SLO, recorded, clipped)


def _life_s(rounds: Sequence[RoundPlan]) -> float:
    return sum(plan.think_s + plan.output_tokens * NOMINAL_TOKEN_S for plan in rounds)


# --- Mooncake's traces --------------------------------------------------------------------


class _Request(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(slots=True)
class _Chain:
    rounds: list[RoundPlan]
    hash_ids: list[int]
    arrival_s: float
    history_tokens: int


def _mooncake(path: Path) -> TimedTrace:
    """Requests become sessions: one that holds the last full block of an earlier request goes
    on with that session, keeping the blocks that both have. (Hash ids name a block together
    with all before it.)"""
    if path.stat().st_size > MAX_TRACE_BYTES:
        raise invalid_field(str(path), f"larger than {MAX_TRACE_BYTES} bytes")
    decoder = msgspec.json.Decoder(_Request)
    chains: list[_Chain] = []
    by_last: dict[int, _Chain] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                request = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise invalid_field(f"{path}: line {number}", str(error)) from error
            if request.input_length < 1 or request.output_length < 0 or request.timestamp < 0:
                raise invalid_field(f"{path}: line {number}", "lengths must be positive")
            _continue(request, chains, by_last)
    if not chains:
        raise invalid_field(str(path), "holds no request")
    plans = [
        SessionPlan(f"s{index}", chain.arrival_s, tuple(chain.rounds))
        for index, chain in enumerate(chains)
    ]
    plans.sort(key=lambda plan: plan.arrival_s)
    return TimedTrace(path.name, AGENT_SLO, tuple(plans))


def _continue(request: _Request, chains: list[_Chain], by_last: dict[int, _Chain]) -> None:
    at_s, ids, prompt = request.timestamp / 1000, request.hash_ids, request.input_length
    output = max(1, request.output_length)
    chain = next((by_last.pop(block) for block in reversed(ids) if block in by_last), None)
    if chain is None:
        chain = _Chain([RoundPlan(0.0, prompt, output)], ids, at_s, prompt + output)
        chains.append(chain)
    else:
        both = 0
        for old, new in zip(chain.hash_ids, ids, strict=False):
            if old != new:
                break
            both += 1
        keep = min(both * MOONCAKE_BLOCK_TOKENS, prompt - 1, chain.history_tokens)
        kept = None if keep == chain.history_tokens else keep
        chain.rounds.append(RoundPlan(0.0, prompt - keep, output, kept, at_s))
        chain.hash_ids, chain.history_tokens = ids, prompt + output
    full = min(prompt // MOONCAKE_BLOCK_TOKENS, len(ids))
    if full:
        by_last[ids[full - 1]] = chain
