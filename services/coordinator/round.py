"""What a coordinator knows of a round while it runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ampd.core import lifecycle
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import (
    BindDecision,
    Binding,
    PolicySpec,
    RoundRecord,
    SamplingParams,
    WorkerInfo,
    WorkerView,
)
from ampd.core.output import RoundOutput
from ampd.ports import Tokens
from ampd.wire.replay import RoundPlaced


@dataclass(frozen=True, slots=True)
class Candidate:
    """A home to try. `bind`: the decision, where that would be a new binding; `waits`: whether
    the round may wait there for KV that others hold."""

    view: WorkerView
    bind: BindDecision | None
    waits: bool = True

    @property
    def binding(self) -> Binding:
        """The worker and its life."""
        return binding_of(self.view.info)


@dataclass(slots=True)
class Round:
    """One attempt of one round, begun in the store."""

    request_id: str
    """The client's, or one made here."""
    attempt_id: str
    replayable: bool
    """Whether the client gave the request_id."""
    created_s: float
    created_unix_s: float
    deadline_s: float | None
    session: SessionRecord
    """As it stands in the store: every write replaces it."""
    read_version: int
    """The session's version as it was read, before the round began."""
    increment: Tokens
    sampling: SamplingParams
    homes: deque[Candidate]
    """Where to try, in order."""
    decode: tuple[WorkerView, ...]
    """The decode workers as they were last seen."""
    prefill: tuple[WorkerView, ...]
    policy: PolicySpec
    round_index: int
    output: RoundOutput = field(default_factory=RoundOutput)
    unseen: bool = False
    """Whether `output` comes from before this call: its client gets it again."""
    detached: bool = False
    """Whether the shared store does not know that the round runs: it could not be asked."""
    record: RoundRecord | None = None
    lost: set[Binding] = field(default_factory=set)
    """Homes that died, left or could not be reached since the round began."""

    @property
    def keep_history_tokens(self) -> int:
        """History that it goes on from."""
        return lifecycle.require_running(self.session).keep_history_tokens

    def time_left_s(self, now_s: float) -> float | None:
        """What is left of the caller's deadline; None without one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - now_s)


def binding_of(info: WorkerInfo) -> Binding:
    """That life of a worker as a session's home."""
    return Binding(info.worker_id, info.incarnation)


def placed(record: RoundRecord) -> RoundPlaced:
    """What the client is told of where the round is prefilled."""
    return RoundPlaced(
        round_index=record.round_index,
        route=record.route,
        reason=record.reason,
        prefill_worker=record.prefill_worker,
        decode_worker=record.decode_worker,
        history_tokens=record.history_tokens,
        increment_tokens=record.increment_tokens,
        history_rebuilt=record.history_rebuilt,
    )
