"""The contract of `ampd.ports.Engine`: checks over a pair of engines, for every adapter.

An adapter's test module parametrises over `CHECKS` with a `Pair`. Nothing here knows vLLM.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import pytest

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import ITL_SAFE_RULE, LocalRule
from ampd.core.model import FinishReason, KvHandle, PrefillStats, SamplingParams, Slo
from ampd.ports import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    GenerateDone,
    GenerateRequest,
    PrefillDone,
    PrefillRequest,
    PrefillResult,
    Tokens,
    TokensOut,
)

SLO = Slo(ttft_s=5.0, itl_s=1.0)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTLE_S = 1.0
"""Within which everything must be free again."""


class EngineUnderTest(Protocol):
    """The port, with what may be far away made awaitable, and a way to forget."""

    info: EngineInfo

    async def prefill(self, request: PrefillRequest) -> PrefillResult: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]: ...
    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle: ...
    async def reclaim(self, kv: KvHandle) -> None: ...
    async def release(self, kv: KvHandle) -> None: ...
    async def use_local_rule(self, rule: LocalRule) -> None: ...
    async def stats_now(self) -> EngineStats: ...
    async def evict(self) -> None: ...


@dataclass(frozen=True)
class Pair:
    prefill: EngineUnderTest
    decode: EngineUnderTest

    async def clean(self) -> None:
        """Nothing pinned, nothing cached."""
        for engine in (self.prefill, self.decode):
            await settled(engine)
            await engine.evict()


@dataclass
class Generated:
    tokens: list[int]
    text: str
    stats: PrefillStats
    done: GenerateDone
    event_times_s: list[float]
    chars_after: list[int]
    """Characters of text that were out with each token."""


def token_ids(rng: random.Random, count: int) -> Tokens:
    return array("I", (rng.randrange(100, 40_000) for _ in range(count)))


async def generate(
    engine: EngineUnderTest,
    tokens: Tokens,
    kv: KvHandle | None = None,
    sampling: SamplingParams = GREEDY,
    *,
    said: Sequence[int] = (),
    text_chars: int = 0,
    session_began_s: float = 0.0,
) -> Generated:
    """`said` and `text_chars`: the output that the round has already."""
    request = GenerateRequest(
        "round",
        tokens,
        kv,
        sampling,
        SLO,
        output=array("I", said),
        text_chars=text_chars,
        session_began_s=session_began_s,
    )
    output: list[int] = []
    chars_after: list[int] = []
    text = ""
    times_s: list[float] = []
    stats: PrefillStats | None = None
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            times_s.append(time.monotonic())
            match event:
                case PrefillDone(prefill_stats):
                    assert stats is None
                    assert not output
                    stats = prefill_stats
                case TokensOut(ids, piece):
                    assert stats is not None
                    output += ids
                    text += piece
                    chars_after += [len(text)] * len(ids)
                case GenerateDone():
                    assert stats is not None
                    assert event.output_tokens == len(said) + len(output)
                    return Generated(output, text, stats, event, times_s, chars_after)
    raise AssertionError("the stream ended without GenerateDone")


async def oracle(engine: EngineUnderTest, tokens: Tokens, count: int = 8) -> list[int]:
    """The greedy continuation, computed from nothing."""
    await engine.evict()
    result = await generate(engine, tokens, sampling=replace(GREEDY, max_tokens=count))
    await engine.release(result.done.kv)
    return result.tokens


async def settled(engine: EngineUnderTest, pinned_tokens: int = 0) -> EngineStats:
    """The statistics once nothing runs and so much is pinned, within SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        stats = await engine.stats_now()
        assert_adds_up(engine, stats)
        if (stats.kv_used_tokens, stats.kv_pinned_tokens) == (0, pinned_tokens):
            return stats
        assert time.monotonic() < deadline_s, stats
        await asyncio.sleep(0.02)


def assert_adds_up(engine: EngineUnderTest, stats: EngineStats) -> None:
    total = stats.kv_free_tokens + stats.kv_used_tokens + stats.kv_pinned_tokens
    assert total == engine.info.kv_capacity_tokens, stats
    assert min(stats.kv_free_tokens, stats.kv_used_tokens, stats.kv_pinned_tokens) >= 0, stats


# --- sessions -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    keep: float
    """Share of the history that is kept; 1.0: no rewind."""
    increment: int
    output: int


@dataclass
class Session:
    rounds: list[Round]
    seed: int


def scripted_sessions(block: int) -> list[Session]:
    """Eight sessions of four and more rounds, with every awkward length."""
    plan = [
        [(1.0, 40), (1.0, block), (1.0, 3), (1.0, 2 * block - 1)],
        [(1.0, block), (1.0, block), (1.0, block), (0.5, block)],
        [(1.0, 2 * block + 1), (1.0, 3), (1.0, 3), (1.0, 3), (0.9, 3)],
        [(1.0, 3 * block - 1), (1.0, block + 1), (0.3, 7), (1.0, block - 1)],
        [(1.0, 400), (1.0, 100), (0.99, 1), (0.5, 200)],
        [(1.0, 128), (0.0, 77), (1.0, 3), (1.0, 130)],
        [(1.0, 250), (1.0, 3), (0.75, block), (1.0, 3), (1.0, 64)],
        [(1.0, 4 * block), (1.0, 4 * block), (0.6, 4 * block + 1), (1.0, 40)],
    ]
    rng = random.Random(11)
    return [
        Session([Round(keep, incr, rng.randrange(2, 14)) for keep, incr in rounds], seed)
        for seed, rounds in enumerate(plan)
    ]


def next_prompt(history: Tokens, step: Round, rng: random.Random) -> tuple[Tokens, int]:
    keep = int(len(history) * step.keep)
    return history[:keep] + token_ids(rng, step.increment), keep


_expected: dict[tuple[str, int], list[list[int]]] = {}
"""By model and session."""


async def expected_outputs(pair: Pair, sessions: list[Session]) -> list[list[list[int]]]:
    """Every round computed from nothing by one engine; the same for all three routes."""
    model = pair.decode.info.model
    for session in sessions:
        if (model, session.seed) in _expected:
            continue
        rng = random.Random(session.seed)
        history = array("I")
        outputs = []
        for step in session.rounds:
            prompt, _ = next_prompt(history, step, rng)
            outputs.append(await oracle(pair.decode, prompt, step.output))
            history = prompt + array("I", outputs[-1])
        _expected[model, session.seed] = outputs
    return [_expected[model, session.seed] for session in sessions]


async def run_session(
    pair: Pair, session: Session, route_remote: Callable[[], bool]
) -> list[list[int]]:
    rng = random.Random(session.seed)
    history = array("I")
    pin: KvHandle | None = None
    outputs = []
    for step in session.rounds:
        prompt, keep = next_prompt(history, step, rng)
        kv: KvHandle | None = None
        if route_remote():
            lent: KvHandle | None = None
            covered = 0 if pin is None else min(keep, pin.tokens)
            if pin is not None and covered:
                lent = await pair.decode.lend(pin, covered)
            result = await pair.prefill.prefill(PrefillRequest("prefill", prompt, lent))
            assert result.stats.computed_tokens <= (
                len(prompt) - covered + pair.prefill.info.block_tokens
            )
            kv = result.kv
        done = await generate(pair.decode, prompt, kv, replace(GREEDY, max_tokens=step.output))
        if kv is not None:
            assert done.stats.computed_tokens == 1
        if pin is not None:
            await pair.decode.release(pin)
        pin = done.done.kv
        assert pin.tokens == len(prompt) + len(done.tokens) - 1
        outputs.append(done.tokens)
        history = prompt + array("I", done.tokens)
    assert pin is not None
    await pair.decode.release(pin)
    return outputs


async def _check_sessions(pair: Pair, route_remote: Callable[[], bool]) -> None:
    sessions = scripted_sessions(pair.decode.info.block_tokens)
    expected = await expected_outputs(pair, sessions)
    await pair.clean()
    outputs = await asyncio.gather(*(run_session(pair, s, route_remote) for s in sessions))
    assert outputs == expected
    for engine in (pair.prefill, pair.decode):
        await settled(engine)


async def check_always_local(pair: Pair) -> None:
    await _check_sessions(pair, lambda: False)


async def check_always_remote(pair: Pair) -> None:
    await _check_sessions(pair, lambda: True)


async def check_mixed_routes(pair: Pair) -> None:
    rng = random.Random(5)
    await _check_sessions(pair, lambda: rng.random() < 0.6)


# --- statistics of a prefill --------------------------------------------------------------


async def check_remote_round_statistics(pair: Pair) -> None:
    """Who computed, had and pulled how much in a second round, in tokens and bytes."""
    await pair.clean()
    block = pair.decode.info.block_tokens
    block_bytes = block * pair.decode.info.kv_bytes_per_token
    rng = random.Random(1)
    prompt = token_ids(rng, 4 * block + 5)
    first = await generate(pair.decode, prompt)
    assert first.stats.computed_tokens == len(prompt)
    assert (first.stats.cached_tokens, first.stats.pulled_bytes) == (0, 0)
    history = first.done.kv.tokens
    assert history == len(prompt) + 7
    tokens = prompt + array("I", first.tokens) + token_ids(rng, 50)

    lent = await pair.decode.lend(first.done.kv, history)
    before_s = time.monotonic()
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    stats = result.stats
    assert result.kv.tokens >= len(tokens) - 1
    assert (stats.pulled_tokens, stats.cached_tokens) == (history, 0)
    assert stats.computed_tokens == len(tokens) - history
    assert stats.pulled_bytes == -(-history // block) * block_bytes
    assert before_s < stats.read_start_s < stats.read_end_s <= stats.compute_start_s
    assert stats.compute_start_s < stats.compute_end_s < time.monotonic()

    second = await generate(pair.decode, tokens, result.kv)
    cached = history // block * block
    assert second.stats.computed_tokens == 1
    assert second.stats.cached_tokens == cached
    assert second.stats.pulled_tokens == len(tokens) - 1 - cached
    assert second.stats.pulled_bytes == (-(-(len(tokens) - 1) // block) - cached // block) * (
        block_bytes
    )
    # The prefill worker's own cache serves the next increment.
    longer = tokens + array("I", second.tokens) + token_ids(rng, 3)
    lent = await pair.decode.lend(second.done.kv, second.done.kv.tokens)
    third = await pair.prefill.prefill(PrefillRequest("p", longer, lent))
    assert third.stats.cached_tokens == len(tokens) // block * block
    assert third.stats.computed_tokens == 4
    for handle in (first.done.kv, second.done.kv):
        await pair.decode.release(handle)
    await pair.prefill.release(third.kv)
    await pair.clean()


async def check_read_overlaps_compute(pair: Pair) -> None:
    """The history of the next prefill is read while the one before is computed, and the one
    before is not slowed down; the computations do not overlap, and keep their order."""
    await pair.clean()
    rng = random.Random(2)
    long = token_ids(rng, 3500)
    short = token_ids(rng, 600)
    first = await generate(pair.decode, short)

    started_s = time.monotonic()
    alone = await pair.prefill.prefill(PrefillRequest("alone", long, None))
    alone_s = time.monotonic() - started_s
    await pair.prefill.release(alone.kv)
    await pair.prefill.evict()

    lent = await pair.decode.lend(first.done.kv, first.done.kv.tokens)
    tokens = short + array("I", first.tokens) + token_ids(rng, 300)
    started_s = time.monotonic()
    one = asyncio.create_task(pair.prefill.prefill(PrefillRequest("one", long, None)))
    await asyncio.sleep(alone_s / 4)
    two = asyncio.create_task(pair.prefill.prefill(PrefillRequest("two", tokens, lent)))
    one_result = await one
    one_s = time.monotonic() - started_s
    two_result = await two
    assert two_result.stats.pulled_tokens == first.done.kv.tokens
    assert two_result.stats.read_start_s < one_result.stats.compute_end_s
    assert two_result.stats.read_end_s <= one_result.stats.compute_end_s
    assert two_result.stats.compute_start_s >= one_result.stats.compute_end_s - 0.01
    assert one_s < 1.5 * alone_s + 0.2
    await pair.decode.release(first.done.kv)
    for result in (one_result, two_result):
        await pair.prefill.release(result.kv)
    await pair.clean()


async def check_prefills_keep_their_order(pair: Pair) -> None:
    await pair.clean()
    rng = random.Random(3)
    lengths = (900, 64, 500, 33)
    results = await asyncio.gather(
        *(pair.prefill.prefill(PrefillRequest(str(n), token_ids(rng, n), None)) for n in lengths)
    )
    ends_s = [result.stats.compute_end_s for result in results]
    starts_s = [result.stats.compute_start_s for result in results]
    assert ends_s == sorted(ends_s)
    assert all(start >= end - 0.01 for start, end in zip(starts_s[1:], ends_s, strict=False))
    for result in results:
        await pair.prefill.release(result.kv)
    await pair.clean()


async def check_entrants_do_not_wait_for_local_prefills(pair: Pair) -> None:
    """A round whose KV comes from a prefill worker starts while a long local prefill runs."""
    await pair.clean()
    rng = random.Random(4)
    long, short = token_ids(rng, 3800), token_ids(rng, 300)
    alone = await generate(pair.decode, long, sampling=replace(GREEDY, max_tokens=1))
    prefill_s = alone.stats.compute_s
    await pair.decode.release(alone.done.kv)
    await pair.decode.evict()
    result = await pair.prefill.prefill(PrefillRequest("p", short, None))
    local = asyncio.create_task(generate(pair.decode, long))
    await asyncio.sleep(prefill_s / 10)
    started_s = time.monotonic()
    entrant = await generate(pair.decode, short, result.kv)
    ttft_s = entrant.event_times_s[1] - started_s
    local_done = await local
    assert entrant.stats.computed_tokens == 1
    assert entrant.event_times_s[1] < local_done.event_times_s[1]
    assert ttft_s < max(0.5 * prefill_s, 0.1)
    for done in (entrant, local_done):
        await pair.decode.release(done.done.kv)
    await pair.clean()


async def check_local_prefills_follow_the_rule(pair: Pair) -> None:
    """With a fixed budget and by sessions: of the prompts that wait, that of the session that
    began first is computed first, and all say what they say alone."""
    rng = random.Random(5)
    brief = replace(GREEDY, max_tokens=2)
    prompts = [token_ids(rng, count) for count in (900, 150, 150, 150)]
    expected = []
    for prompt in prompts:
        await pair.clean()
        alone = await generate(pair.decode, prompt, sampling=brief)
        await pair.decode.release(alone.done.kv)
        expected.append(alone.tokens)
    await pair.clean()
    await pair.decode.use_local_rule(LocalRule(budget_tokens=128, by_session=True))
    began_s = (0.0, 3.0, 1.0, 2.0)
    rounds = await asyncio.gather(
        *(
            generate(pair.decode, prompt, sampling=brief, session_began_s=at_s)
            for prompt, at_s in zip(prompts, began_s, strict=True)
        )
    )
    await pair.decode.use_local_rule(ITL_SAFE_RULE)
    assert [done.tokens for done in rounds] == expected
    assert sorted(range(4), key=lambda i: rounds[i].stats.compute_end_s) == [0, 2, 3, 1]
    for done in rounds:
        await pair.decode.release(done.done.kv)
    await pair.clean()


# --- rounds that go on --------------------------------------------------------------------


async def _resume(
    pair: Pair, tokens: Tokens, whole: Generated, known: int, sampling: SamplingParams, *, far: bool
) -> Generated:
    """The rest of `whole` behind its first `known` tokens, on an engine that knows nothing of it;
    `far`: the KV comes from a prefill engine. What both said is compared."""
    await pair.clean()
    said = whole.tokens[:known]
    text_chars = whole.chars_after[known - 1]
    kv = None
    if far:
        everything = tokens + array("I", said)
        kv = (await pair.prefill.prefill(PrefillRequest("p", everything, None))).kv
    rest = await generate(pair.decode, tokens, kv, sampling, said=said, text_chars=text_chars)
    assert rest.tokens == whole.tokens[known:]
    assert rest.text == whole.text[text_chars:]
    # The last token of an output that has ended needs no KV.
    has_ended = known == len(whole.tokens)
    computed = 1 if far else len(tokens) + known
    assert computed - (has_ended and not far) <= rest.stats.computed_tokens <= computed
    got, right = rest.done, whole.done
    assert (got.finish_reason, got.stop_reason) == (right.finish_reason, right.stop_reason)
    assert got.output_tokens == right.output_tokens
    assert got.kept_output_tokens == right.kept_output_tokens
    # At most the last token has no KV.
    kept = len(tokens) + right.kept_output_tokens
    assert kept - 1 <= got.kv.tokens <= kept
    await pair.decode.release(got.kv)
    return rest


async def _whole(
    pair: Pair, tokens: Tokens, sampling: SamplingParams, *, output_tokens: int
) -> Generated:
    """The round in one piece."""
    await pair.clean()
    whole = await generate(pair.decode, tokens, sampling=sampling)
    assert len(whole.tokens) == output_tokens
    await pair.decode.release(whole.done.kv)
    return whole


async def check_resumed_streams_go_on(pair: Pair) -> None:
    """Behind its first, a middle and its last but one token a greedy round says what it would
    have said, whether the KV is computed or comes from a peer."""
    block = pair.decode.info.block_tokens
    sampling = replace(GREEDY, max_tokens=12)
    for length in (3 * block + 5, 2 * block - 6):  # the output crosses a block's end in both
        tokens = token_ids(random.Random(length), length)
        whole = await _whole(pair, tokens, sampling, output_tokens=12)
        for known in (1, 6, 11):
            for far in (False, True):
                await _resume(pair, tokens, whole, known, sampling, far=far)
    # The pin serves the next round as any other: its KV is the output's as well.
    await pair.clean()
    rest = await generate(pair.decode, tokens, None, sampling, said=whole.tokens[:6])
    following = tokens + array("I", whole.tokens) + token_ids(random.Random(13), 20)
    after = await generate(pair.decode, following)
    assert after.stats.cached_tokens == rest.done.kv.tokens // block * block
    for done in (rest, after):
        await pair.decode.release(done.done.kv)
    assert after.tokens == await oracle(pair.decode, following)
    await pair.clean()


async def check_resumed_output_that_has_ended(pair: Pair) -> None:
    """Nothing more is said behind the end, whatever ended it."""
    tokens = token_ids(random.Random(14), 50)
    sampling = replace(GREEDY, max_tokens=9)
    whole = await _whole(pair, tokens, sampling, output_tokens=9)
    for far in (False, True):
        rest = await _resume(pair, tokens, whole, 9, sampling, far=far)
        assert rest.done.finish_reason is FinishReason.LENGTH
    # A stop token, known or about to come.
    at = next(i for i in range(1, 9) if whole.tokens[i] not in whole.tokens[:i])
    stopping = replace(sampling, stop_token_ids=(whole.tokens[at],))
    stopped = await _whole(pair, tokens, stopping, output_tokens=at + 1)
    assert stopped.done.finish_reason is FinishReason.STOP
    assert stopped.done.stop_reason == str(whole.tokens[at])
    for known in (at, at + 1):
        await _resume(pair, tokens, stopped, known, stopping, far=False)
    # The context is full.
    most = pair.decode.info.max_model_tokens
    long = token_ids(random.Random(15), most - 3)
    full = await _whole(pair, long, sampling, output_tokens=3)
    for known in (2, 3):
        rest = await _resume(pair, long, full, known, sampling, far=False)
        assert rest.done.finish_reason is FinishReason.LENGTH
    await pair.clean()


async def check_resumed_stop_strings(pair: Pair) -> None:
    """A stop string that begins in the known output and ends in the new one is found, and no
    text is said twice or lost, also of what was held back for it."""
    tokens = token_ids(random.Random(16), 50)
    sampling = replace(GREEDY, max_tokens=12)
    plain = await _whole(pair, tokens, sampling, output_tokens=12)
    ends = plain.chars_after

    def stop_at(known: int) -> str:
        """Two characters on either side of the boundary behind `known` tokens."""
        return plain.text[ends[known - 1] - 2 : ends[known - 1] + 2]

    def spans(known: int) -> bool:
        start = ends[known - 1] - 2
        return (
            start >= 2
            and len(stop_at(known)) == 4
            and "\ufffd" not in stop_at(known)
            and plain.text.find(stop_at(known)) == start
        )

    known = next(k for k in range(2, 11) if spans(k))
    for include in (False, True):
        stopping = replace(sampling, stop=(stop_at(known),), include_stop_str_in_output=include)
        await pair.clean()
        stopped = await generate(pair.decode, tokens, sampling=stopping)
        await pair.decode.release(stopped.done.kv)
        assert stopped.done.finish_reason is FinishReason.STOP
        assert stopped.done.stop_reason == stop_at(known)
        cut = ends[known - 1] + (2 if include else -2)
        assert stopped.text == plain.text[:cut]
        for already in (1, known, stopped.done.output_tokens):
            await _resume(pair, tokens, stopped, already, stopping, far=False)
    # One that never comes: what was held back for it is said at the end.
    missing = replace(sampling, stop=("never\x00said",))
    unstopped = await _whole(pair, tokens, missing, output_tokens=12)
    assert unstopped.text == plain.text
    for already in (1, 6, 12):
        await _resume(pair, tokens, unstopped, already, missing, far=False)
    await pair.clean()


# --- pins, loans, ends --------------------------------------------------------------------


async def check_pins_until_release(pair: Pair) -> None:
    await pair.clean()
    block = pair.decode.info.block_tokens
    rng = random.Random(6)
    first = await generate(pair.decode, token_ids(rng, 100))
    pinned = -(-first.done.kv.tokens // block) * block
    await settled(pair.decode, pinned)
    await pair.decode.release(first.done.kv)
    assert (await pair.decode.stats_now()).kv_pinned_tokens == 0
    await pair.decode.release(first.done.kv)  # idempotent
    foreign = replace(first.done.kv, owner="another")
    await pair.decode.release(foreign)
    await pair.decode.release(replace(first.done.kv, payload=b"nonsense"))
    with pytest.raises(AmpdError) as gone:
        await pair.decode.lend(first.done.kv, 10)
    assert gone.value.reason is ErrorReason.TASK_GONE
    with pytest.raises(AmpdError) as gone:
        await pair.decode.lend(foreign, 10)
    assert gone.value.reason is ErrorReason.TASK_GONE
    # A prefill result is pinned until its reader has read it.
    prompt = token_ids(rng, 70)
    result = await pair.prefill.prefill(PrefillRequest("p", prompt, None))
    await settled(pair.prefill, -(-len(prompt) // block) * block)
    second = await generate(pair.decode, prompt, result.kv)
    await settled(pair.prefill)
    await pair.decode.release(second.done.kv)
    # A loan leaves the pin alone, and ends by reclaim.
    third = await generate(pair.decode, prompt)
    lent = await pair.decode.lend(third.done.kv, 40)
    assert lent.tokens == 40
    await pair.decode.reclaim(lent)
    await pair.decode.reclaim(lent)
    await settled(pair.decode, -(-third.done.kv.tokens // block) * block)
    assert (await pair.decode.lend(third.done.kv, 64)).tokens == 64
    await pair.decode.release(third.done.kv)
    await pair.clean()


async def check_a_session_is_taken_over(pair: Pair) -> None:
    """A home's engine prefills what a peer lends, and keeps it: the next round finds it all."""
    block = pair.decode.info.block_tokens
    rng = random.Random(16)
    history, increment = token_ids(rng, 5 * block + 7), token_ids(rng, 20)
    expected = await oracle(pair.decode, history + increment)
    await pair.clean()
    lent = (await pair.prefill.prefill(PrefillRequest("p", history, None))).kv
    taken = await pair.decode.prefill(PrefillRequest("m", history, lent))
    assert taken.stats.pulled_tokens >= 5 * block
    assert taken.stats.computed_tokens <= block
    await pair.decode.reclaim(taken.kv)
    await settled(pair.prefill)
    await settled(pair.decode, 6 * block)
    again = await pair.decode.lend(taken.kv, 5 * block)
    await pair.decode.reclaim(again)
    round_ = await generate(pair.decode, history + increment)
    assert round_.tokens == expected
    assert round_.stats.computed_tokens <= len(increment) + block
    await pair.decode.release(taken.kv)
    await pair.decode.release(round_.done.kv)
    await pair.clean()


async def check_abort_frees_and_keeps_the_previous_pin(pair: Pair) -> None:
    await pair.clean()
    block = pair.decode.info.block_tokens
    rng = random.Random(7)
    prompt = token_ids(rng, 200)
    expected = await oracle(pair.decode, prompt)
    first = await generate(pair.decode, prompt)
    pinned = -(-first.done.kv.tokens // block) * block
    tokens = prompt + array("I", first.tokens) + token_ids(rng, 900)
    endless = replace(GREEDY, max_tokens=2000)
    # Aborted at its first token, in its local prefill, and before anything happened.
    for events_wanted in (3, 0):
        stream = pair.decode.generate(GenerateRequest("x", tokens, None, endless, SLO))
        for _ in range(events_wanted):
            await anext(stream)
        if not events_wanted:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await stream.aclose()
        await settled(pair.decode, pinned)
    # Aborted while it is pulled from a prefill worker.
    for delay_s in (0.0, 0.005, 0.05):
        result = await pair.prefill.prefill(PrefillRequest("p", tokens, None))
        stream = pair.decode.generate(GenerateRequest("x", tokens, result.kv, endless, SLO))
        pull = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(delay_s)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        await stream.aclose()
        await pair.prefill.release(result.kv)
        await settled(pair.decode, pinned)
        await settled(pair.prefill)
    # A prefill that is cancelled before, during and after its read of the history.
    for delay_s in (0.0, 0.01, 0.03, 0.1):
        lent = await pair.decode.lend(first.done.kv, first.done.kv.tokens)
        await pair.prefill.evict()
        task = asyncio.create_task(pair.prefill.prefill(PrefillRequest("p", tokens, lent)))
        await asyncio.sleep(delay_s)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, PrefillResult):
            await pair.prefill.release(outcome.kv)
        await settled(pair.prefill)
    # The pin from before is whole: another engine reads it.
    await pair.prefill.evict()
    lent = await pair.decode.lend(first.done.kv, first.done.kv.tokens)
    again = prompt + array("I", first.tokens) + token_ids(rng, 20)
    result = await pair.prefill.prefill(PrefillRequest("p", again, lent))
    assert result.stats.pulled_tokens == first.done.kv.tokens
    second = await generate(pair.decode, again, result.kv)
    assert first.tokens == expected
    for done in (first, second):
        await pair.decode.release(done.done.kv)
    assert second.tokens == await oracle(pair.decode, again)
    await pair.clean()


async def check_bad_handles_never_give_other_tokens(pair: Pair) -> None:
    await pair.clean()
    rng = random.Random(8)
    prompt = token_ids(rng, 150)
    tokens = prompt + token_ids(rng, 40)
    expected = await oracle(pair.decode, tokens)
    first = await generate(pair.decode, prompt)
    history = len(prompt)

    async def assert_exact(kv: KvHandle) -> PrefillStats:
        """Reading `kv` as history gives the right tokens, and it does not take for ever."""
        await pair.prefill.evict()
        async with asyncio.timeout(8):
            result = await pair.prefill.prefill(PrefillRequest("p", tokens, kv))
            done = await generate(pair.decode, tokens, result.kv)
        assert done.tokens == expected
        await pair.decode.release(done.done.kv)
        return result.stats

    good = await pair.decode.lend(first.done.kv, history)
    assert (await assert_exact(good)).pulled_tokens == history
    # It was read, so the loan is over; so is one that was reclaimed.
    assert (await assert_exact(good)).pulled_tokens == 0
    reclaimed = await pair.decode.lend(first.done.kv, history)
    await pair.decode.reclaim(reclaimed)
    assert (await assert_exact(reclaimed)).pulled_tokens == 0
    # Released, and its blocks full of other KV.
    stale = await pair.decode.lend(first.done.kv, history)
    await pair.decode.release(stale)
    await pair.decode.evict()
    fill = pair.decode.info.kv_capacity_tokens // 3 - 100
    fillers = [await generate(pair.decode, token_ids(rng, min(fill, 3900))) for _ in range(3)]
    assert (await assert_exact(stale)).pulled_tokens == 0
    for filler in fillers:
        await pair.decode.release(filler.done.kv)
    # A prefill result that is stale in the same way.
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, None))
    await pair.prefill.release(result.kv)
    async with asyncio.timeout(8):
        done = await generate(pair.decode, tokens, result.kv)
    assert done.tokens == expected
    await pair.decode.release(done.done.kv)
    # Refused: not lent, of other tokens, longer than the tokens, nonsense.
    second = await generate(pair.decode, prompt)
    lent = await pair.decode.lend(second.done.kv, history)
    other = token_ids(rng, 190)
    for prompt_tokens, kv in (
        (tokens, second.done.kv),
        (other, lent),
        (prompt[:50], lent),
        (tokens, replace(lent, payload=b"\xff\x00")),
        (tokens, replace(lent, tokens=history + 5)),
    ):
        with pytest.raises(AmpdError) as refused:
            await pair.prefill.prefill(PrefillRequest("p", prompt_tokens, kv))
        assert refused.value.reason is ErrorReason.INVALID_FIELD
        assert refused.value.violations[0].field == "history"
    await pair.decode.release(second.done.kv)
    await pair.clean()


async def check_statistics_add_up(pair: Pair) -> None:
    """Random operations, with the statistics looked at all the while."""
    await pair.clean()
    rng = random.Random(9)
    pins: list[KvHandle] = []
    over = asyncio.Event()

    async def watch(engine: EngineUnderTest) -> int:
        looks = 0
        while not over.is_set():
            assert_adds_up(engine, await engine.stats_now())
            looks += 1
            await asyncio.sleep(0.002)
        return looks

    async def operate() -> None:
        for _ in range(12):
            tokens = token_ids(rng, rng.randrange(1, 400))
            kv = None
            if rng.random() < 0.5:
                kv = (await pair.prefill.prefill(PrefillRequest("p", tokens, None))).kv
            if rng.random() < 0.25:
                stream = pair.decode.generate(GenerateRequest("g", tokens, kv, GREEDY, SLO))
                await anext(stream)
                await stream.aclose()
            else:
                pins.append((await generate(pair.decode, tokens, kv)).done.kv)
            if pins and rng.random() < 0.5:
                kv = pins.pop(rng.randrange(len(pins)))
                if rng.random() < 0.5:
                    await pair.decode.lend(kv, kv.tokens)
                await pair.decode.release(kv)

    watchers = [asyncio.create_task(watch(engine)) for engine in (pair.prefill, pair.decode)]
    await asyncio.gather(*(operate() for _ in range(4)))
    over.set()
    assert min(await asyncio.gather(*watchers)) > 20
    for kv in pins:
        await pair.decode.release(kv)
    await pair.clean()


async def check_refuses_bad_requests(pair: Pair) -> None:
    good = array("I", [200] * 10)
    most = pair.decode.info.max_model_tokens
    cases: Sequence[tuple[Tokens, SamplingParams, ErrorReason]] = (
        (array("I"), GREEDY, ErrorReason.INVALID_FIELD),
        (array("I", [pair.decode.info.vocab_size]), GREEDY, ErrorReason.INVALID_FIELD),
        (array("I", [200] * most), GREEDY, ErrorReason.CONTEXT_TOO_LONG),
        (good, replace(GREEDY, top_p=7.0), ErrorReason.INVALID_FIELD),
        (good, replace(GREEDY, max_tokens=0), ErrorReason.INVALID_FIELD),
    )
    for tokens, sampling, reason in cases:
        with pytest.raises(AmpdError) as refused:
            await generate(pair.decode, tokens, sampling=sampling)
        assert refused.value.reason is reason
    await pair.clean()


async def check_one_token_and_the_whole_context(pair: Pair) -> None:
    one = await generate(pair.decode, array("I", [321]), sampling=replace(GREEDY, max_tokens=1))
    assert len(one.tokens) == 1
    most = pair.decode.info.max_model_tokens
    prompt = token_ids(random.Random(10), most - 5)
    full = await generate(pair.decode, prompt, sampling=replace(GREEDY, max_tokens=100))
    assert full.done.finish_reason is FinishReason.LENGTH
    assert full.done.output_tokens == 5
    for done in (one, full):
        await pair.decode.release(done.done.kv)
    await pair.clean()


async def check_full_memory_is_an_error(pair: Pair) -> None:
    """With all memory pinned a request fails soon, with a retry hint, and works afterwards."""
    await pair.clean()
    rng = random.Random(12)
    length = pair.decode.info.max_model_tokens - 100
    pins = []
    while (await pair.decode.stats_now()).kv_free_tokens > length + 50:
        pins.append((await generate(pair.decode, token_ids(rng, length))).done.kv)
    prompt = token_ids(rng, length)
    async with asyncio.timeout(10):
        with pytest.raises(AmpdError) as full:
            await generate(pair.decode, prompt)
    assert full.value.reason is ErrorReason.KV_EXHAUSTED
    assert full.value.retry_after_s is not None
    await pair.decode.release(pins.pop())
    pins.append((await generate(pair.decode, prompt)).done.kv)
    for kv in pins:
        await pair.decode.release(kv)
    await pair.clean()


Check = Callable[[Pair], Awaitable[None]]
CHECKS: Sequence[Check] = (
    check_always_local,
    check_always_remote,
    check_mixed_routes,
    check_remote_round_statistics,
    check_read_overlaps_compute,
    check_prefills_keep_their_order,
    check_entrants_do_not_wait_for_local_prefills,
    check_local_prefills_follow_the_rule,
    check_resumed_streams_go_on,
    check_resumed_output_that_has_ended,
    check_resumed_stop_strings,
    check_pins_until_release,
    check_a_session_is_taken_over,
    check_abort_frees_and_keeps_the_previous_pin,
    check_bad_handles_never_give_other_tokens,
    check_statistics_add_up,
    check_refuses_bad_requests,
    check_one_token_and_the_whole_context,
    check_full_memory_is_an_error,
)
