import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from stepping_engine import SteppingEngine

from ampd.core.cost_model import CostModel, MixedCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.profiling.fit import fit_cost_model
from ampd.profiling.measure import measure

FAST = CostModel(mixed=MixedCost(1e-3, 2e-6, 1e-4, 1e-7, 1e-9))
SLOW = CostModel(mixed=MixedCost(20e-3, 1e-3, 1e-3, 1e-6))
"""About three times as fast as SmolLM2 on a CPU thread."""


@pytest.fixture
async def engines() -> AsyncIterator[list[SteppingEngine]]:
    made: list[SteppingEngine] = []
    yield made
    for engine in made:
        await engine.close()


def assert_clean(engine: SteppingEngine) -> None:
    assert not engine.jobs
    assert not engine.pins


@pytest.mark.parametrize(("cost", "budget_s"), [(FAST, 2.0), (SLOW, 1.5)])
async def test_measures_steps_of_every_kind_in_time(
    engines: list[SteppingEngine], cost: CostModel, budget_s: float
) -> None:
    engine = SteppingEngine(cost)
    engines.append(engine)
    start_s = time.monotonic()
    samples, prefills = await measure(engine, budget_s=budget_s)
    assert time.monotonic() - start_s < budget_s + 0.5
    assert_clean(engine)
    assert any(not s.batch for s in samples)
    assert any(not s.chunk_tokens for s in samples)
    assert any(s.batch and s.chunk_tokens for s in samples)
    assert len({s.batch for s in samples}) > 2
    assert any(s.chunk_history_tokens for s in samples) or cost is SLOW
    fitted, report = fit_cost_model(samples, prefills=prefills)
    for chunk, history, batch, context in ((0, 0, 4, 400), (128, 0, 4, 400), (64, 128, 2, 200)):
        expected = cost.t_mixed(chunk, history, batch, context)
        assert fitted.t_mixed(chunk, history, batch, context) == pytest.approx(expected, rel=0.1)
    assert report.mixed.median_error < 0.01
    assert prefills == [s for s in samples if not s.batch][: len(prefills)]  # one step each, here


async def test_a_fast_engine_is_done_early(engines: list[SteppingEngine]) -> None:
    engine = SteppingEngine(FAST)
    engines.append(engine)
    start_s = time.monotonic()
    await measure(engine, budget_s=60.0)
    assert time.monotonic() - start_s < 5.0


@pytest.mark.parametrize(("capacity", "longest"), [(400, 2048), (100_000, 100), (130, 130)])
async def test_keeps_within_a_small_engine(
    engines: list[SteppingEngine], capacity: int, longest: int
) -> None:
    engine = SteppingEngine(FAST, capacity=capacity, longest=longest)
    engines.append(engine)
    samples, _ = await measure(engine, budget_s=2.0)
    assert engine.most_pinned_tokens <= capacity  # a history and its increment share blocks
    assert_clean(engine)
    fit_cost_model(samples)


async def test_an_engine_too_slow_for_any_step_says_so(engines: list[SteppingEngine]) -> None:
    class Stuck(SteppingEngine):
        steps = 0

        async def _steps(self) -> None:
            await asyncio.sleep(0.01)
            if not self.steps:  # the warm-up comes through
                self.steps += 1
                self.jobs[0].outputs.put_nowait(True)
            else:
                await asyncio.sleep(60)

    engine = Stuck(FAST)
    engines.append(engine)
    with pytest.raises(AmpdError) as caught:
        await measure(engine, budget_s=0.3)
    assert caught.value.reason is ErrorReason.ENGINE_FAILED
    assert_clean(engine)


@pytest.mark.parametrize("steps", [2, 12])
async def test_a_failing_engine_fails_the_measurement_and_is_left_clean(
    engines: list[SteppingEngine], steps: int
) -> None:
    engine = SteppingEngine(FAST)
    engine.fail_after_steps = steps
    engines.append(engine)
    with pytest.raises(RuntimeError, match="broken"):
        await measure(engine, budget_s=2.0)
    assert_clean(engine)


async def test_cancelling_leaves_the_engine_clean(engines: list[SteppingEngine]) -> None:
    for after_s in (0.01, 0.2, 0.7):
        engine = SteppingEngine(SLOW)
        engines.append(engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await measure(engine, budget_s=1.5)
        await asyncio.sleep(0.01)
        assert_clean(engine)
