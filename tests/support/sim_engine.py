"""Emulated engines of a simulated cluster, and a KV transport whose reads take time and fail.

A read copies its pieces one by one while time goes by, so that its owner may overwrite, free and
lend again what is being read. A reader of a dead process learns it late; a message that a loan is
over may come late or never.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from virtual_loop import PROCESS, SimProcess

from ampd.adapters.engine_emulated import EmulatedEngine, EmulatedSettings, Expected, expect
from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import SamplingParams
from ampd.ports import KvPiece

COST = CostModel(
    PrefillCost(base_s=0.004, token_s=0.0003),
    DecodeCost(base_s=0.008, sequence_s=0.0005),
    MixedCost(base_s=0.008, token_s=0.0003, sequence_s=0.0005),
    KvCost(base_s=0.001, token_s=0.00002),
)
"""Slow enough that everything overlaps with everything."""


STORED_BYTES = 16
"""Per token: the least that an emulated engine can do with."""


@dataclass(frozen=True, slots=True)
class KvFaults:
    """What may happen to reads and messages: shares of all, times in seconds."""

    block_s: float = 0.00005
    """Mean time between the copies of two blocks."""
    failed_share: float = 0.0
    """Reads that fail at some piece."""
    stuck_share: float = 0.0
    """Reads that stop at some piece until their timeout."""
    untold_share: float = 0.0
    """Messages that nobody hears."""
    late_s: float = 0.0
    """Longest delay of a message."""


@dataclass(eq=False)
class _Memory:
    process: SimProcess
    memory: memoryview
    hear: Callable[[bytes], None] | None = None


class SimEngines:
    """Every engine of the cluster."""

    def __init__(
        self,
        rng: random.Random,
        shape: Any,
        note: Callable[..., None],
        violate: Callable[[str], None],
    ) -> None:
        self.cost = COST
        self.faults = KvFaults()
        self.rng = rng
        self._shape = shape
        self._note = note
        self._violate = violate
        self._factors: dict[str, float] = {}
        self._settings: dict[str, EmulatedSettings] = {}
        self.memories: dict[bytes, _Memory] = {}
        self.on_start: Callable[[EmulatedEngine, bytes], None] = lambda *_: None
        """An engine has started, under the locator of its memory."""
        self.on_copy: Callable[[bytes, bytes, KvPiece], None] = lambda *_: None
        """Bytes have moved: whose (locator), to whose, and which."""
        self.block_bytes = shape.block_tokens * STORED_BYTES

    async def start(self, process: SimProcess, worker_id: str, incarnation: int) -> EmulatedEngine:
        """A new engine, of the worker's present speed."""
        settings = EmulatedSettings(
            block_tokens=self._shape.block_tokens,
            kv_capacity_tokens=self._shape.kv_tokens,
            max_model_tokens=self._shape.max_model_tokens,
            stored_bytes_per_token=STORED_BYTES,
            kv_lease_s=2 * self._shape.session_ttl_s,
            result_lease_s=self._shape.result_lease_s,
            max_running_requests=self._shape.max_running_requests,
            max_step_tokens=256,
            cost=self.cost,
            time_scale=self._factors.get(worker_id, 1.0),
        )
        self._settings[worker_id] = settings
        transport = SimKvTransport(self, process, f"{worker_id}/{incarnation}".encode())
        engine = EmulatedEngine(
            settings,
            worker_id=worker_id,
            incarnation=incarnation,
            transport=transport,
            clock=time.monotonic,
        )
        self.on_start(engine, transport.locator)
        return engine

    def slow(self, worker_id: str, factor: float) -> None:
        """Its steps take so many times as long, from the next one on."""
        self._factors[worker_id] = factor
        if worker_id in self._settings:
            object.__setattr__(self._settings[worker_id], "time_scale", factor)

    def process_died(self, process: SimProcess) -> None:
        """Its memory is gone."""
        self.memories = {k: m for k, m in self.memories.items() if m.process is not process}

    def expected(self, prompt: Sequence[int], sampling: SamplingParams) -> Expected:
        """What follows the prompt, by tokens alone."""
        return expect(prompt, sampling, max_model_tokens=self._shape.max_model_tokens)


class SimKvTransport:
    """`ampd.ports.KvTransport` between simulated processes."""

    def __init__(self, engines: SimEngines, process: SimProcess, locator: bytes) -> None:
        self._engines = engines
        self._process = process
        self._locator = locator
        self._memory: memoryview | None = None
        self._block_bytes = engines.block_bytes

    def register(self, memory: memoryview) -> None:
        """See the port."""
        self._memory = memory.cast("B")
        self._engines.memories[self._locator] = _Memory(self._process, self._memory)

    @property
    def locator(self) -> bytes:
        """See the port."""
        return self._locator

    def serve(self, *, lent: bool) -> None:
        """Costs nothing."""

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """See the port."""
        self._engines.memories[self._locator].hear = hear

    async def read(self, locator: bytes, pieces: Sequence[KvPiece], timeout_s: float) -> None:
        """See the port."""
        rng, faults = self._engines.rng, self._engines.faults
        slices = [part for piece in pieces for part in _sliced(piece, self._block_bytes)]
        dice, at = rng.random(), rng.randrange(len(slices))
        failed = dice < faults.failed_share
        stuck = not failed and dice < faults.failed_share + faults.stuck_share
        try:
            async with asyncio.timeout(timeout_s):
                for index, piece in enumerate(slices):
                    await asyncio.sleep(rng.expovariate(1 / faults.block_s))
                    if index == at and failed:
                        raise _gone("a transfer has failed")
                    if index == at and stuck:
                        await asyncio.sleep(timeout_s + 1.0)
                    await self._copy(locator, piece)
        except TimeoutError:
            raise _gone("a transfer timed out") from None

    async def _copy(self, locator: bytes, piece: KvPiece) -> None:
        source = self._engines.memories.get(locator)
        if source is None:
            # Whether the owner's host says so, or nobody does until the timeout.
            await asyncio.sleep(self._engines.rng.choice((0.001, 0.5, 60.0)))
            raise _gone("the owner is gone")
        if self._memory is None:
            raise _gone("this transport is closed")
        start, local = piece.remote_offset, piece.local_offset
        self._memory[local : local + piece.length] = source.memory[start : start + piece.length]
        self._engines.on_copy(locator, self._locator, piece)

    async def tell(self, locator: bytes, message: bytes) -> None:
        """See the port."""
        rng, faults = self._engines.rng, self._engines.faults
        if rng.random() < faults.untold_share:
            return
        late_s = 0.0002 + rng.random() * faults.late_s

        def arrive() -> None:
            owner = self._engines.memories.get(locator)
            if owner is not None and owner.hear is not None:
                context = contextvars.Context()
                context.run(PROCESS.set, owner.process)
                asyncio.get_running_loop().call_soon(owner.hear, message, context=context)

        asyncio.get_running_loop().call_later(late_s, arrive, context=contextvars.Context())

    async def close(self) -> None:
        """See the port."""
        self._engines.memories.pop(self._locator, None)
        self._memory = None


def _sliced(piece: KvPiece, length: int) -> list[KvPiece]:
    """The piece in parts of at most `length` bytes."""
    return [
        KvPiece(
            piece.remote_offset + start,
            piece.local_offset + start,
            min(length, piece.length - start),
        )
        for start in range(0, piece.length, length)
    ]


def _gone(why: str) -> AmpdError:
    return AmpdError(ErrorReason.WORKER_UNAVAILABLE, why)
