"""Sessions whose KV moves between homes, each token compared with the emulated engine's oracle."""

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from inprocess import InProcess, LocalHome, Outcome, in_process, run

from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings, oracle
from ampd.adapters.kv_inproc import InprocKvNetwork, InprocKvTransport
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import SamplingParams
from ampd.wire.generate import RoundRequest
from ampd.wire.sampling import SamplingRequest
from services.decode.draining import HomeDrain
from services.decode.settings import HomeLimits

SOON_S = 20.0
SETTINGS = EmulatedSettings(
    block_tokens=16, kv_capacity_tokens=8192, max_model_tokens=2048, kv_bytes_per_token=1024
)
BEATEN = {
    ErrorReason.ROUND_RUNNING,
    ErrorReason.SESSION_CONFLICT,
    ErrorReason.SESSION_NOT_FOUND,
}
"""How a move ends when another call was faster."""


@dataclass
class Scripted:
    """A session that knows what should be said to it."""

    session_id: str
    tokens: list[int] = field(default_factory=list)

    async def round(self, cluster: InProcess, count: int, max_tokens: int) -> Outcome:
        rng = random.Random(f"{self.session_id}/{len(self.tokens)}")
        increment = [rng.randrange(300, 5000) for _ in range(count)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        wanted = RoundRequest(
            session_id=self.session_id,
            request_id="",
            text=None,
            messages=(),
            token_ids=array("I", increment),
            keep_history_tokens=None,
            sampling=SamplingRequest(sampling, max_tokens),
        )
        outcome = await run(cluster.coordinators[0], wanted)
        prompt = self.tokens + increment
        expected = oracle(prompt, sampling, max_model_tokens=SETTINGS.max_model_tokens)
        assert outcome.token_ids == expected
        self.tokens = prompt + expected
        return outcome


@asynccontextmanager
async def emulated(*names: str) -> AsyncIterator[InProcess]:
    kv = InprocKvNetwork()
    async with in_process() as cluster:
        for name in names:
            engine = EmulatedEngine(
                SETTINGS,
                worker_id=name,
                incarnation=1,
                transport=InprocKvTransport(kv, name, 1),
            )
            await cluster.add_home(name, engine=engine, limits=HomeLimits())
        yield cluster


async def check_books(cluster: InProcess, names: list[str]) -> None:
    """Ledgers balance, and engines hold the pins of the sessions and nothing else, once
    everything is at rest."""
    async with asyncio.timeout(SOON_S):
        for name in names:
            local = cluster.homes[name]
            local.home._ledger.check()
            local.engine.check()
            while len(local.engine._pins) != pinned_sessions(local):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            stats = local.engine.stats()
            assert stats.kv_used_tokens == 0
            # A session's last token need not have KV: it may be the first of a block.
            spare = local.home._ledger.pinned_tokens - stats.kv_pinned_tokens
            assert 0 <= spare <= SETTINGS.block_tokens * pinned_sessions(local)


def pinned_sessions(local: LocalHome) -> int:
    return sum(session.kv is not None for session in local.home.sessions())


async def test_kv_goes_round_all_homes() -> None:
    names = ["a", "b", "c"]
    async with emulated(*names) as cluster:
        session = Scripted(await cluster.new_session())
        home = (await session.round(cluster, 37, 11)).placed.decode_worker
        for hop in range(6):
            target = names[(names.index(home) + 1) % 3]
            history = len(session.tokens)
            moved = await cluster.homes[home].mover.move(session.session_id, target)
            assert moved.worker_id == target
            # All but the last token's KV is there, and what the target kept of an earlier stay
            # need not be read again.
            assert 0 < moved.moved_tokens <= history
            blocks = -(-moved.moved_tokens // SETTINGS.block_tokens)
            assert moved.moved_bytes == blocks * SETTINGS.block_tokens * SETTINGS.kv_bytes_per_token
            increment = (16, 17, 5, 90, 33, 64)[hop]
            outcome = await session.round(cluster, increment, 9)
            assert outcome.placed.decode_worker == target
            assert not outcome.placed.history_rebuilt
            usage = outcome.finished.usage
            # What lies behind the last whole block of the history is computed with the increment.
            assert usage.decode_computed_tokens <= increment + SETTINGS.block_tokens
            home = target
        await check_books(cluster, names)
        assert sum(cluster.homes[n].home.load().sessions for n in names) == 1


async def test_a_drained_home_hands_its_kv_over() -> None:
    async with emulated("a", "b", "c") as cluster:
        sessions = [Scripted(await cluster.new_session()) for _ in range(6)]
        for session in sessions:
            await session.round(cluster, 60, 8)
            await cluster.beat()
        local = cluster.homes["a"]
        held = local.home.load().sessions
        assert held > 0
        running = asyncio.ensure_future(sessions[0].round(cluster, 20, 1000))
        async with asyncio.timeout(SOON_S):
            while not local.home.running_rounds:  # noqa: ASYNC110
                await asyncio.sleep(0)
        drain = HomeDrain(
            home=local.home,
            mover=local.mover,
            cost=local.info.cost,
            clock=time.monotonic,
        )
        drain.start()
        await cluster.beat()
        async with asyncio.timeout(SOON_S):
            await drain.run()
        assert (await running).placed.decode_worker == "a"
        assert drain.status().sessions == 0
        await check_books(cluster, ["a", "b", "c"])
        await cluster.lose_home("a")
        for session in sessions:
            await cluster.beat()
            outcome = await session.round(cluster, 10, 8)
            assert not outcome.placed.history_rebuilt


@pytest.mark.parametrize("seed", range(6))
async def test_moves_at_any_moment_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    async with emulated(*names) as cluster:
        sessions = [Scripted(await cluster.new_session()) for _ in range(5)]
        moved = 0
        done = asyncio.Event()

        async def live(session: Scripted) -> None:
            for _ in range(8):
                await asyncio.sleep(rng.random() * 0.02)
                await session.round(cluster, rng.randrange(1, 80), rng.randrange(1, 20))

        async def move() -> None:
            nonlocal moved
            while not done.is_set():
                source, target = rng.sample(names, 2)
                local = cluster.homes[source]
                for resident in local.home.sessions():
                    await asyncio.sleep(rng.random() * 0.003)
                    try:
                        await local.mover.move(
                            resident.session_id, target, with_kv=rng.random() < 0.8
                        )
                        moved += 1
                    except AmpdError as error:
                        if error.reason not in BEATEN:
                            raise
                await cluster.beat()
                await asyncio.sleep(0.001)

        movers = [asyncio.ensure_future(move()) for _ in range(2)]
        try:
            await asyncio.gather(*map(live, sessions))
        finally:
            done.set()
            await asyncio.gather(*movers)
        assert moved
        await asyncio.sleep(0.05)
        await check_books(cluster, names)
        for session in sessions:
            at = [n for n in names if cluster.homes[n].home.session(session.session_id)]
            record = await cluster.record(session.session_id)
            assert record.home is not None
            assert at == [record.home.worker_id]
