"""One real cluster for the tests of this folder: real processes, vLLM, NIXL, Valkey, gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cluster_keeper import ClusterKeeper
from engine_harness import RemoteEngine, free_port

from ampd.adapters.engine_vllm.settings import VllmSettings
from ampd.cli.cluster import ClusterSpec, LocalCluster
from ampd.client import AmpdClient
from ampd.core.model import Role
from ampd.models import prepare

BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 4096


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model() -> Path:
    return prepare("tiny")


@pytest.fixture(scope="session")
def profile_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers measure themselves once in a run, not at every start."""
    return tmp_path_factory.mktemp("profiles")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(
    model: Path, profile_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    spec = ClusterSpec(
        model=model,
        prefill=1,
        decode=2,
        coordinators=2,
        max_model_tokens=MAX_MODEL_TOKENS,
        kv_cache_bytes=1 << 28,
        ttft_slo_s=30.0,
        itl_slo_s=2.0,
        profile_dir=profile_dir,
    )
    async with LocalCluster(spec, tmp_path_factory.mktemp("cluster"), progress=print) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def keeper(
    model: Path, profile_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ClusterKeeper]:
    """For a small cluster that may be broken: one worker of each kind, two coordinators.

    Each worker has KV for one session as long as the model takes, and no more.
    """
    spec = ClusterSpec(
        model=model,
        coordinators=2,
        max_model_tokens=2 * MAX_MODEL_TOKENS,
        # 2 KiB a token; vLLM keeps one block for itself.
        kv_cache_bytes=(2 * MAX_MODEL_TOKENS + BLOCK_TOKENS) * 2048,
        ttft_slo_s=30.0,
        itl_slo_s=2.0,
        profile_dir=profile_dir,
    )
    keeper = ClusterKeeper(spec, tmp_path_factory.mktemp("kept"))
    yield keeper
    await keeper.close()


@pytest_asyncio.fixture(loop_scope="session")
async def clients(cluster: LocalCluster) -> AsyncIterator[list[AmpdClient]]:
    """One client per coordinator."""
    clients = [AmpdClient(address) for address in cluster.addresses]
    yield clients
    for client in clients:
        await client.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def single_engine(model: Path) -> AsyncIterator[RemoteEngine]:
    """The reference: one engine without any transfer."""
    settings = VllmSettings(
        model=str(model),
        role=Role.DECODE,
        max_model_tokens=MAX_MODEL_TOKENS,
        kv_cache_bytes=1 << 28,
        side_channel_port=free_port(),
    )
    engine = RemoteEngine(settings, "reference", 1)
    await engine.connect()
    yield engine
    await engine.stop()
