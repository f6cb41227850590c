"""What a cluster costs while it has nothing to do but keep its sessions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Container
from urllib.parse import urlsplit

import psutil
import pytest
import pytest_asyncio
from raw_calls import RawClient, is_free, round_request, until
from rounds import random_tokens

from ampd.cli.cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

SESSIONS = 16
SECONDS = 5.0
ATTEMPTS = 3
"""The best counts: what else runs on the machine can only make it worse."""
MAX_CORES = 0.10
"""Of a coordinator, a worker of each kind and the store."""
BOUND_FOR = {"coordinator-0", "prefill-0", "decode-0"}
"""This cluster has one more coordinator and one more decode worker: what the store does for
these two counts all the same."""
MAX_RSS_BYTES = 8 << 30


def processes(cluster: LocalCluster, names: Container[str]) -> list[psutil.Process]:
    """The services of these names and all that they have started, and the store."""
    services = [psutil.Process(s.pid) for s in cluster.services if s.name in names]
    port = urlsplit(services[0].environ()["AMPD_STORE_URL"]).port
    (store,) = [
        child
        for child in psutil.Process().children()
        if any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in child.net_connections()
        )
    ]
    return [p for top in (store, *services) for p in (top, *top.children(recursive=True))]


def listening_ports(process: psutil.Process) -> set[int]:
    connections = process.net_connections()
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def cpu_s(measured: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in measured]
    return sum(t.user + t.system for t in times)


@pytest_asyncio.fixture(loop_scope="session")
async def pinned(cluster: LocalCluster) -> AsyncIterator[int]:
    """Tokens of KV that paused sessions hold; some of it was lent and read."""
    rng = random.Random(1)
    async with RawClient(cluster.address) as client:
        sessions = [await client.create() for _ in range(SESSIONS)]
        for policy in ("always-local", "always-remote", "ampd"):
            await client.set_policy(policy)
            await asyncio.gather(
                *(client.generate(round_request(s, random_tokens(rng, 100))) for s in sessions)
            )
        await until(is_free, client, 2.0)
        yield sum(worker.load.kv_pinned_tokens for worker in await client.workers())
        for session_id in sessions:
            await client.close(session_id)


async def test_an_idle_cluster_with_pinned_sessions(pinned: int, cluster: LocalCluster) -> None:
    assert pinned >= SESSIONS * 200
    measured = processes(cluster, BOUND_FOR)
    assert len(measured) >= len(BOUND_FOR) + 1
    shares = []
    for _ in range(ATTEMPTS):
        before_s = cpu_s(measured)
        await asyncio.sleep(SECONDS)
        shares.append((cpu_s(measured) - before_s) / SECONDS)
        if shares[-1] < MAX_CORES:
            break
    assert min(shares) < MAX_CORES, shares
    everything = processes(cluster, {service.name for service in cluster.services})
    assert sum(process.memory_info().rss for process in everything) < MAX_RSS_BYTES
