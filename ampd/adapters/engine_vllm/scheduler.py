"""vLLM's scheduler with AMPD's rules of who computes in a step, loaded by `scheduler_cls`.

Every step:
1. decodes take their token each;
2. *entrants*, requests whose KV is at hand but for at most a block, join at once (stock vLLM
   lets a chunked prefill take the whole budget, and does not even start their pull);
3. one prefill gets a chunk, first come first served. On a decode worker its size keeps the
   running streams within their ITL SLO (`ampd.core.local_prefill`), 0 making a pure decode
   step; on a prefill worker it is a constant, and there are no entrants;
4. the KV pulls of all others start, whoever computes.

A finished pull enters the prefix cache only when the lender says that its loan was alive
until after the read (`side_channel.is_loan_alive`).

All of it runs on the engine thread, but for `loan_read`.
"""

from __future__ import annotations

import queue
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from ampd.adapters.engine_vllm import side_channel
from ampd.adapters.engine_vllm.pins import PinTable
from ampd.adapters.engine_vllm.progress import RequestRecord
from ampd.adapters.engine_vllm.settings import OPTIONS_KEY
from ampd.adapters.engine_vllm.step_plan import Prefill, plan_step
from ampd.core.cost_model import CostModel
from ampd.core.local_prefill import StreamProgress, calibrate, chunk_tokens
from ampd.core.model import Role, Slo
from ampd.ports import StepSample

FIXED_CHUNK_TOKENS: Final = 256
"""The local prefill chunk until a cost model is known."""
MAX_STEP_SAMPLES: Final = 4096
LOAN_CHECK_THREADS: Final = 4
"""Questions to lenders at a time; a dead one may hold one of them for seconds."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A scheduled step whose output has not come back."""

    started_s: float
    chunk_tokens: int
    chunk_history_tokens: int
    batch: int
    context_tokens: int


class AmpdScheduler(Scheduler):  # type: ignore[misc]
    """The rules, for synchronous steps (CPU)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config[OPTIONS_KEY]
        self._prefills_only = Role(options["role"]) is Role.PREFILL
        self._max_chunk_tokens: int = options["prefill_chunk_tokens"]
        self._lease_s: float = options["result_lease_s" if self._prefills_only else "kv_lease_s"]
        self.pins = PinTable(self.kv_cache_manager.block_pool, self.block_size, time.monotonic)
        self.records: dict[str, RequestRecord] = {}
        self.samples: deque[StepSample] = deque(maxlen=MAX_STEP_SAMPLES)
        self.cost: CostModel | None = None
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when the next step has news."""
        self.scheduled_tokens = 0
        """In the last step."""
        self.pulled_blocks_total = 0
        self._calibration = 1.0
        self._arrivals = 0
        self._admitted: frozenset[str] = frozenset()
        self._in_flight: deque[StepInFlight] = deque()
        self._last_step_end_s = 0.0
        self._checks = ThreadPoolExecutor(LOAN_CHECK_THREADS, thread_name_prefix="ampd-loan-check")
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.connector.connector_scheduler.owner = self

    # --- a step ---------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's step, within the plan."""
        del throttle_prefills  # vLLM's own way of deferring prefills; ours is the plan
        started_s = time.monotonic()
        self.pins.expire()
        self.take_news()
        decodes = [r for r in self.running if not r.is_prefill_chunk]
        prefills = [r for r in self.running if r.is_prefill_chunk]
        plan = plan_step(
            [self._candidate(r) for r in prefills],
            [self._candidate(r) for r in self._waiting() if self._is_ready(r)],
            entrant_tokens=0 if self._prefills_only else self.block_size,
            chunk_tokens=lambda head: self._chunk_tokens(decodes, head, started_s),
        )
        self._admitted = plan.admitted
        held = [r for r in prefills if r.request_id in plan.held]
        stock_tokens: int = self.scheduler_config.max_num_batched_tokens
        stock_requests: int = self.scheduler_config.max_num_seqs
        self.running[:] = decodes + [r for r in prefills if r not in held]
        self.max_num_active_reqs = stock_requests - len(held)
        # One token over, that nobody may take: with none left vLLM starts no pull.
        spare = any(r.request_id not in plan.admitted for r in self._waiting())
        self.max_num_scheduled_tokens = min(
            len(decodes) + plan.prefill_tokens + spare, stock_tokens
        )
        self.scheduler_config.long_prefill_token_threshold = plan.cap_tokens
        try:
            output = super().schedule(False)
        finally:
            self.running.extend(held)
            self.max_num_scheduled_tokens = stock_tokens
            self.max_num_active_reqs = stock_requests
            self.scheduler_config.long_prefill_token_threshold = 0
        self._note_step(output, {r.request_id for r in decodes}, started_s)
        return output

    def _waiting(self) -> Iterator[Any]:
        yield from self.kv_holding_waiting
        yield from self.waiting

    def _is_ready(self, request: Any) -> bool:
        """Whether a waiting request has all the KV that it will get from elsewhere."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in self.finished_recving_kv_req_ids
        return request.num_computed_tokens > 0 or not self._wants_pull(request)

    def _wants_pull(self, request: Any) -> bool:
        cached = self._cached_estimate_tokens(request)
        return self._pullable_tokens(request) > cached

    def _cached_estimate_tokens(self, request: Any) -> int:
        record = self.records[request.request_id]
        if record.cached_estimate_tokens is None:
            _, cached_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
            record.cached_estimate_tokens = cached_tokens
            return int(cached_tokens)
        return record.cached_estimate_tokens

    @staticmethod
    def _pullable_tokens(request: Any) -> int:
        """KV that a peer lends. The last prompt token is computed in any case."""
        parameters = request.kv_transfer_params
        if parameters.get("pull_done") or "remote_request_id" not in parameters:
            return 0
        lent_tokens: int = parameters["remote_num_tokens"]
        return min(lent_tokens, int(request.num_prompt_tokens) - 1)

    def _candidate(self, request: Any) -> Prefill:
        at_hand = request.num_computed_tokens or self._cached_estimate_tokens(request)
        record = self.records[request.request_id]
        left = max(1, request.num_tokens - at_hand)
        return Prefill(request.request_id, record.order, left)

    def _chunk_tokens(self, decodes: list[Any], head: Prefill, now_s: float) -> int:
        most = min(self._max_chunk_tokens, head.left_tokens)
        if self._prefills_only:
            return most
        if self.cost is None:
            return min(FIXED_CHUNK_TOKENS, most)
        request = self.requests[head.request_id]
        return chunk_tokens(
            cost=self.cost,
            calibration=self._calibration,
            now_s=now_s,
            streams=[self._stream(r, now_s) for r in decodes],
            context_tokens=sum(r.num_tokens for r in decodes),
            chunk_history_tokens=request.num_tokens - head.left_tokens,
            max_chunk_tokens=most,
        )

    def _stream(self, request: Any, now_s: float) -> StreamProgress:
        record = self.records[request.request_id]
        # Tokens of a step in flight count (asynchronous scheduling): they are on their way.
        emitted = request.num_output_tokens + request.num_output_placeholders
        first_s = record.first_token_s or now_s
        slo = cast("Slo", record.slo)  # only a prefill worker's requests have none
        return StreamProgress(emitted, first_s, slo.itl_s, slo.itl_statistic)

    def _note_step(self, output: Any, decode_ids: set[str], started_s: float) -> None:
        chunk = history = batch = context = 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request_id in decode_ids:
                batch += 1
                context += request.num_tokens
                continue
            chunk += tokens
            history = max(history, request.num_computed_tokens - tokens)
            record = self.records[request_id]
            if not record.first_token_s:
                record.compute_start_s = record.compute_start_s or started_s
                record.computed_tokens += tokens
        self.scheduled_tokens = output.total_num_scheduled_tokens
        self._in_flight.append(StepInFlight(started_s, chunk, history, batch, context))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The end of a step: measure it."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        step = self._in_flight.popleft()
        now_s = time.monotonic()
        seconds = now_s - max(step.started_s, self._last_step_end_s)
        self._last_step_end_s = now_s
        if step.chunk_tokens or step.batch:
            shape = (step.chunk_tokens, step.chunk_history_tokens, step.batch, step.context_tokens)
            self.samples.append(StepSample(*shape, seconds))
            if self.cost is not None:
                predicted_s = self.cost.t_mixed(*shape)
                self._calibration = calibrate(self._calibration, predicted_s, seconds)
        return result

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        # A request whose KV has come is computed only when the plan says so.
        return request.num_computed_tokens == 0 or request.request_id in self._admitted

    # --- requests -------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """A new request, with a record of its progress."""
        self._arrivals += 1
        slo = request.kv_transfer_params.get("slo")
        self.records[request.request_id] = RequestRecord(self._arrivals, slo)
        super().add_request(request)

    def _update_request_with_output(
        self,
        request: Any,
        new_token_ids: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        record = self.records[request.request_id]
        if new_token_ids and not record.first_token_s:
            record.first_token_s = time.monotonic()
        return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)

    def request_ends(self, request: Any) -> None:
        """Pin the KV of a request that ran to its end (a stop string ends it by an abort)."""
        record = self.records[request.request_id]
        if not request.kv_transfer_params.get("pull_done"):
            self._decline_loan(request)
        if not record.wants_pin or not record.first_token_s:
            return
        # The last token has no KV; under asynchronous scheduling neither have those in flight.
        valid = request.num_computed_tokens - request.num_output_placeholders
        valid = min(valid, request.num_tokens - 1)
        (blocks,) = self.kv_cache_manager.get_blocks(request.request_id).blocks
        record.pin_id = self.pins.pin(
            array("I", request.all_token_ids[:valid]),
            blocks[: -(-valid // self.block_size)],
            self._lease_s,
            release_on_read=self._prefills_only,
        ).pin_id

    # --- pulls and loans ------------------------------------------------------------------

    def pull_tokens(self, request: Any, cached_tokens: int) -> int | None:
        """See `connector.Owner`."""
        record = self.records[request.request_id]
        tokens = max(0, self._pullable_tokens(request) - cached_tokens)
        if not tokens and request.request_id not in self._admitted:
            record.cached_estimate_tokens = cached_tokens
            return None
        if not record.first_token_s:
            record.cached_tokens = cached_tokens
        return tokens

    def pull_admitted(self, request: Any, pulled_tokens: int) -> None:
        """See `connector.Owner`."""
        record = self.records[request.request_id]
        record.pulled_tokens = pulled_tokens
        if pulled_tokens:
            blocks = -(-(record.cached_tokens + pulled_tokens) // self.block_size)
            record.pulled_blocks = blocks - record.cached_tokens // self.block_size
            record.read_start_s = record.read_end_s = time.monotonic()
        else:
            self._decline_loan(request)

    def loan_read(self, loan_id: str) -> bool:
        """See `connector.Owner`."""
        alive = self.pins.is_lent(loan_id)
        if alive:
            self._news.put(partial(self.pins.read_done, loan_id))
            self.wake()
        return alive

    def has_requests(self) -> bool:
        """Whether steps are needed."""
        # Workers are polled while somebody may be reading.
        return self.is_lending or bool(super().has_requests())

    @property
    def is_lending(self) -> bool:
        """See `connector.Owner`."""
        return self.pins.may_be_read

    @property
    def pulls_in_flight(self) -> bool:
        """Whether vLLM's workers have reads to finish, also of aborted requests."""
        running, waiting = self.get_request_counts()
        if len(self.requests) > running + waiting:
            return True
        return any(
            r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in self.kv_holding_waiting
        )

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        settled = set()
        failed = kv_connector_output.failed_recving or set()
        for request_id in kv_connector_output.finished_recving or ():
            record = self.records.get(request_id)
            if record is not None:
                record.read_end_s = time.monotonic()
                self.pulled_blocks_total += record.pulled_blocks * (request_id not in failed)
            if request_id in failed:
                self._note_failed_pull(request_id)
                settled.add(request_id)
            elif self.requests[request_id].is_finished():
                settled.add(request_id)
            else:
                self._check_loan(request_id)
        super()._update_from_kv_xfer_finished(
            replace(kv_connector_output, finished_recving=settled)
        )

    def _check_loan(self, request_id: str) -> None:
        question = _loan_question(self.requests[request_id])

        def check() -> None:
            alive = side_channel.confirm_read(*question)
            self._news.put(partial(self._settle_read, request_id, alive))
            self.wake()

        self._checks.submit(check)

    def _decline_loan(self, request: Any) -> None:
        """Tell the lender not to wait for a reader, if there is one."""
        if "remote_request_id" in request.kv_transfer_params:
            self._checks.submit(side_channel.confirm_read, *_loan_question(request))

    def _settle_read(self, request_id: str, alive: bool) -> None:
        """Let the KV of a loan that was alive in, and have any other recomputed."""
        request = self.requests[request_id]
        if request.is_finished():
            self._free_blocks(request)
            return
        if not alive:
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request_id)
            self._note_failed_pull(request_id)
        self.finished_recving_kv_req_ids.add(request_id)

    def take_news(self) -> None:
        """What other threads have found out since the last step."""
        with suppress(queue.Empty):
            while True:
                self._news.get_nowait()()

    def _note_failed_pull(self, request_id: str) -> None:
        record = self.records.get(request_id)
        if record is not None:
            record.pulled_tokens = record.pulled_blocks = 0
            record.cached_estimate_tokens = None

    def shutdown(self) -> None:
        """End the questions to lenders as well."""
        self._checks.shutdown(wait=False, cancel_futures=True)
        super().shutdown()


class AmpdAsyncScheduler(AmpdScheduler, AsyncScheduler):  # type: ignore[misc]
    """The rules, for steps that are scheduled before the one before has ended (CUDA)."""


def _loan_question(request: Any) -> tuple[str, int, str]:
    parameters = request.kv_transfer_params
    return (
        parameters["remote_host"],
        parameters["remote_port"],
        parameters["remote_request_id"],
    )
