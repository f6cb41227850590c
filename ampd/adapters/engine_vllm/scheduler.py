"""vLLM's scheduler with AMPD's rules of who computes in a step, loaded by `scheduler_cls`.

Every step:
1. decodes take their token each;
2. *entrants*, requests whose KV is at hand but for at most a block, join at once (stock vLLM
   lets a chunked prefill take the whole budget, and does not even start their pull);
3. one prefill gets a chunk, first come first served. On a decode worker its size keeps the
   running streams within their ITL SLO (`ampd.core.local_prefill`), 0 making a pure decode
   step, or several share a fixed budget (`ampd.core.fixed_chunks`), as the rule says; on a
   prefill worker it is a constant, and there are no entrants;
4. the KV pulls of all others start, whoever computes.

All of it runs on the engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from ampd.adapters.engine_vllm.pulls import PullingScheduler
from ampd.adapters.engine_vllm.settings import OPTIONS_KEY
from ampd.adapters.engine_vllm.step_plan import Prefill, plan_step
from ampd.core.cost_model import CostModel
from ampd.core.fixed_chunks import ITL_SAFE_RULE, LocalRule, joint_history_tokens
from ampd.core.local_prefill import StreamProgress, calibrate, chunk_tokens
from ampd.core.model import Slo
from ampd.ports import StepSample

FIXED_CHUNK_TOKENS: Final = 256
"""The local prefill chunk until a cost model is known."""
MAX_STEP_SAMPLES: Final = 4096


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A scheduled step whose output has not come back."""

    started_s: float
    chunk_tokens: int
    chunk_history_tokens: int
    batch: int
    context_tokens: int


class AmpdScheduler(PullingScheduler):
    """The rules, for synchronous steps (CPU)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config[OPTIONS_KEY]
        self._max_chunk_tokens: int = options["prefill_chunk_tokens"]
        self.samples: deque[StepSample] = deque(maxlen=MAX_STEP_SAMPLES)
        self.cost: CostModel | None = None
        self.rule: LocalRule = ITL_SAFE_RULE
        """How local prefills are cut and ordered."""
        self.scheduled_tokens = 0
        """In the last step."""
        self.calibration = 1.0
        """Measured over predicted time of the steps."""
        self._in_flight: deque[StepInFlight] = deque()
        self._last_step_end_s = 0.0

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
            budget_tokens=self._budget_tokens(len(decodes)),
        )
        if self.rule.by_session:
            self._sort_waiting()
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

    @property
    def prefill_tokens_left(self) -> int:
        """Prompt tokens to compute, of the requests that are computed here."""
        prefills = [r for r in self.running if r.is_prefill_chunk]
        prefills += [r for r in self._waiting() if self._is_ready(r)]
        return sum(self._candidate(request).left_tokens for request in prefills)

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

    def _candidate(self, request: Any) -> Prefill:
        at_hand = request.num_computed_tokens or self._cached_estimate_tokens(request)
        left = max(1, request.num_tokens - at_hand)
        return Prefill(request.request_id, self._order(request), left)

    def _order(self, request: Any) -> tuple[float, int]:
        record = self.records[request.request_id]
        began_s = record.session_began_s if self.rule.by_session else 0.0
        return (began_s, record.order)

    def _sort_waiting(self) -> None:
        """vLLM fills the step in the order of its own queue."""
        queue = sorted(self.waiting, key=self._order)
        self.waiting.clear()
        self.waiting.extend(queue)

    def _budget_tokens(self, decoding: int) -> int | None:
        """Prompt tokens of the next step under a fixed budget; None: there is none."""
        if self.rule.budget_tokens is None:
            return None
        most: int = self.scheduler_config.max_num_batched_tokens
        return min(self.rule.budget_tokens, most) - decoding

    def _chunk_tokens(self, decodes: list[Any], head: Prefill, now_s: float) -> int:
        most = min(self._max_chunk_tokens, head.left_tokens)
        if self._prefills_only:
            return most
        if self.cost is None:
            return min(FIXED_CHUNK_TOKENS, most)
        request = self.requests[head.request_id]
        return chunk_tokens(
            cost=self.cost,
            calibration=self.calibration,
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
        batch = context = 0
        pieces = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request_id in decode_ids:
                batch += 1
                context += request.num_tokens
                continue
            pieces.append((tokens, request.num_computed_tokens - tokens))
            record = self.records[request_id]
            if not record.first_token_s:
                record.compute_start_s = record.compute_start_s or started_s
                record.computed_tokens += tokens
        chunk = sum(tokens for tokens, _ in pieces)
        history = max((before for _, before in pieces), default=0)
        if self.rule.budget_tokens is not None and len(pieces) > 1:
            history = joint_history_tokens(pieces)
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
                self.calibration = calibrate(self.calibration, predicted_s, seconds)
        return result

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        # A request whose KV has come is computed only when the plan says so.
        return request.num_computed_tokens == 0 or request.request_id in self._admitted


class AmpdAsyncScheduler(AmpdScheduler, AsyncScheduler):  # type: ignore[misc]
    """The rules, for steps that are scheduled before the one before has ended (CUDA)."""
