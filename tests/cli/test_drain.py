"""`ampdctl worker drain` and `session move` on a cluster of real processes under load: emulated
engines, KV over NIXL, and every token compared with the oracle."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from cli_harness import Ampdctl

from ampd.adapters.engine_emulated import oracle
from ampd.cli.cluster import (
    EMULATED_KV_CACHE_BYTES,
    ClusterSpec,
    EngineKind,
    LocalCluster,
)
from ampd.cli.errors import ExitCode
from ampd.client import AmpdClient
from ampd.core.model import SamplingParams as CoreSamplingParams
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_service_pb2 import GenerateRequest, RoundPlaced, TokenBatch, TokenIds

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MODEL_TOKENS = 8192
EXIT_S = 20.0
KEPT_SESSIONS = 6
"""Sessions that pause while the worker drains."""


@dataclass
class Driven:
    """A session that knows what should be said to it."""

    session_id: str
    tokens: list[int] = field(default_factory=list)
    placed: list[RoundPlaced] = field(default_factory=list)

    async def round(self, client: AmpdClient, count: int, max_tokens: int) -> RoundPlaced:
        """One round, each token compared; where it ran."""
        rng = random.Random(f"{self.session_id}/{len(self.tokens)}")
        increment = [rng.randrange(300, 5000) for _ in range(count)]
        request = GenerateRequest(
            session_id=self.session_id,
            token_ids=TokenIds(ids=increment),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        said: list[int] = []
        async for event in client.generate(request):
            if isinstance(event, TokenBatch):
                said += event.token_ids
            elif isinstance(event, RoundPlaced):
                self.placed.append(event)
        prompt = self.tokens + increment
        sampling = CoreSamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        assert said == oracle(prompt, sampling, max_model_tokens=MAX_MODEL_TOKENS)
        self.tokens = prompt + said
        return self.placed[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    spec = ClusterSpec(
        model="emulated",
        engine=EngineKind.EMULATED,
        prefill=2,
        decode=3,
        profile="gpu:h100_sxm/Qwen3-32B/tp1",
        time_scale=0.2,
        max_model_tokens=MAX_MODEL_TOKENS,
        kv_cache_bytes=EMULATED_KV_CACHE_BYTES,
    )
    async with LocalCluster(spec, tmp_path_factory.mktemp("cluster"), progress=print) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[AmpdClient]:
    async with AmpdClient(cluster.address) as client:
        yield client


@dataclass(frozen=True)
class Operator:
    """`ampdctl` for that cluster."""

    ampdctl: Ampdctl

    async def ok(self, *arguments: str) -> dict[str, object]:
        told: dict[str, object] = json.loads(
            await asyncio.to_thread(self.ampdctl.ok, *arguments, "-o", "json")
        )
        return told

    async def exit_code(self, *arguments: str) -> int:
        return (await asyncio.to_thread(self.ampdctl.run, *arguments)).returncode


@pytest.fixture
def operator(cluster: LocalCluster, tmp_path: Path) -> Operator:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AMPD_")}
    return Operator(
        Ampdctl({**environment, "AMPD_CACHE_DIR": str(tmp_path), "AMPD_ADDRESS": cluster.address})
    )


async def live_on(client: AmpdClient, driven: Driven, stop: asyncio.Event) -> None:
    """Rounds without a pause, until it is time to stop."""
    while not stop.is_set():
        await driven.round(client, 50, 40)


async def ends_well(cluster: LocalCluster, name: str) -> None:
    service = next(service for service in cluster.services if service.name == name)
    async with asyncio.timeout(EXIT_S):
        assert await service.process.wait() == 0


async def names(client: AmpdClient) -> set[str]:
    return {worker.worker_id async for worker in client.list_workers()}


async def test_a_session_moves_where_the_operator_says(
    client: AmpdClient, operator: Operator
) -> None:
    driven = Driven((await client.create_session()).session_id)
    home = (await driven.round(client, 600, 20)).decode_worker
    target = next(f"decode-{i}" for i in range(3) if f"decode-{i}" != home)
    moved = await operator.ok("session", "move", driven.session_id, "--to", target)
    assert moved["home_worker"] == target
    assert isinstance(moved["moved_tokens"], int)
    assert moved["moved_tokens"] >= 600
    again = await operator.ok("session", "move", driven.session_id, "--to", target)
    assert (again["home_worker"], again["moved_tokens"]) == (target, 0)
    placed = await driven.round(client, 30, 20)
    assert (placed.decode_worker, placed.history_rebuilt) == (target, False)
    anywhere = await operator.ok("session", "move", driven.session_id)
    assert anywhere["home_worker"] != target
    assert await operator.exit_code("session", "move", "nobody") == ExitCode.NOT_FOUND
    wrong = ("session", "move", driven.session_id, "--to", "prefill-0")
    assert await operator.exit_code(*wrong) == ExitCode.USAGE
    await client.close_session(driven.session_id)


async def test_a_drained_decode_worker_loses_nothing(
    cluster: LocalCluster, client: AmpdClient, operator: Operator
) -> None:
    paused = [Driven((await client.create_session()).session_id) for _ in range(KEPT_SESSIONS)]
    for driven in paused:
        await driven.round(client, 400, 10)
    busy = [Driven((await client.create_session()).session_id) for _ in range(4)]
    stop = asyncio.Event()
    lives = [asyncio.create_task(live_on(client, driven, stop)) for driven in busy]
    await asyncio.sleep(1.0)
    had = sum(driven.placed[-1].decode_worker == "decode-0" for driven in paused)
    assert had
    told = await operator.ok("worker", "drain", "decode-0", "--wait")
    assert (told["worker_id"], told["running"]) == ("decode-0", 0)
    await ends_well(cluster, "decode-0")
    assert "decode-0" not in await names(client)
    assert await operator.exit_code("worker", "drain", "decode-0") == ExitCode.NOT_FOUND
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*lives)
    for driven in paused:
        placed = await driven.round(client, 30, 10)
        assert placed.decode_worker != "decode-0"
        # Their KV went along: reading it costs far less than computing it.
        assert not placed.history_rebuilt
    assert {driven.placed[-1].decode_worker for driven in busy} <= {"decode-1", "decode-2"}


async def test_a_drained_prefill_worker_loses_nothing(
    cluster: LocalCluster, client: AmpdClient, operator: Operator
) -> None:
    busy = [Driven((await client.create_session()).session_id) for _ in range(4)]
    stop = asyncio.Event()
    lives = [asyncio.create_task(live_on(client, driven, stop)) for driven in busy]
    await asyncio.sleep(0.5)
    await operator.ok("worker", "drain", "prefill-0", "--wait")
    await ends_well(cluster, "prefill-0")
    stop.set()
    await asyncio.gather(*lives)
    assert "prefill-0" not in await names(client)


async def test_a_coordinator_is_not_drained_so(operator: Operator) -> None:
    assert await operator.exit_code("worker", "drain", "coordinator-0") == ExitCode.USAGE
    assert await operator.exit_code("worker", "drain", "nobody") == ExitCode.NOT_FOUND


async def test_the_last_decode_worker_drains_on_sigterm(
    cluster: LocalCluster, client: AmpdClient
) -> None:
    """Its sessions stay in the store: nobody takes them."""
    driven = Driven((await client.create_session()).session_id)
    await driven.round(client, 50, 10)
    for name in ("decode-1", "decode-2"):
        service = next(service for service in cluster.services if service.name == name)
        service.process.terminate()
        await ends_well(cluster, name)
    session = await client.get_session(driven.session_id)
    assert session.history_tokens == len(driven.tokens)
