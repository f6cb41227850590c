"""A tiny engine for the self-measurement: steps of a known cost, and books of what is held."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import ITL_SAFE_RULE, LocalRule
from ampd.core.model import FinishReason, KvHandle, PrefillStats
from ampd.ports import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    GenerateDone,
    GenerateRequest,
    PrefillDone,
    PrefillRequest,
    PrefillResult,
    StepSample,
    Tokens,
    TokensOut,
)

BLOCK = 16


@dataclass(eq=False)
class Job:
    prompt: int
    cached: int
    outputs: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    prefilled: bool = False
    context: int = 0


class SteppingEngine:
    """One prefill per step, whole, beside all decodes; a step sleeps what it costs."""

    def __init__(self, cost: CostModel, *, capacity: int = 100_000, longest: int = 2048) -> None:
        self.info = EngineInfo("stub 1", "stub", BLOCK, capacity, 4, longest, 1000)
        self.cost = cost
        self.jobs: list[Job] = []
        self.pins: dict[str, tuple[int, ...]] = {}
        self.lent: set[str] = set()
        self.samples: list[StepSample] = []
        self.most_pinned_tokens = 0
        self.rule = ITL_SAFE_RULE
        self.fail_after_steps: int | None = None
        self._made = 0
        self._stepper: asyncio.Task[None] | None = None

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        job = self._start(request.tokens)
        try:
            await job.outputs.get()
        finally:
            self.jobs.remove(job)
        kv = self._pin(request.tokens)
        self.lent.add(kv.payload.decode())
        pulled = request.history.tokens if request.history is not None else 0
        return PrefillResult(kv, PrefillStats(pulled_tokens=pulled, pulled_bytes=4 * pulled))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        job = self._start(request.tokens + request.output)
        said = len(request.output)
        try:
            for number in range(said, request.sampling.max_tokens):
                await job.outputs.get()
                if number == said:
                    yield PrefillDone(PrefillStats())
                yield TokensOut([1], "")
        finally:
            self.jobs.remove(job)
        count = request.sampling.max_tokens
        kv = self._pin(request.tokens + request.output)
        yield GenerateDone(FinishReason.LENGTH, "", count, count, kv)

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        await asyncio.sleep(0)
        if kv.payload.decode() not in self.pins:
            raise AmpdError(ErrorReason.TASK_GONE, "not pinned")
        self.lent.add(kv.payload.decode())
        return replace(kv, tokens=tokens)

    async def reclaim(self, kv: KvHandle) -> None:
        await asyncio.sleep(0)
        self.lent.discard(kv.payload.decode())

    async def release(self, kv: KvHandle) -> None:
        await asyncio.sleep(0)
        self.lent.discard(kv.payload.decode())
        self.pins.pop(kv.payload.decode(), None)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, len(self.jobs), 0, 0)

    def take_step_samples(self) -> Sequence[StepSample]:
        taken, self.samples = self.samples, []
        return taken

    def use_cost_model(self, cost: CostModel) -> None:
        raise NotImplementedError

    def use_local_rule(self, rule: LocalRule) -> None:
        """Its one prefill per step is whole under any rule."""
        self.rule = rule

    async def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)

    def _start(self, tokens: Tokens) -> Job:
        assert len(tokens) < self.info.max_model_tokens
        if self.fail_after_steps is not None and len(self.samples) >= self.fail_after_steps:
            raise RuntimeError("broken")
        cached = max(
            (len(pin) for pin in self.pins.values() if tuple(tokens[: len(pin)]) == pin),
            default=0,
        )
        job = Job(len(tokens), cached // BLOCK * BLOCK)
        self.jobs.append(job)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._steps())
        return job

    async def _steps(self) -> None:
        while self.jobs:
            decodes = [job for job in self.jobs if job.prefilled]
            entrant = next((job for job in self.jobs if not job.prefilled), None)
            chunk = entrant.prompt - entrant.cached if entrant else 0
            history = entrant.cached if entrant else 0
            context = sum(job.context for job in decodes)
            seconds = self.cost.t_mixed(chunk, history, len(decodes), context)
            await asyncio.sleep(seconds)
            if not self.jobs:
                break  # the last one has left meanwhile: nothing was computed
            self.samples.append(StepSample(chunk, history, len(decodes), context, seconds))
            for job in decodes:
                job.context += 1
                job.outputs.put_nowait(True)
            if entrant:
                entrant.prefilled, entrant.context = True, entrant.prompt + 1
                entrant.outputs.put_nowait(True)

    def _pin(self, tokens: Tokens) -> KvHandle:
        self._made += 1
        self.pins[str(self._made)] = tuple(tokens)
        self.most_pinned_tokens = max(
            self.most_pinned_tokens, sum(len(pin) for pin in self.pins.values())
        )
        return KvHandle("stub", 1, len(tokens), 60.0, str(self._made).encode())
