"""The measurement of a live engine, on emulated engines of known costs, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from virtual_loop import run_virtual

from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.core.cost_model import CostModel, DecodeCost, KvCost, Link, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import KvHandle
from ampd.ports import PrefillRequest, StepSample, Tokens
from ampd.profiling.campaign import Limits, disturbed, measure_points, merged, spread
from ampd.profiling.journal import Entry, Journal, Point, Subject
from ampd.profiling.profile_file import Profile
from ampd.profiling.result import profile_of

TRUTH = CostModel(
    PrefillCost(5e-3, 2e-6, 1e-8, 1e-9, hinges=((256.0, 2e-5),)),
    DecodeCost(4e-3, 1e-4, 2e-8, hinges=((4.0, -2e-5),)),
    MixedCost(4e-3, 1e-5, 8e-5, 2e-8, 1e-9, hinges=((64.0, 2e-5),), batch_counts=True),
    KvCost(4e-4, 3e-7),
)
SETTINGS = EmulatedSettings(
    cost=TRUTH,
    kv_capacity_tokens=65_536,
    max_model_tokens=8192,
    kv_lease_s=1e5,
    result_lease_s=1e5,
    stored_bytes_per_token=16,
)
SUBJECT = Subject("m", "emulated", "emulated 1", 1)
LIMITS = Limits(budget_s=30.0, max_batch=16)


class Peer:
    """Lends the KV of another engine."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine

    async def lend(self, tokens: Tokens) -> KvHandle:
        return (await self._engine.prefill(PrefillRequest("lent", tokens, None))).kv

    async def release(self, kv: KvHandle) -> None:
        await self._engine.release(kv)


class NoisyEngine(EmulatedEngine):
    """Steps look up to 12 % longer, and one in eight takes several times as long: as on a machine
    where others work too."""

    def take_step_samples(self) -> Sequence[StepSample]:
        numbers = random.Random(self._clock())

        def disturbed(step: StepSample) -> StepSample:
            factor = 4.0 if numbers.random() < 1 / 8 else numbers.uniform(1.0, 1.12)
            return replace(step, seconds=step.seconds * factor)

        return [disturbed(step) for step in super().take_step_samples()]


def on_engines(
    work: Callable[[EmulatedEngine, EmulatedEngine], Awaitable[None]],
    settings: EmulatedSettings = SETTINGS,
    kind: type[EmulatedEngine] = EmulatedEngine,
) -> None:
    """`work` with the engine that is measured and one to read from."""

    async def main() -> None:
        network = InprocKvNetwork()
        engine, peer = (
            one(
                settings,
                worker_id=name,
                incarnation=1,
                transport=InprocKvTransport(network, name, 1),
                clock=asyncio.get_running_loop().time,
            )
            for one, name in ((kind, "d0"), (EmulatedEngine, "p0"))
        )
        try:
            await work(engine, peer)
            engine.check()
            stats = engine.stats()
            assert stats.running_requests == stats.waiting_requests == 0
            assert stats.kv_pinned_tokens == 0
        finally:
            await engine.close()
            await peer.close()

    run_virtual(main(), limit_s=1e5)


async def measured(
    engine: EmulatedEngine,
    peer: EmulatedEngine | None,
    journal: Journal,
    limits: Limits = LIMITS,
    heard: Callable[[str, float], None] = lambda text, spent_s: None,
) -> Profile:
    clock = asyncio.get_running_loop().time
    lender = None if peer is None else Peer(peer)
    await measure_points(engine, journal, limits, lender=lender, progress=heard, clock=clock)
    return profile_of(
        journal,
        SUBJECT,
        link=Link.SAME_HOST,
        other_link=KvCost(1.0),
        kv_bytes_per_token=1,
        provenance={},
    )


def assert_like_the_truth(cost: CostModel, within: float) -> None:
    """At sizes inside the measured range that no grid has."""
    numbers = random.Random(1)
    for _ in range(200):
        history, increment = numbers.randrange(4000), numbers.randrange(20, 3000)
        chunk, batch, each = numbers.randrange(20, 1000), numbers.randrange(1, 17), 700
        for found, true in (
            (cost.t_pre(history, increment), TRUTH.t_pre(history, increment)),
            (cost.t_dec(batch, batch * each), TRUTH.t_dec(batch, batch * each)),
            (
                cost.t_mixed(chunk, history, batch, batch * each),
                TRUTH.t_mixed(chunk, history, batch, batch * each),
            ),
            (cost.t_kv(increment, Link.SAME_HOST), TRUTH.t_kv(increment)),
        ):
            assert found == pytest.approx(true, rel=within)


def test_known_costs_are_found_again() -> None:
    async def work(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        spent: list[float] = []
        profile = await measured(
            engine, peer, Journal(SUBJECT), heard=lambda _, spent_s: spent.append(spent_s)
        )
        assert_like_the_truth(profile.cost, within=0.06)
        assert profile.cost.kv == KvCost(1.0)  # no link between hosts was measured
        fit = profile.fit
        for function in (fit.prefill, fit.decode, fit.mixed, fit.kv_same_host):
            assert function.held_out >= 8
            assert function.median_error < 0.02
            assert function.p95_error < 0.05
        assert spent == sorted(spent)
        assert spent[-1] < LIMITS.budget_s
        assert {step.batch for step in profile.samples} >= {0, 1, 4, 16}
        assert any(step.chunk_history_tokens > 1000 for step in profile.samples if step.batch)

    on_engines(work)


def test_a_noisy_machine_is_seen_through() -> None:
    async def work(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        journal = Journal(SUBJECT)
        profile = await measured(engine, peer, journal)
        assert_like_the_truth(profile.cost, within=0.16)
        assert 0.0 < profile.fit.prefill.median_error < 0.06
        assert any(len(point.seconds) > 3 for point in merged(journal) if point.kind == "prefill")

    on_engines(work, kind=NoisyEngine)


def test_what_was_measured_before_a_kill_is_not_measured_again(tmp_path: Path) -> None:
    """Killed three times, once in mid-write; what comes out is what one run would have found."""
    path = tmp_path / "p.yaml.part"
    keys: list[str] = []

    async def killed(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        journal = Journal.open(path, SUBJECT)
        task = asyncio.create_task(measured(engine, peer, journal))
        while len(journal) < len(keys) + 9 and not task.done():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.03)  # in the middle of the next one
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(journal) > len(keys)
        keys[:] = [entry.key for entry in journal]

    for _ in range(3):
        on_engines(killed)
    with path.open("ab") as file:
        file.write(b'{"key": "prefill 1')

    async def finished(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        journal = Journal.open(path, SUBJECT)
        assert [entry.key for entry in journal] == keys
        again: list[str] = []
        resumed = await measured(engine, peer, journal, heard=lambda text, _: again.append(text))
        assert not {text.partition(":")[0] for text in again} & set(keys)
        assert [entry.key for entry in Journal.open(path, SUBJECT)] == [e.key for e in journal]
        assert_like_the_truth(resumed.cost, within=0.06)

    on_engines(finished)


def test_a_slow_engine_is_measured_at_small_sizes_in_time() -> None:
    slow = TRUTH.scaled(30.0)

    async def work(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        limits = Limits(budget_s=100.0, max_batch=16)
        profile = await measured(engine, peer, Journal(SUBJECT), limits)
        assert clock() - begun_s < 1.2 * limits.budget_s
        assert profile.fit.prefill.samples
        assert profile.fit.decode.samples
        assert profile.fit.prefill.largest < 4096
        assert profile.cost.t_pre(0, 500) == pytest.approx(slow.t_pre(0, 500), rel=0.1)

    on_engines(work, replace(SETTINGS, cost=slow))


@pytest.mark.parametrize(("capacity", "longest"), [(512, 256), (65_536, 96), (256, 8192)], ids=str)
def test_keeps_within_a_small_engine(capacity: int, longest: int) -> None:
    settings = replace(SETTINGS, kv_capacity_tokens=capacity, max_model_tokens=longest)

    async def work(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        profile = await measured(engine, peer, Journal(SUBJECT))
        assert profile.fit.prefill.samples

    on_engines(work, settings)


def test_without_a_peer_the_link_is_assumed() -> None:
    async def work(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        profile = await measured(engine, None, Journal(SUBJECT), replace(LIMITS, budget_s=5.0))
        assert profile.cost.kv == KvCost(1.0)
        assert profile.cost.kv_same_host is None
        assert not profile.kv_samples

    on_engines(work)


def test_an_engine_that_takes_no_time_cannot_be_measured() -> None:
    async def work(engine: EmulatedEngine, peer: EmulatedEngine) -> None:
        with pytest.raises(AmpdError) as caught:
            await measured(engine, peer, Journal(SUBJECT))
        assert caught.value.reason is ErrorReason.ENGINE_FAILED

    on_engines(work, replace(SETTINGS, cost=CostModel()))


def test_what_other_work_disturbed_does_not_count() -> None:
    journal = Journal(SUBJECT)

    def measured_at(key: str, seconds: float, reference_s: float, *, held_out: bool) -> None:
        name = key.removeprefix("again ")
        point = Point("prefill", name, 16, 0, 0, 0, (seconds,), 1, held_out)
        journal.add(Entry(key, 1.0, (point,), reference_s))

    for number in range(6):
        measured_at(f"prefill {number},0", 1.0, 0.1, held_out=False)
    measured_at("prefill 6,0", 3.0, 0.3, held_out=False)
    measured_at("prefill 7,0", 3.0, 0.3, held_out=False)
    measured_at("again prefill 7,0", 1.1, 0.11, held_out=False)
    measured_at("prefill 9,0", 5.0, 0.3, held_out=True)
    found = {point.name: point.seconds for point in merged(journal)}
    assert found.pop("prefill 9,0") == (5.0,)  # there is no other one of its kind
    assert found.pop("prefill 7,0") == (1.1,)
    assert found == {f"prefill {number},0": (1.0,) for number in range(6)}
    assert disturbed(journal) == 3


def test_the_scatter_of_times_ignores_one_that_is_far_off() -> None:
    assert spread([1.0, 1.0, 1.0]) == 0.0
    assert spread([1.0, 1.1, 0.9]) == pytest.approx(0.1)
    assert spread([1.0, 1.02, 0.98, 1.01, 9.0]) == pytest.approx(0.01 / 1.01)
