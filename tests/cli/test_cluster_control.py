"""A local cluster whose processes are killed, frozen, drained and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
from cli_harness import Ampdctl
from raw_calls import POLL_S, RawClient, refused, round_request
from raw_calls import refusal as refusal_of

from ampd.adapters.engine_emulated import oracle
from ampd.cli.cluster import EMULATED_KV_CACHE_BYTES, ClusterSpec, EngineKind, LocalCluster
from ampd.cli.errors import CliError
from ampd.core.model import SamplingParams
from ampd.v1.worker_pb2 import Worker

pytestmark = pytest.mark.timeout(90)
in_module_loop = pytest.mark.asyncio(loop_scope="module")

NOTICED_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    spec = ClusterSpec(
        model="emulated", engine=EngineKind.EMULATED, kv_cache_bytes=EMULATED_KV_CACHE_BYTES
    )
    async with LocalCluster(spec, tmp_path_factory.mktemp("cluster"), progress=print) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[RawClient]:
    """With every process there, whatever the test before has left."""
    await cluster.restart_store()
    cluster.thaw_store()
    for service in cluster.services:
        cluster.thaw(service.name)
        if not service.is_running:
            await cluster.restart(service.name)
    async with RawClient(cluster.address) as raw:
        await workers(raw, lambda live: len(live) == len(cluster.services))
        yield raw


async def workers(client: RawClient, wanted: Callable[[dict[str, Worker]], bool]) -> None:
    """Returns when the cluster's live processes are like that."""
    async with asyncio.timeout(NOTICED_S):
        while True:
            if wanted({worker.worker_id: worker for worker in await client.workers()}):
                return
            await asyncio.sleep(POLL_S)


async def one_round(client: RawClient, session: str, history: list[int]) -> list[int]:
    """A round with the oracle's tokens; the history behind it."""
    increment = list(range(1000 + len(history), 1100 + len(history)))
    request = round_request(session, increment, max_tokens=8)
    async with asyncio.timeout(NOTICED_S):
        result = await client.generate(request)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = oracle(array("I", history + increment), sampling, max_model_tokens=8192)
    assert result.token_ids == expected
    return history + increment + expected


@in_module_loop
async def test_a_killed_worker_comes_back_at_its_address(
    cluster: LocalCluster, client: RawClient
) -> None:
    session = await client.create()
    history = await one_round(client, session, [])
    service = cluster.service("decode-0")
    first = {w.worker_id: w.incarnation for w in await client.workers()}["decode-0"]
    address, pid = service.address, service.pid
    await cluster.kill("decode-0")
    await cluster.kill("decode-0")
    assert not psutil.pid_exists(pid)
    assert not service.is_running
    await cluster.restart("decode-0")
    assert (service.address, service.is_running) == (address, True)
    assert service.pid != pid
    await workers(client, lambda live: "decode-0" in live and live["decode-0"].incarnation > first)
    await one_round(client, session, history)


@in_module_loop
async def test_a_frozen_worker_is_given_up_and_goes_on(
    cluster: LocalCluster, client: RawClient
) -> None:
    cluster.freeze("prefill-0")
    await workers(client, lambda live: "prefill-0" not in live)
    cluster.thaw("prefill-0")
    await workers(client, lambda live: "prefill-0" in live)
    # One that is frozen is killed like any other.
    cluster.freeze("prefill-0")
    await cluster.kill("prefill-0")
    await cluster.restart("prefill-0")
    await workers(client, lambda live: "prefill-0" in live)


@in_module_loop
async def test_a_terminated_service_ends_well_and_starts_again(
    cluster: LocalCluster, client: RawClient
) -> None:
    session = await client.create()
    history = await one_round(client, session, [])
    for name in ("prefill-0", "decode-0", "coordinator-0"):
        assert await cluster.terminate(name) == 0
        await cluster.restart(name)
    async with RawClient(cluster.address) as again:
        await workers(again, lambda live: len(live) == 3)
        await one_round(again, session, history)


@in_module_loop
async def test_a_killed_store_comes_back_with_what_it_had(
    cluster: LocalCluster, client: RawClient
) -> None:
    session = await client.create()
    history = await one_round(client, session, [])
    await asyncio.sleep(1.1)  # it is written down every second
    await cluster.kill_store()
    refusal = await refused(client.create())
    assert refusal.reason == "STORE_UNAVAILABLE"
    await cluster.restart_store()
    await workers(client, lambda live: len(live) == 3)
    async with asyncio.timeout(NOTICED_S):
        while True:
            try:
                found = await client.get(session)
                break
            except grpc.aio.AioRpcError as error:
                # It may not have got back yet what it had lost: it says so rather than be wrong.
                assert refusal_of(error).reason == "STORE_UNAVAILABLE"  # noqa: PT017
                await asyncio.sleep(POLL_S)
    assert found.history_tokens == len(history)
    await one_round(client, session, history)


@in_module_loop
async def test_a_frozen_store_is_an_outage(cluster: LocalCluster, client: RawClient) -> None:
    cluster.freeze_store()
    started_s = time.monotonic()
    refusal = await refused(client.create())
    assert refusal.reason == "STORE_UNAVAILABLE"
    assert time.monotonic() - started_s < NOTICED_S
    cluster.thaw_store()
    await workers(client, lambda live: len(live) == 3)
    await client.create()


@in_module_loop
async def test_one_that_does_not_come_back_is_told_with_its_log(
    cluster: LocalCluster, client: RawClient
) -> None:
    await cluster.kill("prefill-0")
    taken = await asyncio.start_server(
        lambda _reader, writer: writer.close(),
        *cluster.service("prefill-0").address.split(":"),
        reuse_port=False,
    )
    try:
        with pytest.raises(CliError, match="prefill-0 ended with exit code 1 at start"):
            await cluster.restart("prefill-0")
    finally:
        taken.close()
        await taken.wait_closed()
    await cluster.restart("prefill-0")
    await workers(client, lambda live: "prefill-0" in live)


def test_up_says_which_service_has_ended(ampdctl: Ampdctl) -> None:
    with ampdctl.started("up", "--engine", "emulated", "--foreground") as supervisor:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            if "the cluster is ready" in line:
                break
        folder = Path(ampdctl.environment["AMPD_CACHE_DIR"]) / "run" / "local"
        services = json.loads((folder / "state.json").read_text())["services"]
        pids = {service["name"]: service["pid"] for service in services}
        os.kill(pids["decode-0"], signal.SIGKILL)
        assert "decode-0 ended with exit code -9; its log is " in supervisor.stdout.readline()
        supervisor.terminate()
        supervisor.wait(30)
