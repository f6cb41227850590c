"""The ports: everything AMPD does to the world goes through one of these small protocols.

Adapters live in `ampd.adapters`, one module per port and technology; each port has one
contract suite in tests/contract that runs over all its adapters.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ampd.core.cost_model import CostModel
from ampd.core.fixed_chunks import LocalRule
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import (
    Adopted,
    AdoptOrder,
    DrainStatus,
    FinishReason,
    KvHandle,
    Moved,
    PolicySpec,
    PrefillStats,
    PrefillTarget,
    PrefillTask,
    RoundEvent,
    RoundOrder,
    RoundRecord,
    SamplingParams,
    Slo,
    ToolCall,
    ToolReturn,
    WorkerInfo,
    WorkerLoad,
    WorkerView,
)
from ampd.core.model import TokensOut as TokensOut

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # not subscriptable at run time before Python 3.12
"""A token sequence: `array("I")`, unsigned 32-bit ids, the wire's packed form."""

Clock = Callable[[], float]
"""Monotonic seconds."""


# --- engine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed facts of a started engine."""

    engine: str
    model: str
    block_tokens: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    max_model_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of an engine, in tokens of KV. free + used + pinned = capacity, cached KV that
    nothing holds counting as free; a block that both a running request and a pin hold is used."""

    kv_free_tokens: int
    kv_used_tokens: int
    kv_pinned_tokens: int
    running_requests: int
    waiting_requests: int
    pulled_bytes_total: int
    """KV bytes read from other engines since start."""
    prefill_tokens_left: int = 0
    """Prompt tokens that it has yet to compute, those that it reads from elsewhere left out."""
    calibration: float = 1.0
    """Measured over predicted time of its steps, a running mean."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute the KV of `tokens`, of which the first `history.tokens` lie at `history`."""

    request_id: str
    tokens: Tokens
    history: KvHandle | None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """`kv` covers all of the request's tokens but at most the last; it is pinned and lent out
    (readable by peers) until it was read, released, or its lease ran out."""

    kv: KvHandle
    stats: PrefillStats


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Decode from `tokens` (history + increment, never empty).

    `kv`: a prefill worker's result: pull what the own prefix cache lacks, compute at most one
    token. None: prefill locally over the own prefix cache, in chunks that respect `slo`, or as
    `Engine.use_local_rule` says.

    `output`: what the round has said already, elsewhere or before; it follows `tokens`, and `kv`
    covers it. `sampling` is the whole round's: max_tokens and min_tokens count `output`,
    penalties and stop strings see it. Only what is new is emitted: tokens behind `output`, text
    behind its first `text_chars` characters. Greedy, the stream is the one that a single
    request would have had. An output that has ended already gives PrefillDone and GenerateDone.
    """

    request_id: str
    tokens: Tokens
    kv: KvHandle | None
    sampling: SamplingParams
    slo: Slo
    output: Tokens = field(default_factory=lambda: array("I"))
    text_chars: int = 0
    session_began_s: float = 0.0
    """On any clock that all requests share: under a rule that takes sessions in the order in which
    they arrived, local prefills go by it."""


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt is in: emitted once, before the first tokens."""

    stats: PrefillStats


@dataclass(frozen=True, slots=True)
class GenerateDone:
    """The end of a generation. `kv` pins the KV of tokens + kept output (less at most the
    last token) on this engine until released; `kept_output_tokens` excludes the cut-off tail
    of a stop string; both counts include the request's own `output`. `stop_reason`: the stop
    string or token id that ended it, or ''."""

    finish_reason: FinishReason
    stop_reason: str
    output_tokens: int
    kept_output_tokens: int
    kv: KvHandle


EngineEvent = PrefillDone | TokensOut | GenerateDone


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step as it was measured: what a cost model is fitted from."""

    chunk_tokens: int
    """Prompt tokens computed in the step."""
    chunk_history_tokens: int
    """KV tokens before the (longest) chunk."""
    batch: int
    """Sequences that decoded one token."""
    context_tokens: int
    """Their contexts in all."""
    seconds: float


class Engine(Protocol):
    """An inference engine with a paged KV cache and a prefix cache.

    Cancelling `prefill`, or closing `generate`'s generator early, aborts the request and
    frees all it took within a second (a transfer in flight: when it ends). Errors are
    `AmpdError`: ENGINE_FAILED, INVALID_FIELD, CONTEXT_TOO_LONG.
    """

    @property
    def info(self) -> EngineInfo:
        """Fixed facts; there once the engine has started."""
        ...

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Prefill side: read the history KV (overlapping the computation of other requests),
        compute the rest. A history that cannot be read is recomputed, and shows in the stats."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        """Decode side: PrefillDone, then TokensOut..., then GenerateDone."""
        ...

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        """Make the first `tokens` of a pinned handle readable by peers for its lease, until
        `reclaim` or `release`. Only a lent handle costs polling. Unknown or stale handles:
        AmpdError TASK_GONE."""
        ...

    async def reclaim(self, kv: KvHandle) -> None:
        """End of a loan; the pin stays. Idempotent."""
        ...

    async def release(self, kv: KvHandle) -> None:
        """Drop a pin (and its loan). Idempotent: unknown handles are ignored."""
        ...

    def stats(self) -> EngineStats:
        """The latest moment; costs nothing."""
        ...

    def take_step_samples(self) -> Sequence[StepSample]:
        """The steps since the last call, oldest first, at most a named limit of the newest."""
        ...

    def use_cost_model(self, cost: CostModel) -> None:
        """The model by which local prefill chunks are sized from the next step on."""
        ...

    def use_local_rule(self, rule: LocalRule) -> None:
        """How local prefills are cut and ordered from the next step on; at the start ITL-safe
        chunks, first come first served. What an engine can compute in one step is a limit of its
        own."""
        ...

    async def close(self) -> None:
        """Free connections and what else is held. Idempotent."""
        ...


# --- KV transport -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvPiece:
    """So many bytes from there to here: offsets into the owner's and the reader's memory."""

    remote_offset: int
    local_offset: int
    length: int


class KvTransport(Protocol):
    """Moves bytes between the memories of engines, pull only: the reader names what it wants,
    the owner's code takes no part. Who may read what, and until when, is the engines' matter."""

    def register(self, memory: memoryview) -> None:
        """The memory that peers read from and reads go to: once, before anything else."""
        ...

    @property
    def locator(self) -> bytes:
        """How a peer's transport of the same kind reaches this memory; it travels in handles and
        names this very life of it."""
        ...

    def serve(self, *, lent: bool) -> None:
        """Whether anything is lent: only then the transport may cost time when idle."""
        ...

    async def read(self, locator: bytes, pieces: Sequence[KvPiece], timeout_s: float) -> None:
        """Copy the pieces into the own memory. AmpdError WORKER_UNAVAILABLE when the peer is
        gone, is another life, or does not answer in time; INVALID_FIELD for a locator of
        another kind. When this returns, raises or is cancelled, no byte lands any more."""
        ...

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """Whom to give the messages of peers, on the event loop: once, before anything is lent.
        They must arrive only while something is lent."""
        ...

    async def tell(self, locator: bytes, message: bytes) -> None:
        """Send a short message to the owner of the memory, at most once and never an error:
        who is gone does not hear it. Readers tell that a loan is over by it."""
        ...

    async def close(self) -> None:
        """Free memory registrations and connections. Idempotent."""
        ...


# --- shared store -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundContext:
    """Everything one routing decision reads, in one round trip."""

    session: SessionRecord | None
    workers: tuple[WorkerView, ...]
    policy: PolicySpec | None
    replay: bytes | None
    """What a finished round stored under this request_id, if any."""


@dataclass(frozen=True, slots=True)
class SessionWrites:
    """What is written together with a session record, or not at all."""

    tokens_offset: int = 0
    tokens: Tokens | None = None
    """Token ids to store from `tokens_offset` (tokens) on; what lay behind is void."""
    round: RoundRecord | None = None
    replay_request_id: str = ""
    replay: bytes | None = None


@dataclass(frozen=True, slots=True)
class SessionPage:
    """One page of sessions by session_id; an empty token ends the listing."""

    sessions: tuple[SessionRecord, ...]
    next_page_token: str


class StateStore(Protocol):
    """The state all processes share. It has no domain logic: the lifecycle computes the next
    record, the store swaps it in if nobody was faster. Raises AmpdError STORE_UNAVAILABLE
    within its own timeout; nothing hangs."""

    async def heartbeat(
        self, info: WorkerInfo, load: WorkerLoad, lease_s: float
    ) -> PolicySpec | None:
        """Register (first call) and renew a worker; its policy comes back. The entry
        vanishes `lease_s` after the last heartbeat. AmpdError STALE_INCARNATION when a newer
        incarnation of the worker is registered: this process was replaced."""
        ...

    @property
    def life(self) -> str:
        """Which life of the store the last heartbeat, load_round or ping met; '' before the
        first. A store of another life may have lost its last writes, or all."""
        ...

    @property
    def age_s(self) -> float:
        """For how long that life had lasted then, in seconds; infinite before the first, and for
        the one in which the store's data began: it has lost nothing."""
        ...

    async def deregister(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker, unless a newer incarnation has replaced it."""
        ...

    async def list_workers(self) -> tuple[WorkerView, ...]:
        """All live workers and coordinators, by worker_id."""
        ...

    async def load_round(self, session_id: str, request_id: str) -> RoundContext:
        """One round trip; see RoundContext."""
        ...

    async def create_session(
        self, record: SessionRecord, request_id: str, max_sessions: int | None = None
    ) -> SessionRecord:
        """Store a new session; a repeated request_id of the tenant gives the first one back
        ('': never repeated). AmpdError SESSION_CONFLICT when the session_id is taken, QUEUE_FULL
        when the tenant has `max_sessions` open ones (expired ones may count for a while)."""
        ...

    async def get_session(self, session_id: str) -> SessionRecord | None:
        """The record, a recently closed one included; None: unknown or expired."""
        ...

    async def compare_and_set(
        self, record: SessionRecord, expected_version: int, writes: SessionWrites | None = None
    ) -> bool:
        """Replace the session's record if its version is `expected_version`. A record in
        state CLOSED removes the session's tokens and rounds; the record itself stays for a
        while, so that a repeated close finds it, and no open one replaces it. AmpdError
        INTERNAL when the tokens would leave a hole behind the stored ones."""
        ...

    async def list_sessions(self, tenant: str, page_size: int, page_token: str) -> SessionPage:
        """By session_id; a malformed token is AmpdError INVALID_FIELD `page_token`."""
        ...

    async def read_history(self, session_id: str, start: int, end: int) -> Tokens:
        """Token ids [start, end): the whole for a rebuild, one for the last token. AmpdError
        SESSION_NOT_FOUND when not all of them are stored."""
        ...

    async def read_rounds(self, session_id: str) -> tuple[RoundRecord, ...]:
        """The kept rounds, oldest first (a named limit of the newest is kept)."""
        ...

    async def get_policy(self) -> PolicySpec | None:
        """The policy in force; None: none was set."""
        ...

    async def set_policy(self, policy: PolicySpec, expected_version: int) -> bool:
        """Replace the policy if its version is `expected_version` (0: none was set)."""
        ...

    async def ping(self) -> None:
        """Returns when the store answers."""
        ...

    async def close(self) -> None:
        """Free connections and what else is held. Idempotent."""
        ...


# --- peers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimedTask:
    """What a claim grants: the prompt, and where the history lies (None: no history)."""

    tokens: Tokens
    history: KvHandle | None


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What a prefill worker tells the home when it is done."""

    kv: KvHandle
    stats: PrefillStats
    queue_s: float


class PrefillPeer(Protocol):
    """A prefill worker as a home sees it."""

    async def offer(self, task: PrefillTask) -> None:
        """Put the task's metadata into the worker's queue. AmpdError QUEUE_FULL (for a task that
        waits at home: it has other work), DRAINING, STALE_INCARNATION or WORKER_UNAVAILABLE when
        it does not take it."""
        ...

    async def withdraw(self, task_id: str) -> None:
        """The task is void at whatever stage it is: free all it took. Idempotent."""
        ...

    async def lost(self) -> None:
        """Returns when the worker is gone (dead, restarted or unreachable)."""
        ...


class DecodePeer(Protocol):
    """A home as a prefill worker sees it."""

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        """`claimer`: where the home finds the worker; without it only a task that was offered to
        the worker is given. AmpdError TASK_GONE when it is no longer to be had."""
        ...

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        """Hand the result over. AmpdError TASK_GONE: the worker frees it."""
        ...

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        """The claimed task could not be computed; the home goes on without this worker."""
        ...

    async def lost(self) -> None:
        """Returns when the home is gone (dead, restarted or unreachable)."""
        ...


class Peers(Protocol):
    """Finds peers by address; connections are kept and shared, with a bound."""

    def prefill(self, target: PrefillTarget) -> PrefillPeer:
        """That life of a prefill worker."""
        ...

    def decode(self, address: str, incarnation: int) -> DecodePeer:
        """That life of a home."""
        ...

    async def close(self) -> None:
        """Free connections and what else is held. Idempotent."""
        ...


class HomePeer(Protocol):
    """A home as coordinators and other homes see it."""

    def run_round(
        self, order: RoundOrder, timeout_s: float | None
    ) -> AsyncGenerator[RoundEvent, None]:
        """Accepted, then Rerouted and TokensOut as they come, then Finished. Closing the
        generator early discards the round at the home. AmpdError: DecodeHandler's own,
        STALE_INCARNATION, WORKER_UNAVAILABLE when the home is lost, DEADLINE after
        `timeout_s` (None: no bound but the home's)."""
        ...

    async def release(self, session_id: str, *, paused_after: int | None = None) -> None:
        """Free all that a session holds there; with `paused_after` only if it is paused and has
        settled that many rounds. Idempotent."""
        ...

    async def move(self, session_id: str, target_worker_id: str) -> Moved:
        """Let it hand the session over ('': to the home with the most free KV). AmpdError:
        MoveHandler's own, STALE_INCARNATION, WORKER_UNAVAILABLE."""
        ...

    async def adopt(self, order: AdoptOrder) -> Adopted:
        """Hand a session over to it. AmpdError: MoveHandler's own, STALE_INCARNATION,
        WORKER_UNAVAILABLE: whether it has taken the session is not known then."""
        ...

    async def run_tool(self, call: ToolCall, timeout_s: float | None) -> ToolReturn:
        """Run a tool there; cancelling ends it at once. AmpdError: ToolRunner's own,
        STALE_INCARNATION, WORKER_UNAVAILABLE, DEADLINE after `timeout_s` (None: no bound but
        the worker's)."""
        ...


class WorkerPeer(Protocol):
    """A prefill or decode worker as a coordinator sees it."""

    async def drain(self) -> DrainStatus:
        """Let it finish and end; answers at once. AmpdError STALE_INCARNATION,
        WORKER_UNAVAILABLE."""
        ...


class Homes(Protocol):
    """Finds homes (and workers) by address; connections are kept and shared, with a bound."""

    def home(self, info: WorkerInfo) -> HomePeer:
        """That life of a decode worker."""
        ...

    def worker(self, info: WorkerInfo) -> WorkerPeer:
        """That life of a prefill or decode worker."""
        ...

    async def close(self) -> None:
        """Free connections and what else is held. Idempotent."""
        ...


# --- handlers: the other side of the peers ------------------------------------------------


class PrefillHandler(Protocol):
    """What a prefill worker does for homes. Incarnations are checked before."""

    async def offer(self, task: PrefillTask, home_address: str, home_incarnation: int) -> None:
        """Queue the task; one that waits at home only if there is nothing else to do. AmpdError
        QUEUE_FULL (with `retry_after_s`), DRAINING. An offer repeated (same task_id) is one
        task."""
        ...

    async def withdraw(self, task_id: str) -> None:
        """The task is void at whatever stage it is: free all it took. Idempotent."""
        ...


class DecodeHandler(Protocol):
    """What a home does for coordinators and prefill workers. Incarnations are checked before."""

    def run_round(self, order: RoundOrder) -> AsyncGenerator[RoundEvent, None]:
        """Admit the round, have it prefilled as ordered, decode, stream; Accepted comes first,
        Finished last. Closing the generator early, or cancelling, discards the round.
        AmpdError HISTORY_NOT_RESIDENT, ROUND_RUNNING, KV_EXHAUSTED, QUEUE_FULL,
        INVALID_FIELD, CONTEXT_TOO_LONG, DRAINING, ENGINE_FAILED."""
        ...

    async def release(self, session_id: str, *, paused_after: int | None = None) -> None:
        """Free all that the session holds here, its running round included; with
        `paused_after` only if it is paused and has settled that many rounds. Idempotent."""
        ...

    async def claim(
        self, task_id: str, worker_id: str, claimer: PrefillTarget | None = None
    ) -> ClaimedTask:
        """A prefill worker takes the task: one that was offered to it or, if it says where it is
        to be found, one that waits for whoever comes first. AmpdError TASK_GONE: not to be had
        (any more)."""
        ...

    async def complete(self, task_id: str, worker_id: str, report: PrefillReport) -> None:
        """The claimed task is computed. AmpdError TASK_GONE: the worker frees it."""
        ...

    async def fail(self, task_id: str, worker_id: str, error_message: str) -> None:
        """The claimed task could not be computed. Unknown tasks are ignored."""
        ...


class MoveHandler(Protocol):
    """What a home does to hand sessions over. Incarnations are checked before."""

    async def move(self, session_id: str, target_worker_id: str) -> Moved:
        """Hand the idle session over to another home ('': the one with the most free KV). A
        round that comes meanwhile wins. AmpdError SESSION_NOT_FOUND (not resident here),
        WORKER_NOT_FOUND, ROUND_RUNNING, SESSION_CONFLICT, NO_DECODE_WORKER,
        STORE_UNAVAILABLE, and the target's refusals as of `adopt`."""
        ...

    async def adopt(self, order: AdoptOrder) -> Adopted:
        """Take an idle session over, reading the KV that is lent with it. A round that comes
        meanwhile wins; no other session loses KV. AmpdError DRAINING, ROUND_RUNNING,
        SESSION_CONFLICT, KV_EXHAUSTED, QUEUE_FULL, ENGINE_FAILED."""
        ...


class WorkerHandler(Protocol):
    """What prefill and decode workers both do for coordinators. Incarnations are checked
    before."""

    async def drain(self) -> DrainStatus:
        """Take no new work, finish what there is, and end. Answers at once; idempotent."""
        ...


# --- server-side tools --------------------------------------------------------------------


class ToolRunner(Protocol):
    """Runs tools by name, outside of this process (spec 2 step 5)."""

    def names(self) -> tuple[str, ...]:
        """The tools that can be run now."""
        ...

    async def run(self, call: ToolCall) -> ToolReturn:
        """Run the tool within its limits of time and output. What the tool does wrong (an
        exception, no end in time, arguments that it does not take) is a return with `failed`.
        Cancelling ends it at once, with all that it has started.

        AmpdError TOOL_NOT_FOUND; QUEUE_FULL (with `retry_after_s`) over the bound of running
        tools; DRAINING."""
        ...

    async def close(self) -> None:
        """Free connections and what else is held. Idempotent."""
        ...


# --- tokenisation -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of an increment; `name` and `tool_call_id` may be empty."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Text to token ids, an increment at a time; the history is never rendered again."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    def encode_text(self, text: str, *, first: bool) -> Tokens:
        """Raw text; with `first` the model's own start tokens go in front."""
        ...

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, first: bool, last_token_id: int | None
    ) -> Tokens:
        """The model's chat template applied to the new messages alone, with what the template
        puts between the assistant's turn and them (less the stop token when the history ends
        with it: `last_token_id`), and the prompt for the next assistant turn behind. AmpdError
        INVALID_FIELD when the template does not take them."""
        ...
