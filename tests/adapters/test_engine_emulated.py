"""The emulated engine's own promises: what its tokens depend on, its oracle, memory, and time."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import pytest_asyncio
from emulated_pair import CheckedEngine, close, make_pair
from engine_contract import GREEDY, SLO, Pair, generate, settled, token_ids
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from virtual_loop import run_virtual

from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings, expect, oracle
from ampd.adapters.engine_emulated.pins import READER_TAIL_S
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import FinishReason, KvHandle, SamplingParams, Slo
from ampd.ports import (
    GenerateDone,
    GenerateRequest,
    KvPiece,
    PrefillDone,
    PrefillRequest,
    Tokens,
    TokensOut,
)

BLOCK = 8
SETTINGS = EmulatedSettings(block_tokens=BLOCK, kv_capacity_tokens=1024, max_model_tokens=256)
COST = CostModel(
    PrefillCost(base_s=0.01, token_s=0.001, history_token_s=1e-5, attention_pair_s=1e-7),
    DecodeCost(base_s=0.02, sequence_s=0.001, context_token_s=1e-6),
    MixedCost(base_s=0.02, token_s=0.001, sequence_s=0.001, context_token_s=1e-6),
    KvCost(base_s=0.002, token_s=1e-5),
)


class WatchedTransport(InprocKvTransport):
    """An in-process transport that lets a test in between, and notes when it is to serve."""

    def __init__(self, network: InprocKvNetwork, name: str) -> None:
        super().__init__(network, name, 1)
        self.after_read: list[Callable[[], Awaitable[None]]] = []
        self.served: list[bool] = []

    def serve(self, *, lent: bool) -> None:
        self.served.append(lent)
        super().serve(lent=lent)

    async def read(self, locator: bytes, pieces: Sequence[KvPiece], timeout_s: float) -> None:
        await super().read(locator, pieces, timeout_s)
        if self.after_read:
            await self.after_read.pop(0)()


def engine_of(engine: object) -> EmulatedEngine:
    assert isinstance(engine, CheckedEngine)
    return engine.engine


def transport_of(engine: object) -> WatchedTransport:
    transport = engine_of(engine)._transport
    assert isinstance(transport, WatchedTransport)
    return transport


def new_pair(settings: EmulatedSettings = SETTINGS, *, virtual: bool = False) -> Pair:
    network = InprocKvNetwork()
    clock = {"clock": asyncio.get_running_loop().time} if virtual else {}
    return make_pair(settings, lambda name: WatchedTransport(network, name), **clock)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = new_pair()
    yield pair
    await close(pair)


def right(tokens: Tokens, sampling: SamplingParams = GREEDY) -> list[int]:
    return oracle(tokens, sampling, max_model_tokens=SETTINGS.max_model_tokens)


# --- what the next token depends on -------------------------------------------------------

PROMPT = token_ids(random.Random(1), 6 * BLOCK + 3)
LENGTH = len(PROMPT) + 1  # with the first token


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("block", range(7))
async def test_one_flipped_byte_of_any_block_changes_the_next_token(
    pair: Pair, block: int, remote: bool
) -> None:
    engine = engine_of(pair.decode)
    valid_bytes = min(BLOCK, len(PROMPT) - block * BLOCK) * SETTINGS.stored_bytes_per_token
    for place in (0, valid_bytes // 2, valid_bytes - 1):
        await pair.clean()
        kv = None
        if remote:
            kv = (await pair.prefill.prefill(PrefillRequest("p", PROMPT, None))).kv
        request = GenerateRequest("g", PROMPT, kv, GREEDY, SLO)
        said: list[int] = []
        async with aclosing(pair.decode.generate(request)) as events:
            async for event in events:
                if isinstance(event, TokensOut):
                    said += event.token_ids
                    if len(said) == 1:
                        (job,) = engine._requests
                        stored = engine._store.data[job.blocks[block]].view("u1")
                        stored[place] ^= 1 << block
                elif isinstance(event, GenerateDone):
                    await pair.decode.release(event.kv)
        assert said[0] == right(PROMPT)[0]
        assert said[1] != right(PROMPT)[1]
        engine.evict()


async def test_bytes_behind_the_sequence_do_not_matter(pair: Pair) -> None:
    engine = engine_of(pair.decode)
    engine._store.data[:] = 0xA5A5A5A5
    assert (await generate(pair.decode, PROMPT)).tokens == right(PROMPT)


async def test_a_flipped_byte_of_the_history_changes_what_is_computed_on_it(pair: Pair) -> None:
    """The home's own history is whole: what differs is the increment, computed over bad KV."""
    history = PROMPT[: 4 * BLOCK]
    first = await pair.prefill.prefill(PrefillRequest("p", PROMPT, None))
    home = await generate(pair.decode, PROMPT, first.kv)
    assert home.tokens == right(PROMPT)
    prefill = engine_of(pair.prefill)
    (block,) = prefill._store.find([h for h in prefill._store._hashes if h][:1])
    prefill._store.data[block].view("u1")[5] ^= 1
    tokens = history + token_ids(random.Random(2), 30)
    bad = await pair.prefill.prefill(PrefillRequest("p", tokens, None))
    assert bad.stats.cached_tokens == len(history)
    said = await generate(pair.decode, tokens, bad.kv)
    assert said.stats.cached_tokens == len(history)
    assert said.tokens != right(tokens)


async def test_sizes_do_not_change_tokens() -> None:
    """Neither how KV is stored and cut, nor how prompts are chunked."""
    for changes in (
        {"stored_bytes_per_token": 16},
        {"block_tokens": 16},
        {"max_step_tokens": 5},
        {"max_model_tokens": 4096, "kv_capacity_tokens": 8192},
    ):
        pair = new_pair(replace(SETTINGS, **changes))
        kv = (await pair.prefill.prefill(PrefillRequest("p", PROMPT, None))).kv
        assert (await generate(pair.decode, PROMPT, kv)).tokens == right(PROMPT), changes
        await close(pair)


# --- sampling -----------------------------------------------------------------------------


async def test_sampling_parameters(pair: Pair) -> None:
    async def said(**changes: object) -> tuple[list[int], str, FinishReason]:
        sampling = replace(GREEDY, max_tokens=6, **changes)  # type: ignore[arg-type]
        got = await generate(pair.decode, PROMPT, sampling=sampling)
        await pair.decode.release(got.done.kv)
        if sampling.temperature == 0 or sampling.seed is not None:
            wanted = expect(PROMPT, sampling, max_model_tokens=SETTINGS.max_model_tokens)
            assert (got.tokens, got.text) == (wanted.tokens, wanted.text)
            assert got.done.kept_output_tokens == wanted.kept_output_tokens
            assert got.done.finish_reason is wanted.finish_reason
        return got.tokens, got.done.stop_reason, got.done.finish_reason

    greedy, _, reason = await said()
    assert reason is FinishReason.LENGTH
    assert min(greedy) >= 256
    assert (await said(logit_bias={777: 50.0, 3: 49.9, 778: 49.0}))[0] == [777] * 6
    assert (await said(logit_bias={777: 50.0}, allowed_token_ids=(5, 9)))[0] != [777] * 6
    assert set((await said(allowed_token_ids=(5, 9)))[0]) == {5, 9}
    assert (await said(logit_bias={2: 100.0}))[0] == [2] * 6
    assert (await said(logit_bias={2: 100.0}, ignore_eos=False)) == ([2], "", FinishReason.STOP)
    late = await said(logit_bias={2: 100.0}, ignore_eos=False, min_tokens=3)
    assert (len(late[0]), late[0][-1], late[0][:3].count(2)) == (4, 2, 0)
    assert await said(stop_token_ids=(greedy[2],)) == (
        greedy[:3],
        str(greedy[2]),
        FinishReason.STOP,
    )
    kept_off = (await said(stop_token_ids=(greedy[2],), min_tokens=5))[0]
    assert kept_off[:2] == greedy[:2]
    assert kept_off[2] != greedy[2]
    hot = {"temperature": 1.5, "seed": 7}
    assert (await said(**hot))[0] == (await said(**hot))[0] != greedy
    assert (await said(**(hot | {"seed": 8})))[0] != (await said(**hot))[0]
    assert (await said(temperature=0.5))[0] != (await said(temperature=0.5))[0]


async def test_stop_strings_cut_text_and_tokens(pair: Pair) -> None:
    whole = expect(PROMPT, GREEDY, max_model_tokens=SETTINGS.max_model_tokens)
    words = whole.text.split()  # one per token
    sampling = replace(GREEDY, stop=(f"{words[3][-2:]} {words[4][:2]}",))
    for include, kept, text in (
        (False, 3, whole.text[: whole.text.index(words[4]) - 3]),
        (True, 4, whole.text[: whole.text.index(words[4]) + 2]),
    ):
        cut = replace(sampling, include_stop_str_in_output=include)
        got = await generate(pair.decode, PROMPT, sampling=cut)
        assert got.text == text
        assert (got.done.output_tokens, got.done.kept_output_tokens) == (5, kept)
        assert (got.done.finish_reason, got.done.stop_reason) == (FinishReason.STOP, cut.stop[0])
        assert got.done.kv.tokens == len(PROMPT) + kept
        await pair.decode.release(got.done.kv)


async def test_output_of_another_vocabulary_is_refused(pair: Pair) -> None:
    with pytest.raises(AmpdError) as refused:
        await generate(pair.decode, PROMPT, said=[SETTINGS.vocab_size])
    assert refused.value.violations[0].field == "output"


def test_the_oracle_refuses_what_nobody_can_know() -> None:
    with pytest.raises(ValueError, match="seed"):
        right(PROMPT, replace(GREEDY, temperature=1.0))


# --- the oracle equals the engine ---------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One round of a session, in tokens."""

    keep: float
    """Share of the history."""
    increment: int
    output: int
    remote: bool
    seed: int | None
    known: int
    """Output that the round has already."""


rounds = st.lists(
    st.builds(
        Plan,
        keep=st.sampled_from((1.0, 1.0, 1.0, 0.9, 0.5, 0.0)),
        increment=st.integers(1, 3 * BLOCK),
        output=st.integers(1, 2 * BLOCK),
        remote=st.booleans(),
        seed=st.sampled_from((None, 3)),
        known=st.integers(0, 2 * BLOCK),
    ),
    min_size=1,
    max_size=5,
)


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    sessions=st.lists(rounds, min_size=1, max_size=5),
    same_beginning=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_stream_is_the_oracles(
    sessions: list[list[Plan]],
    same_beginning: bool,
    seed: int,
) -> None:
    """Random sessions at once: rewinds, pins, both routes, resumed rounds, in a memory that is
    small enough for eviction and waiting. The books are checked after every event."""
    # A session of the largest kind and its copies on the way: 5 of them do not fit.
    settings = replace(
        SETTINGS,
        kv_capacity_tokens=256,
        cost=COST,
        max_step_tokens=16,
        result_lease_s=600.0,  # of virtual time: waiting for memory may take a while
    )

    async def run(pair: Pair, number: int, plans: list[Plan]) -> None:
        rng = random.Random(seed if same_beginning else 100 * seed + number)
        history = array("I")
        pin: KvHandle | None = None
        for plan in plans:
            kept = int(len(history) * plan.keep)
            if kept + plan.increment + plan.output >= settings.max_model_tokens // 2:
                kept = 0
            tokens = history[:kept] + token_ids(rng, plan.increment)
            sampling = replace(
                GREEDY,
                max_tokens=plan.output,
                temperature=0.0 if plan.seed is None else 1.0,
                seed=plan.seed,
            )
            wanted = right(tokens, sampling)
            said = wanted[: min(plan.known, len(wanted) - 1)]
            prompt = tokens + array("I", said)
            while True:
                kv = None
                try:
                    if plan.remote:
                        covered = 0 if pin is None else min(kept, pin.tokens)
                        lent = None
                        if pin is not None and covered:
                            lent = await pair.decode.lend(pin, covered)
                        result = await pair.prefill.prefill(PrefillRequest("p", prompt, lent))
                        # Nothing fails here, so nothing is computed twice.
                        assert result.stats.computed_tokens <= len(prompt) - covered
                        kv = result.kv
                    got = await generate(pair.decode, tokens, kv, sampling, said=said)
                    assert kv is None or got.stats.computed_tokens == 1
                    break
                except AmpdError as error:
                    if error.reason is not ErrorReason.KV_EXHAUSTED:
                        raise
                    # All memory is pinned by paused sessions: what a home does is evict one.
                    if pin is not None:
                        await pair.decode.release(pin)
                        pin = None
                    await asyncio.sleep(rng.random())
            assert said + got.tokens == wanted
            if pin is not None:
                await pair.decode.release(pin)
            pin = got.done.kv
            history = tokens + array("I", wanted)
        assert pin is not None
        await pair.decode.release(pin)

    async def main() -> None:
        pair = new_pair(settings, virtual=True)
        async with asyncio.TaskGroup() as group:
            for number, plans in enumerate(sessions):
                group.create_task(run(pair, number, plans))
        for engine in (pair.prefill, pair.decode):
            stats = await engine.stats_now()
            assert stats.kv_free_tokens == settings.kv_capacity_tokens, stats
            assert (stats.running_requests, stats.waiting_requests) == (0, 0)
        await close(pair)

    run_virtual(main())


# --- memory -------------------------------------------------------------------------------


async def test_the_longest_unused_is_evicted_first(pair: Pair) -> None:
    rng = random.Random(3)
    prompts = [token_ids(rng, 30 * BLOCK) for _ in range(4)]  # 4 x 31 blocks of 128
    for prompt in prompts:
        await pair.decode.release((await generate(pair.decode, prompt)).done.kv)
    # Used again: it is the youngest now.
    again = await generate(pair.decode, prompts[0])
    assert again.stats.cached_tokens == 30 * BLOCK - BLOCK
    await pair.decode.release(again.done.kv)
    filler = await generate(pair.decode, token_ids(rng, 25 * BLOCK))
    cached = []
    for prompt in prompts:
        probe = await generate(pair.decode, prompt, sampling=replace(GREEDY, max_tokens=1))
        cached.append(probe.stats.cached_tokens)
        await pair.decode.release(probe.done.kv)
    # Of the one that was evicted a beginning is left: ends go first.
    assert cached[0] == 30 * BLOCK - BLOCK
    assert 0 < cached[1] < 15 * BLOCK
    await pair.decode.release(filler.done.kv)


async def test_pinned_kv_is_never_evicted(pair: Pair) -> None:
    rng = random.Random(4)
    prompt = token_ids(rng, 100)
    kept = await generate(pair.decode, prompt)
    for _ in range(20):
        await pair.decode.release((await generate(pair.decode, token_ids(rng, 200))).done.kv)
    lent = await pair.decode.lend(kept.done.kv, kept.done.kv.tokens)
    tokens = prompt + array("I", kept.tokens) + token_ids(rng, 3)
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    assert result.stats.pulled_tokens == kept.done.kv.tokens
    assert (await generate(pair.decode, tokens, result.kv)).tokens == right(tokens)


async def test_requests_wait_for_memory_in_order() -> None:
    pair = new_pair(replace(SETTINGS, kv_capacity_tokens=256, cost=COST, time_scale=0.05))
    rng = random.Random(5)
    prompts = [token_ids(rng, length) for length in (150, 140, 20, 130)]
    order: list[int] = []

    async def run(number: int) -> None:
        got = await generate(pair.decode, prompts[number])
        assert got.tokens == right(prompts[number])
        order.append(number)
        await pair.decode.release(got.done.kv)

    runs = [asyncio.create_task(run(number)) for number in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stats = await pair.decode.stats_now()
    # The short one would fit, but comes behind one that does not.
    assert (stats.running_requests, stats.waiting_requests) == (1, 3)
    await asyncio.gather(*runs)
    assert order == [0, 2, 1, 3] or order == [0, 1, 2, 3]
    await close(pair)


async def test_a_request_gets_all_that_it_was_promised() -> None:
    """A growing request never stands before a memory that a later one has taken."""
    pair = new_pair(replace(SETTINGS, kv_capacity_tokens=256))
    rng = random.Random(6)
    sampling = replace(GREEDY, max_tokens=100)
    prompts = [token_ids(rng, 40) for _ in range(3)]
    got = await asyncio.gather(*(_released(pair, prompt, sampling) for prompt in prompts))
    assert got == [right(prompt, sampling) for prompt in prompts]
    await close(pair)


async def _released(pair: Pair, prompt: Tokens, sampling: SamplingParams) -> list[int]:
    got = await generate(pair.decode, prompt, sampling=sampling)
    await pair.decode.release(got.done.kv)
    return got.tokens


async def test_alone_in_a_memory_that_is_too_small_it_ends_with_an_error() -> None:
    pair = new_pair(replace(SETTINGS, kv_capacity_tokens=64))
    sampling = replace(GREEDY, max_tokens=100)
    with pytest.raises(AmpdError) as full:
        await generate(pair.decode, token_ids(random.Random(7), 40), sampling=sampling)
    assert full.value.reason is ErrorReason.KV_EXHAUSTED
    await settled(pair.decode)
    await close(pair)


# --- pulls --------------------------------------------------------------------------------


async def _history(pair: Pair) -> tuple[KvHandle, KvHandle, Tokens]:
    """A pin, its loan, and the next round's tokens."""
    first = await generate(pair.decode, PROMPT)
    lent = await pair.decode.lend(first.done.kv, first.done.kv.tokens)
    return first.done.kv, lent, PROMPT + array("I", first.tokens) + token_ids(random.Random(8), 9)


@pytest.mark.parametrize(
    "fault", ["reused", "reused, loan stands", "reclaimed", "lent again", "expired"]
)
async def test_kv_that_changes_while_it_is_read_is_not_taken(pair: Pair, fault: str) -> None:
    pin, lent, tokens = await _history(pair)
    home = engine_of(pair.decode)

    async def interfere() -> None:
        match fault:
            case "reused" | "reused, loan stands":
                loans = home._store.loans.copy()
                await pair.decode.release(pin)
                home.evict()
                for number in range(4):
                    filler = token_ids(random.Random(number), 240)
                    got = await generate(pair.decode, filler)
                    assert got.tokens == right(filler)
                if fault == "reused, loan stands":
                    home._store.loans[:] = loans
            case "reclaimed":
                await pair.decode.reclaim(lent)
            case "lent again":
                await pair.decode.lend(pin, 8)
            case "expired":
                home._pins.get(1).expires_s = 0.0  # type: ignore[union-attr]
                home._pins._next_expiry_s = 0.0
                home.stats()

    transport_of(pair.prefill).after_read.append(interfere)
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    assert (result.stats.pulled_tokens, result.stats.pulled_bytes) == (0, 0)
    assert result.stats.computed_tokens == len(tokens)
    assert result.stats.read_end_s > result.stats.read_start_s
    assert engine_of(pair.prefill).stats().pulled_bytes_total == 0
    home._pins.release_all()
    home._store.loans[:] = 0
    home.evict()
    assert (await generate(pair.decode, tokens, result.kv)).tokens == right(tokens)


async def test_kv_of_a_peer_that_is_gone_is_computed(pair: Pair) -> None:
    _, lent, tokens = await _history(pair)
    await engine_of(pair.decode).close()
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    assert result.stats.computed_tokens == len(tokens)


async def test_a_cancelled_pull_keeps_its_blocks_until_its_read_has_ended(pair: Pair) -> None:
    _, lent, tokens = await _history(pair)
    landed = asyncio.Event()

    async def last_bytes() -> None:
        """What a transport must do: it ends a read before it lets a cancellation through."""
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await landed.wait()
            raise

    transport_of(pair.prefill).after_read.append(last_bytes)
    task = asyncio.create_task(pair.prefill.prefill(PrefillRequest("p", tokens, lent)))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert (await pair.prefill.stats_now()).kv_used_tokens > 0
    landed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await pair.prefill.stats_now()).kv_used_tokens == 0


async def test_pulled_kv_takes_the_modelled_time() -> None:
    pair = new_pair(replace(SETTINGS, cost=CostModel(kv=KvCost(0.01, 0.001))))
    _, lent, tokens = await _history(pair)
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    assert result.stats.pulled_tokens == lent.tokens
    assert result.stats.read_s >= 0.01 + 0.001 * lent.tokens
    await close(pair)


@pytest.mark.parametrize("host", ["", "here"])
async def test_a_pull_takes_the_link_between_the_two_hosts(host: str) -> None:
    cost = CostModel(kv=KvCost(0.2), kv_same_host=KvCost(0.01))
    pair = new_pair(replace(SETTINGS, cost=cost, host=host))
    _, lent, tokens = await _history(pair)
    read_s = (await pair.prefill.prefill(PrefillRequest("p", tokens, lent))).stats.read_s
    assert (read_s >= 0.2) if not host else (0.01 <= read_s < 0.2)
    await close(pair)


async def test_other_forms_of_kv_are_refused(pair: Pair) -> None:
    _, lent, tokens = await _history(pair)
    other = new_pair(replace(SETTINGS, stored_bytes_per_token=32))
    with pytest.raises(AmpdError) as refused:
        await other.prefill.prefill(PrefillRequest("p", tokens, lent))
    assert refused.value.violations[0].field == "history"
    await close(other)


# --- leases and loans ---------------------------------------------------------------------


def test_leases_end_on_the_engines_clock_though_nobody_asks() -> None:
    async def main() -> None:
        pair = new_pair(replace(SETTINGS, kv_lease_s=100.0, result_lease_s=5.0), virtual=True)
        pin, _, _ = await _history(pair)
        result = await pair.prefill.prefill(PrefillRequest("p", PROMPT, None))
        assert transport_of(pair.prefill).served == [True]
        await asyncio.sleep(4.9)
        assert (await pair.prefill.stats_now()).kv_pinned_tokens > 0
        await asyncio.sleep(0.2)
        assert (await pair.prefill.stats_now()).kv_pinned_tokens == 0
        # A reader in the middle of it is helped to its end.
        assert transport_of(pair.prefill).served == [True]
        await asyncio.sleep(READER_TAIL_S)
        assert transport_of(pair.prefill).served == [True, False]
        # A loan renews the lease of its pin.
        await asyncio.sleep(90)
        await pair.decode.lend(pin, 8)
        await asyncio.sleep(90)
        assert transport_of(pair.decode).served == [True]
        assert (await pair.decode.stats_now()).kv_pinned_tokens > 0
        await asyncio.sleep(20)
        assert transport_of(pair.decode).served == [True, False]
        with pytest.raises(AmpdError) as gone:
            await pair.decode.lend(pin, 8)
        assert gone.value.reason is ErrorReason.TASK_GONE
        await pair.prefill.release(result.kv)
        await close(pair)

    run_virtual(main())


def test_the_transport_serves_while_something_is_lent() -> None:
    async def main() -> None:
        pair = new_pair(virtual=True)
        served = transport_of(pair.decode).served
        first, second = [(await generate(pair.decode, PROMPT[:n])).done.kv for n in (20, 30)]
        assert served == []
        await pair.decode.lend(first, 10)
        await pair.decode.lend(first, 20)
        await pair.decode.lend(second, 20)
        await pair.decode.reclaim(first)
        await asyncio.sleep(10)
        assert served == [True]
        await pair.decode.release(second)
        await asyncio.sleep(READER_TAIL_S)
        assert served == [True, False]
        # Read to its end: nobody can be in the middle of it.
        lent = await pair.decode.lend(first, 10)
        await pair.prefill.prefill(PrefillRequest("p", PROMPT, lent))
        assert served == [True, False] * 2
        await close(pair)

    run_virtual(main())


# --- time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("most", [2048, 16])
def test_steps_take_what_the_cost_model_says(scale: float, most: int) -> None:
    settings = replace(SETTINGS, cost=COST, time_scale=scale, max_step_tokens=most)

    async def main() -> None:
        pair = new_pair(settings, virtual=True)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        got = await generate(pair.decode, PROMPT, sampling=replace(GREEDY, max_tokens=3))
        contexts = len(PROMPT) + 1, len(PROMPT) + 2
        decodes_s = sum(COST.t_dec(1, context) for context in contexts)
        took_s = loop.time() - started_s
        assert took_s == pytest.approx(scale * (COST.t_pre(0, len(PROMPT)) + decodes_s))
        lent = await pair.decode.lend(got.done.kv, 40)
        tokens = PROMPT[:40] + token_ids(random.Random(9), 50)
        started_s = loop.time()
        result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
        took_s = loop.time() - started_s
        assert took_s == pytest.approx(scale * (COST.t_kv(40) + COST.t_pre(40, 50)))
        assert result.stats.compute_s == pytest.approx(scale * COST.t_pre(40, 50))
        samples = engine_of(pair.prefill).take_step_samples()
        assert sum(sample.chunk_tokens for sample in samples) == 50
        assert [s.chunk_history_tokens for s in samples] == list(range(40, 90, min(most, 50)))
        assert engine_of(pair.prefill).take_step_samples() == []
        await close(pair)

    run_virtual(main())


@pytest.mark.parametrize("model_known", [True, False])
def test_a_local_prefill_keeps_running_streams_within_their_slo(model_known: bool) -> None:
    """With a cost model chunks are sized to the ITL SLO; without one nothing holds them back."""
    settings = replace(
        SETTINGS, cost=COST, block_tokens=32, max_model_tokens=8192, kv_capacity_tokens=16_384
    )
    slo = Slo(ttft_s=5.0, itl_s=0.1)

    async def main() -> None:
        pair = new_pair(settings, virtual=True)
        if not model_known:
            engine_of(pair.decode).use_cost_model(CostModel())
        loop = asyncio.get_running_loop()
        times_s: list[float] = []

        async def stream() -> None:
            sampling = replace(GREEDY, max_tokens=100)
            request = GenerateRequest("s", PROMPT, None, sampling, slo)
            async with aclosing(pair.decode.generate(request)) as events:
                times_s.extend([loop.time() async for e in events if isinstance(e, TokensOut)])

        running = asyncio.create_task(stream())
        await asyncio.sleep(0.5)
        long = token_ids(random.Random(10), 4000)
        got = await generate(pair.decode, long, sampling=replace(GREEDY, max_tokens=1))
        assert got.stats.computed_tokens == 4000
        await running
        mean_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        worst_s = max(b - a for a, b in pairwise(times_s))
        if model_known:
            assert mean_s <= slo.itl_s
            assert worst_s <= 2 * slo.itl_s + 0.05
        else:
            assert worst_s > 1.0
        await close(pair)

    run_virtual(main())


def test_prompts_share_a_step_with_a_fixed_budget() -> None:
    settings = replace(SETTINGS, cost=COST, max_model_tokens=2048, kv_capacity_tokens=8192)

    async def main() -> None:
        pair = new_pair(settings, virtual=True)
        engine = engine_of(pair.decode)
        engine.use_local_rule(LocalRule(budget_tokens=500))
        rng = random.Random(11)
        prompts = [token_ids(rng, count) for count in (100, 300, 300, 300)]
        one = replace(GREEDY, max_tokens=1)
        rounds = await asyncio.gather(*(generate(pair.decode, p, sampling=one) for p in prompts))
        samples = engine.take_step_samples()
        # The first step begins with whoever is there first; the next are full.
        assert sum(sample.chunk_tokens for sample in samples) == 1000
        assert max(sample.chunk_tokens for sample in samples) == 500
        assert len(samples) <= 3
        ends_s = [done.stats.compute_end_s for done in rounds]
        assert ends_s == sorted(ends_s)
        assert [done.tokens for done in rounds] == [right(p, one) for p in prompts]
        await close(pair)

    run_virtual(main())


def test_the_same_run_twice_is_the_same() -> None:
    async def main() -> list[tuple[float, tuple[int, ...]]]:
        pair = new_pair(replace(SETTINGS, cost=COST), virtual=True)
        loop = asyncio.get_running_loop()
        log: list[tuple[float, tuple[int, ...]]] = []

        async def stream(number: int) -> None:
            tokens = token_ids(random.Random(number), 10 + 9 * number)
            kv = None
            if number % 2:
                kv = (await pair.prefill.prefill(PrefillRequest("p", tokens, None))).kv
            sampling = replace(GREEDY, temperature=1.0)
            request = GenerateRequest("g", tokens, kv, sampling, SLO)
            async with aclosing(pair.decode.generate(request)) as events:
                log.extend(
                    [
                        (loop.time(), tuple(event.token_ids))
                        async for event in events
                        if isinstance(event, TokensOut)
                    ]
                )

        await asyncio.gather(*(stream(number) for number in range(6)))
        await close(pair)
        return log

    log = run_virtual(main())
    assert len(log) == 6 * 8
    assert run_virtual(main()) == log


# --- ends ---------------------------------------------------------------------------------


async def test_close_ends_everything(pair: Pair) -> None:
    engine = engine_of(pair.decode)
    request = GenerateRequest("g", PROMPT, None, replace(GREEDY, max_tokens=150), SLO)
    async with aclosing(pair.decode.generate(request)) as events:
        assert isinstance(await anext(events), PrefillDone)
        await engine.close()
        with pytest.raises(AmpdError) as ended:
            async for _ in events:
                pass
    assert ended.value.reason is ErrorReason.ENGINE_FAILED
    assert engine.stats().kv_free_tokens == SETTINGS.kv_capacity_tokens
    with pytest.raises(AmpdError) as closed:
        await generate(pair.decode, PROMPT)
    assert closed.value.reason is ErrorReason.ENGINE_FAILED
    await engine.close()


async def test_a_result_that_nobody_takes_is_freed(pair: Pair) -> None:
    """The reader is cancelled when its result is there, but not yet in its hands."""
    task = asyncio.create_task(pair.prefill.prefill(PrefillRequest("p", PROMPT, None)))
    engine = engine_of(pair.prefill)
    while not engine.stats().kv_pinned_tokens:  # noqa: ASYNC110 - to the very step
        await asyncio.sleep(0)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)
    await settled(pair.prefill)


def test_the_books_are_really_checked() -> None:
    async def main() -> None:
        for break_ in (
            lambda engine: engine._store.take(1),
            lambda engine: engine._store._empty.pop(),
            lambda engine: engine._store.unpin([engine._pins.get(1).blocks[0]]),
            lambda engine: engine._store._cached.popitem(),
            lambda engine: engine._store.loans.fill(3),
            lambda engine: setattr(engine._steps, "promised_blocks", 1),
        ):
            pair = new_pair()
            engine = engine_of(pair.decode)
            await generate(pair.decode, PROMPT)
            engine.check()
            break_(engine)
            with pytest.raises(AssertionError):
                engine.check()
            await close(pair)

    asyncio.run(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"block_tokens": 0},
        {"kv_capacity_tokens": 1023},
        {"stored_bytes_per_token": 8},
        {"vocab_size": 256},
        {"vocab_size": 70_000},
        {"time_scale": -1.0},
        {"kv_lease_s": 0.0},
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(SETTINGS, **changes)  # type: ignore[arg-type]
