"""The engine contract over real vLLM engines and real NIXL."""

from __future__ import annotations

import pytest
from engine_contract import CHECKS, Check, Pair

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, pair: Pair) -> None:
    await check(pair)
