"""What tests of several packages share."""

import os
from collections.abc import AsyncIterator

import pytest_asyncio
from hypothesis import settings

from ampd.runtime.embedded_store import EmbeddedStore

# The same examples in every CI run: a change fails for what it did. Runs by hand search on.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_url() -> AsyncIterator[str]:
    """The URL of one Valkey server for the whole run: take a key prefix of your own."""
    async with EmbeddedStore() as store:
        yield store.url
