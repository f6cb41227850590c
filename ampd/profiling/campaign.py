"""`ampdctl profile run`: a full measurement of a live engine, in minutes (spec 3).

The grid is adaptive. Sizes grow as long as one point of them fits into the time there is. A
coarse grid comes first, the cheapest points before the others; then points between, near those
that surprised most, until new points are met before the fit has seen them or the time is up.
Every point is measured several times, more often where the times scatter, and counts with its
median. Between two groups of points one and the same small prefill is measured: groups around
which it was slow were disturbed by other work on the machine; they are measured again at the
end, as are those that scatter most, and do not count. In between, points of random sizes are
measured that no fit sees: the errors that a profile states are those on them.

All that was measured is in the journal; what is there is not measured again.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Protocol

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import KvHandle
from ampd.ports import Clock, Engine, StepSample, Tokens
from ampd.profiling.fit import (
    MIN_SAMPLES,
    KvSample,
    fit_decode,
    fit_kv,
    fit_mixed,
    fit_prefill,
    predicted_s,
)
from ampd.profiling.journal import Entry, Journal, Point
from ampd.profiling.load import EngineLoad, Stream, whole_prefill

PREFILL: Final = "prefill"
DECODE: Final = "decode"
MIXED: Final = "mixed"
KV: Final = "kv"
"""Kinds of points."""
BATCH: Final = "batch"
"""Decode and mixed steps of one batch: measured together."""

PREFILL_SHARE: Final = 0.25
KV_SHARE: Final = 0.06
AGAIN_SHARE: Final = 0.15
"""Of the budget: for prefills alone, for KV transfers, for what is measured again. What they
leave is for decode and mixed steps."""
LARGEST_SHARE: Final = 0.15
"""Of its part that one point may take; larger ones are not measured."""
LARGEST_BATCH_SHARE: Final = 0.25
"""The same for a batch, with all that is measured beside it."""
SMALLEST_TOKENS: Final = 16
LARGEST_TOKENS: Final = 131_072
MAX_HISTORIES: Final = 10
LEAST_HISTORY_TOKENS: Final = 64
LEAST_CONTEXT_TOKENS: Final = 64
LARGEST_CONTEXT_TOKENS: Final = 16_384
"""Of one stream: each is prefilled before it decodes."""
LEAST_POINTS: Final = 4
"""The smallest of each grid are measured whatever they take: without them nothing is known."""
COARSE: Final = 4
"""From one size of the coarse grid to the next; the fine one halves that."""
UNKNOWN_GROWTH: Final = 1.5
"""What a first larger prefill may take of what its tokens would cost in proportion."""
GRID_PER_HELD_OUT: Final = 2
"""Points of the grid between two that are held out."""
LEAST_HELD_OUT: Final = 12
"""Points to hold out of each kind, if a part's time allows ..."""
LAST_DRAWS: Final = 20
"""... and so many more are drawn for it."""
REPEATS: Final = 3
MAX_REPEATS: Final = 7
QUIET_SPREAD: Final = 0.04
"""Times that scatter less need no more repeats; nor does what has taken its share of time."""
KV_PASSES: Final = 3
"""Over all transfers, if their part's time allows."""
NOISY_SPREAD: Final = 0.10
"""Points that scatter more are measured again at the end."""
KNOWN_ERROR: Final = 0.03
KNOWN_WINDOW: Final = 6
"""When of so many new points the median is met better, before they were fitted, no more are
needed."""
REFERENCE_TOKENS: Final = 32
REFERENCES: Final = 3
"""The small prefill, and how often it is measured for its median."""
USUAL: Final = 0.25
"""The quantile of all references that a calm machine has ..."""
DISTURBED: Final = 1.25
"""... and how much more is a sign of other work."""
DECODE_STEPS: Final = 9
WARM_UP_TOKENS: Final = 2
"""Of every stream, before its steps count."""
PROBES: Final = 6
LEAST_PROBES: Final = 2
"""Chunks of different sizes that are prefilled beside one batch: fewer where they take long."""
STEPS_PER_PROBE: Final = 3
"""The chunk's, and those that pass between two of them."""

Sizes = tuple[int, int]
"""(increment, history) of a prefill, (sequences, context of each) of a batch, (tokens, 0)."""
Progress = Callable[[str, float], None]
"""Hears what was measured, and how many seconds are spent."""


class Lender(Protocol):
    """Another engine of the same kind, whose KV can be read."""

    async def lend(self, tokens: Tokens) -> KvHandle:
        """Compute the KV of the tokens (all but at most the last) and lend it."""
        ...

    async def release(self, kv: KvHandle) -> None:
        """Let go of it. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a measurement may take: seconds in all, and sequences of one step."""

    budget_s: float = 300.0
    max_batch: int = 64


async def measure_points(
    engine: Engine,
    journal: Journal,
    limits: Limits,
    *,
    lender: Lender | None = None,
    progress: Progress = lambda text, spent_s: None,
    clock: Clock = time.monotonic,
) -> None:
    """Measure an otherwise idle engine until its costs are known or the time is spent; the
    points are in the journal. Without a `lender` no KV transfers are measured.

    The engine is left as it was found, also when this is cancelled. Raises what the engine
    raises, and ENGINE_FAILED when its steps take no time.
    """
    campaign = _Campaign(engine, journal, limits, progress, clock)
    # All is free by it, so no chunk is cut for the sake of the streams beside it.
    engine.use_cost_model(CostModel())
    try:
        await campaign.prefills()
        if lender is not None:
            await campaign.transfers(lender)
        await campaign.batches()
        await campaign.noisy_ones(lender)
    finally:
        await campaign.close()


def merged(journal: Journal) -> list[Point]:
    """All points; one that was measured again has the times of both. What was measured while
    the machine was disturbed is left out, unless hardly anything of its kind would be left."""
    limit_s = _calm_limit_s(journal)
    calm = _by_name(entry for entry in journal if entry.reference_s <= limit_s)
    every = _by_name(journal)
    kinds = [(point.kind, point.held_out) for point in calm.values()]
    return [
        calm.get(name, point)
        for name, point in every.items()
        if name in calm or kinds.count((point.kind, point.held_out)) < LEAST_POINTS
    ]


def disturbed(journal: Journal) -> int:
    """How many groups of points were measured while other work disturbed the machine."""
    limit_s = _calm_limit_s(journal)
    return sum(entry.reference_s > limit_s for entry in journal)


def _calm_limit_s(journal: Journal) -> float:
    references = sorted(entry.reference_s for entry in journal)
    return DISTURBED * references[int(USUAL * len(references))] if references else 0.0


def _by_name(entries: Iterable[Entry]) -> dict[str, Point]:
    points: dict[str, Point] = {}
    for entry in entries:
        for point in entry.points:
            known = points.get(point.name)
            if known is not None:
                seconds = known.seconds + point.seconds
                points[point.name] = replace(known, seconds=seconds)
            else:
                points[point.name] = point
    return points


def as_sample(point: Point) -> StepSample:
    """The point with the median of its times."""
    return StepSample(
        point.chunk_tokens,
        point.chunk_history_tokens,
        point.batch,
        point.context_tokens,
        median(point.seconds),
    )


def spread(seconds: Sequence[float]) -> float:
    """How much times scatter: their median distance from the median, relative to it."""
    middle = median(seconds)
    return median(abs(one - middle) for one in seconds) / middle if middle else 0.0


class _Campaign:
    """One run of it."""

    def __init__(
        self, engine: Engine, journal: Journal, limits: Limits, progress: Progress, clock: Clock
    ) -> None:
        self._engine = engine
        # Prompts that no cache knows, not secrets.
        self._load = EngineLoad(engine, random.Random())  # noqa: S311
        self._journal = journal
        self._limits = limits
        self._progress = progress
        self._clock = clock
        self._block = engine.info.block_tokens
        self._longest = min(
            engine.info.max_model_tokens - 1, self._load.kv_tokens - 1, LARGEST_TOKENS
        )
        self._seen: list[Point] = []
        """In the order of this run."""
        self._known: dict[str, tuple[int, CostModel | None]] = {}
        """By kind: what so many points of it say."""
        self._base: Tokens | None = None
        self._base_kv: KvHandle | None = None
        """The history of all that has one."""
        self._base_s = 0.0
        """What computing it took: it is in no entry."""
        self._histories: list[int] = []
        self._reference_s = 0.0
        """The last one; 0: none yet."""
        self._most_batch_s = 0.0

    async def close(self) -> None:
        """Let go of all that is held."""
        if self._base_kv is not None:
            await self._load.release(self._base_kv)
        await self._load.settle()

    # --- the parts ------------------------------------------------------------------------

    async def prefills(self) -> None:
        """T_pre over increments and histories."""
        part_s = PREFILL_SHARE * self._limits.budget_s
        alone = [(size, 0) for size in _sizes(SMALLEST_TOKENS, self._longest, COARSE)]
        await self._survey(PREFILL, part_s, alone, [], self._prefill_cost_s, self._prefill, None)
        increments = [point.chunk_tokens for point in self._seen if point.kind == PREFILL]
        largest = max(increments)
        self._histories = self._affordable_histories(LARGEST_SHARE * part_s)
        fine_increments = _sizes(increments[0], largest, 2)
        longest = self._longest
        coarse = [(i, h) for i in increments for h in self._histories[::-2] if i + h <= longest]
        fine = [(i, h) for i in fine_increments for h in (0, *self._histories) if i + h <= longest]

        def draw(numbers: random.Random) -> Sizes:
            increment = _log_uniform(numbers, increments[0], largest)
            return increment, self._random_history(numbers, increment)

        await self._survey(PREFILL, part_s, coarse, fine, self._prefill_cost_s, self._prefill, draw)

    async def transfers(self, lender: Lender) -> None:
        """T_kv over tokens."""
        part_s = KV_SHARE * self._limits.budget_s
        grid = [(size, 0) for size in _sizes(self._block, self._longest - 1, 2)]

        async def transfer(sizes: Sizes, held_out: bool, name: str = "") -> list[Point]:
            return await self._transfer(lender, sizes, held_out, name)

        def draw(numbers: random.Random) -> Sizes:
            known = [point.chunk_tokens for point in self._seen if point.kind == KV]
            return _log_uniform(numbers, self._block, max(known)), 0

        await self._survey(KV, part_s, grid, [], self._prefill_cost_s, transfer, draw)
        # A read is over when somebody looks: what else runs on the hosts shows for seconds.
        for number in range(1, KV_PASSES):
            for entry in [e for e in self._journal if e.key.startswith(f"{KV} ")]:
                name = f"again {number} {entry.key}"
                spent_s = sum(e.took_s for e in self._journal if f"{KV} " in e.key)
                if self._journal.get(name) is not None or spent_s + entry.took_s <= part_s:
                    await transfer(*_planned(entry.key), name)

    async def batches(self) -> None:
        """T_dec over sequences and contexts, and T_mixed with chunks beside them."""
        budget_s = self._limits.budget_s
        spent_s = sum(e.took_s for e in self._journal if not e.key.startswith(f"{BATCH} "))
        part_s = max(0.0, (1 - AGAIN_SHARE) * budget_s - spent_s - self._base_s)
        self._most_batch_s = LARGEST_BATCH_SHARE * part_s
        most_context = min(self._longest // 2, LARGEST_CONTEXT_TOKENS)
        least_context = min(LEAST_CONTEXT_TOKENS, most_context)
        sequences = _sizes(1, self._limits.max_batch, 2)
        contexts = _sizes(least_context, most_context, 2)
        fits = [(b, c) for b in sequences for c in contexts if self._fits(b, c)]
        coarse = [(b, c) for b, c in fits if b in sequences[::2] and c in contexts[::2]]

        def draw(numbers: random.Random) -> Sizes:
            known = [point for point in self._seen if point.kind == DECODE]
            most = max(point.batch for point in known)
            longest = max(point.context_tokens // point.batch for point in known)
            return _log_uniform(numbers, 1, most), _log_uniform(numbers, least_context, longest)

        await self._survey(BATCH, part_s, coarse, fits, self._batch_cost_s, self._batch, draw)

    async def noisy_ones(self, lender: Lender | None) -> None:
        """What scatters most is measured again: somebody else was busy then."""
        limit_s = _calm_limit_s(self._journal)
        worst: dict[str, float] = {}
        took = {entry.key: entry.took_s for entry in self._journal}
        for entry in list(self._journal):
            noise = max((spread(point.seconds) for point in entry.points), default=0.0)
            is_disturbed = entry.reference_s > limit_s
            if (is_disturbed or noise > NOISY_SPREAD) and not entry.key.startswith("again "):
                worst[entry.key] = noise + is_disturbed
        for key in sorted(worst, key=lambda one: -worst[one]):
            name, took_s = f"again {key}", took[key]
            if self._journal.get(name) is not None:
                continue
            if self._spent_s() + took_s > self._limits.budget_s:
                continue
            sizes, held_out = _planned(key)
            if key.startswith(KV):
                if lender is not None:
                    await self._transfer(lender, sizes, held_out, name)
            elif key.startswith(PREFILL):
                await self._prefill(sizes, held_out, name)
            else:
                await self._batch(sizes, held_out, name)

    # --- a survey -------------------------------------------------------------------------

    async def _survey(
        self,
        kind: str,
        part_s: float,
        coarse: Sequence[Sizes],
        fine: Sequence[Sizes],
        cost_s: Callable[[Sizes], float],
        measure: Callable[..., Awaitable[list[Point]]],
        draw: Callable[[random.Random], Sizes] | None,
    ) -> None:
        """Measure the grid as far as `part_s` reaches, and now and then a point that `draw`
        draws."""
        surprises: list[tuple[Sizes, float]] = []
        largest = LARGEST_BATCH_SHARE if kind == BATCH else LARGEST_SHARE

        def affordable(sizes: Sizes, *, held_out: bool = False) -> bool:
            if self._journal.get(_key(kind, sizes, held_out)) is not None:
                return True
            spent_s = sum(e.took_s for e in self._journal if e.key.startswith(f"{kind} "))
            return cost_s(sizes) <= min(largest * part_s, part_s - spent_s)

        def plan() -> Iterator[Sizes]:
            done: set[Sizes] = set()
            todo = set(coarse)
            while todo:
                sizes = min(todo, key=lambda one: (cost_s(one), one))
                if len(done) >= LEAST_POINTS and not affordable(sizes):
                    break
                todo.remove(sizes)
                done.add(sizes)
                yield sizes
            todo = set(fine) - done
            while affordable_ones := [one for one in todo if affordable(one)]:
                recent = [error for _, error in surprises[-KNOWN_WINDOW:]]
                if len(recent) == KNOWN_WINDOW and median(recent) < KNOWN_ERROR:
                    return
                sizes = max(affordable_ones, key=lambda one: (_interest(one, surprises), one))
                todo.remove(sizes)
                yield sizes

        async def hold_out(number: int) -> None:
            if draw is None:
                return
            sizes = draw(_numbers(f"{kind} {number}"))
            if self._holds(kind, sizes) and affordable(sizes, held_out=True):
                self._seen.extend(await measure(sizes, True))

        count = 0
        for count, sizes in enumerate(plan(), 1):
            points = await measure(sizes, False)
            if points:
                surprises.append((sizes, median(self._errors(points))))
            self._seen.extend(points)
            if count % GRID_PER_HELD_OUT == 0:
                await hold_out(count)
        for number in range(count + 1, count + 1 + LAST_DRAWS if count else 0):
            held_out = {p.name for p in self._seen if p.held_out and p.kind in (kind, DECODE)}
            if len(held_out) >= LEAST_HELD_OUT:
                break
            await hold_out(number)

    def _errors(self, points: Sequence[Point]) -> list[float]:
        """How far off these were predicted from what was seen before, relative; 1 where too
        little was."""
        errors = []
        for point in points:
            cost = self._cost(point.kind)
            seconds = median(point.seconds)
            if cost is None:
                errors.append(1.0)
            elif point.kind == KV:
                errors.append(abs(cost.t_kv(point.chunk_tokens) / seconds - 1))
            else:
                errors.append(abs(predicted_s(cost, as_sample(point)) / seconds - 1))
        return errors

    def _cost(self, kind: str) -> CostModel | None:
        """What is known of one function; None: too little."""
        samples = [as_sample(p) for p in self._seen if p.kind == kind and not p.held_out]
        known = self._known.get(kind)
        if known is None or known[0] != len(samples):
            known = len(samples), _fitted(kind, samples)
            self._known[kind] = known
        return known[1]

    # --- points ---------------------------------------------------------------------------

    async def _prefill(self, sizes: Sizes, held_out: bool, name: str = "") -> list[Point]:
        increment, history = sizes
        key = _key(PREFILL, sizes, held_out)

        async def measure() -> list[Point]:
            async def once() -> tuple[StepSample, int] | None:
                tokens = await self._behind(history, increment)
                result = await self._load.prefill(tokens)
                await self._load.release(result.kv)
                steps = self._take_steps()
                whole = whole_prefill(steps)
                return None if whole is None else (whole, len(steps))

            return await self._repeated(PREFILL, key, held_out, once)

        await self._base_for(history)
        return await self._entry(name or key, measure)

    async def _transfer(
        self, lender: Lender, sizes: Sizes, held_out: bool, name: str
    ) -> list[Point]:
        tokens, _ = sizes
        key = _key(KV, sizes, held_out)

        async def measure() -> list[Point]:
            async def once() -> tuple[StepSample, int] | None:
                prompt = self._load.prompt(tokens)
                lent = await lender.lend(prompt)
                try:
                    # One token more than is lent has to be computed in any case.
                    asked = prompt + self._load.prompt(1)
                    result = await self._load.prefill(asked, lent)
                    await self._load.release(result.kv)
                finally:
                    await lender.release(lent)
                stats = result.stats
                if not stats.pulled_tokens:
                    return None
                return StepSample(stats.pulled_tokens, 0, 0, 0, stats.read_s), 0

            return await self._repeated(KV, key, held_out, once)

        points = await self._entry(name or key, measure)
        self._take_steps()
        return points

    async def _batch(self, sizes: Sizes, held_out: bool, name: str = "") -> list[Point]:
        batch, context = sizes
        key = _key(BATCH, sizes, held_out)
        numbers = _numbers(key)
        longest = min(self._step_tokens(), self._longest - SMALLEST_TOKENS)
        count = self._probes(sizes)
        if held_out:
            chunks = [_log_uniform(numbers, SMALLEST_TOKENS, longest) for _ in range(count)]
            probes = [(chunk, self._random_history(numbers, chunk)) for chunk in chunks]
        else:
            histories = [0, *self._histories[::-3]]
            chunks = _sizes(SMALLEST_TOKENS, longest, 2)
            grid = [(c, h) for c in chunks for h in histories if c + h < self._longest]
            probes = numbers.sample(grid, min(count, len(grid)))

        async def measure() -> list[Point]:
            return await self._beside(batch, context, probes, held_out)

        await self._base_for(max((history for _, history in probes), default=0))
        return await self._entry(name or key, measure)

    async def _beside(
        self, batch: int, context: int, probes: Sequence[Sizes], held_out: bool
    ) -> list[Point]:
        """Let streams decode, alone and with chunks beside them."""
        load = self._load
        output_tokens = self._output_tokens(batch, context)
        streams = [Stream() for _ in range(batch)]
        decodes: list[StepSample] = []
        mixed: dict[Sizes, list[StepSample]] = {probe: [] for probe in probes}
        last = streams[-1]
        enough_s = self._clock() + self._most_batch_s / 4

        def take() -> list[StepSample]:
            steps = [step for step in self._take_steps() if step.batch == batch]
            decodes.extend(step for step in steps if not step.chunk_tokens)
            return [step for step in steps if step.chunk_tokens]

        def wanted(probe: Sizes) -> bool:
            seconds = [step.seconds for step in mixed[probe]]
            if len(seconds) < REPEATS:
                return True
            return self._clock() < enough_s and spread(seconds) > QUIET_SPREAD

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        load.follow(load.request(load.prompt(context), output_tokens), stream)
                    )
                    for stream in streams
                ]
                try:
                    await last.reach(WARM_UP_TOKENS)
                    self._take_steps()
                    await last.reach(WARM_UP_TOKENS + DECODE_STEPS)
                    take()
                    # In rounds, so that a short disturbance does not meet one probe alone.
                    for _ in range(MAX_REPEATS):
                        for probe in filter(wanted, probes):
                            if any(stream.ended for stream in streams):
                                break
                            tokens = await self._behind(probe[1], probe[0])
                            await load.follow(load.request(tokens, 1), Stream())
                            if steps := take():
                                mixed[probe].append(max(steps, key=lambda s: s.chunk_tokens))
                finally:
                    for task in tasks:
                        task.cancel()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        await load.settle()
        self._take_steps()
        where = f"{batch}x{context}" + " held out" * held_out
        points = [_point(DECODE, f"decode {where}", held_out, decodes[: 4 * DECODE_STEPS])]
        points += [
            _point(MIXED, f"mixed {chunk}+{history} beside {where}", held_out, steps)
            for (chunk, history), steps in mixed.items()
        ]
        return [point for point in points if point is not None]

    async def _repeated(
        self,
        kind: str,
        name: str,
        held_out: bool,
        once: Callable[[], Awaitable[tuple[StepSample, int] | None]],
    ) -> list[Point]:
        """One point, as often as its times scatter."""
        samples: list[StepSample] = []
        steps = 1
        share = KV_SHARE if kind == KV else PREFILL_SHARE
        enough_s = self._clock() + LARGEST_SHARE * share * self._limits.budget_s / 3
        for _ in range(MAX_REPEATS):
            measured = await once()
            if measured is not None:
                sample, steps = measured
                samples.append(sample)
            if len(samples) >= REPEATS and (
                self._clock() >= enough_s or spread([s.seconds for s in samples]) <= QUIET_SPREAD
            ):
                break
        point = _point(kind, name, held_out, samples, steps)
        return [] if point is None else [point]

    async def _entry(self, key: str, measure: Callable[[], Awaitable[list[Point]]]) -> list[Point]:
        """From the journal, or measured now."""
        entry = self._journal.get(key)
        if entry is None:
            self._take_steps()
            begun_s = self._clock()
            if not self._reference_s:
                await self._reference()
            before_s = self._reference_s
            points = await measure()
            if any(min(point.seconds) <= 0 for point in points):
                raise AmpdError(ErrorReason.ENGINE_FAILED, "the engine's steps take no time")
            await self._reference()
            reference_s = max(before_s, self._reference_s)
            entry = Entry(key, self._clock() - begun_s, tuple(points), reference_s)
            self._journal.add(entry)
            self._progress(_told(entry), self._spent_s())
        return list(entry.points)

    async def _reference(self) -> None:
        """The small prefill by which a disturbed machine is known."""
        tokens = min(REFERENCE_TOKENS, self._longest)
        self._take_steps()
        seconds = []
        for _ in range(REFERENCES):
            result = await self._load.prefill(self._load.prompt(tokens))
            await self._load.release(result.kv)
            seconds.append(sum(step.seconds for step in self._take_steps()))
        self._reference_s = median(seconds)

    def _take_steps(self) -> Sequence[StepSample]:
        return self._engine.take_step_samples()

    def _spent_s(self) -> float:
        return self._journal.spent_s + self._base_s

    # --- histories ------------------------------------------------------------------------

    def _affordable_histories(self, most_s: float) -> list[int]:
        """Whole blocks each, ascending, by halves of the longest that can be afforded."""
        size = self._longest - SMALLEST_TOKENS
        while size >= LEAST_HISTORY_TOKENS and self._prefill_s(size, 0) > most_s:
            size //= 2
        found: list[int] = []
        while size >= LEAST_HISTORY_TOKENS and len(found) < MAX_HISTORIES:
            whole = size // self._block * self._block
            if whole:
                found.append(whole)
            size //= 2
        return found[::-1]

    def _random_history(self, numbers: random.Random, tokens: int) -> int:
        """For so many new tokens; 0 now and then."""
        if not self._histories or numbers.random() < 1 / 4:
            return 0
        size = _log_uniform(numbers, self._histories[0], self._histories[-1])
        return max(0, min(size, self._longest - tokens - 1)) // self._block * self._block

    async def _base_for(self, history: int) -> None:
        """Have the KV of the longest history at hand, once one is needed."""
        if history and self._base_kv is None:
            begun_s = self._clock()
            self._base = self._load.prompt(self._histories[-1] + 1)
            self._base_kv = await self._load.pin(self._base)
            self._base_s += self._clock() - begun_s

    async def _behind(self, history: int, tokens: int) -> Tokens:
        """A prompt of so many new tokens over so many cached ones."""
        prompt = self._load.prompt(tokens)
        return prompt if self._base is None else self._base[:history] + prompt

    # --- what things may cost --------------------------------------------------------------

    def _prefill_s(self, increment: int, history: int) -> float:
        """As far as is known."""
        cost = self._cost(PREFILL)
        if cost is not None:
            return cost.t_pre(history, increment)
        known = [point for point in self._seen if point.kind == PREFILL]
        if not known:
            return 0.0
        largest = max(known, key=lambda point: point.chunk_tokens)
        ratio = increment / largest.chunk_tokens
        return median(largest.seconds) * max(1.0, UNKNOWN_GROWTH * ratio)

    def _prefill_cost_s(self, sizes: Sizes) -> float:
        return REPEATS * self._prefill_s(*sizes)

    def _batch_cost_s(self, sizes: Sizes) -> float:
        return self._beside_s(sizes, self._probes(sizes))

    def _probes(self, sizes: Sizes) -> int:
        """As many as a batch may take."""
        for count in range(PROBES, LEAST_PROBES, -1):
            if self._beside_s(sizes, count) <= self._most_batch_s:
                return count
        return LEAST_PROBES

    def _beside_s(self, sizes: Sizes, probes: int) -> float:
        """Streams of these sizes, and so many chunks beside them."""
        batch, context = sizes
        cost = self._cost(DECODE)
        step_s = self._prefill_s(batch, 0) if cost is None else cost.t_dec(batch, batch * context)
        chunk_s = self._prefill_s(self._step_tokens() // 3, 0)
        chunks = REPEATS * probes
        steps = WARM_UP_TOKENS + DECODE_STEPS + (STEPS_PER_PROBE - 1) * chunks
        return batch * self._prefill_s(context, 0) + steps * step_s + chunks * (step_s + chunk_s)

    def _step_tokens(self) -> int:
        """The most prompt tokens that one step is known to compute."""
        return max(p.chunk_tokens for p in self._seen if p.kind == PREFILL and p.steps == 1)

    def _output_tokens(self, batch: int, context: int) -> int:
        """Of a stream: while the others are prefilled, and while all are measured."""
        prefill_steps = batch * -(-context // self._step_tokens())
        measured = DECODE_STEPS + STEPS_PER_PROBE * PROBES * MAX_REPEATS
        return WARM_UP_TOKENS + prefill_steps + measured

    def _fits(self, batch: int, context: int) -> bool:
        """Whether the engine can hold these streams, the history and a chunk at once."""
        stream = context + self._output_tokens(batch, context)
        other = (self._histories[-1] if self._histories else 0) + self._step_tokens()
        return stream <= self._longest and batch * stream + other <= self._load.kv_tokens

    def _holds(self, kind: str, sizes: Sizes) -> bool:
        return self._fits(*sizes) if kind == BATCH else sum(sizes) <= self._longest


def _fitted(kind: str, samples: Sequence[StepSample]) -> CostModel | None:
    """None: too few samples."""
    if len(samples) < MIN_SAMPLES:
        return None
    if kind == PREFILL:
        return CostModel(prefill=fit_prefill(samples, folds=0)[0])
    if kind == DECODE:
        return CostModel(decode=fit_decode(samples, folds=0)[0])
    if kind == MIXED:
        return CostModel(mixed=fit_mixed(samples, folds=0)[0])
    return CostModel(kv=fit_kv([KvSample(s.chunk_tokens, s.seconds) for s in samples])[0])


def _point(
    kind: str, name: str, held_out: bool, samples: Sequence[StepSample], steps: int = 1
) -> Point | None:
    """Samples of one point: their sizes may differ by a few tokens."""
    if not samples:
        return None
    chunk = max(sample.chunk_tokens for sample in samples)
    alike = [sample for sample in samples if sample.chunk_tokens == chunk]
    context = int(median(sample.context_tokens for sample in alike))
    first = alike[0]
    seconds = tuple(sample.seconds for sample in alike)
    return Point(
        kind,
        name,
        chunk,
        first.chunk_history_tokens,
        first.batch,
        context,
        seconds,
        steps,
        held_out,
    )


def _key(kind: str, sizes: Sizes, held_out: bool) -> str:
    return f"{kind} {sizes[0]},{sizes[1]}" + " held out" * held_out


def _planned(key: str) -> tuple[Sizes, bool]:
    """What `_key` was made of."""
    _, sizes, *rest = key.split(" ")
    first, _, second = sizes.partition(",")
    return (int(first), int(second)), bool(rest)


def _told(entry: Entry) -> str:
    point = entry.points[-1] if entry.points else None
    if point is None:
        return f"{entry.key}: nothing could be measured"
    times = f"{median(point.seconds) * 1e3:.3g} ms, scatter {spread(point.seconds):.0%}"
    more = f", {len(entry.points)} points" if len(entry.points) > 1 else ""
    return f"{entry.key}: {point.name} {times}{more}"


def _sizes(first: int, last: int, factor: int) -> list[int]:
    """From `first` on, each `factor` times the one before; `first` alone if `last` is less."""
    found: list[int] = [first]
    size = first * factor
    while size <= last:
        found.append(size)
        size *= factor
    return found


def _interest(sizes: Sizes, surprises: Sequence[tuple[Sizes, float]]) -> float:
    """How much a new point may tell: near it something was not as expected."""

    def distance(other: Sizes) -> float:
        return math.hypot(
            *(math.log2((a + 1) / (b + 1)) for a, b in zip(sizes, other, strict=True))
        )

    return max((error * math.exp(-distance(at)) for at, error in surprises), default=0.0)


def _numbers(seed: str) -> random.Random:
    """The same numbers when a measurement goes on."""
    return random.Random(seed)  # noqa: S311


def _log_uniform(numbers: random.Random, least: int, most: int) -> int:
    return round(math.exp(numbers.uniform(math.log(least), math.log(max(least, most)))))
