"""vLLM's pull connector as AMPD needs it, loaded by `kv_connector_module_path`.

Against the stock connector of 0.32.0:
- what is pulled, pinned and lent is decided by our scheduler; vLLM's two modes
  (`do_remote_prefill`, `do_remote_decode`) are not used, a request simply names a loan in its
  `kv_transfer_params`;
- a pull takes the blocks that it lacks by their position, so a history that was cut short
  can never be paired with the wrong end of the lender's blocks;
- a failed pull is tried once and recomputed (stock: a failed read of a decode node's KV is
  waited for, for ever);
- finished requests never keep blocks by themselves: pins do (`pins.py`), with a release;
- pulls are posted before a step's computation on the CPU, where computing blocks the thread;
- a dead peer is noticed before the 5 s of the handshake, and a pull that does not end is
  given up;
- UCX's progress thread, which spins a whole core, is off unless asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from ampd.adapters.engine_vllm import side_channel

DRIVE_INTERVAL_S = 0.005
PULL_TIMEOUT_S = 5.0
"""A pull that has not ended by then is given up, and its tokens are recomputed."""


class Owner(Protocol):
    """Our scheduler as the connector sees it (`pulls.py`)."""

    def pull_tokens(self, request: Any, cached_tokens: int) -> int | None:
        """Tokens to pull beyond the cached ones; None: not to be admitted in this step."""
        ...

    def pull_admitted(self, request: Any, pulled_tokens: int) -> None:
        """The request has its blocks, and so many tokens of them are pulled from now on."""
        ...

    def request_ends(self, request: Any) -> None:
        """The request is about to give its blocks back."""
        ...

    @property
    def is_lending(self) -> bool:
        """Whether peers may be reading."""
        ...

    def loan_read(self, loan_id: str) -> bool:
        """A reader says that it has read: whether the loan was alive until now. Any thread."""
        ...


class AmpdConnectorScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Turns the scheduler's decisions into connector metadata."""

    owner: Owner

    def on_new_request(self, request: Any) -> None:
        """Nothing: no lease of ours needs heartbeats."""

    def get_num_new_matched_tokens(
        self,
        request: Any,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """(tokens to pull beyond the cached ones, whether that goes on beside the steps)."""
        tokens = self.owner.pull_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,
        num_external_tokens: int,
    ) -> None:
        """Note what is pulled into which of the request's new blocks."""
        parameters = request.kv_transfer_params
        if not parameters or parameters.get("pull_done"):
            return
        if num_external_tokens:
            (held,) = blocks.get_block_ids()
            (lent,) = parameters["remote_block_ids"]
            (unhashed,) = blocks.get_unhashed_block_ids_all_groups()
            start = len(held) - len(unhashed)
            parameters["remote_block_ids"] = [lent[start : len(held)]]
            self._reqs_need_recv[request.request_id] = (request, (unhashed,), (start,), True)
        parameters["pull_done"] = True
        self.owner.pull_admitted(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers learn of this step."""
        meta = super().build_connector_meta(scheduler_output)
        meta.lent = self.owner.is_lending
        return meta

    def request_finished(
        self,
        request: Any,
        block_ids: Any,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never keeps blocks for vLLM: pins do."""
        self.owner.request_ends(request)
        return False, None

    def _nixl_handshake_listener(  # type: ignore[no-untyped-def]
        self, encoded_data, ready_event, stop_event, host, port
    ) -> None:
        handshakes: Mapping[tuple[int, int], bytes] = encoded_data
        side_channel.serve(handshakes, self._loan_read, ready_event, stop_event, (host, port))

    def _loan_read(self, loan_id: str) -> bool:
        owner: Owner | None = getattr(self, "owner", None)
        return owner is not None and owner.loan_read(loan_id)


_agent_config_lock = threading.Lock()


class AmpdConnectorWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Moves the bytes; one per tensor-parallel rank.

    NIXL makes progress only when it is called, on both sides of a transfer where the transport
    needs the owner's help (shared memory, TCP). A step may compute for long, so a thread calls
    it in the meantime, but only in steps while something is lent or read.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        stock = base_worker.nixl_agent_config
        has_progress_thread = bool(extra.get("nixl_progress_thread"))

        def agent_config(*args: Any, **kwargs: Any) -> Any:
            # vLLM has no setting for it: its configuration is intercepted for this one call.
            if not has_progress_thread:
                kwargs |= {"enable_prog_thread": False, "num_threads": 0}
            return stock(*args, **kwargs)

        with _agent_config_lock:
            base_worker.nixl_agent_config = agent_config
            try:
                super().__init__(vllm_config, engine_id, kv_cache_config)
            finally:
                base_worker.nixl_agent_config = stock
        self._pull_deadlines_s: dict[str, float] = {}
        self._nixl_lock = threading.RLock()
        self._driving = threading.Event()
        self._stopped = threading.Event()
        if not has_progress_thread:
            threading.Thread(target=self._drive, name="ampd-nixl", daemon=True).start()

    def _drive(self) -> None:
        while not self._stopped.is_set():
            self._driving.wait()
            with self._nixl_lock:
                if self._driving.is_set() and not self._stopped.is_set():
                    self.nixl_wrapper.get_new_notifs()
            self._stopped.wait(DRIVE_INTERVAL_S)

    def start_load_kv(self, metadata: Any) -> None:
        """Post the step's reads."""
        with self._nixl_lock:
            super().start_load_kv(metadata)
            if metadata.lent or self._recving_metadata:
                self._driving.set()

    def get_transfer_results(self) -> Any:
        """Which reads have ended."""
        self._driving.clear()
        with self._nixl_lock:
            self._give_up_late_pulls()
            return super().get_transfer_results()

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> Any:
        """Register a peer after its handshake."""
        with self._nixl_lock:  # called by the thread of the handshakes
            return super().add_remote_agent(*args, **kwargs)

    def shutdown(self) -> None:
        """End the helping thread, then NIXL."""
        if hasattr(self, "_stopped"):  # also called when the construction has failed
            self._stopped.set()
            self._driving.set()
            with self._nixl_lock:
                super().shutdown()

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        # vLLM asserts, and the whole engine ends, where a handle names blocks that its owner
        # has not: such a read has failed like any other.
        if self._is_out_of_range(meta.remote):
            self._handle_failed_transfer(
                req_id, None, self._recv_failures, record_failed_transfer=False
            )
            return
        super()._read_blocks_for_req(req_id, meta)

    def _is_out_of_range(self, remote: Any) -> bool:
        physical_blocks = self.dst_num_blocks.get(remote.engine_id)
        if physical_blocks is None or self.transfer_topo is None:
            return False  # its handshake comes first
        info = self.transfer_topo.get_engine_info(remote.engine_id)
        blocks = physical_blocks // info.remote_physical_blocks_per_logical
        return any(block >= blocks for group in remote.block_ids for block in group)

    def _give_up_late_pulls(self) -> None:
        """Abort pulls that are past their time. One that NIXL cannot abort keeps its blocks,
        since its bytes may still arrive."""
        now_s = time.perf_counter()
        for request_id in self._pull_deadlines_s.keys() - self._recving_transfers.keys():
            del self._pull_deadlines_s[request_id]
        for request_id, transfers in self._recving_transfers.items():
            deadline_s = self._pull_deadlines_s.setdefault(request_id, now_s + PULL_TIMEOUT_S)
            if now_s < deadline_s or not transfers:
                continue
            self._recving_transfers[request_id] = [
                transfer
                for transfer in transfers
                if not self._handle_failed_transfer(request_id, transfer, self._recv_failures)
            ]

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if not side_channel.can_connect(host, port):
            raise ConnectionError(f"no engine listens at {host}:{port}")
        return super()._nixl_handshake(host, port, *args, **kwargs)

    def _get_new_notifs(self) -> set[str]:
        """Nothing: readers report over the side channel. Asking drives NIXL's progress, and
        throws away the notices that come with every read."""
        self.nixl_wrapper.get_new_notifs()
        return set()


class AmpdConnector(NixlBaseConnector):  # type: ignore[misc]
    """What vLLM instantiates: once in the scheduler, once in every worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads_posted = False
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = AmpdConnectorScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            self.connector_worker = AmpdConnectorWorker(
                vllm_config, self.engine_id, kv_cache_config
            )

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The first call of a step in a worker."""
        super().bind_connector_metadata(connector_metadata)
        if self.connector_worker is not None and current_platform.is_cpu():
            # vLLM starts loads after it has launched the computation. On a CPU that is after
            # it has *ended*, so nothing would overlap.
            self.connector_worker.start_load_kv(connector_metadata)
            self._loads_posted = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called when the step's computation is launched."""
        if not self._loads_posted and self.connector_worker is not None:
            self.connector_worker.start_load_kv(self._connector_metadata)
        self._loads_posted = False
