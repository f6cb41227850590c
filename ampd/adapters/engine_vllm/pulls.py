"""vLLM's scheduler with AMPD's pulls, loans and pins: what KV comes, goes, and stays.

A finished pull enters the prefix cache only when the lender says that its loan was alive
until after the read (`side_channel.confirm_read`). A request that ends leaves a pin.

All of it runs on the engine thread, but for `loan_read`.
"""

from __future__ import annotations

import queue
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from ampd.adapters.engine_vllm import side_channel
from ampd.adapters.engine_vllm.pins import PinTable
from ampd.adapters.engine_vllm.progress import RequestRecord
from ampd.adapters.engine_vllm.settings import OPTIONS_KEY
from ampd.core.model import Role

LOAN_CHECK_THREADS: Final = 4
"""Questions to lenders at a time; a dead one may hold one of them for seconds."""


class PullingScheduler(Scheduler):  # type: ignore[misc]
    """The `connector.Owner`; who computes in a step is its subclass's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config[OPTIONS_KEY]
        self._prefills_only = Role(options["role"]) is Role.PREFILL
        self._lease_s: float = options["result_lease_s" if self._prefills_only else "kv_lease_s"]
        self.pins = PinTable(self.kv_cache_manager.block_pool, self.block_size, time.monotonic)
        self.records: dict[str, RequestRecord] = {}
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when the next step has news."""
        self.pulled_blocks_total = 0
        self._admitted: frozenset[str] = frozenset()
        """Waiting requests that may compute in this step."""
        self._arrivals = 0
        self._checks = ThreadPoolExecutor(LOAN_CHECK_THREADS, thread_name_prefix="ampd-loan-check")
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.connector.connector_scheduler.owner = self

    # --- requests -------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """A new request, with a record of its progress."""
        self._arrivals += 1
        parameters = request.kv_transfer_params
        self.records[request.request_id] = RequestRecord(
            self._arrivals, parameters.get("session_began_s", 0.0), parameters.get("slo")
        )
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

    def shutdown(self) -> None:
        """End the questions to lenders as well."""
        self._checks.shutdown(wait=False, cancel_futures=True)
        super().shutdown()


def _loan_question(request: Any) -> tuple[str, int, str]:
    parameters = request.kv_transfer_params
    return (
        parameters["remote_host"],
        parameters["remote_port"],
        parameters["remote_request_id"],
    )
