"""The asyncio front of a vLLM engine: the `Engine` port."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

from ampd.adapters.engine_vllm import handles
from ampd.adapters.engine_vllm.outputs import Job, Output
from ampd.adapters.engine_vllm.pins import MAX_PINS
from ampd.adapters.engine_vllm.sampling import to_vllm
from ampd.adapters.engine_vllm.settings import VllmSettings, has_tokenizer
from ampd.adapters.engine_vllm.thread import EngineThread
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import KvHandle, SamplingParams
from ampd.ports import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    GenerateDone,
    GenerateRequest,
    PrefillRequest,
    PrefillResult,
    StepSample,
    Tokens,
)

MAX_REQUESTS: Final = 4096
"""Requests of one engine that have not ended; more are refused (QUEUE_FULL)."""
CLOSE_TIMEOUT_S: Final = 10.0

T = TypeVar("T")


async def start(settings: VllmSettings, worker_id: str, incarnation: int) -> VllmEngine:
    """Load the model and start the engine (seconds to a minute). One per process: vLLM keeps
    its distributed state in globals. Raises what vLLM raises when it cannot start."""
    engine = VllmEngine(settings, worker_id, incarnation)
    await engine._start()
    return engine


class VllmEngine:
    """`ampd.ports.Engine` over one vLLM engine; make it with `start`.

    A job's mailbox holds at most its events, `max_tokens` + 2 of them.
    """

    def __init__(self, settings: VllmSettings, worker_id: str, incarnation: int) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._has_tokenizer = has_tokenizer(settings.model)
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(settings, worker_id, incarnation, self._deliver)
        self._mailboxes: dict[Job, _Mailbox] = {}
        self._info: EngineInfo | None = None
        self._submitted = 0

    async def _start(self) -> None:
        self._info = await asyncio.wrap_future(self._thread.start())

    @property
    def info(self) -> EngineInfo:
        """Fixed facts of the engine."""
        if self._info is None:
            raise RuntimeError("the engine has not started")
        return self._info

    # --- requests -------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """See the port."""
        pull = self._pull(request.tokens, request.history, "history")
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        parameters = to_vllm(sampling, {"slo": None, **pull}, has_tokenizer=False)
        self._check(request.tokens)
        job = Job(
            self._unique_id(request.request_id),
            array("I", request.tokens),
            parameters,
            sampling,
            lends_result=True,
        )
        async with _Submitted(self, job) as mailbox:
            return cast("PrefillResult", await mailbox.next())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        """See the port."""
        pull = self._pull(request.tokens + request.output, request.kv, "kv")
        parameters = to_vllm(
            request.sampling,
            {"slo": request.slo, "session_began_s": request.session_began_s, **pull},
            has_tokenizer=self._has_tokenizer,
            output=request.output,
        )
        self._check(request.tokens, request.output)
        job = Job(
            self._unique_id(request.request_id),
            array("I", request.tokens),
            parameters,
            request.sampling,
            lends_result=False,
            output_token_ids=request.output.tolist(),
            characters=request.text_chars,
        )
        async with _Submitted(self, job) as mailbox:
            while True:
                event = cast("EngineEvent", await mailbox.next())
                yield event
                if isinstance(event, GenerateDone):
                    return

    def _pull(self, tokens: Tokens, handle: KvHandle | None, field: str) -> dict[str, Any]:
        """What the connector needs to read the handle's KV; nothing without a handle."""
        if handle is None:
            return {}
        loan = handles.loan_of(handle, tokens, field, block_tokens=self.info.block_tokens)
        return handles.transfer_parameters(loan, handle.tokens)

    def _check(self, tokens: Tokens, output: Tokens | None = None) -> None:
        """Whether a job over these tokens may be submitted now."""
        if self._thread.failure is not None:
            raise self._thread.failure
        if len(self._mailboxes) >= MAX_REQUESTS:
            raise AmpdError(ErrorReason.QUEUE_FULL, "the engine has too many requests")
        if self._thread.pin_count >= MAX_PINS:
            raise AmpdError(ErrorReason.QUEUE_FULL, "the engine holds too many pins")
        if not tokens:
            raise invalid_field("tokens", "must not be empty")
        if len(tokens) >= self.info.max_model_tokens:
            raise AmpdError(
                ErrorReason.CONTEXT_TOO_LONG,
                f"{len(tokens)} tokens leave no room in a context of {self.info.max_model_tokens}",
            )
        for name, part in (("tokens", tokens), ("output", output)):
            if part and max(part) >= self.info.vocab_size:
                raise invalid_field(name, f"token ids must be below {self.info.vocab_size}")
        total = len(tokens) + len(output or ())
        if total > self.info.max_model_tokens:
            raise invalid_field("output", f"leaves a context of {self.info.max_model_tokens}")
        if total + 1 > self.info.kv_capacity_tokens:
            raise AmpdError(
                ErrorReason.KV_TOO_SMALL,
                f"{total} tokens do not fit a KV memory of {self.info.kv_capacity_tokens}",
            )

    def _unique_id(self, request_id: str) -> str:
        """Ids need not be unique over time for the caller; for vLLM they are."""
        self._submitted += 1
        return f"{request_id}#{self._submitted}"

    def _deliver(self, outputs: Sequence[tuple[Job, Output]]) -> None:
        """Called on the engine thread."""
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: Sequence[tuple[Job, Output]]) -> None:
        for job, output in outputs:
            mailbox = self._mailboxes.get(job)
            if mailbox is not None:
                mailbox.put(output)

    # --- handles --------------------------------------------------------------------------

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        """See the port. One loan per pin: lending again ends the loan before."""
        if not 0 < tokens <= kv.tokens:
            raise invalid_field("tokens", f"must be in 1..{kv.tokens}")
        pin_id = self._own_pin_id(kv)
        lent = None
        if pin_id is not None:
            lent = await self._call(partial(self._thread.lend, pin_id, tokens))
        if lent is None:
            raise AmpdError(ErrorReason.TASK_GONE, "the handle is not pinned on this engine")
        return lent

    async def reclaim(self, kv: KvHandle) -> None:
        """See the port."""
        pin_id = self._own_pin_id(kv)
        if pin_id is not None:
            await self._call(partial(self._thread.reclaim, pin_id))

    async def release(self, kv: KvHandle) -> None:
        """See the port."""
        pin_id = self._own_pin_id(kv)
        if pin_id is not None:
            await self._call(partial(self._thread.release, pin_id))

    def _own_pin_id(self, kv: KvHandle) -> str | None:
        """None for a handle of another engine, of an earlier life, or of no engine at all."""
        if (kv.owner, kv.incarnation) != (self._worker_id, self._incarnation):
            return None
        try:
            return handles.decode(kv, "kv").pin_id
        except AmpdError:
            return None

    async def _call(self, command: Callable[[], T]) -> T:
        """Run `command` between two steps of the engine."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command()
            except AmpdError as error:
                future.set_exception(error)
                return
            self._thread.refresh_stats()
            future.set_result(result)

        self._thread.submit(run)
        return await asyncio.wrap_future(future)

    # --- the rest -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The newest snapshot: at most a step old, and never older than an answer."""
        return self._thread.stats

    def take_step_samples(self) -> Sequence[StepSample]:
        """See the port; the newest 4096 are kept."""
        return self._thread.take_samples()

    def use_cost_model(self, cost: CostModel) -> None:
        """See the port."""
        self._thread.submit(partial(self._thread.use_cost_model, cost))

    def use_local_rule(self, rule: LocalRule) -> None:
        """See the port. `max_batched_tokens` limits a fixed budget."""
        self._thread.submit(partial(self._thread.use_local_rule, rule))

    async def close(self) -> None:
        """End all requests (ENGINE_FAILED) and the engine."""
        await asyncio.to_thread(self._thread.stop, CLOSE_TIMEOUT_S)


class _Mailbox:
    """A job's outputs on their way from the engine thread to one reader."""

    def __init__(self) -> None:
        self._outputs: deque[Output] = deque()
        self._arrived = asyncio.Event()
        self.ended = False
        """The reader has the last output."""

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._arrived.set()

    async def next(self) -> EngineEvent | PrefillResult:
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        self.ended = isinstance(output, AmpdError | GenerateDone | PrefillResult)
        if isinstance(output, AmpdError):
            raise output
        return output


class _Submitted:
    """A job on the engine for as long as its reader stays; then whatever it holds is freed,
    unless the reader took its last output."""

    def __init__(self, engine: VllmEngine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._mailbox = _Mailbox()

    async def __aenter__(self) -> _Mailbox:
        self._engine._mailboxes[self._job] = self._mailbox
        self._engine._thread.submit(partial(self._engine._thread.add, self._job))
        return self._mailbox

    async def __aexit__(self, *exc_info: object) -> None:
        del self._engine._mailboxes[self._job]
        if not self._mailbox.ended:
            self._engine._thread.submit(partial(self._engine._thread.cancel, self._job))
