"""Cases of tests/scenarios/lifecycle.yaml at the real engine's own interface: handles that are
not what they say, and transfers that silently bring nothing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest
from engine_contract import Pair, generate, oracle, token_ids
from engine_harness import free_port

from ampd.adapters.engine_vllm import handles
from ampd.adapters.engine_vllm.handles import Loan
from ampd.core.errors import AmpdError
from ampd.core.model import KvHandle, PrefillStats
from ampd.ports import PrefillRequest

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

BOUND_S = 8.0
"""No read takes longer, whatever is wrong with the handle."""

Forge = Callable[[Loan], Loan]


def forged(handle: KvHandle, forge: Forge) -> KvHandle:
    payload = handles.decode(handle, "kv")
    assert payload.loan is not None
    made = handles.Payload(payload.pin_id, forge(payload.loan))
    return replace(handle, payload=handles.encode(made))


def another(**changes: object) -> Forge:
    return lambda loan: msgspec.structs.replace(loan, **changes)


@pytest.mark.case("bad-kv-handles")
@pytest.mark.parametrize(
    "forge",
    [
        another(loan_id="of-nobody"),
        another(engine_id="d0-unknown", port=1),
        another(blocks=(1 << 30, (1 << 30) + 1)),
        another(blocks=()),
        another(blocks=(0,) * 100_000),
    ],
    ids=["unknown loan", "unknown engine", "blocks out of range", "no blocks", "too many blocks"],
)
async def test_handles_that_are_unknown_or_out_of_range(forge: Forge, pair: Pair) -> None:
    """(a) and (b): an error or an exact rebuild, in time; and the engines go on. (c) and (d) are
    engine_contract.check_bad_handles_never_give_other_tokens, (e) test_leases_run_out."""
    await pair.clean()
    rng = Random(41)
    prompt = token_ids(rng, 150)
    tokens = prompt + token_ids(rng, 40)
    expected = await oracle(pair.decode, tokens, 8)
    await pair.clean()
    first = await generate(pair.decode, prompt)
    handle = forged(await pair.decode.lend(first.done.kv, len(prompt)), forge)
    async with asyncio.timeout(BOUND_S):
        try:
            result = await pair.prefill.prefill(PrefillRequest("p", tokens, handle))
        except AmpdError as error:
            assert error.violations[0].field == "history"  # noqa: PT017 - or it is rebuilt
        else:
            assert result.stats.pulled_tokens == 0
            done = await generate(pair.decode, tokens, result.kv)
            assert done.tokens == expected
            await pair.decode.release(done.done.kv)
    await pair.decode.release(first.done.kv)
    again = await generate(pair.decode, tokens)
    assert again.tokens == expected
    await pair.decode.release(again.done.kv)
    await pair.clean()


def check_moved(stats: PrefillStats, history: int, prompt: array[int], block: int) -> None:
    """What a read of the history and the computation of the rest come to."""
    assert stats.pulled_tokens + stats.cached_tokens >= history // block * block
    assert stats.pulled_bytes > 0
    assert stats.computed_tokens <= len(prompt) - history + block


@pytest.mark.case("silent-no-transfer")
async def test_a_transfer_that_brings_nothing_is_noticed(pair: Pair) -> None:
    """The tokens are right either way: what was computed, pulled and moved is not."""
    await pair.clean()
    rng = Random(42)
    block = pair.decode.info.block_tokens
    prompt = token_ids(rng, 5 * block + 3)
    tokens = prompt + token_ids(rng, 20)
    first = await generate(pair.decode, prompt)
    said = []
    for is_broken in (False, True):
        await pair.prefill.evict()
        lent = await pair.decode.lend(first.done.kv, len(prompt))
        if is_broken:
            lent = forged(lent, another(engine_id="d0-elsewhere", port=free_port()))
        result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
        if is_broken:
            with pytest.raises(AssertionError):
                check_moved(result.stats, len(prompt), tokens, block)
            assert result.stats.computed_tokens == len(tokens)
        else:
            check_moved(result.stats, len(prompt), tokens, block)
        done = await generate(pair.decode, tokens, result.kv)
        said.append(done.tokens)
        await pair.decode.release(done.done.kv)
        await pair.decode.reclaim(first.done.kv)
    assert said[0] == said[1]
    await pair.decode.release(first.done.kv)
    await pair.clean()
