"""Sessions and administration: reads and small writes of the shared store."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Final

import structlog

from ampd.core import lifecycle, policies
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import Binding, PolicySpec, Role, RoundRecord, Slo, WorkerView
from ampd.ports import Clock, Homes, SessionPage, StateStore
from services.coordinator.shared_state import SharedState

log = structlog.get_logger(__name__)

MAX_WRITE_ATTEMPTS: Final = 8
"""Compare-and-set attempts of a close or of a new policy: each lost one means that another
writer got further."""


class Sessions:
    """Create, read, list and close sessions of a tenant."""

    def __init__(
        self,
        *,
        store: StateStore,
        state: SharedState,
        homes: Homes,
        model: str,
        default_slo: Slo,
        wall_clock: Clock,
        max_sessions: int | None = None,
    ) -> None:
        """`max_sessions`: that one tenant may have open; None: no bound."""
        self._store = store
        self._state = state
        self._homes = homes
        self.model = model
        self._wall_clock = wall_clock
        self.default_slo = default_slo
        self._max_sessions = max_sessions

    async def create(
        self, tenant: str, *, request_id: str, slo: Slo, labels: dict[str, str]
    ) -> SessionRecord:
        """A new session, or the one that this request_id made before."""
        now_unix_s = self._wall_clock()
        record = SessionRecord(
            session_id=uuid.uuid4().hex,
            tenant=tenant,
            model=self.model,
            slo=slo,
            created_unix_s=now_unix_s,
            last_used_unix_s=now_unix_s,
            labels=labels,
        )
        created = await self._store.create_session(record, request_id, self._max_sessions)
        self._state.noted(created, request_id)
        return created

    async def get(self, tenant: str, session_id: str) -> SessionRecord:
        """SESSION_NOT_FOUND for an unknown, closed or foreign one."""
        await self._state.written(session_id)
        record = await self._store.get_session(session_id)
        await self._state.require_complete(record)
        return await self._own(record, tenant, session_id)

    async def list(self, tenant: str, page_size: int, page_token: str) -> SessionPage:
        """The tenant's open sessions by session_id."""
        return await self._store.list_sessions(tenant, page_size, page_token)

    async def close(self, tenant: str, session_id: str, request_id: str) -> SessionRecord:
        """End the session and free its KV at its home; a running round is cancelled.

        Repeating the request_id that closed it gives the same answer again.
        """
        for _ in range(MAX_WRITE_ATTEMPTS):
            record = await self._store.get_session(session_id)
            if record is not None and record.tenant == tenant and _closed_by(record, request_id):
                return record
            record = await self._own(record, tenant, session_id)
            closed = lifecycle.close(record, request_id=request_id, now_unix_s=self._wall_clock())
            if await self._store.compare_and_set(closed, record.version):
                self._state.noted(closed, "")
                await self._free(record)
                return closed
        raise lifecycle.conflict(session_id)

    async def _own(
        self, record: SessionRecord | None, tenant: str, session_id: str
    ) -> SessionRecord:
        try:
            return lifecycle.require_own(record, tenant, session_id)
        except AmpdError as error:
            raise await self._state.doubted(error) from None

    async def _free(self, record: SessionRecord) -> None:
        if record.home is None:
            return
        for view in await self._store.list_workers():
            if record.home == Binding(view.info.worker_id, view.info.incarnation):
                try:
                    await self._homes.home(view.info).release(record.session_id)
                except AmpdError as error:
                    # Closed is closed: a home that cannot be told drops it as idle.
                    log.warning("release_failed", session=record.session_id, reason=error.reason)


class Admin:
    """What operators read and set."""

    def __init__(self, *, store: StateStore, default_policy: PolicySpec) -> None:
        self._store = store
        self._default_policy = default_policy

    async def list_workers(self, role: Role | None) -> tuple[WorkerView, ...]:
        """Live workers and coordinators by worker_id."""
        views = await self._store.list_workers()
        return tuple(view for view in views if role is None or view.info.role is role)

    async def get_policy(self) -> PolicySpec:
        """The policy in force, every setting with its value."""
        return policies.resolve(await self._store.get_policy() or self._default_policy)

    async def set_policy(self, policy: PolicySpec, expected_version: int | None) -> PolicySpec:
        """Replace the policy. INVALID_FIELD: name or a setting; POLICY_CONFLICT: another version
        is in force. Setting the policy that is in force changes nothing."""
        wanted = policies.resolve(policy)
        for _ in range(MAX_WRITE_ATTEMPTS):
            current = await self.get_policy()
            if expected_version is not None and expected_version != current.version:
                raise _policy_conflict(current.version)
            if (wanted.name, dict(wanted.settings)) == (current.name, dict(current.settings)):
                return current
            wanted = replace(wanted, version=current.version + 1)
            if await self._store.set_policy(wanted, current.version):
                return wanted
        raise _policy_conflict(current.version)

    async def explain(
        self, tenant: str, session_id: str, round_index: int | None
    ) -> tuple[RoundRecord, ...]:
        """The kept rounds of a session, oldest first, or the one asked for."""
        lifecycle.require_own(await self._store.get_session(session_id), tenant, session_id)
        rounds = await self._store.read_rounds(session_id)
        if round_index is None:
            return rounds
        found = tuple(record for record in rounds if record.round_index == round_index)
        if not found:
            raise AmpdError(
                ErrorReason.ROUND_NOT_FOUND,
                f"session {session_id} has no record of round {round_index}",
            )
        return found


def _closed_by(record: SessionRecord, request_id: str) -> bool:
    closed = record.state is lifecycle.SessionState.CLOSED
    return closed and request_id != "" and record.closed_by == request_id


def _policy_conflict(version: int) -> AmpdError:
    return AmpdError(
        ErrorReason.POLICY_CONFLICT,
        f"policy version {version} is in force",
        metadata={"version": str(version)},
    )
