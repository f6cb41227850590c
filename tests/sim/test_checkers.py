"""The checkers notice: engines broken on purpose do not pass."""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any
from unittest import mock

import pytest
from cluster_sim import SimShape
from kv_watch import KvWatch
from sim_engine import KvFaults, SimEngines
from sim_run import run_seed
from virtual_loop import SimProcess, run_virtual

from ampd.adapters.engine_emulated.pulls import Puller
from ampd.ports import PrefillRequest

PROMPT_TOKENS = 100
SMALL = SimShape(kv_tokens=128, max_model_tokens=120)
"""One prompt fills the memory: the next one overwrites it."""

read = Puller._read


async def believes_before_it_has_read(*_: Any) -> bool:
    return True


async def asks_for_no_proof(*args: Any) -> bool:
    await read(*args)
    return True


def test_a_pull_that_has_not_read_is_noticed() -> None:
    with mock.patch.object(Puller, "_read", believes_before_it_has_read):
        outcome = run_seed(1, "calm")
    assert any("before position 0 was written" in what for what in outcome.violations)


@pytest.mark.parametrize("broken", [False, True])
def test_a_pull_of_what_another_owner_has_overwritten_is_noticed(broken: bool) -> None:
    violations: list[str] = []

    async def overwritten() -> int:
        engines = SimEngines(random.Random(1), SMALL, lambda *_: None, violations.append)
        engines.faults = KvFaults(block_s=0.1)
        watch = KvWatch(engines, violations.append)
        owner = await engines.start(SimProcess("owner"), "owner", 1)
        reader = await engines.start(SimProcess("reader"), "reader", 1)
        lent = await owner.prefill(PrefillRequest("first", prompt(1), None))
        reading = asyncio.create_task(reader.prefill(PrefillRequest("second", prompt(1), lent.kv)))
        await asyncio.sleep(0.3)
        await owner.release(lent.kv)
        await owner.prefill(PrefillRequest("third", prompt(2), None))
        result = await reading
        await asyncio.gather(owner.close(), reader.close())
        assert watch.reads
        return result.stats.pulled_tokens

    with mock.patch.object(Puller, "_read", asks_for_no_proof if broken else read):
        pulled_tokens = run_virtual(overwritten())
    assert (pulled_tokens > 0) == broken
    assert any("a pull of reader believes KV of" in what for what in violations) == broken
    assert broken or not violations


def prompt(first: int) -> array[int]:
    return array("I", range(first, first + PROMPT_TOKENS))
