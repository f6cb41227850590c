"""Rounds that call server-side tools: real coordinators, homes and tool processes; the engine
says what the test wants it to say."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import tool_package
from inprocess import STEP, InProcess, in_process, request
from stepping_engine import SteppingEngine
from tool_package import NAMES, all_dead, pids_in

from ampd.adapters.homes_loopback import LoopbackHomes
from ampd.adapters.state_memory import MemoryStateStore
from ampd.adapters.tools.entry_points import EntryPointTools
from ampd.adapters.tools.limits import ToolLimits
from ampd.adapters.tools.toolbox import ToolBox
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import Finished, ToolCall, ToolReturn
from ampd.core.tool_calls import hermes
from ampd.ports import (
    ChatMessage,
    EngineEvent,
    GenerateRequest,
    SessionWrites,
    TokensOut,
    ToolRunner,
)
from ampd.wire.generate import RoundRequest
from ampd.wire.replay import RoundPlaced
from services.coordinator import tool_loop
from services.coordinator.tool_loop import (
    MAX_CALLS,
    ToolCalled,
    ToolLoop,
    ToolLoopEvent,
    ToolReturned,
)
from services.decode.settings import HomeLimits


def called(name: str, **arguments: object) -> str:
    """What a model writes to call a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


class Tokens:
    """A token for every message, whose content it remembers."""

    vocab_size = 1000

    def __init__(self) -> None:
        self.increments: list[tuple[ChatMessage, ...]] = []

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, first: bool, last_token_id: int | None
    ) -> array[int]:
        assert not first
        self.increments.append(tuple(messages))
        return array("I", [100 + len(message.content) % 100 for message in messages])


class TalkingEngine(SteppingEngine):
    """Says the next text of the script in each new round, with the first token."""

    def __init__(self, script: list[str], capacity: int) -> None:
        super().__init__(STEP, capacity=capacity)
        self.script = script

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        text = "" if request.output else self.script.pop(0)
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, TokensOut) and text:
                    event, text = TokensOut(event.token_ids, text), ""
                yield event


class FlakyStore(MemoryStateStore):
    """A store that can be down."""

    down = False

    def _check(self) -> None:
        if self.down:
            raise AmpdError(ErrorReason.STORE_UNAVAILABLE, "down")

    async def get_session(self, session_id: str) -> SessionRecord | None:
        self._check()
        return await super().get_session(session_id)

    async def compare_and_set(
        self, record: SessionRecord, expected_version: int, writes: SessionWrites | None = None
    ) -> bool:
        self._check()
        return await super().compare_and_set(record, expected_version, writes)


class FixedTool:
    """A tool that answers at once."""

    def names(self) -> tuple[str, ...]:
        return ("fixed",)

    async def run(self, call: ToolCall) -> ToolReturn:
        return ToolReturn(call.name)

    async def close(self) -> None:
        """Nothing is held."""


@dataclass
class Talk:
    """A cluster whose model talks, and whose rounds may call tools."""

    cluster: InProcess
    script: list[str]
    session_id: str = ""
    loops: list[ToolLoop] = field(default_factory=list)

    @property
    def tokenizer(self) -> Tokens:
        tokenizer: Tokens = self.cluster.tokenizer
        return tokenizer

    async def add_home(self, worker_id: str, tools: ToolRunner | None = None) -> None:
        if tools is None:
            tools = ToolBox([EntryPointTools(NAMES, ToolLimits())], max_running=16)
        engine = TalkingEngine(self.script, 4096)
        limits = HomeLimits(kv_lease_s=0.0)
        await self.cluster.add_home(worker_id, limits=limits, engine=engine, tools=tools)

    async def record(self) -> SessionRecord:
        return await self.cluster.record(self.session_id)

    def wanted(
        self,
        *tools: str,
        request_id: str = "r",
        max_tool_rounds: int = 8,
        max_tokens: int = 4,
    ) -> RoundRequest:
        plain = request(self.session_id, request_id=request_id, max_tokens=max_tokens)
        return replace(plain, server_tools=tools, max_tool_rounds=max_tool_rounds)

    def stream(
        self, wanted: RoundRequest, *, loop: int = 0, timeout_s: float | None = None
    ) -> AsyncGenerator[ToolLoopEvent, None]:
        return self.loops[loop].run("t", wanted, timeout_s)

    async def run(
        self, wanted: RoundRequest, *, loop: int = 0, timeout_s: float | None = None
    ) -> list[ToolLoopEvent]:
        async with aclosing(self.stream(wanted, loop=loop, timeout_s=timeout_s)) as events:
            return [event async for event in events]

    async def until_settled(self, rounds: int) -> None:
        async with asyncio.timeout(10):
            while (await self.record()).rounds < rounds:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def refused(self, wanted: RoundRequest, timeout_s: float | None = None) -> AmpdError:
        with pytest.raises(AmpdError) as caught:
            await self.run(wanted, timeout_s=timeout_s)
        return caught.value


@asynccontextmanager
async def talk(*script: str, homes: int = 1, tool_timeout_s: float = 30.0) -> AsyncIterator[Talk]:
    async with in_process(coordinators=0) as cluster:
        cluster.tokenizer = Tokens()
        cluster.store = FlakyStore()
        talking = Talk(cluster, list(script))
        for number in range(homes):
            await talking.add_home(f"d{number}")
        for number in range(2):
            coordinator = await cluster.add_coordinator()
            talking.loops.append(
                ToolLoop(
                    coordinator=coordinator,
                    state=cluster.states[number],
                    store=cluster.store,
                    homes=LoopbackHomes(cluster.network),
                    parser=hermes,
                    tool_timeout_s=tool_timeout_s,
                    clock=asyncio.get_running_loop().time,
                    wall_clock=asyncio.get_running_loop().time,
                )
            )
        talking.session_id = await cluster.new_session()
        yield talking


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    tool_package.install(folder, monkeypatch)


def kinds(events: Sequence[ToolLoopEvent]) -> list[str]:
    """The events' names, tokens once per round."""
    names = [type(event).__name__ for event in events]
    return [
        name
        for index, name in enumerate(names)
        if name != "TokensOut" or names[index - 1] != "TokensOut"
    ]


def results(events: Sequence[ToolLoopEvent]) -> list[ToolReturn]:
    return [event.returned for event in events if isinstance(event, ToolReturned)]


def said(events: Sequence[ToolLoopEvent]) -> list[tuple[str, bool]]:
    return [(returned.content, returned.failed) for returned in results(events)]


def facts(events: Sequence[ToolLoopEvent]) -> list[object]:
    """What a client can compare between two streams of one request."""
    tokens = "".join(e.text for e in events if isinstance(e, TokensOut))
    return [tokens, *[event for event in events if not isinstance(event, TokensOut)]]


ROUND = ["RoundPlaced", "TokensOut", "Finished"]


# --- the loop -----------------------------------------------------------------------------


async def test_without_server_tools_nothing_is_run() -> None:
    async with talk(called("echo", text="a")) as t:
        assert kinds(await t.run(t.wanted())) == ROUND


async def test_a_round_that_calls_no_tool_ends_the_stream() -> None:
    async with talk("no call") as t:
        assert kinds(await t.run(t.wanted("echo"))) == ROUND


async def test_tool_calls_lead_to_further_rounds() -> None:
    script = [
        "Let me see. " + called("echo", text="a") + called("numbers"),
        called("echo", text="b"),
        "So.",
    ]
    async with talk(*script) as t:
        events = await t.run(t.wanted("echo", "numbers"))
        assert kinds(events) == [
            *("RoundPlaced", "TokensOut", "Continues"),
            *("ToolCalled", "ToolCalled", "ToolReturned", "ToolReturned"),
            *("RoundPlaced", "TokensOut", "Continues", "ToolCalled", "ToolReturned"),
            *ROUND,
        ]
        assert "".join(e.text for e in events if isinstance(e, TokensOut)) == "".join(script)
        placed = [event for event in events if isinstance(event, RoundPlaced)]
        assert [event.round_index for event in placed] == [0, 1, 2]
        sid = t.session_id
        assert t.tokenizer.increments == [
            (
                ChatMessage("tool", "a", "echo", f"{sid}-0-0"),
                ChatMessage("tool", '{"numbers": [0, 1], "é": null}', "numbers", f"{sid}-0-1"),
            ),
            (ChatMessage("tool", "b", "echo", f"{sid}-1-0"),),
        ]
        record = await t.record()
        # 20 + 4, 2 messages + 4, 1 message + 4.
        assert (record.rounds, record.history_tokens) == (3, 24 + 6 + 5)
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.history_tokens == record.history_tokens
        rounds = await t.cluster.store.read_rounds(sid)
        assert [kept.request_id for kept in rounds] == ["r", "r#1", "r#2"]


async def test_results_come_as_they_are_ready_and_go_on_in_order() -> None:
    slow, fast = called("echo_later", text="slow", after_s=1.0), called("echo", text="fast")
    async with talk(slow + fast, "done") as t:
        events = await t.run(t.wanted("echo", "echo_later"))
        assert [content for content, _ in said(events)] == ["fast", "slow"]
        assert [m.content for m in t.tokenizer.increments[0]] == ["slow", "fast"]


async def test_a_tool_that_fails_is_told_and_the_rounds_go_on() -> None:
    calls = called("fail", message="no luck") + called("die", signum=9) + called("echo", wrong=1)
    async with talk(calls, "I see.") as t:
        events = await t.run(t.wanted("fail", "die", "echo"))
        assert kinds(events)[-3:] == ROUND
        contents = [message.content for message in t.tokenizer.increments[0]]
        assert contents[0] == "RuntimeError: no luck"
        assert "signal 9" in contents[1]
        assert "TypeError" in contents[2]
        assert all(returned.failed for returned in results(events))


async def test_a_call_that_cannot_be_read_is_told_too() -> None:
    async with talk("<tool_call>echo(a)</tool_call>" + called("echo", text="b"), "done") as t:
        events = await t.run(t.wanted("echo"))
        calls = [event.call for event in events if isinstance(event, ToolCalled)]
        assert [(call.name, call.arguments) for call in calls] == [
            ("", "echo(a)"),
            ("echo", '{"text": "b"}'),
        ]
        by_call = {e.call.call_id: e.returned for e in events if isinstance(e, ToolReturned)}
        assert by_call[calls[0].call_id].failed
        assert "cannot be read" in by_call[calls[0].call_id].content
        assert by_call[calls[1].call_id].content == "b"


async def test_calls_of_other_tools_are_the_clients() -> None:
    text = called("echo", text="a") + called("numbers")
    async with talk(text) as t:
        events = await t.run(t.wanted("echo"))
        assert kinds(events) == ROUND
        assert (await t.record()).rounds == 1


@pytest.mark.parametrize("budget", [1, 3])
async def test_the_rounds_are_bounded(budget: int) -> None:
    async with talk(*[called("echo", text="again")] * (budget + 1)) as t:
        events = await t.run(t.wanted("echo", max_tool_rounds=budget))
        assert kinds(events).count("Continues") == budget
        assert kinds(events)[-1] == "Finished"
        assert (await t.record()).rounds == budget + 1
        assert t.script == []


async def test_the_calls_of_a_round_are_bounded() -> None:
    async with talk("".join([called("echo", text="a")] * (MAX_CALLS + 2)), "done") as t:
        events = await t.run(t.wanted("echo"))
        returned = results(events)
        assert len(returned) == MAX_CALLS + 2
        assert sum(one.failed for one in returned) == 2
        assert [m.content for m in t.tokenizer.increments[0]][:MAX_CALLS] == ["a"] * MAX_CALLS


async def test_a_tool_that_is_nowhere_is_a_wrong_field() -> None:
    async with talk() as t:
        error = await t.refused(t.wanted("echo", "nowhere"))
        assert error.reason is ErrorReason.INVALID_FIELD
        assert error.violations[0].field == "server_tools[1]"
        assert (await t.record()).rounds == 0


async def test_without_a_request_id_it_works_as_well() -> None:
    async with talk(called("echo", text="a"), "done") as t:
        events = await t.run(t.wanted("echo", request_id=""))
        assert said(events) == [("a", False)]
        assert (await t.record()).rounds == 2


# --- repetition ---------------------------------------------------------------------------


async def test_a_repeated_request_runs_nothing_again(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    count = called("count_calls", log=str(log))
    async with talk(count + count, count, "done", "another") as t:
        wanted = t.wanted("count_calls")
        first = await t.run(wanted)
        for loop in (0, 1):
            assert sorted(map(repr, facts(await t.run(wanted, loop=loop)))) == sorted(
                map(repr, facts(first))
            )
        # And when the session has long gone on.
        await t.run(t.wanted(request_id="s"))
        assert kinds(await t.run(wanted)) == kinds(first)
        assert log.read_text() == "call\n" * 3
        assert (await t.record()).rounds == 4
        assert t.script == []


@pytest.mark.parametrize("loop", [0, 1])
async def test_a_broken_stream_goes_on_with_the_same_results(tmp_path: Path, loop: int) -> None:
    log = tmp_path / "calls"
    async with talk(called("count_calls", log=str(log)), "and so on", "and so on") as t:
        wanted = t.wanted("count_calls", max_tokens=50)
        async with aclosing(t.stream(wanted)) as events:
            async for event in events:
                if isinstance(event, TokensOut) and event.text == "and so on":
                    break
        assert (await t.record()).rounds == 1
        events_again = await t.run(wanted, loop=loop)
        assert said(events_again) == [("1", False)]
        assert log.read_text() == "call\n"
        record = await t.record()
        assert (record.rounds, record.history_tokens) == (2, 20 + 50 + 1 + 50)


async def test_a_round_that_was_refused_does_not_run_its_tools_again(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    async with talk(called("count_calls", log=str(log)), "done") as t:
        wanted = t.wanted("count_calls")
        async with aclosing(t.stream(wanted)) as events:
            async for event in events:
                if isinstance(event, ToolReturned):
                    break
            # The results are kept, and then no home is left for the round that takes them.
            t.cluster.homes["d0"].home.draining = True
            with pytest.raises(AmpdError):
                async for _ in events:
                    pass
        t.cluster.homes["d0"].home.draining = False
        assert said(await t.run(wanted)) == [("1", False)]
        assert log.read_text() == "call\n"
        assert (await t.record()).rounds == 2


async def test_a_call_that_was_cut_off_is_made_again_under_its_id(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with talk(called("sleep", pids=str(pids)), "done") as t:
        seen: list[ToolLoopEvent] = []

        async def run(wanted: RoundRequest) -> None:
            async with aclosing(t.stream(wanted)) as events:
                async for event in events:
                    seen.append(event)  # noqa: PERF401 - kept when it is cancelled

        running = asyncio.create_task(run(t.wanted("sleep")))
        noted = await pids_in(pids)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await all_dead(noted)
        record = await t.record()
        assert (record.state, record.rounds) == (SessionState.IDLE, 1)

        await t.add_home(
            "d0", ToolBox([EntryPointTools(["sleep"], ToolLimits(timeout_s=0.5))], max_running=1)
        )
        again = await t.run(t.wanted("sleep"))
        calls = [event.call for event in (*seen, *again) if isinstance(event, ToolCalled)]
        assert calls[0] == calls[1]
        assert [one.failed for one in results(again)] == [True]
        assert kinds(again)[-3:] == ROUND


# --- faults -------------------------------------------------------------------------------


async def test_a_tool_of_a_lost_home_is_run_elsewhere(tmp_path: Path) -> None:
    log, pids = tmp_path / "calls", tmp_path / "pids"
    calls = called("sleep", pids=str(pids)) + called("count_calls", log=str(log))
    async with talk(calls, "done", homes=2) as t:
        running = asyncio.create_task(t.run(t.wanted("sleep", "count_calls")))
        noted = await pids_in(pids)
        home = (await t.record()).home
        assert home is not None
        other = {"d0": "d1", "d1": "d0"}[home.worker_id]
        brief = EntryPointTools(["sleep", "count_calls"], ToolLimits(timeout_s=1.5))
        await t.add_home(other, ToolBox([brief], max_running=4))
        await t.cluster.lose_home(home.worker_id)
        events = await running
        assert await all_dead(noted)
        assert [one.failed for one in results(events)].count(True) == 1
        placed = [event for event in events if isinstance(event, RoundPlaced)]
        assert [event.decode_worker for event in placed] == [home.worker_id, other]
        assert placed[1].history_rebuilt
        assert (await t.record()).rounds == 2


@dataclass
class Silent:
    """A worker's tools, of which the first call is lost."""

    tools: ToolRunner
    lost: int = 0

    def names(self) -> tuple[str, ...]:
        return self.tools.names()

    async def run(self, call: ToolCall) -> ToolReturn:
        if not self.lost:
            self.lost += 1
            await asyncio.Event().wait()
        return await self.tools.run(call)

    async def close(self) -> None:
        await self.tools.close()


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_a_tool_call_that_is_lost_is_made_elsewhere(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    monkeypatch.setattr(tool_loop, "LOST_CALL_S", 0.05)
    silent = Silent(FixedTool())
    async with talk(called("fixed"), "done", tool_timeout_s=0.0) as t:
        await t.add_home("d0", silent)
        await t.add_home("d1", silent)
        events = await t.run(t.wanted("fixed"), timeout_s=timeout_s)
        assert said(events) == [("fixed", False)]
        assert silent.lost == 1


async def test_a_tool_call_that_is_lost_everywhere_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_loop, "LOST_CALL_S", 0.05)
    async with talk(called("fixed"), "done", tool_timeout_s=0.0) as t:
        await t.add_home("d0", Silent(FixedTool()))
        error = await t.refused(t.wanted("fixed"))
        assert error.reason is ErrorReason.WORKER_UNAVAILABLE


async def test_workers_that_are_full_refuse_with_a_hint(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    text = called("echo", text="a")
    async with talk(text, "done") as t:
        box = ToolBox([EntryPointTools(NAMES, ToolLimits())], max_running=1)
        await t.add_home("d0", box)
        arguments = json.dumps({"pids": str(pids)})
        busy = asyncio.create_task(box.run(ToolCall("s", "c", "sleep", arguments)))
        await pids_in(pids)
        error = await t.refused(t.wanted("echo"))
        assert error.reason is ErrorReason.QUEUE_FULL
        assert error.retry_after_s
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        assert said(await t.run(t.wanted("echo"))) == [("a", False)]


async def test_one_deadline_for_the_whole_stream(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with talk(called("sleep", pids=str(pids))) as t:
        error = await t.refused(t.wanted("sleep"), timeout_s=0.7)
        assert error.reason is ErrorReason.DEADLINE
        assert await all_dead(await pids_in(pids))
        assert (await t.record()).rounds == 1


async def test_another_round_while_a_tool_runs_wins() -> None:
    text = called("echo_later", text="a", after_s=0.5)
    async with talk(text, "of another call") as t:
        running = asyncio.create_task(t.run(t.wanted("echo_later")))
        await t.until_settled(1)
        await t.run(t.wanted(request_id="other"), loop=1)
        with pytest.raises(AmpdError) as caught:
            await running
        assert caught.value.reason is ErrorReason.SESSION_CONFLICT
        assert (await t.record()).rounds == 2
        # Repeated, it runs no tool for a round that can not follow.
        error = await t.refused(t.wanted("echo_later"))
        assert error.reason is ErrorReason.SESSION_CONFLICT


async def test_a_session_that_is_closed_while_a_tool_runs() -> None:
    async with talk(called("echo_later", text="a", after_s=0.5)) as t:
        running = asyncio.create_task(t.run(t.wanted("echo_later")))
        await t.until_settled(1)
        await t.cluster.sessions().close("t", t.session_id, "")
        with pytest.raises(AmpdError) as caught:
            await running
        assert caught.value.reason is ErrorReason.SESSION_NOT_FOUND


async def test_a_store_that_is_down_between_two_rounds_is_waited_for() -> None:
    async with talk(called("echo_later", text="a", after_s=0.3), "done") as t:
        store = t.cluster.store
        assert isinstance(store, FlakyStore)
        running = asyncio.create_task(t.run(t.wanted("echo_later")))
        await t.until_settled(1)
        await asyncio.sleep(0.1)
        store.down = True
        await asyncio.sleep(0.8)
        assert not running.done()
        store.down = False
        assert said(await running) == [("a", False)]
        assert (await t.record()).rounds == 2
