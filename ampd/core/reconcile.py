"""A home's copy of a session against the shared store's record of it (spec 7).

The store may have lost its last writes, or all of them, or have been down when a round settled:
then the home knows more, and publishes it. Or the session was closed, has expired or is at home
elsewhere, and the news did not reach the home: then the copy is void.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ampd.core.lifecycle import SessionRecord, SessionState, with_settled
from ampd.core.model import Binding, SessionFacts, Slo


class Fate(StrEnum):
    """What becomes of a home's copy."""

    KEEP = "keep"
    WAIT = "wait"
    """Looked at again: a round is being tried on what the store has."""
    DROP = "drop"
    PUBLISH = "publish"


@dataclass(frozen=True, slots=True)
class ResidentCopy:
    """A paused session as its home holds it.

    `unconfirmed`: rounds have settled here that the store is not known to have. `restarted`: the
    store has, since the last of them.
    """

    session_id: str
    home: Binding
    rounds: int
    history_tokens: int
    last_token_id: int | None
    facts: SessionFacts
    slo: Slo
    unconfirmed: bool
    restarted: bool = False
    attempt_id: str = ""
    """The attempt that settled last, as far as it is known."""
    settled: tuple[str, ...] = ()
    """The requests of the last rounds that settled here, the newest last."""


def fate(stored: SessionRecord | None, copy: ResidentCopy) -> Fate:
    """What becomes of the copy, given the store's record (None: it has none)."""
    if stored is None:
        return Fate.PUBLISH if copy.unconfirmed and copy.rounds else Fate.DROP
    if stored.state is SessionState.CLOSED:
        return Fate.DROP
    # What has settled at a session's home is settled, unless the session went on elsewhere: the
    # news of its end had reached nobody.
    if stored.rounds < copy.rounds and (stored.home == copy.home or copy.restarted):
        running = stored.running
        over = running is None or running.attempt_id == copy.attempt_id
        return Fate.PUBLISH if over else Fate.WAIT
    here = stored.home == copy.home and stored.rounds == copy.rounds
    return Fate.KEEP if here else Fate.DROP


def published(
    stored: SessionRecord | None, copy: ResidentCopy, *, now_unix_s: float
) -> SessionRecord:
    """The record with what the copy knows. `stored` None: in place of the `unpublished` one."""
    stored = stored if stored is not None else unpublished(copy, now_unix_s=now_unix_s)
    return replace(
        stored,
        version=stored.version + 1,
        state=SessionState.IDLE,
        running=None,
        resumable="",
        home=copy.home,
        rounds=copy.rounds,
        settled=with_settled(stored.settled, copy.settled),
        history_tokens=copy.history_tokens,
        last_token_id=copy.last_token_id,
        prefix_holders=(),
        last_used_unix_s=now_unix_s,
    )


def unpublished(copy: ResidentCopy, *, now_unix_s: float) -> SessionRecord:
    """The session as it was created, for a store that has lost it."""
    return SessionRecord(
        session_id=copy.session_id,
        tenant=copy.facts.tenant,
        model=copy.facts.model,
        slo=copy.slo,
        created_unix_s=copy.facts.created_unix_s,
        last_used_unix_s=now_unix_s,
        labels=dict(copy.facts.labels),
    )
