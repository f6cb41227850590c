"""The engine contract over emulated engines, with KV moved in process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from emulated_pair import SMALL_COST, close, make_pair
from engine_contract import CHECKS, Check, Pair

from ampd.adapters.engine_emulated import EmulatedSettings
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport

SETTINGS = EmulatedSettings(
    kv_capacity_tokens=12_288, max_model_tokens=4096, max_step_tokens=256, cost=SMALL_COST
)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    network = InprocKvNetwork()
    pair = make_pair(SETTINGS, lambda name: InprocKvTransport(network, name, 1))
    yield pair
    await close(pair)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, pair: Pair) -> None:
    await check(pair)
