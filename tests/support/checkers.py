"""What must hold in a simulated cluster, whatever happens to it. Nothing here acts: it looks at
what clients saw, at the books of workers, and at what is left in the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from cluster_sim import Life, SimCluster
from sim_tools import returned, server_calls
from sim_workload import Ask, Seen

from ampd.adapters.engine_emulated import Expected
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import Role
from ampd.core.prefill_queue import PrefillQueue, QueuedPrefill
from ampd.v1.session_pb2 import Session
from ampd.wire import enums

LOOK_EVERY_S: Final = 0.1
BLOCKS_EVERY_S: Final = 0.5
TWO_HOMES_S: Final = 20.0
"""Longer than any process may take to notice that it was given up, less than a session's TTL."""

ROUND_RUNNING_S: Final = 30.0
"""A round that its client has left is over then, whatever became of its coordinator and of the
store: longer than any fault lasts."""

LOAN_ENDS_S: Final = 1.0
"""A home that lives ends a loan so soon after its reader's task, whoever else is dead."""

RETRIABLE: Final = frozenset(
    {
        ErrorReason.NO_DECODE_WORKER,
        ErrorReason.WORKER_UNAVAILABLE,
        ErrorReason.STORE_UNAVAILABLE,
        ErrorReason.DRAINING,
    }
)
"""What faults may show a client: UNAVAILABLE."""
FULL: Final = frozenset({ErrorReason.KV_EXHAUSTED, ErrorReason.QUEUE_FULL})
"""RESOURCE_EXHAUSTED: only with a hint."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a run's faults excuse."""

    faults: bool = True
    """UNAVAILABLE may be seen."""
    conflicts: bool = True
    """ABORTED may be seen."""
    full: bool = True
    """RESOURCE_EXHAUSTED may be seen."""


class Judge:
    """`sim_workload.Witness`: every token and every end that a client sees."""

    def __init__(self, cluster: SimCluster, allowed: Allowed) -> None:
        self._cluster = cluster
        self._allowed = allowed
        self._outputs: dict[tuple[tuple[int, ...], str], Expected] = {}
        self._told_running_s: dict[str, float] = {}
        self.ends: Counter[str] = Counter()
        self.rounds = 0
        self.resumed = 0

    def begins(self, ask: Ask, histories: list[list[int]]) -> None:
        """See the protocol."""

    def expected(self, history: list[int], ask: Ask) -> Expected:
        """By the oracle, which runs nothing of the cluster."""
        prompt = _kept(history, ask) + ask.increment
        key = (tuple(prompt), ask.request_id)
        if key not in self._outputs:
            self._outputs[key] = self._cluster.engines.expected(prompt, ask.sampling)
        return self._outputs[key]

    def saw(self, ask: Ask, histories: list[list[int]], seen: Seen) -> list[list[int]]:
        """See the protocol."""
        self.ends[self._end(seen)] += 1
        if seen.after_end:
            self._violate(ask, f"{seen.after_end} events behind the end")
        if seen.error is None and seen.finished is None and not seen.dropped:
            self._violate(ask, "the stream ended without a word")
        if seen.error is not None:
            self._judge_error(ask, seen.error)
            if seen.placed and seen.error.reason in FULL and not self._allowed.faults:
                self._violate(ask, f"{seen.error.reason} for a round that was accepted")
        told = [*seen.earlier, seen]
        if any((one.tokens or one.finished) and not one.placed for one in told):
            self._violate(ask, "tokens without a placement")
        if not told[0].placed:
            return histories
        agree = [h for h in histories if self._all_agree(h, ask, told)]
        if not agree:
            self._explain(ask, histories, told)
            return histories
        for (history, asked), one in zip(ask.rounds(agree[0], self.expected), told, strict=False):
            self._judge_round(asked, history, one)
        return agree

    def _judge_round(self, ask: Ask, history: list[int], seen: Seen) -> None:
        """One of the stream's, which agrees with the history."""
        text = self.expected(history, ask).text
        if not text.startswith(seen.text):
            self._violate(ask, f"text {seen.text!r} does not begin {text!r}")
        if seen.finished is not None:
            self._judge_finished(ask, history, seen)
            self.rounds += not seen.replays
        if seen.called:
            calls = server_calls(text)
            if seen.called != [(call.name, call.arguments) for call in calls][: len(seen.called)]:
                self._violate(ask, f"tools called: {seen.called}, not {calls}")
            results = [(call.name, returned(call).content, returned(call).failed) for call in calls]
            if not set(seen.returned) <= set(results) or len(seen.returned) > len(results):
                self._violate(ask, f"tools returned: {seen.returned}, not {results}")

    def found(self, histories: list[list[int]], session: Session) -> None:
        """See the protocol."""
        lengths = sorted({len(history) for history in histories})
        if session.history_tokens not in lengths:
            self._cluster.violate(
                f"session {session.session_id} has {session.history_tokens} tokens of history, "
                f"its client knows of {lengths}"
            )

    def turned_away(self, error: AmpdError) -> None:
        """See the protocol."""
        full = error.reason in FULL and error.retry_after_s is not None
        if not (self._allowed.full and full) and not (
            self._allowed.faults and error.reason in RETRIABLE | {ErrorReason.DEADLINE}
        ):
            self._cluster.violate(f"a new session: {error.reason} {error.message}")

    def refused(self, session: str, what: str, error: AmpdError) -> None:
        """See the protocol."""
        self._cluster.violate(f"{what} of session {session!r}: {error.reason} {error.message}")

    def done(self, session: str, rounds: int) -> None:
        """See the protocol."""

    # --- how ---------------------------------------------------------------------------------

    def _all_agree(self, history: list[int], ask: Ask, told: list[Seen]) -> bool:
        """All rounds of a stream with what must follow that history."""
        rounds = ask.rounds(history, self.expected)
        over = told[-1].finished is not None
        if len(told) > len(rounds) or (over and len(told) < len(rounds)):
            return False
        return all(
            self._agrees(before, asked, one)
            for (before, asked), one in zip(rounds, told, strict=False)
        )

    def _agrees(self, history: list[int], ask: Ask, seen: Seen) -> bool:
        kept = _kept(history, ask)
        if any(placed.history_tokens != len(kept) for placed in seen.placed):
            return False
        expected = self.expected(history, ask)
        if seen.finished is not None:
            return seen.tokens == expected.tokens
        return seen.tokens == expected.tokens[: len(seen.tokens)]

    def _explain(self, ask: Ask, histories: list[list[int]], stream: list[Seen]) -> None:
        """What is wrong with a stream that agrees with no history: the first such round."""
        for number, seen in enumerate(stream):
            rounds = [ask.rounds(history, self.expected) for history in histories]
            rounds = [following for following in rounds if len(following) > number]
            if not any(self._agrees(*following[number], seen) for following in rounds):
                break
        if not rounds:
            self._violate(ask, f"round {number} of a stream behind its end")
            return
        ask, histories = rounds[0][number][1], [following[number][0] for following in rounds]
        told = sorted({placed.history_tokens for placed in seen.placed})
        lengths = [len(_kept(history, ask)) for history in histories]
        right = [_common(seen.tokens, self.expected(history, ask).tokens) for history in histories]
        self._violate(
            ask,
            f"{len(seen.tokens)} tokens over a history of {told} tokens; the client knows of "
            f"{lengths}, of which so many tokens are right: {right}; finished: "
            f"{seen.finished is not None}; told {_short(seen.tokens)}, not "
            f"{_short(self.expected(histories[0], ask).tokens)}",
        )

    def _judge_finished(self, ask: Ask, history: list[int], seen: Seen) -> None:
        assert seen.finished is not None
        expected, usage = self.expected(history, ask), seen.finished.usage
        told = (
            usage.history_tokens,
            usage.increment_tokens,
            usage.output_tokens,
            usage.kept_output_tokens,
            enums.FINISH_REASON.from_proto(seen.finished.finish_reason, "finish_reason"),
            seen.finished.stop_reason,
        )
        right = (
            len(_kept(history, ask)),
            len(ask.increment),
            len(expected.tokens),
            expected.kept_output_tokens,
            expected.finish_reason,
            expected.stop_reason,
        )
        if told != right:
            self._violate(ask, f"the end tells {told}, not {right}")
        if seen.text != expected.text:
            self._violate(ask, f"text {seen.text!r}, not {expected.text!r}")

    def _judge_error(self, ask: Ask, error: AmpdError) -> None:
        reason = error.reason
        if reason in RETRIABLE and self._allowed.faults:
            return
        if reason in FULL and self._allowed.full:
            if error.retry_after_s is None:
                self._violate(ask, f"{reason} without a hint when to try again")
            return
        if reason is ErrorReason.DEADLINE and ask.deadline_s is not None:
            return
        if reason is ErrorReason.ROUND_RUNNING and self._running_since(ask) < ROUND_RUNNING_S:
            return
        if reason is ErrorReason.SESSION_NOT_FOUND and ask.own_close:
            return
        if reason is ErrorReason.SESSION_CONFLICT and self._allowed.conflicts:
            return
        self._violate(ask, f"{reason}: {error.message}")

    def _running_since(self, ask: Ask) -> float:
        """How long the client has been told that a round of its session runs (s)."""
        now_s = self._cluster.loop.time()
        return now_s - self._told_running_s.setdefault(ask.request_id, now_s)

    def _violate(self, ask: Ask, what: str) -> None:
        self._cluster.violate(f"{ask.request_id} of {ask.session}: {what}")

    @staticmethod
    def _end(seen: Seen) -> str:
        if seen.finished is not None:
            return "finished"
        return seen.error.reason.value if seen.error is not None else "dropped"


class Books:
    """The accounting of every live process, looked at all the time.

    `frees_within_s`: how long anything of a round may outlive it on either side.
    """

    def __init__(self, cluster: SimCluster, *, frees_within_s: float) -> None:
        self._cluster = cluster
        self._frees_within_s = frees_within_s
        self._orphans_s: dict[str, float] = {}
        self._passed: Counter[str] = Counter()
        self._seen: dict[Any, Any] = {}
        self._at_two_s: dict[str, float] = {}
        cluster.on_take = self._taken

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """At this moment."""
        for life in self._cluster.lives.values():
            if life.alive:
                with life.process.current():
                    self._balance(life)
        self._homes()
        self._orphans()

    def _balance(self, life: Life) -> None:
        try:
            if (home := life.parts.get("home")) is not None:
                home._ledger.check()
            if (engine := life.parts.get("engine")) is not None and self._has_changed(engine):
                engine.check()
        except AssertionError as error:
            self._cluster.violate(f"the books of {life.name}: {error}")

    def _has_changed(self, engine: Any) -> bool:
        """Since the last time: going through every block takes longer than a round."""
        pins, (at_s, before) = engine._pins, self._seen.get(engine, (-BLOCKS_EVERY_S, None))
        if self._cluster.loop.time() < at_s + BLOCKS_EVERY_S:
            return False
        now = (engine.stats(), engine._arrivals, len(pins), pins.loans)
        self._seen[engine] = (self._cluster.loop.time(), now)
        return before != now

    def _homes(self) -> None:
        """No session stays at two homes."""
        now_s = self._cluster.loop.time()
        at = Counter(
            session
            for life in self._cluster.alive(Role.DECODE)
            if not life.process.frozen and (home := life.parts.get("home")) is not None
            for session, resident in home._sessions.items()
            if resident.round is not None
        )
        twice = {session for session, count in at.items() if count > 1}
        self._at_two_s = {s: self._at_two_s.get(s, now_s) for s in sorted(twice)}
        for session, since_s in self._at_two_s.items():
            if now_s - since_s > TWO_HOMES_S:
                self._cluster.violate(f"session {session} runs at two homes since {since_s:.3f} s")

    def _orphans(self) -> None:
        """What a prefill worker has for a home that does not want it, and what a home lends
        though nobody reads: for a moment only."""
        now_s = self._cluster.loop.time()
        awake = [
            life for life in self._cluster.lives.values() if life.alive and not life.process.frozen
        ]
        homes = {life.address: life.parts for life in awake if "home" in life.parts}
        found: dict[str, float] = {}
        for life in awake:
            with life.process.current():
                if "worker" in life.parts:
                    tasks = _orphan_tasks(life.name, life.parts["worker"], homes)
                    found |= dict.fromkeys(tasks, self._frees_within_s)
                if "mover" in life.parts:
                    loans = _orphan_loans(life.name, life.parts)
                    found |= dict.fromkeys(loans, LOAN_ENDS_S)
        self._orphans_s = {name: self._orphans_s.get(name, now_s) for name in found}
        for name, since_s in self._orphans_s.items():
            if now_s - since_s > found[name]:
                self._cluster.violate(f"not freed for {found[name]} s: {name}")
                self._orphans_s[name] = now_s

    def _taken(
        self, queue: PrefillQueue, before: list[QueuedPrefill], taken: QueuedPrefill
    ) -> None:
        """No task is passed over more often than the policy's bound."""
        for entry in before:
            if entry is taken:
                break
            name = entry.task.task_id
            self._passed[name] += 1
            if self._passed[name] > queue.order.bound:
                self._cluster.violate(f"task {name} was passed over {self._passed[name]} times")
        self._passed.pop(taken.task.task_id, None)


def _orphan_tasks(name: str, worker: Any, homes: dict[str, Any]) -> list[str]:
    """Tasks and results of a prefill worker that their living home has given up."""
    tasks = {task_id: home for task_id, (home, _) in worker._homes.items()}
    tasks |= {task_id: taken.home_address for task_id, taken in worker._taken.items()}
    found = []
    for task_id, address in tasks.items():
        if (parts := homes.get(address)) is not None and task_id not in parts["tasks"]._offered:
            found.append(f"task {task_id} at {name}")
    wanted = {
        task_id
        for parts in homes.values()
        for task_id in (
            *parts["tasks"]._offered,
            *(
                session.round.computed.task_id
                for session in parts["home"]._sessions.values()
                if session.round is not None and session.round.computed is not None
            ),
        )
    }
    for task_id, result in worker._delivered._results.items():
        if task_id not in wanted and worker._engine._own_pin(result.kv) is not None:
            found.append(f"result {task_id} at {name}")
    return found


def _orphan_loans(name: str, parts: dict[str, Any]) -> list[str]:
    """Loans of a home that no task of its reads, unless a session moves."""
    if parts["mover"]._moves or parts["mover"]._taking_back:
        return []
    engine, tasks = parts["engine"], parts["tasks"]
    read = {
        engine._own_pin(offered.history)
        for offered in tasks._offered.values()
        if offered.history is not None
    }
    loans = engine._pins._loans
    return [f"loan {loan} of {name}" for loan, pin in loans.items() if pin not in read]


def left_overs(cluster: SimCluster) -> list[str]:
    """What an idle cluster without sessions still holds: nothing, or words for it."""
    found: list[str] = []
    for life in cluster.lives.values():
        if not life.alive:
            found.append(f"{life.name} is not alive")
            continue
        with life.process.current():
            found += [f"{life.name}: {k} = {n}" for k, n in _holdings(life).items() if n]
    calls = [f"{call.client}: {call.method}" for call in cluster.network.calls.values()]
    found += [
        f"a call of {what}"
        for what in (*calls, *cluster.network.running_handlers())
        if not what.endswith("/Watch")
    ]
    return found


def _holdings(life: Life) -> dict[str, Any]:
    parts, held = life.parts, {}
    if (home := parts.get("home")) is not None:
        ledger = home._ledger
        held |= {
            "sessions": len(home._sessions),
            "running rounds": home.running_rounds,
            "ledger sessions": ledger.sessions,
            "ledger running tokens": ledger.running_tokens,
            "ledger pinned tokens": ledger.pinned_tokens,
            "pins to release": len(home._unpinned),
        }
    if (tasks := parts.get("tasks")) is not None:
        held["offered tasks"] = len(tasks._offered)
    if (toolbox := parts.get("toolbox")) is not None:
        held["running tools"] = toolbox.running
    if (worker := parts.get("worker")) is not None:
        held |= {
            "queued tasks": len(worker._queue),
            "homes of queued tasks": len(worker._homes),
            "taken tasks": len(worker._taken),
        }
    if (coordinator := parts.get("coordinator")) is not None:
        held |= {"rounds": coordinator.running_rounds, "live attempts": len(coordinator._live)}
    if (engine := parts.get("engine")) is not None:
        stats = engine.stats()
        held |= {
            "pinned KV tokens": stats.kv_pinned_tokens,
            "running requests": stats.running_requests,
            "waiting requests": stats.waiting_requests,
        }
    return held


def _kept(history: list[int], ask: Ask) -> list[int]:
    return history if ask.keep is None else history[: ask.keep]


def _short(tokens: list[int]) -> str:
    return " ".join(map(str, tokens[:24]))


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
