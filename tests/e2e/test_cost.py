"""What a cluster costs while it has nothing to do but keep its sessions."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit

import psutil
import pytest
from raw_calls import RawClient, is_free, round_request, until
from rounds import random_tokens

from ampd.cli.cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

SESSIONS = 16
SECONDS = 5.0
ATTEMPTS = 3
"""The best counts: what else runs on the machine can only make it worse."""
MAX_CORES = 0.10
MAX_RSS_BYTES = 8 << 30


def processes(cluster: LocalCluster) -> list[psutil.Process]:
    """The services and all that they have started, and the store."""
    services = [psutil.Process(service.pid) for service in cluster.services]
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


async def test_an_idle_cluster_with_pinned_sessions(cluster: LocalCluster) -> None:
    """The bounds are those of a coordinator, two workers and a store; this cluster has one more
    coordinator and one more worker, and keeps within them."""
    rng = random.Random(1)
    async with RawClient(cluster.address) as client:
        sessions = [await client.create() for _ in range(SESSIONS)]
        for policy in ("always-local", "always-remote"):
            # Local and remote rounds: KV has been lent and read, and is pinned now.
            await client.set_policy(policy)
            await asyncio.gather(
                *(client.generate(round_request(s, random_tokens(rng, 100))) for s in sessions)
            )
        await until(is_free, client, 2.0)
        pinned = sum(worker.load.kv_pinned_tokens for worker in await client.workers())
        assert pinned >= SESSIONS * 200
        measured = processes(cluster)
        assert len(measured) >= len(cluster.services) + 1
        shares = []
        for _ in range(ATTEMPTS):
            before_s = cpu_s(measured)
            await asyncio.sleep(SECONDS)
            shares.append((cpu_s(measured) - before_s) / SECONDS)
            if shares[-1] < MAX_CORES:
                break
        assert min(shares) < MAX_CORES, shares
        assert sum(process.memory_info().rss for process in measured) < MAX_RSS_BYTES
        for session_id in sessions:
            await client.close(session_id)
