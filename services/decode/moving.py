"""Handing sessions over to other homes, and taking them over from them (spec 2.7 and 7).

A session's home drives its move: it lends the KV where that pays, lets the target adopt the
session, and then writes the new binding by compare-and-set. The binding decides: whoever loses
frees its copy. A round, a release or a close that comes meanwhile wins, on both sides: it
cancels the move and goes on when that has let go. It cannot meet a binding that was written: a
round begins in the store before it reaches a home, and the binding is written only over the
idle record that was read first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar

import structlog

from ampd.core import binding, lifecycle
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import (
    Adopted,
    AdoptOrder,
    Binding,
    KvHandle,
    Moved,
    Role,
    SessionFacts,
    WorkerInfo,
    WorkerView,
)
from ampd.core.moving import decide_move
from ampd.core.placements import Placement, RecentPlacements
from ampd.ports import Clock, Engine, HomePeer, Homes, PrefillRequest, StateStore
from services.decode.home import Home
from services.decode.round import ResidentSession

log = structlog.get_logger(__name__)

MAX_TARGETS: Final = 3
"""Homes that a move without a named one tries."""
MAX_MOVES: Final = 64
"""Sessions that are handed over at once; one more is refused."""
MAX_ADOPTIONS: Final = 16
"""Sessions that are taken over at once; one more is refused."""
RETRY_AFTER_S: Final = 0.5

_TRY_NEXT: Final = frozenset(
    {
        ErrorReason.DRAINING,
        ErrorReason.KV_EXHAUSTED,
        ErrorReason.QUEUE_FULL,
        ErrorReason.STALE_INCARNATION,
        ErrorReason.WORKER_UNAVAILABLE,
    }
)
"""Refusals of one target that another one need not share."""

T = TypeVar("T")


class SessionMover:
    """The use case beside the home's rounds, behind `ampd.ports.MoveHandler`."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        home: Home,
        engine: Engine,
        store: StateStore,
        homes: Homes,
        chores: asyncio.TaskGroup,
        clock: Clock,
    ) -> None:
        """`info`: as this home registers itself."""
        self._info = info
        self._me = Binding(info.worker_id, info.incarnation)
        self._home = home
        self._engine = engine
        self._store = store
        self._homes = homes
        self._chores = chores
        self._clock = clock
        self._recent = RecentPlacements()
        self._moves = self._adoptions = 0
        self._taking_back: dict[str, asyncio.Task[None]] = {}

    # --- handing over ------------------------------------------------------------------------

    async def move(self, session_id: str, target_worker_id: str, *, with_kv: bool = True) -> Moved:
        """Hand the session over; see `ampd.ports.MoveHandler`. `with_kv`: its KV goes along
        where that pays. A move that runs already is waited for."""
        while (session := self._home.session(session_id)) is not None:
            # What is taken back from a target must not be what the next move gives it.
            before = session.moving or self._taking_back.get(session_id)
            if before is None:
                break
            await asyncio.wait([before])
        if session is not None and session.round is not None:
            raise AmpdError(
                ErrorReason.ROUND_RUNNING, f"a round of session {session_id} is still running"
            )
        # One whose every round was given up has no tokens yet: the next one may begin anywhere.
        if session is None or not session.tokens:
            raise AmpdError(
                ErrorReason.SESSION_NOT_FOUND,
                f"{self._info.worker_id} holds nothing of session {session_id}",
            )
        if target_worker_id == self._info.worker_id:
            return Moved(target_worker_id)
        if self._moves >= MAX_MOVES:
            raise _full(f"{self._info.worker_id} moves {self._moves} sessions already")
        self._moves += 1
        try:
            return await self._alone(session, self._move(session, target_worker_id, with_kv))
        finally:
            self._moves -= 1

    async def _alone(
        self,
        session: ResidentSession,
        work: Coroutine[Any, Any, T],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """Do `work` as a task of its own, so that a round can end it and nothing else. `undo`:
        for a task that fails, or is cancelled before its first step, which nothing inside it
        would see."""
        task = asyncio.create_task(work)
        session.moving = task

        def ended(done: asyncio.Task[T]) -> None:
            session.moving = None
            if done.cancelled() or done.exception() is not None:
                undo()

        task.add_done_callback(ended)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            raise AmpdError(
                ErrorReason.SESSION_CONFLICT,
                f"another call was faster than the move of session {session.session_id}",
            )
        return task.result()

    async def _move(self, session: ResidentSession, wanted: str, with_kv: bool) -> Moved:
        record = await self._idle_record(session)
        targets = await self._targets(session, wanted)
        for position, target in enumerate(targets, start=1):
            try:
                return await self._hand_over(session, record, target, with_kv)
            except AmpdError as error:
                log.warning(
                    "not_moved",
                    session=session.session_id,
                    target=target.info.worker_id,
                    reason=error.reason,
                    error=error.message,
                )
                if position == len(targets) or error.reason not in _TRY_NEXT:
                    raise
        raise AssertionError("there is a target, and the last one returns or raises")

    async def _idle_record(self, session: ResidentSession) -> SessionRecord:
        """The session in the store, where it must be as it is here."""
        record = await self._store.get_session(session.session_id)
        if record is None:
            raise lifecycle.session_not_found(session.session_id)
        lifecycle.rebind(record, self._me, expected=self._me)
        if record.rounds != session.rounds:
            raise lifecycle.conflict(session.session_id)
        return record

    async def _targets(self, session: ResidentSession, wanted: str) -> list[WorkerView]:
        """Where it may go, best first; the named one alone if there is one."""
        others = [
            view
            for view in await self._store.list_workers()
            if view.info.worker_id != self._info.worker_id
        ]
        if wanted:
            others = [view for view in others if view.info.worker_id == wanted]
            if not others:
                raise AmpdError(ErrorReason.WORKER_NOT_FOUND, f"no live worker {wanted!r}")
        now_s = self._clock()
        decode = self._recent.shown_in(
            (view for view in others if view.info.role is Role.DECODE), now_s
        )
        decisions = binding.bind(
            decode,
            prompt_tokens=len(session.tokens),
            max_tokens=0,
            footprint=binding.resident_footprint(decode),
        )
        best = decisions[0]
        self._recent.add(Placement(best.worker_id, now_s, reserved_tokens=best.footprint_tokens))
        by_id = {view.info.worker_id: view for view in decode}
        return [by_id[decision.worker_id] for decision in decisions[:MAX_TARGETS]]

    async def _hand_over(
        self,
        session: ResidentSession,
        record: SessionRecord,
        target: WorkerView,
        with_kv: bool,
    ) -> Moved:
        """Lend, let adopt, bind, drop. On any other end the session stays, and the target has
        nothing of it."""
        kv = session.kv if with_kv else None
        decision = decide_move(
            self._info,
            target.info,
            history_tokens=len(session.tokens),
            kv_tokens=min(kv.tokens, len(session.tokens)) if kv is not None else 0,
        )
        peer = self._homes.home(target.info)
        order = AdoptOrder(
            session_id=session.session_id,
            rounds=session.rounds,
            tokens=session.tokens,
            facts=SessionFacts(record.tenant, record.model, record.created_unix_s, record.labels),
            slo=record.slo,
        )
        try:
            if kv is not None and decision.kv_tokens:
                adopted = await self._adopt_with_kv(peer, order, kv, decision.kv_tokens)
            else:
                adopted = await peer.adopt(order)
        except BaseException:
            self._take_back(peer, order)
            raise
        await self._bind_there(session, record, target, peer, order)
        self._home.forget(session)
        log.info(
            "moved",
            session=session.session_id,
            target=decision.worker_id,
            reason=decision.reason,
            history_tokens=len(session.tokens),
            read_s=round(decision.read_s, 6),
            compute_s=round(decision.compute_s, 6),
            pulled_tokens=adopted.pulled_tokens,
        )
        return Moved(decision.worker_id, adopted.pulled_tokens, adopted.pulled_bytes)

    async def _adopt_with_kv(
        self, peer: HomePeer, order: AdoptOrder, kv: KvHandle, tokens: int
    ) -> Adopted:
        try:
            try:
                lent = await self._engine.lend(kv, tokens)
            except AmpdError as error:
                # The pin is gone (its lease ended): the target computes the history.
                log.warning("history_not_lent", session=order.session_id, reason=error.reason)
                return await peer.adopt(order)
            return await peer.adopt(replace(order, history=lent))
        finally:
            # Of a call that was broken off nobody knows whether it lent. A round that waits for
            # this may lend the same pin: its loan must not be the one that ends here.
            await asyncio.wait([self._chores.create_task(self._engine.reclaim(kv))])

    async def _bind_there(
        self,
        session: ResidentSession,
        record: SessionRecord,
        target: WorkerView,
        peer: HomePeer,
        order: AdoptOrder,
    ) -> None:
        """Write the new binding, unless another writer was faster. A cancellation waits for the
        answer, and comes too late for a binding that is written."""
        there = Binding(target.info.worker_id, target.info.incarnation)
        moved = lifecycle.rebind(record, there, expected=self._me)
        writing = asyncio.create_task(self._store.compare_and_set(moved, record.version))
        cancelled = False
        while not writing.done():
            try:
                await asyncio.wait([writing])
            except asyncio.CancelledError:
                cancelled = True
        # A store that has not answered may have written it: both copies stay until it says whose
        # the session is (`Reconciler`), and are harmless: orders go by the store.
        if writing.result():
            return
        self._take_back(peer, order)
        if cancelled:
            raise asyncio.CancelledError
        raise lifecycle.conflict(session.session_id)

    def _take_back(self, peer: HomePeer, order: AdoptOrder) -> None:
        """The target may free what it has of the order. Does not wait: a round may."""
        taking_back = self._chores.create_task(self._release(peer, order), name="take back")
        self._taking_back[order.session_id] = taking_back

        def ended(_: object) -> None:
            if self._taking_back.get(order.session_id) is taking_back:
                del self._taking_back[order.session_id]

        taking_back.add_done_callback(ended)

    async def _release(self, peer: HomePeer, order: AdoptOrder) -> None:
        try:
            await peer.release(order.session_id, paused_after=order.rounds)
        except AmpdError as error:
            # A home that cannot be told is dead, or drops the copy as idle.
            log.info("take_back_failed", session=order.session_id, reason=error.reason)

    # --- taking over -------------------------------------------------------------------------

    async def adopt(self, order: AdoptOrder) -> Adopted:
        """Take the session over; see `ampd.ports.MoveHandler`. Idempotent."""
        if self._has(order):
            return Adopted(0, 0)
        if self._adoptions >= MAX_ADOPTIONS:
            raise _full(f"{self._info.worker_id} takes {self._adoptions} sessions over already")
        session = ResidentSession(
            session_id=order.session_id,
            tokens=order.tokens,
            rounds=order.rounds,
            last_used_s=self._clock(),
            facts=order.facts,
            slo=order.slo,
        )
        self._home.take_over(session, with_kv=order.history is not None)
        if order.history is None:
            self._home.keep_taken_over(session, None)
            return Adopted(0, 0)
        self._adoptions += 1
        try:
            return await self._alone(
                session,
                self._read(session, order.history),
                undo=lambda: self._home.forget(session),
            )
        finally:
            self._adoptions -= 1

    def _has(self, order: AdoptOrder) -> bool:
        """Whether an earlier call with this order has succeeded."""
        session = self._home.session(order.session_id)
        return (
            session is not None
            and session.paused
            and session.rounds == order.rounds
            and session.tokens == order.tokens
            and (session.kv is not None or order.history is None)
        )

    async def _read(self, session: ResidentSession, history: KvHandle) -> Adopted:
        """Pin the session's KV here: what is lent is read, the rest computed."""
        request = PrefillRequest(f"{session.session_id}/adopt", session.tokens, history)
        result = await self._engine.prefill(request)
        try:
            # The result of a prefill is lent; this one is for this home alone.
            await self._engine.reclaim(result.kv)
        except BaseException:
            self._chores.create_task(self._engine.release(result.kv))
            raise
        self._home.keep_taken_over(session, result.kv)
        return Adopted(result.stats.pulled_tokens, result.stats.pulled_bytes)


def _full(message: str) -> AmpdError:
    return AmpdError(ErrorReason.QUEUE_FULL, message, retry_after_s=RETRY_AFTER_S)
