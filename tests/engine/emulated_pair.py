"""Pairs of emulated engines that look like the engines under the contract."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable

from engine_contract import Pair

from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings
from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import KvHandle
from ampd.ports import (
    Clock,
    EngineEvent,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    KvTransport,
    PrefillRequest,
    PrefillResult,
)

SMALL_COST = CostModel(
    PrefillCost(base_s=0.0005, token_s=30e-6),
    DecodeCost(base_s=0.0005, sequence_s=20e-6),
    MixedCost(base_s=0.0005, token_s=30e-6, sequence_s=20e-6),
    KvCost(base_s=0.0005, token_s=0.2e-6),
)
"""So that there is something to overlap and to interrupt."""


class CheckedEngine:
    """An emulated engine whose books are checked after every call and every event."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine
        self.info: EngineInfo = engine.info

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        try:
            return await self.engine.prefill(request)
        finally:
            self.engine.check()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineEvent, None]:
        stream = self.engine.generate(request)
        try:
            async for event in stream:
                self.engine.check()
                yield event
        finally:
            await stream.aclose()
            self.engine.check()

    async def lend(self, kv: KvHandle, tokens: int) -> KvHandle:
        try:
            return await self.engine.lend(kv, tokens)
        finally:
            self.engine.check()

    async def reclaim(self, kv: KvHandle) -> None:
        await self.engine.reclaim(kv)
        self.engine.check()

    async def release(self, kv: KvHandle) -> None:
        await self.engine.release(kv)
        self.engine.check()

    async def use_local_rule(self, rule: LocalRule) -> None:
        self.engine.use_local_rule(rule)

    async def stats_now(self) -> EngineStats:
        self.engine.check()
        return self.engine.stats()

    async def evict(self) -> None:
        self.engine.evict()
        self.engine.check()


def make_pair(
    settings: EmulatedSettings,
    transport: Callable[[str], KvTransport],
    clock: Clock = time.monotonic,
) -> Pair:
    """A prefill engine `p0` and a decode engine `d0`, each with a transport of its name."""
    prefill, decode = (
        CheckedEngine(
            EmulatedEngine(
                settings, worker_id=name, incarnation=1, transport=transport(name), clock=clock
            )
        )
        for name in ("p0", "d0")
    )
    return Pair(prefill, decode)


async def close(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert isinstance(engine, CheckedEngine)
        await engine.engine.close()


def forget(pair: Pair) -> None:
    """Drop every pin and all cached KV, whoever left them."""
    for engine in (pair.prefill, pair.decode):
        assert isinstance(engine, CheckedEngine)
        engine.engine._pins.release_all()
        engine.engine.evict()
