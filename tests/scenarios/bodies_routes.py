"""Rounds when nothing fails: every route says the same, and moves and computes no more than it
has to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest
from catalogue import scenario
from driver import (
    BLOCK,
    KV_BYTES_PER_TOKEN,
    LEASE_S,
    MAX_STEP_TOKENS,
    PREFILL_TOKEN_S,
    Ability,
    KvTrouble,
    Shape,
)
from scene import Scene, check_economy
from sim_engine import COST

from ampd.core.model import PolicySpec, Role
from ampd.core.model import Slo as ModelSlo
from ampd.sim.cluster import simulate
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import RoundPlan, SessionPlan, Workload
from ampd.v1.round_pb2 import ROUTE_LOCAL, ROUTE_REMOTE, RouteReason
from ampd.v1.session_pb2 import Slo
from ampd.wire.times import duration_to_proto

ROUTES: Final = {"always-local": ROUTE_LOCAL, "always-remote": ROUTE_REMOTE}
SOLE: Final = Shape(prefill=1, decode=1)


@scenario(SOLE, cases=("length-at-block-multiple",))
async def lengths_at_block_multiples(scene: Scene) -> None:
    """Prompts and increments of exactly k blocks, one more and one less."""
    for policy, route in ROUTES.items():
        await scene.client().set_policy(policy)
        for difference in (-1, 0, 1):
            dialogue = await scene.open()
            for k in range(1, 5):
                # One less and the output end at the border of a block.
                seen = await dialogue.round(k * BLOCK + difference, 1)
                assert seen.where.route == route
                assert len(seen.placed) == 1
                check_economy(seen)
            await dialogue.close()
            for k in range(1, 5):
                first = await scene.open()
                check_economy(await first.round(k * BLOCK + difference, 2))
                await first.close()


@scenario(SOLE, cases=("increment-shorter-than-a-block",), real=True)
async def increments_shorter_than_a_block(scene: Scene) -> None:
    """The policy is obeyed, and a block moves, not the history."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.open()
    await dialogue.round(10 * BLOCK - 6, 4)
    await client.set_policy("always-remote")
    first = await dialogue.round(3, 4)
    assert first.where.route == ROUTE_REMOTE
    check_economy(first)
    usage = first.finished.usage
    # The prefill worker has nothing of the history, and reads what has KV: all but its last
    # token. The home takes the block that the increment lies in.
    assert 9 * BLOCK <= usage.history_pulled_tokens < usage.history_tokens
    assert usage.increment_pulled_bytes <= 2 * BLOCK * KV_BYTES_PER_TOKEN
    again = await dialogue.round(3, 4)
    assert again.where.route == ROUTE_REMOTE
    # Now it has what it computed itself, and reads what was decoded since.
    assert again.finished.usage.history_pulled_bytes <= 2 * BLOCK * KV_BYTES_PER_TOKEN
    assert again.finished.usage.increment_pulled_bytes <= BLOCK * KV_BYTES_PER_TOKEN
    check_economy(again)
    await client.set_policy("always-local")
    local = await dialogue.round(3, 4)
    assert local.where.route == ROUTE_LOCAL
    check_economy(local)


@scenario(cases=("two-coordinators",), real=True)
async def two_coordinators_take_turns(scene: Scene) -> None:
    """Twelve rounds of one session have one home, and no history is computed again."""
    for policy in ROUTES:
        await scene.client().set_policy(policy)
        dialogue = await scene.open(client=scene.client(1))
        homes = set()
        for index in range(12):
            seen = await dialogue.round(40, 6, client=scene.client(index % 2))
            check_economy(seen)
            homes.add(seen.where.decode_worker)
        assert len(homes) == 1


@scenario()
async def two_coordinators_at_once(scene: Scene) -> None:
    """Of rounds that race through two coordinators one wins; the session stays whole."""
    await scene.client().set_policy("always-remote")
    dialogue = await scene.open()
    for _ in range(4):
        ask = dialogue.ask(60, 10)
        streams = [scene.client(index % 2).start(ask) for index in range(3)]
        answers = await asyncio.gather(*(s.end() for s in streams), return_exceptions=True)
        won = [stream.seen for stream in streams if stream.seen.end is not None]
        assert len(won) == 1, answers
        dialogue.accept(ask, won[0])
        await dialogue.check_as_before()


@scenario(cases=("hash-seeds-differ",), needs={Ability.HASH_SEEDS}, real=True)
async def hash_seeds_differ(scene: Scene) -> None:
    """Every interpreter has a seed of its own; the workers agree on what is cached."""
    await scene.client().set_policy("always-remote")
    dialogue = await scene.opened(10 * BLOCK)
    for _ in range(6):
        check_economy(await dialogue.round(20, 4))


@scenario(
    SOLE,
    cases=("silent-no-transfer",),
    needs={Ability.BREAK_KV},
)
async def transfers_that_silently_fail_are_noticed(scene: Scene) -> None:
    """The text is right either way: only what was computed and moved tells."""
    await scene.client().set_policy("always-remote")
    dialogue = await scene.opened(4 * BLOCK)
    check_economy(await dialogue.round(BLOCK, 4))
    scene.driver.trouble_kv(KvTrouble.FAILED)
    broken = await dialogue.round(BLOCK, 4)
    scene.driver.trouble_kv(KvTrouble.NONE)
    with pytest.raises(AssertionError):
        check_economy(broken)
    usage = broken.finished.usage
    assert usage.increment_pulled_bytes == 0
    assert usage.decode_computed_tokens >= BLOCK
    check_economy(await dialogue.round(BLOCK, 4))


@scenario(SOLE, cases=("decode-leg-too-early",))
async def a_queued_prefill_holds_a_number_at_home(scene: Scene) -> None:
    """Behind a slow queue: KV is promised, no block is taken and no batch slot."""
    await scene.client().set_policy("always-remote")
    waiting = await scene.opened(4 * BLOCK)
    ahead = [await scene.open() for _ in range(2)]
    before = _used_at_home(scene)
    asks = [d.ask(2000, 4) for d in ahead]
    streams = [scene.client().start(ask) for ask in asks]
    for stream in streams:
        await stream.placed()
    ask = waiting.ask(100, 100)
    stream = scene.client().start(ask)
    await stream.placed()
    promised = 4 * BLOCK + 8 + 100 + 100
    await scene.until(
        lambda w: (
            w["decode-0"].load.kv_running_tokens >= promised
            and w["decode-0"].load.running_rounds == 0
            and w["prefill-0"].load.queued_tasks == 3
        ),
        1.0,
    )
    assert _used_at_home(scene) == before
    for dialogue, other, running in zip(ahead, asks, streams, strict=True):
        dialogue.accept(other, await running.end())
    waiting.accept(ask, await stream.end())
    # It waited in a queue, not for KV.
    timings = stream.seen.finished.timings
    assert timings.queue.ToTimedelta().total_seconds() > 1500 * PREFILL_TOKEN_S
    assert timings.kv_return.ToTimedelta().total_seconds() < 0.2 + scene.driver.slack_s


def _used_at_home(scene: Scene) -> tuple[int, int]:
    """Blocks and slots that requests take in the home's engine, where one can look."""
    try:
        stats = scene.driver.engine("decode-0")
    except LookupError:
        return 0, 0
    return stats.kv_used_tokens, stats.running_requests + stats.waiting_requests


def _slo(ttft_s: float, itl_s: float = 2.0) -> Slo:
    return Slo(ttft=duration_to_proto(ttft_s), itl=duration_to_proto(itl_s))


@scenario(SOLE, cases=("deadline-order-is-fifo",), needs={Ability.EXACT})
async def the_order_changes_when_both_can_be_on_time(scene: Scene) -> None:
    """Two wait behind what computes: the one that came first has much time left, the other one
    hardly any. First come, first served, one of them is late."""
    client = scene.client()
    attained = {}
    for policy, settings in (("ampd-paper", {"alpha": 10.0, "w": 3.0}), ("always-remote", {})):
        await client.set_policy(policy, **settings)
        await asyncio.sleep(1.0)  # until the worker has heard of it
        blockers = [await scene.open(slo=_slo(30.0)) for _ in range(2)]
        patient, urgent = await scene.open(slo=_slo(6.0)), await scene.open(slo=_slo(1.45))
        asked = []
        # Two in the engine take 1.2 s; behind them 1.2 s and 0.1 s of work.
        for dialogue, count in ((blockers[0], 2000), (blockers[1], 1600), (patient, 4000)):
            asked.append((dialogue, ask := dialogue.ask(count, 1), client.start(ask)))
            await asked[-1][2].placed()
            assert asked[-1][2].seen.where.route == ROUTE_REMOTE
        ask = urgent.ask(60, 1)
        asked.append((urgent, ask, client.start(ask)))
        for dialogue, ask, stream in asked:
            dialogue.accept(ask, await stream.end())
        records = [(await client.explain(d.session_id))[0] for d in (patient, urgent)]
        attained[policy] = [record.attained for record in records]
    assert attained == {"ampd-paper": [True, True], "always-remote": [True, False]}


@scenario(
    Shape(prefill=1, decode=1, max_model_tokens=16_384, kv_tokens=32_768),
    cases=("shared-prefix-tier-counted-wrong",),
    needs={Ability.EXACT},
)
async def history_at_home_counts_as_cached(scene: Scene) -> None:
    """10,000 tokens at the home: what a local prefill is predicted to cost is its increment."""
    client = scene.client()
    await client.set_policy("always-local")
    dialogue = await scene.open()
    await dialogue.round(10_000, 8)
    await client.set_policy("ampd-paper")
    seen = await dialogue.round(1500, 4)
    assert not seen.where.history_rebuilt
    record = (await client.explain(dialogue.session_id))[1]
    (home,) = [c for c in record.decision.candidates if c.route == ROUTE_LOCAL]
    predicted_s = home.compute.ToTimedelta().total_seconds()
    assert predicted_s == pytest.approx(1500 * PREFILL_TOKEN_S, rel=0.1)
    check_economy(seen)
    # 1,500 tokens are not cached: little, of 13,000. Of a new prompt nothing is.
    await client.set_policy("threshold", tokens=4096.0)
    seen = await dialogue.round(1500, 4)
    assert seen.where.route == ROUTE_LOCAL
    check_economy(seen)
    new = await scene.open()
    assert (await new.round(10_000, 1)).where.route == ROUTE_REMOTE


@scenario(needs={Ability.EXACT})
async def a_session_outlives_the_silence_of_its_client(scene: Scene) -> None:
    """Longer than any lease: nothing is rebuilt."""
    await scene.client().set_policy("always-remote")
    dialogue = await scene.opened(200)
    await asyncio.sleep(1.5 * LEASE_S)
    check_economy(await dialogue.round(50))


@scenario()
async def a_rewind_drops_the_tail(scene: Scene) -> None:
    """To the border of a block and beside it, on either route."""
    for policy, route in ROUTES.items():
        await scene.client().set_policy(policy)
        dialogue = await scene.opened(150)
        for keep in (4 * BLOCK, 4 * BLOCK - 1, 2 * BLOCK + 1, 1, 0):
            seen = await dialogue.round(40, keep=keep)
            assert seen.where.route == route
            await dialogue.check_as_before()


@dataclass(frozen=True, slots=True)
class Recorded(Workload):
    """A recorded trace: every round has its own instant, whatever the ones before it took."""

    plans: tuple[SessionPlan, ...] = ()

    def sessions(self, *, rate: float, horizon_s: float, seed: int) -> Iterator[SessionPlan]:
        """See `Workload.sessions`."""
        return iter(self.plans)


def recorded(rng: random.Random) -> tuple[SessionPlan, ...]:
    """Sessions of three rounds, several at a time. Rounds come in pairs: the second sees where the
    first was placed. Any other two are so far apart that the earlier one's prefill has ended in
    every load that the later one sees, nor are two lengths equal: decisions that hang on a tie, or
    on when a heartbeat came, would tell of the network alone."""
    plans = []
    for number in range(18):
        first_s = 2.6 * (number // 2) + 0.03 * (number % 2)
        rounds = [
            RoundPlan(
                0.0,
                rng.randrange(40, 1500),
                rng.randrange(4, 40),
                earliest_s=first_s + index * 2.6 * (2 + 1 / 3),
            )
            for index in range(3)
        ]
        plans.append(SessionPlan(f"s{number}", first_s, tuple(rounds)))
    return tuple(plans)


@scenario(cases=("simulator-and-live-differ",), needs={Ability.EXACT})
async def the_simulator_decides_as_the_services_do(scene: Scene) -> None:
    """One recorded trace through both: the same list of decisions."""
    shape, client = scene.shape, scene.client()
    worker = WorkerSpec(COST, shape.kv_tokens)
    slo = ModelSlo(0.25, 0.02)
    plans = recorded(scene.rng)
    for policy in ("ampd-paper", "always-remote"):
        report = simulate(
            SimSettings(
                (worker,) * shape.prefill,
                (worker,) * shape.decode,
                PolicySpec(policy),
                kv_block_tokens=BLOCK,
                max_step_tokens=MAX_STEP_TOKENS,
                decision_log=True,
            ),
            Recorded("recorded", slo, plans),
            rate=1.0,
            horizon_s=60.0,
        )
        simulated = {
            (d.session_id, d.round_index): (d.home, d.ordered, d.reason, d.predicted_ttft_s)
            for d in report.decisions
        }
        await client.set_policy(policy)
        await asyncio.sleep(1.0)
        live = await _live(scene, plans, slo)
        assert {key: decided[:3] for key, decided in live.items()} == {
            key: decided[:3] for key, decided in simulated.items()
        }
        for key, (*_, predicted_ttft_s) in live.items():
            assert predicted_ttft_s == pytest.approx(simulated[key][3], rel=0.1, abs=0.01)
        # It was worth comparing: both kinds of execution, every worker.
        assert {decided[0] for decided in live.values()} == set(shape.names(Role.DECODE))
        ordered = {decided[1] for decided in live.values()}
        assert ordered >= set(shape.names(Role.PREFILL))
        assert policy == "always-remote" or ordered & set(shape.names(Role.DECODE))


Decided = tuple[str, str, str, float]
"""Home, where the prefill was sent, why, and the predicted TTFT (s)."""


async def _live(
    scene: Scene, plans: tuple[SessionPlan, ...], slo: ModelSlo
) -> dict[tuple[str, int], Decided]:
    """What the services decided, by session and round."""
    begin_s = scene.now_s() + 0.1
    decided: dict[tuple[str, int], Decided] = {}

    async def agent(plan: SessionPlan) -> None:
        await asyncio.sleep(begin_s + plan.arrival_s - scene.now_s())
        dialogue = await scene.open(slo=_slo(slo.ttft_s, slo.itl_s))
        for index, round_ in enumerate(plan.rounds):
            await asyncio.sleep(begin_s + round_.earliest_s - scene.now_s())
            ask = dialogue.ask(round_.increment_tokens, round_.output_tokens)
            dialogue.accept(ask, await scene.client().start(ask).end())
            (record,) = [
                r
                for r in await scene.client().explain(dialogue.session_id)
                if r.round_index == index
            ]
            decision = record.decision
            decided[plan.session_id, index] = (
                record.decode_worker,
                decision.prefill_worker or record.decode_worker,
                RouteReason.Name(decision.reason).removeprefix("ROUTE_REASON_").lower(),
                decision.predicted_ttft.ToTimedelta().total_seconds(),
            )
        await dialogue.close()

    await asyncio.gather(*(agent(plan) for plan in plans))
    return decided
