"""The thread that owns vLLM: it runs commands, steps the engine, and reports what came out.

It blocks while there is nothing to do, polls NIXL (`LENT_POLL_S`) while KV is lent out or a
read is in flight, and steps without pause while there is something to compute.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from ampd.adapters.engine_vllm.outputs import Deliver, Identity, Job, Output, Translator
from ampd.adapters.engine_vllm.resuming import resume
from ampd.adapters.engine_vllm.settings import (
    Device,
    VllmSettings,
    engine_arguments,
    environment,
)
from ampd.core.cost_model import CostModel
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import KvHandle
from ampd.ports import (
    EngineInfo,
    EngineStats,
    StepSample,
)

LENT_POLL_S: Final = 0.005
PULL_POLL_S: Final = 0.001
STUCK_S: Final = 1.0
"""How long the only requests may wait for memory that nobody is about to free."""


class EngineThread:
    """All methods but `start`, `submit` and `stop` run on the thread itself."""

    def __init__(
        self, settings: VllmSettings, worker_id: str, incarnation: int, deliver: Deliver
    ) -> None:
        self._settings = settings
        # Never reused: a handle of an earlier life meets a foreign engine.
        engine_id = f"{worker_id}-{incarnation}-{os.urandom(4).hex()}"
        self._identity = Identity(worker_id, incarnation, engine_id)
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._outbox: list[tuple[Job, Output]] = []
        self._ready: Future[EngineInfo] = Future()
        self._thread = threading.Thread(target=self._run, name="ampd-engine", daemon=True)
        self._ended = threading.Event()
        self._stuck_since_s = 0.0
        self._stats_key: tuple[int, ...] = ()
        self._llm: Any = None
        self._scheduler: Any = None
        self._translator: Translator
        self._block_bytes = 0
        self._capacity_blocks = 0
        self.failure: AmpdError | None = None
        """Why the engine is no more, once it is."""
        self.stats = EngineStats(0, 0, 0, 0, 0, 0)
        """The newest snapshot; any thread."""

    # --- any thread -----------------------------------------------------------------------

    def start(self) -> Future[EngineInfo]:
        """Load the model; the future fails with what vLLM raised."""
        self._thread.start()
        return self._ready

    def submit(self, command: Callable[[], None]) -> None:
        """Run `command` between two steps. What is submitted is bounded by the front's limit
        of requests (each one a start and an end) and its callers' handles."""
        self._commands.put(command)
        if self._ended.is_set():
            self._drain_commands()

    def stop(self, timeout_s: float) -> None:
        """End the thread and the engine; blocks."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    @property
    def pin_count(self) -> int:
        """Pins that are held."""
        return len(self._scheduler.pins)

    def take_samples(self) -> Sequence[StepSample]:
        """The steps since the last call, oldest first."""
        samples = self._scheduler.samples
        return [samples.popleft() for _ in range(len(samples))]

    # --- life -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            info = self._load()
        except BaseException as error:  # noqa: BLE001 - reported to whoever waits for the start
            self._ready.set_exception(error)
            return
        self._ready.set_result(info)
        try:
            self._loop()
        except Exception as error:
            logging.getLogger(__name__).exception("the engine thread has failed")
            self.failure = AmpdError(ErrorReason.ENGINE_FAILED, f"vLLM failed: {error!r}")
        else:
            self.failure = AmpdError(ErrorReason.ENGINE_FAILED, "the engine is closed")
        self._outbox.extend((job, self.failure) for job in self._jobs.values())
        self._jobs.clear()
        self._flush()
        self._ended.set()
        self._drain_commands()
        self._llm.engine_core.shutdown()

    def _load(self) -> EngineInfo:
        settings = self._settings
        os.environ.update(environment(settings))
        # Would override kv_cache_bytes.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        import torch
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if settings.device is Device.CPU:
            torch.set_num_threads(settings.threads)
        arguments = engine_arguments(settings, self._identity.engine_id)
        self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        self._scheduler.wake = lambda: self._commands.put(_nothing)
        kv_cache = self._scheduler.kv_cache_config
        per_rank = sum(t.size for t in kv_cache.kv_cache_tensors) // kv_cache.num_blocks
        self._block_bytes = per_rank * settings.tensor_parallel
        block_tokens = self._scheduler.block_size
        self._translator = Translator(
            settings,
            self._identity,
            self._scheduler.pins,
            self._llm.renderer.tokenizer,
            block_tokens,
            self._block_bytes,
        )
        info = EngineInfo(
            engine=f"vllm {vllm.__version__}",
            model=settings.model,
            block_tokens=block_tokens,
            # Block 0 is vLLM's placeholder.
            kv_capacity_tokens=(kv_cache.num_blocks - 1) * block_tokens,
            kv_bytes_per_token=self._block_bytes // block_tokens,
            max_model_tokens=settings.max_model_tokens,
            vocab_size=self._llm.model_config.get_vocab_size(),
        )
        self._capacity_blocks = kv_cache.num_blocks - 1
        self.refresh_stats()
        return info

    def _loop(self) -> None:
        wait_s: float | None = None
        while True:
            if not self._run_commands(wait_s):
                return
            self._scheduler.pins.expire()
            self._scheduler.take_news()
            if self._scheduler.has_requests():
                self._take_outputs(self._llm.step())
                self._end_if_stuck()
            self.refresh_stats()
            self._flush()
            wait_s = self._wait_s()

    def _run_commands(self, wait_s: float | None) -> bool:
        """Wait for a command at most `wait_s` (None: for ever) and run all; False to stop."""
        try:
            command = self._commands.get(block=wait_s != 0, timeout=wait_s)
        except queue.Empty:
            return True
        while True:
            if command is None:
                return False
            command()
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True

    def _drain_commands(self) -> None:
        """Commands that came too late still run: they find no job and a failed engine."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command()

    def _wait_s(self) -> float | None:
        """How long there is nothing to do but wait for commands."""
        scheduler = self._scheduler
        if scheduler.scheduled_tokens and scheduler.has_requests():
            return 0
        if scheduler.pulls_in_flight:
            return PULL_POLL_S
        if scheduler.has_requests():
            return LENT_POLL_S
        expiry_s = scheduler.pins.next_expiry_s()
        return None if expiry_s is None else max(0.0, expiry_s - time.monotonic())

    def _end_if_stuck(self) -> None:
        """Requests that wait for memory while nothing runs get an error, not an eternity."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        if not waiting or running or scheduler.scheduled_tokens or scheduler.pulls_in_flight:
            self._stuck_since_s = 0.0
            return
        now_s = time.monotonic()
        self._stuck_since_s = self._stuck_since_s or now_s
        if now_s - self._stuck_since_s < STUCK_S:
            return
        for job in list(self._jobs.values()):
            self._abort(job)
            full = AmpdError(ErrorReason.KV_EXHAUSTED, "no KV memory is free", retry_after_s=1.0)
            self._outbox.append((job, full))
        self._stuck_since_s = 0.0

    # --- commands -------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Hand the job to vLLM."""
        if self.failure is not None:
            self._outbox.append((job, self.failure))
            self._flush()
            return
        from vllm.exceptions import VLLMClientError

        try:
            prompt = (job.tokens.tolist() + job.output_token_ids)[: self._most_prompt_tokens]
            job.internal_id = self._llm.add_request(
                job.request_id, {"prompt_token_ids": prompt}, job.parameters
            )
        except (VLLMClientError, ValueError) as error:
            self._outbox.append((job, invalid_field("sampling", f"vLLM refuses it: {error}")))
            return
        self._jobs[job.request_id] = job
        if job.output_token_ids:
            self._resume(job)

    def _resume(self, job: Job) -> None:
        """Have vLLM go on with the job's text, or make one token only when it has ended."""
        request = self._scheduler.requests[job.internal_id]
        text, job.end = resume(
            self._llm.renderer.tokenizer,
            job.tokens.tolist(),
            job.output_token_ids,
            job.characters,
            job.sampling,
            request.sampling_params,
            self._settings.max_model_tokens,
        )
        if job.end is None:
            self._llm.output_processor.request_states[job.internal_id].detokenizer = text
        else:
            request.max_tokens = 1

    @property
    def _most_prompt_tokens(self) -> int:
        """vLLM takes no prompt that fills the context; an output that does has ended, and its
        last token needs no KV."""
        return self._settings.max_model_tokens - 1

    def cancel(self, job: Job) -> None:
        """Free all that the job holds, whether it runs or has ended."""
        if self.failure is not None:
            return
        if self._jobs.get(job.request_id) is job:
            self._abort(job)
        elif job.pin_id:
            self._scheduler.pins.release(job.pin_id)

    def _abort(self, job: Job) -> None:
        del self._jobs[job.request_id]
        record = self._scheduler.records[job.internal_id]
        record.wants_pin = False
        self._llm.abort_request([job.request_id])
        del self._scheduler.records[job.internal_id]

    def lend(self, pin_id: str, tokens: int) -> KvHandle | None:
        """A lent handle of the pin's first `tokens` tokens; None: no such pin."""
        if self.failure is not None:
            raise self.failure
        pins = self._scheduler.pins
        pins.expire()
        pin = pins.get(pin_id)
        if pin is None or not 0 < tokens <= len(pin.tokens):
            return None
        return self._translator.lend(pin, tokens)

    def reclaim(self, pin_id: str) -> None:
        """End the pin's loan."""
        if self.failure is None:
            self._scheduler.pins.reclaim(pin_id)

    def release(self, pin_id: str) -> None:
        """Drop the pin."""
        if self.failure is None:
            self._scheduler.pins.release(pin_id)

    def use_cost_model(self, cost: CostModel) -> None:
        """Size local prefill chunks by it from the next step on."""
        self._scheduler.cost = cost

    def use_local_rule(self, rule: LocalRule) -> None:
        """Cut and order local prefills by it from the next step on."""
        self._scheduler.rule = rule

    # --- outputs --------------------------------------------------------------------------

    def _take_outputs(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            record = self._scheduler.records[job.internal_id]
            self._outbox.extend((job, o) for o in self._translator.take(job, output, record))
            if output.finished:
                del self._jobs[job.request_id], self._scheduler.records[job.internal_id]

    def _flush(self) -> None:
        if self._outbox:
            self._deliver(self._outbox)
            self._outbox = []

    def refresh_stats(self) -> None:
        """Publish a snapshot if anything in it has changed."""
        if self.failure is not None:
            return
        scheduler = self._scheduler
        block_tokens = scheduler.block_size
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        running, waiting = scheduler.get_request_counts()
        pulled = scheduler.pulled_blocks_total
        left = scheduler.prefill_tokens_left
        # Which blocks only pins hold changes with pins and with the running requests.
        key = (free, running, waiting, pulled, left, scheduler.pins.version)
        if key == self._stats_key:
            return
        self._stats_key = key
        pinned = scheduler.pins.pinned_blocks()
        self.stats = EngineStats(
            kv_free_tokens=free * block_tokens,
            kv_used_tokens=(self._capacity_blocks - free - pinned) * block_tokens,
            kv_pinned_tokens=pinned * block_tokens,
            running_requests=running,
            waiting_requests=waiting,
            pulled_bytes_total=pulled * self._block_bytes,
            prefill_tokens_left=left,
            calibration=scheduler.calibration,
        )


def _nothing() -> None:
    """A command that only wakes the thread."""
