"""The embedded store: up, down, kept and never left behind."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from ampd.core.errors import AmpdError, ErrorReason
from ampd.runtime.embedded_store import EmbeddedStore


async def gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while alive(pid):  # noqa: ASYNC110 - it is not our child
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.05)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_start_and_stop_are_idempotent() -> None:
    store = EmbeddedStore()
    with pytest.raises(AmpdError):
        _ = store.url
    url = await store.start()
    pid = store.pid
    assert await store.start() == url == store.url
    assert store.pid == pid
    assert pid is not None

    await store.stop()
    await store.stop()

    assert store.pid is None
    assert not alive(pid)


async def test_the_url_outlives_a_restart_and_the_data_only_on_request(tmp_path: Path) -> None:
    for directory, kept in ((None, None), (tmp_path / 'a "b" \\c', b"v")):
        if directory is not None:
            directory.mkdir()
        async with EmbeddedStore(appendonly_dir=directory) as store:
            url = store.url
            async with Redis.from_url(url) as client:
                await client.set("k", "v")
            await store.stop()
            assert await store.start() == url
            async with Redis.from_url(url) as client:
                assert await client.get("k") == kept


async def test_it_starts_again_after_it_was_killed() -> None:
    async with EmbeddedStore() as store:
        pid = store.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        await store.start()
        assert store.pid != pid


async def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    store = EmbeddedStore(appendonly_dir=tmp_path / "missing")
    with pytest.raises(AmpdError) as caught:
        await store.start()
    assert caught.value.reason is ErrorReason.STORE_UNAVAILABLE
    assert store.pid is None


async def test_a_cancelled_start_leaves_nothing_running() -> None:
    before = set(psutil.Process().children())
    for delay_s in (0.0, 0.001, 0.01, 0.03, 0.06):
        store = EmbeddedStore()
        start = asyncio.ensure_future(store.start())
        await asyncio.sleep(delay_s)
        start.cancel()
        await asyncio.wait([start])
        if start.cancelled():
            assert store.pid is None
        await store.stop()
    await asyncio.sleep(0.1)
    assert set(psutil.Process().children()) <= before


async def test_the_password_shows_in_no_process_list() -> None:
    async with EmbeddedStore() as store:
        password = store.url.split(":")[2].split("@")[0]
        assert store.pid is not None
        assert password not in command_line(store.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
async def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio
        from ampd.runtime.embedded_store import EmbeddedStore
        async def main():
            async with EmbeddedStore() as store:
                print(store.pid, flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.communicate()

    await gone(pid)


async def test_a_start_right_after_a_kill_brings_it_back() -> None:
    async with EmbeddedStore() as store:
        for _ in range(5):
            assert store.pid is not None
            os.kill(store.pid, signal.SIGKILL)
            url = await store.start()
            client = Redis.from_url(url)
            try:
                assert await client.ping()
            finally:
                await client.aclose()
