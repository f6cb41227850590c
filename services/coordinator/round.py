"""What a coordinator knows of a round while it runs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ampd.core import lifecycle
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import (
    BindDecision,
    PolicySpec,
    RoundRecord,
    SamplingParams,
    WorkerView,
)
from ampd.ports import Tokens
from services.coordinator.replay import RoundPlaced


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
    increment: Tokens
    sampling: SamplingParams
    homes: tuple[tuple[WorkerView, BindDecision | None], ...]
    """Where to try, in order; with a decision where that would be a new binding."""
    prefill: tuple[WorkerView, ...]
    policy: PolicySpec
    round_index: int
    record: RoundRecord | None = None
    output: Tokens = field(default_factory=lambda: array("I"))
    text: list[str] = field(default_factory=list)

    @property
    def keep_history_tokens(self) -> int:
        """History that it goes on from."""
        return lifecycle.require_running(self.session).keep_history_tokens

    def time_left_s(self, now_s: float) -> float | None:
        """What is left of the caller's deadline; None without one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - now_s)


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
