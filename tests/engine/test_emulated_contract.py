"""The engine contract over emulated engines, with KV moved in process and by NIXL."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from emulated_pair import SMALL_COST, close, forget, make_pair
from engine_contract import CHECKS, Check, Pair, generate, token_ids

from ampd.adapters.engine_emulated import EmulatedSettings
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.adapters.kv_nixl import NixlKvTransport
from ampd.ports import KvTransport, PrefillRequest

SETTINGS = EmulatedSettings(
    kv_capacity_tokens=12_288, max_model_tokens=4096, max_step_tokens=256, cost=SMALL_COST
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _inproc() -> Callable[[str], KvTransport]:
    network = InprocKvNetwork()
    return lambda name: InprocKvTransport(network, name, 1)


def _nixl() -> Callable[[str], KvTransport]:
    return lambda name: NixlKvTransport(name, 1)


@pytest_asyncio.fixture(
    params=[_inproc, _nixl], ids=["inproc", "nixl"], scope="module", loop_scope="module"
)
async def connected(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """A pair whose engines have read from each other: NIXL takes 0.1 s for the first time."""
    pair = make_pair(SETTINGS, request.param())
    tokens = token_ids(random.Random(0), 100)
    first = await generate(pair.decode, tokens)
    lent = await pair.decode.lend(first.done.kv, 64)
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    await pair.decode.release(first.done.kv)
    await pair.decode.evict()
    second = await generate(pair.decode, tokens, result.kv)
    assert (result.stats.pulled_tokens, second.stats.pulled_tokens) == (64, 99)
    yield pair
    await close(pair)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(connected: Pair) -> Pair:
    """The same engines, empty."""
    forget(connected)
    return connected


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, pair: Pair) -> None:
    await check(pair)
