"""What tests of several packages share."""

from collections.abc import AsyncIterator

import pytest_asyncio

from ampd.runtime.embedded_store import EmbeddedStore


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_url() -> AsyncIterator[str]:
    """The URL of one Valkey server for the whole run: take a key prefix of your own."""
    async with EmbeddedStore() as store:
        yield store.url
