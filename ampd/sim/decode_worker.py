"""A decode worker: the home of its sessions, its KV ledger, and the steps of its engine.

A step is that of the emulated engine: all that decodes takes a token; rounds whose prompt is
at hand join at once (one token of it is computed here); one local prefill gets a chunk that
`ampd.core.local_prefill` sizes to what the running streams bear, or several share a fixed budget
(`ampd.core.fixed_chunks`), as the policy says.

A batch that nothing joins and nothing leaves needs no events: with n streams and C tokens of
context the first j steps take `j * (base + slope(n)) + context_token * (j*C + n*j*(j-1)/2)`. Such
a *run* ends with its first stream, or at the next step boundary when something comes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count, repeat
from math import ceil, sqrt
from typing import Final

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import fill_budget, joint_history_tokens
from ampd.core.kv_ledger import KvLedger, RoundDemand
from ampd.core.late_binding import (
    HOME_BACKLOG_TOKENS,
    MAX_SHOWN_TASKS,
    RemoteOutlook,
    Task,
    can_decode_more,
    take_home,
    task,
)
from ampd.core.local_prefill import (
    CALIBRATION_WEIGHT,
    MIN_CHUNK_TOKENS,
    StreamProgress,
    calibrate,
    chunk_tokens,
)
from ampd.core.model import PolicySpec, Slo, WaitingPrefill, WorkerInfo, WorkerLoad
from ampd.core.policies import ALWAYS_REMOTE, AMPD, is_literal, local_rule, number
from ampd.core.window import MeanWindow
from ampd.sim.kernel import Kernel
from ampd.sim.links import LinkEnd
from ampd.sim.noise import Noise
from ampd.sim.published import PublishedLoad
from ampd.sim.report import Totals
from ampd.sim.rounds import SimRound
from ampd.sim.settings import SimSettings, WorkerSpec

LOOK_S: Final = 0.05
"""How soon a home looks again at tasks that wait and that it did not take."""
MAX_GAP_SEGMENTS: Final = 1 << 16
"""Segments of equal gaps that are kept before those that no stream needs are dropped."""


class _Mode(Enum):
    IDLE = auto()
    RUN = auto()
    """Decode steps in closed form."""
    STEP = auto()
    """One step that computes prompt tokens too, or holds a local prefill back."""
    PLANNING = auto()
    """Between two steps: what comes now is seen by the plan."""


class SimDecodeWorker(PublishedLoad):
    """See the module."""

    def __init__(
        self,
        info: WorkerInfo,
        spec: WorkerSpec,
        settings: SimSettings,
        policy: PolicySpec,
        slo: Slo,
        *,
        kernel: Kernel,
        totals: Totals,
        finished: Callable[[SimRound, tuple[float, float]], None],
        refused: Callable[[SimRound], None],
        gap_statistics: bool,
        outlook: Callable[[float], RemoteOutlook],
        offers: Callable[[], None],
        phase_s: float,
    ) -> None:
        """`finished` gets a round that has said its last token, with P95 and largest gap (s);
        `refused` one that no KV memory holds."""
        super().__init__(info, heartbeat_s=settings.heartbeat_s, phase_s=phase_s)
        self.link = LinkEnd()
        self.ledger = KvLedger(
            capacity_tokens=spec.kv_capacity_tokens, block_tokens=settings.kv_block_tokens
        )
        self.busy_s = 0.0
        """Seconds of steps, within the counted time."""
        self._cost = spec.cost
        self._actual = spec.cost.scaled(spec.slowdown)
        self._noise = Noise(settings.noise, f"{info.worker_id} {phase_s}")
        self._settings = settings
        self._slo = slo
        self._kernel = kernel
        self._totals = totals
        self._finished = finished
        self._refused = refused
        self._gap_statistics = gap_statistics
        self._counts_open = not is_literal(policy)
        self._itl = MeanWindow(number(policy, "window_s"))
        self._calibration = 1.0
        self._calibrates = policy.name != ALWAYS_REMOTE
        self._rule = local_rule(policy)
        ttl_s = self._rule.kv_ttl_s
        self._kv_lease_s = settings.kv_lease_s if ttl_s is None else ttl_s
        self._waiting: deque[SimRound] = deque()
        self._waiting_known: deque[SimRound] = deque()
        """Rounds of sessions that live here: they go before new ones."""
        self._lease_poke_s = 0.0
        self._poking = False
        self._entrants: list[SimRound] = []
        self._locals: deque[SimRound] = deque()
        self._locals_s = 0.0
        self._binds_late = policy.name == AMPD
        self._late: dict[str, SimRound] = {}
        self._late_tasks: dict[str, Task] = {}
        self._shows_late = False
        self._coming = 0
        self._look_s = 0.0
        self._outlook = outlook
        self._offers = offers
        self._order = count()
        self._streams: list[tuple[int, int, SimRound]] = []
        self._steps = 0
        self._context_tokens = 0
        self._mode = _Mode.IDLE
        self._since_s = 0.0
        self._left = 0
        self._version = 0
        self._step_entrants: list[SimRound] = []
        self._step_chunks: list[tuple[SimRound, int]] = []
        self._step_shape = (0, 0, 0, 0)
        self._batch_s: dict[int, float] = {}
        self._gap_ends: list[int] = []
        self._gaps_s: list[float] = []

    @property
    def idle(self) -> bool:
        """Whether it holds no round."""
        return not (
            self._waiting
            or self._waiting_known
            or self._late
            or self._entrants
            or self._locals
            or self._streams
        )

    # --- admission ---------------------------------------------------------------------------

    def has_room(self, demand: RoundDemand) -> bool:
        """Whether a round would be admitted at once."""
        return not (self._waiting or self._waiting_known) and self.ledger.can_admit(
            demand, self._kernel.now_s
        )

    def demand(self, round_: SimRound) -> RoundDemand:
        """What a round asks of the ledger."""
        return RoundDemand(
            round_.session.plan.session_id,
            round_.keep_tokens,
            round_.plan.increment_tokens,
            round_.max_tokens,
            round_.footprint_tokens,
        )

    def submit(self, round_: SimRound) -> None:
        """Admit a round, or let it wait for KV in the order of arrival."""
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        queue = self._waiting if round_.bound else self._waiting_known
        blocked = self._waiting_known or (round_.bound and self._waiting)
        if blocked or not self._admit(round_):
            queue.append(round_)
            self._watch_leases(now_s)

    def preload(self, round_: SimRound) -> None:
        """The round's session lives here already: its history is resident if there is room."""
        demand = RoundDemand(round_.session.plan.session_id, round_.session.history_tokens, 0, 0)
        try:
            self.ledger.require_free(demand, 0.0)
        except AmpdError:
            return
        self.ledger.admit(demand, 0.0)
        self.ledger.settle(
            demand.session_id,
            history_tokens=demand.history_tokens,
            lease_end_s=self._kv_lease_s,
        )

    def close(self, session_id: str) -> None:
        """The session is over: its KV is free."""
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self.ledger.close(session_id)
        self._poke(None)

    def _poke(self, _: None) -> None:
        """KV may have become free: the first that wait look again."""
        if not (self._waiting or self._waiting_known) or self._poking:
            return
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._poking = True  # one that is refused closes its session, which pokes again
        while True:
            waiting = self._waiting_known or self._waiting
            if not waiting or not self._admit(waiting[0]):
                break
            waiting.popleft()
        self._poking = False
        self._watch_leases(now_s)

    def _watch_leases(self, now_s: float) -> None:
        """The first that waits looks again when the next paused session may be evicted."""
        if not (self._waiting or self._waiting_known) or self._lease_poke_s > now_s:
            return
        lease_end_s = self.ledger.next_lease_end_s(now_s)
        if lease_end_s is not None:
            self._lease_poke_s = lease_end_s
            self._kernel.at(lease_end_s, self._poke, None)

    def _admit(self, round_: SimRound) -> bool:
        """Promise it its KV and start its prefill; False: not now. One that never fits is
        refused, which is an answer too."""
        try:
            evicted = self.ledger.admit(self.demand(round_), self._kernel.now_s)
        except AmpdError as error:
            if error.reason is ErrorReason.KV_TOO_SMALL:
                self._refused(round_)
                return True
            return False
        self._totals.evictions += len(evicted)
        keep = round_.keep_tokens
        resident = self.ledger.resident_tokens(round_.session.plan.session_id) > 0
        round_.history_tokens = keep if resident else 0
        round_.new_tokens = round_.prompt_tokens - round_.history_tokens
        if keep and not resident:
            self._totals.rebuilt_rounds += 1
            self._totals.rebuilt_tokens += keep
        self._prefill(round_)
        return True

    # --- prefill -----------------------------------------------------------------------------

    def wait_for_worker(self, round_: SimRound) -> None:
        """Late binding: the round waits here until a prefill worker or the home takes it."""
        now_s = self._kernel.now_s
        session = round_.session
        round_.task_id = f"{session.plan.session_id}/{round_.index}"
        self._late[round_.task_id] = round_
        self._late_tasks[round_.task_id] = task(
            self._shown(round_, now_s), self.info.worker_id, now_s, self._cost
        )
        if round_.targets and round_.targets[0].hint(self, round_):
            return
        if not self._shows_late:
            self._shows_late = True
            self._kernel.at(max(now_s, self.next_heartbeat_s), self._show_late, None)
        self._wake(now_s)

    def _show_late(self, _: None) -> None:
        """The list is published: prefill workers that are idle look at it."""
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._shows_late = bool(self._late)
        if self._late:
            self._offers()
            interval_s = max(self._settings.heartbeat_s, LOOK_S)
            self._kernel.at(now_s + interval_s, self._show_late, None)

    def claim(self, task_id: str) -> SimRound | None:
        """A prefill worker takes a waiting task; None: it is gone."""
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        round_ = self._late.pop(task_id, None)
        if round_ is not None:
            del self._late_tasks[task_id]
            self._coming += 1
        return round_

    def _take_late(self, now_s: float) -> None:
        """Begin own waiting tasks that are better prefilled here."""
        while self._late and self._backlog_tokens() < HOME_BACKLOG_TOKENS:
            load = self._load(now_s)
            if not self._can_decode_more(load):
                break
            decision = take_home(
                sorted(self._late_tasks.values()),
                self._outlook(now_s),
                now_s=now_s,
                cost=self._cost,
                calibration=self._calibration,
                load=load,
                itl_slo_s=self._slo.itl_s,
            )
            if decision is None:
                break
            del self._late_tasks[decision.task.task_id]
            self._prefill_here(self._late.pop(decision.task.task_id), now_s)
        if self._late and self._look_s <= now_s:
            self._look_s = now_s + LOOK_S
            self._kernel.at(self._look_s, self._look, None)

    def _look(self, _: None) -> None:
        if self._late:
            self._wake(self._kernel.now_s)

    def _can_decode_more(self, load: WorkerLoad) -> bool:
        # What it has begun itself will decode here as much as what others have claimed.
        coming = self._coming + len(self._entrants) + len(self._locals)
        return can_decode_more(self._cost, load, self._slo, coming)

    def _backlog_tokens(self) -> int:
        return sum(round_.new_tokens - round_.done_tokens for round_ in self._locals)

    def _shown(self, round_: SimRound, now_s: float) -> WaitingPrefill:
        session, slo = round_.session, self._slo
        return WaitingPrefill(
            round_.task_id,
            session.plan.session_id,
            round_.history_tokens,
            round_.new_tokens,
            now_s - round_.created_s,
            slo.ttft_s,
            max(0.0, session.rounds_done * slo.ttft_s - session.ttft_sum_s),
        )

    def prefill_elsewhere(self, round_: SimRound) -> None:
        """A prefill worker has given the task back."""
        round_.attempt += 1
        round_.rerouted = True
        self._prefill(round_)

    def _prefill(self, round_: SimRound) -> None:
        """At its next target that has a place, or here."""
        targets = round_.targets
        if self._binds_late:
            self.wait_for_worker(round_)
            return
        while round_.attempt < len(targets):
            if targets[round_.attempt].offer(round_):
                return
            round_.attempt += 1
            round_.rerouted = True
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._prefill_here(round_, now_s)
        self._wake(now_s)

    def _prefill_here(self, round_: SimRound, now_s: float) -> None:
        round_.predicted_s = self._cost.t_pre(round_.history_tokens, round_.new_tokens)
        round_.done_tokens = 0
        self._calibrates = True  # under always-remote, only once it is needed
        self._locals_s += round_.predicted_s
        if self._rule.by_session:
            self._locals.insert(self._place_of(round_), round_)
        else:
            self._locals.append(round_)

    def _place_of(self, round_: SimRound) -> int:
        """Behind what has begun and behind sessions that arrived before its own."""
        begun = {head for head, _ in self._step_chunks}
        arrival_s = round_.session.plan.arrival_s
        return sum(
            other in begun or other.done_tokens > 0 or other.session.plan.arrival_s <= arrival_s
            for other in self._locals
        )

    def arrived(self, round_: SimRound) -> None:
        """The KV of its increment is here: it joins the next step."""
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._entrants.append(round_)
        self._coming -= self._binds_late
        self._wake(now_s)

    # --- steps -------------------------------------------------------------------------------

    def _wake(self, now_s: float) -> None:
        """Something waits for the next step: a run ends at its next boundary."""
        if self._mode is _Mode.IDLE:
            self._plan(now_s)
        elif self._mode is _Mode.RUN and self._left > 1:
            self._sync(now_s)
            if self._left > 1:
                self._left = 1
                self._version += 1
                end_s = max(now_s, self._since_s + self._run_s(1))
                self._kernel.at(end_s, self._run_ends, self._version)

    def _plan(self, now_s: float) -> None:
        if self._late:
            self._take_late(now_s)
        streams, entrants = self._streams, self._entrants
        batch = len(streams)
        self._since_s = now_s
        if not entrants and not self._locals:
            if not batch:
                self._mode = _Mode.IDLE
                return
            self._mode = _Mode.RUN
            self._left = streams[0][0] - self._steps
            self._version += 1
            self._kernel.at(now_s + self._run_s(self._left), self._run_ends, self._version)
            return
        self._mode = _Mode.STEP
        self._step_entrants, self._entrants = entrants, []
        chunks = self._next_chunks(now_s, len(entrants)) if self._locals else []
        self._step_chunks = chunks
        seconds = self._step_s(entrants, chunks, batch)
        if entrants or chunks:
            seconds *= self._noise.factor()
        self.busy_s += self._totals.counted_s(now_s, now_s + seconds)
        self._kernel.at(now_s + seconds, self._step_ends, None)

    def _next_chunks(self, now_s: float, entering: int) -> list[tuple[SimRound, int]]:
        """Who computes how many tokens of its prompt in the next step: the first in order."""
        budget = self._rule.budget_tokens
        if budget is not None:
            left_tokens = (round_.new_tokens - round_.done_tokens for round_ in self._locals)
            chunks = fill_budget(left_tokens, budget - len(self._streams) - entering)
            return list(zip(self._locals, chunks, strict=False))
        chunk = self._itl_safe_chunk(now_s, entering)
        return [(self._locals[0], chunk)] if chunk else []

    def _itl_safe_chunk(self, now_s: float, entering: int) -> int:
        head, steps, slo = self._locals[0], self._steps, self._slo
        left = head.new_tokens - head.done_tokens
        chunk = chunk_tokens(
            cost=self._cost,
            calibration=self._calibration,
            now_s=now_s,
            streams=[
                StreamProgress(
                    round_.output_tokens - (end_step - steps),
                    round_.first_token_s,
                    slo.itl_s,
                    slo.itl_statistic,
                )
                for end_step, _, round_ in self._streams
            ],
            context_tokens=self._context_tokens,
            chunk_history_tokens=head.history_tokens + head.done_tokens,
            max_chunk_tokens=min(left, self._settings.max_step_tokens),
        )
        # The entrants' tokens are part of the step's time.
        return max(chunk - entering, min(chunk, MIN_CHUNK_TOKENS))

    def _step_s(
        self, entrants: list[SimRound], chunks: list[tuple[SimRound, int]], batch: int
    ) -> float:
        cost, context = self._actual, self._context_tokens
        pieces = [(chunk, head.history_tokens + head.done_tokens) for head, chunk in chunks]
        computed = sum(chunk for _, chunk in chunks) + len(entrants)
        history = max((round_.prompt_tokens - 1 for round_ in entrants), default=0)
        if len(pieces) == 1:
            history = max(history, pieces[0][1])
        elif pieces:
            pieces += [(1, round_.prompt_tokens - 1) for round_ in entrants]
            history = joint_history_tokens(pieces)
        self._step_shape = (computed, history, batch, context)
        if not computed:
            return cost.t_dec(batch, context)
        if batch or len(entrants) + len(chunks) > 1:
            return cost.t_mixed(computed, history, batch, context)
        # Alone, its steps together take what one prefill takes, however it is cut.
        if not chunks:
            return cost.t_pre(history, 1)
        ((head, chunk),) = chunks
        done = head.done_tokens
        whole_s = cost.t_pre(head.history_tokens, done + chunk)
        return whole_s - cost.t_pre(head.history_tokens, done) if done else whole_s

    def _step_ends(self, _: None) -> None:
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._mode = _Mode.PLANNING
        seconds = now_s - self._since_s
        batch = len(self._streams)
        if batch:
            self._emitted(now_s, 1, seconds, batch)
        if self._calibrates:
            self._calibration = calibrate(
                self._calibration, self._cost.t_mixed(*self._step_shape), seconds
            )
        entrants, self._step_entrants = self._step_entrants, []
        chunks, self._step_chunks = self._step_chunks, []
        for head, chunk in chunks:
            if not head.done_tokens:
                head.queue_s = self._since_s - head.created_s
                head.taken_s = self._since_s
            head.done_tokens += chunk
            if head.done_tokens == head.new_tokens:
                self._locals.remove(head)
                self._locals_s = self._locals_s - head.predicted_s if self._locals else 0.0
                head.compute_s = now_s - head.taken_s
                entrants.append(head)
        for round_ in entrants:
            self._first_token(round_, now_s)
        self._end_streams(now_s)
        self._plan(now_s)

    def _first_token(self, round_: SimRound, now_s: float) -> None:
        round_.first_token_s = now_s
        round_.join_step = self._steps
        round_.end_step = self._steps + round_.output_tokens - 1
        self._context_tokens += round_.prompt_tokens + 1
        heappush(self._streams, (round_.end_step, next(self._order), round_))

    def _end_streams(self, now_s: float) -> None:
        streams, steps = self._streams, self._steps
        while streams and streams[0][0] <= steps:
            _, _, round_ = heappop(streams)
            self._context_tokens -= round_.prompt_tokens + round_.output_tokens
            self._settle(round_, now_s)

    def _settle(self, round_: SimRound, now_s: float) -> None:
        session = round_.session
        session.rounds_done += 1
        session.ttft_sum_s += round_.first_token_s - round_.created_s
        session.history_tokens = round_.prompt_tokens + round_.output_tokens
        self.ledger.settle(
            session.plan.session_id,
            history_tokens=session.history_tokens,
            lease_end_s=now_s + self._kv_lease_s,
        )
        gaps = self._gaps(round_) if self._gap_statistics else (0.0, 0.0)
        self._finished(round_, gaps)
        self._poke(None)

    # --- runs --------------------------------------------------------------------------------

    def _run_s(self, steps: int) -> float:
        """How long the next so many steps of the run take."""
        batch = len(self._streams)
        batch_s = self._batch_s.get(batch)
        if batch_s is None:
            batch_s = self._batch_s[batch] = self._actual.t_dec(batch, 0)
        tokens = steps * self._context_tokens + batch * steps * (steps - 1) // 2
        return steps * batch_s + self._actual.decode.context_token_s * tokens

    def _sync(self, at_s: float) -> None:
        """Count the steps of the run that have ended by then, the last one never: its end is
        an event."""
        elapsed_s = at_s - self._since_s
        if self._left <= 1 or elapsed_s <= 0:
            return
        batch = len(self._streams)
        slope = self._actual.decode.context_token_s
        square = slope * batch / 2
        linear = self._run_s(1) - square
        root = linear + sqrt(linear * linear + 4 * square * elapsed_s)
        most = self._left - 1
        steps = most if root <= 0 else min(most, int(2 * elapsed_s / root))
        while steps < most and self._run_s(steps + 1) <= elapsed_s:
            steps += 1
        while steps and self._run_s(steps) > elapsed_s:
            steps -= 1
        if steps:
            self._advance(self._since_s + self._run_s(steps), steps)

    def _advance(self, to_s: float, steps: int) -> None:
        """So many steps of the run have ended at `to_s`."""
        seconds, batch = to_s - self._since_s, len(self._streams)
        mean_s = seconds / steps
        self.busy_s += self._totals.counted_s(self._since_s, to_s)
        predicted_s = 0.0
        if self._calibrates:
            predicted_s = self._cost.t_mixed(0, 0, batch, self._context_tokens)
        if predicted_s > 0:
            # `calibrate` so many times: the distance to its limit shrinks by a factor each.
            once = calibrate(self._calibration, predicted_s, mean_s)
            gained = (1 - (1 - CALIBRATION_WEIGHT) ** steps) / CALIBRATION_WEIGHT
            self._calibration += (once - self._calibration) * gained
        self._emitted(to_s, steps, mean_s, batch)
        self._left -= steps
        self._since_s = to_s

    def _run_ends(self, version: int) -> None:
        if version != self._version:
            return  # something came, and the run was cut short
        now_s = self._kernel.now_s
        if now_s >= self.next_heartbeat_s:
            self.publish(now_s)
        self._mode = _Mode.PLANNING
        self._advance(now_s, self._left)
        self._end_streams(now_s)
        self._plan(now_s)

    def _emitted(self, now_s: float, steps: int, mean_s: float, batch: int) -> None:
        """Every stream has taken so many tokens."""
        self._steps += steps
        self._context_tokens += steps * batch
        self._itl.add(now_s, mean_s, steps * batch)
        if self._gap_statistics:
            if len(self._gap_ends) >= MAX_GAP_SEGMENTS:
                self._forget_gaps()
            self._gap_ends.append(self._steps)
            self._gaps_s.append(mean_s)

    # --- gaps --------------------------------------------------------------------------------

    def _gaps(self, round_: SimRound) -> tuple[float, float]:
        """P95 (nearest rank) and largest of a round's gaps (s); a run's are taken as equal."""
        first = bisect_right(self._gap_ends, round_.join_step)
        last = bisect_right(self._gap_ends, round_.end_step)
        before, gaps = round_.join_step, []
        for end, gap_s in zip(self._gap_ends[first:last], self._gaps_s[first:last], strict=True):
            gaps.append((gap_s, end - before))
            before = end
        gaps.sort()
        rank = ceil(0.95 * (round_.end_step - round_.join_step))
        for gap_s, steps in gaps:
            rank -= steps
            if rank <= 0:
                return gap_s, gaps[-1][0]
        return 0.0, 0.0

    def _forget_gaps(self) -> None:
        """Those before every stream that decodes."""
        oldest = min((round_.join_step for _, _, round_ in self._streams), default=self._steps)
        first = bisect_right(self._gap_ends, oldest)
        del self._gap_ends[:first], self._gaps_s[:first]

    # --- load --------------------------------------------------------------------------------

    def load(self, at_s: float) -> WorkerLoad:
        """What binding and routing need to know, as the live worker publishes it."""
        return self._load(at_s, self._waiting_shown(at_s) if self._late else ())

    def _load(self, at_s: float, waiting: tuple[WaitingPrefill, ...] = ()) -> WorkerLoad:
        if self._mode is _Mode.RUN:
            self._sync(at_s)
        batch, ledger = len(self._streams), self.ledger
        ages_s = repeat(at_s - self._since_s, batch if self._counts_open else 0)
        if self._rule.by_session:
            oldest = min((round_.created_s for round_ in self._locals), default=at_s)
        else:
            oldest = self._locals[0].created_s if self._locals else at_s
        return WorkerLoad(
            queued_tasks=len(self._locals),
            queued_prefill_s=self._locals_s,
            oldest_wait_s=at_s - oldest,
            itl_window_s=self._itl.statistic(at_s, ages_s),
            running_rounds=batch,
            running_context_tokens=self._context_tokens,
            sessions=ledger.sessions,
            kv_pinned_tokens=ledger.pinned_tokens,
            kv_running_tokens=ledger.running_tokens,
            kv_reserved_tokens=ledger.reserved_tokens,
            waiting=waiting,
        )

    def _waiting_shown(self, at_s: float) -> tuple[WaitingPrefill, ...]:
        """What prefill workers may take: nothing while one more stream would cost the others
        their ITL."""
        if not self._can_decode_more(self._load(at_s)):
            return ()
        # Admitted in another order: some waited for memory before.
        first = sorted(self._late_tasks.values())[:MAX_SHOWN_TASKS]
        return tuple(self._shown(self._late[task_.task_id], at_s) for task_ in first)
