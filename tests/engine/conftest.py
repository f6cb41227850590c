"""One prefill and one decode engine, each in its own process, for the whole run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from engine_contract import Pair
from engine_harness import RemoteEngine, free_port

from ampd.adapters.engine_vllm.settings import VllmSettings
from ampd.core.model import Role
from ampd.models import prepare

KV_CACHE_BYTES = 24 << 20
"""12,288 tokens of the tiny model: enough for every test, and small enough to fill."""


@pytest.fixture(scope="session")
def model_path() -> Path:
    return prepare("tiny")


def tiny_settings(model_path: Path, role: Role, **changes: object) -> VllmSettings:
    settings: dict[str, object] = {
        "model": str(model_path),
        "role": role,
        "side_channel_port": free_port(),
        "kv_cache_bytes": KV_CACHE_BYTES,
    }
    return VllmSettings(**(settings | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def running(*engines: RemoteEngine) -> AsyncIterator[None]:
    """The engines started together (importing vLLM is most of it), and closed."""
    try:
        await asyncio.gather(*(engine.connect() for engine in engines))
        yield
    finally:
        codes = await asyncio.gather(*(engine.stop() for engine in engines))
        assert codes == [0] * len(engines)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_pair(model_path: Path) -> AsyncIterator[Pair]:
    prefill = RemoteEngine(tiny_settings(model_path, Role.PREFILL), "p0", 1)
    decode = RemoteEngine(tiny_settings(model_path, Role.DECODE), "d0", 1)
    async with running(prefill, decode):
        yield Pair(prefill, decode)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(vllm_pair: Pair) -> Pair:
    """The engines under the contract, empty; another adapter overrides this fixture."""
    for engine in (vllm_pair.prefill, vllm_pair.decode):
        assert isinstance(engine, RemoteEngine)
        await engine.forget()
    return vllm_pair
