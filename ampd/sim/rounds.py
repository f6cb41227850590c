"""What the simulator keeps of a session and of a round while they live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampd.core.model import RoundTimings, RouteDecision
from ampd.sim.workload import RoundPlan, SessionPlan

if TYPE_CHECKING:
    from ampd.sim.decode_worker import SimDecodeWorker
    from ampd.sim.prefill_worker import SimPrefillWorker


class SimSession:
    """A session: `history_tokens` after its last round, `holders` the prefix that each prefill
    worker computed of it, `timings` of its counted rounds."""

    __slots__ = (
        "history_tokens",
        "holders",
        "home",
        "next_round",
        "plan",
        "rounds_done",
        "timings",
        "ttft_sum_s",
    )

    def __init__(self, plan: SessionPlan) -> None:
        self.plan = plan
        self.history_tokens = plan.history_tokens
        self.next_round = 0
        self.home: SimDecodeWorker | None = None
        self.holders: dict[str, int] = {}
        self.timings: list[RoundTimings] = []
        self.rounds_done = 0
        self.ttft_sum_s = 0.0


class SimRound:
    """A round: `history_tokens` are resident at its home, `new_tokens` are computed, wherever;
    `bound`: its session gets its home by it.
    Instants and durations in seconds."""

    __slots__ = (
        "attempt",
        "bound",
        "compute_s",
        "created_s",
        "decision",
        "done_tokens",
        "end_step",
        "expected_s",
        "first_token_s",
        "footprint_tokens",
        "have_tokens",
        "history_tokens",
        "index",
        "join_step",
        "keep_tokens",
        "max_tokens",
        "new_tokens",
        "output_tokens",
        "plan",
        "predicted_s",
        "prefilled_by",
        "queue_s",
        "read_s",
        "rerouted",
        "return_s",
        "session",
        "taken_s",
        "targets",
        "task_id",
        "turn",
    )

    def __init__(self, session: SimSession, created_s: float, max_tokens_factor: float) -> None:
        plan: RoundPlan = session.plan.rounds[session.next_round]
        history, keep = session.history_tokens, plan.keep_tokens
        self.session = session
        self.plan = plan
        self.index = session.next_round
        self.created_s = created_s
        self.keep_tokens = history if keep is None else min(keep, history)
        self.output_tokens = plan.output_tokens
        self.max_tokens = max(plan.output_tokens, round(max_tokens_factor * plan.output_tokens))
        self.bound = session.home is None
        self.footprint_tokens = 0
        self.decision: RouteDecision | None = None
        self.targets: tuple[SimPrefillWorker, ...] = ()
        self.attempt = 0
        self.task_id = ""
        self.prefilled_by: SimPrefillWorker | None = None
        self.rerouted = False
        self.history_tokens = 0
        self.new_tokens = 0
        self.have_tokens = 0
        self.done_tokens = 0
        self.turn = 0
        self.predicted_s = 0.0
        self.expected_s = 0.0
        self.taken_s = 0.0
        self.queue_s = 0.0
        self.read_s = 0.0
        self.compute_s = 0.0
        self.return_s = 0.0
        self.first_token_s = 0.0
        self.join_step = 0
        self.end_step = 0

    @property
    def prompt_tokens(self) -> int:
        """Kept history and increment."""
        return self.keep_tokens + self.plan.increment_tokens
