"""What operators do to workers and sessions: drain the one, move the other (spec 7)."""

from __future__ import annotations

from typing import Final

from ampd.core import lifecycle
from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import Binding, DrainStatus, Moved, Role, WorkerView
from ampd.ports import Homes, StateStore

MAX_MOVE_ATTEMPTS: Final = 3
"""Each one after the first because the session has moved meanwhile."""


class Operations:
    """Finds the worker that is to act, and asks it."""

    def __init__(self, *, store: StateStore, homes: Homes) -> None:
        self._store = store
        self._homes = homes

    async def drain_worker(self, worker_id: str) -> DrainStatus:
        """Let a worker finish and end; asked again, how far it is.

        WORKER_NOT_FOUND: no such worker, or it has ended. INVALID_FIELD: a coordinator.
        """
        view = await self._worker(worker_id)
        if view.info.role is Role.COORDINATOR:
            raise invalid_field("worker_id", "a coordinator: SIGTERM drains it")
        return await self._homes.worker(view.info).drain()

    async def move_session(self, tenant: str, session_id: str, target_worker_id: str) -> Moved:
        """Hand an idle session over to another home ('': the one with the most free KV). One
        that is at the target already stays. Errors as of AdminService.MoveSession."""
        if target_worker_id:
            target = await self._worker(target_worker_id)
            if target.info.role is not Role.DECODE:
                raise invalid_field("target_worker_id", "not a decode worker")
        left: Binding | None = None
        for _ in range(MAX_MOVE_ATTEMPTS):
            record = lifecycle.require_own(
                await self._store.get_session(session_id), tenant, session_id
            )
            home = await self._home(record)
            moved_meanwhile = left is not None and left != record.home
            if home.info.worker_id == target_worker_id or (
                moved_meanwhile and not target_worker_id
            ):
                return Moved(home.info.worker_id)
            try:
                return await self._homes.home(home.info).move(session_id, target_worker_id)
            except AmpdError as error:
                # Moved away, or forgotten there: the store tells.
                if error.reason is not ErrorReason.SESSION_NOT_FOUND or left == record.home:
                    raise
                left = record.home
        raise lifecycle.conflict(session_id)

    async def _home(self, record: SessionRecord) -> WorkerView:
        for view in await self._store.list_workers():
            if record.home == Binding(view.info.worker_id, view.info.incarnation):
                return view
        raise AmpdError(
            ErrorReason.WORKER_NOT_FOUND,
            f"session {record.session_id} has no living home: its next round binds it",
        )

    async def _worker(self, worker_id: str) -> WorkerView:
        for view in await self._store.list_workers():
            if view.info.worker_id == worker_id:
                return view
        raise AmpdError(ErrorReason.WORKER_NOT_FOUND, f"no live worker {worker_id!r}")
