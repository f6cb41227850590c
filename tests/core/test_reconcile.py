"""A home's copy of a session against the store's record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampd.core import lifecycle
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import Binding, SessionFacts, Slo
from ampd.core.reconcile import Fate, ResidentCopy, fate, published

HERE, ELSEWHERE = Binding("d0", 2), Binding("d1", 1)
COPY = ResidentCopy(
    session_id="s",
    home=HERE,
    rounds=3,
    history_tokens=90,
    last_token_id=7,
    facts=SessionFacts("t", "m", 1.0, {"a": "b"}),
    slo=Slo(1.0, 0.1),
    unconfirmed=False,
)
KNOWN = SessionRecord(
    session_id="s",
    tenant="t",
    model="m",
    slo=COPY.slo,
    created_unix_s=1.0,
    last_used_unix_s=2.0,
    version=8,
    home=HERE,
    history_tokens=90,
    last_token_id=7,
    rounds=3,
    labels={"a": "b"},
)
CLOSED = lifecycle.close(KNOWN, request_id="", now_unix_s=3.0)


@pytest.mark.parametrize(
    ("stored", "unconfirmed", "expected"),
    [
        (KNOWN, False, Fate.KEEP),
        (KNOWN, True, Fate.KEEP),
        (CLOSED, True, Fate.DROP),
        (None, False, Fate.DROP),
        (None, True, Fate.PUBLISH),
        (replace(KNOWN, rounds=2), True, Fate.PUBLISH),
        (replace(KNOWN, rounds=2), False, Fate.PUBLISH),
        (replace(KNOWN, rounds=4), True, Fate.DROP),
        (replace(KNOWN, home=ELSEWHERE), True, Fate.DROP),
        (replace(KNOWN, home=Binding("d0", 1)), False, Fate.DROP),
        (replace(KNOWN, home=ELSEWHERE, rounds=2), True, Fate.DROP),
        (replace(KNOWN, home=ELSEWHERE, rounds=2), False, Fate.DROP),
    ],
)
def test_fate(stored: SessionRecord | None, unconfirmed: bool, expected: Fate) -> None:
    assert fate(stored, replace(COPY, unconfirmed=unconfirmed)) is expected


def test_a_restarted_store_may_have_lost_where_the_session_went() -> None:
    restarted = replace(COPY, unconfirmed=True, restarted=True)
    assert fate(replace(KNOWN, home=ELSEWHERE, rounds=2), restarted) is Fate.PUBLISH


def test_a_round_that_is_tried_on_what_the_store_has_is_waited_for() -> None:
    running = lifecycle.begin(
        replace(KNOWN, rounds=2, history_tokens=50),
        lifecycle.RunningRound("r", "a", "c", 1, 50, 4, 4),
        coordinator_alive=False,
        max_model_tokens=1000,
        now_unix_s=5.0,
    )
    assert fate(running, replace(COPY, unconfirmed=True)) is Fate.WAIT


def test_what_is_published_is_what_the_home_knows() -> None:
    again = published(None, COPY, now_unix_s=9.0)
    assert again == replace(KNOWN, version=2, last_used_unix_s=9.0)
    behind = replace(KNOWN, rounds=2, history_tokens=50)
    ahead = published(behind, COPY, now_unix_s=9.0)
    assert (ahead.rounds, ahead.history_tokens, ahead.running) == (3, 90, None)
    assert ahead.version == behind.version + 1
