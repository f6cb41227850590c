"""What only the in-memory store promises: a clock of one's own, and nothing kept for ever."""

from array import array
from dataclasses import replace

from ampd.adapters.state_limits import CLOSED_TTL_S, CREATE_REQUEST_TTL_S, REPLAY_TTL_S
from ampd.adapters.state_memory import MemoryStateStore
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import Role, Slo, WorkerInfo, WorkerLoad
from ampd.ports import SessionWrites

SESSION = SessionRecord("s-1", "acme", "tiny", Slo(2.0, 0.1), 1.0, 1.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_everything_ends_on_the_given_clock() -> None:
    clock = Clock()
    store = MemoryStateStore(clock=clock)
    await store.create_session(SESSION, "c-1")
    writes = SessionWrites(0, array("I", [1]), None, "r-1", b"said")
    await store.compare_and_set(replace(SESSION, version=2), 1, writes)
    closed = replace(SESSION, version=3, state=SessionState.CLOSED)
    await store.compare_and_set(closed, 2)
    await store.heartbeat(WorkerInfo("w", Role.PREFILL, 1, "a:1", "h"), WorkerLoad(), 3.0)

    clock.now_s = 2.0
    assert [view.age_s for view in await store.list_workers()] == [2.0]
    clock.now_s = 3.0
    assert await store.list_workers() == ()

    clock.now_s = min(CLOSED_TTL_S, REPLAY_TTL_S, CREATE_REQUEST_TTL_S) - 1.0
    assert await store.get_session("s-1") == closed
    assert (await store.load_round("s-1", "r-1")).replay == b"said"

    clock.now_s = max(CLOSED_TTL_S, REPLAY_TTL_S, CREATE_REQUEST_TTL_S)
    assert await store.get_session("s-1") is None
    assert (await store.load_round("s-1", "r-1")).replay is None
    assert (await store.create_session(replace(SESSION, session_id="s-2"), "c-1")).version == 1
