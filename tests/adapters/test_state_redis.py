"""What only the Valkey adapter promises: one round trip, outages, restarts, expiry, transports."""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from ampd.adapters.state_limits import CLOSED_TTL_S, CREATE_REQUEST_TTL_S, REPLAY_TTL_S
from ampd.adapters.state_redis import RedisStateStore
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import PolicySpec, Role, Slo, WorkerInfo, WorkerLoad
from ampd.ports import SessionWrites, StateStore
from ampd.runtime.embedded_store import EmbeddedStore

TIMEOUT_S = 0.5
MARGIN_S = 0.5
"""What a busy test machine may add to the timeout."""

WORKER = WorkerInfo("decode-0", Role.DECODE, 1, "10.0.0.1:7000", "node-1")
SESSION = SessionRecord("s-1", "acme", "tiny", Slo(2.0, 0.1), 1.0, 1.0)


@pytest.fixture
async def prefix() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def store(valkey_url: str, prefix: str) -> AsyncIterator[RedisStateStore]:
    store = RedisStateStore(valkey_url, prefix=prefix, timeout_s=5.0)
    yield store
    await store.close()


@pytest.fixture
async def raw(valkey_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore(appendonly_dir=tmp_path) as server:
        yield server


class Proxy:
    """A relay in front of the server: over TLS, a unix socket, or losing answers."""

    def __init__(self, valkey_url: str) -> None:
        parts = urlsplit(valkey_url)
        assert parts.port is not None
        self._upstream = ("127.0.0.1", parts.port)
        self.password = parts.password or ""
        self.lose_answers = 0
        """So many answers from now on break the connection instead of arriving."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        with contextlib.suppress(ConnectionError):
            async with asyncio.TaskGroup() as group:
                up = group.create_task(self._pump(reader, up_writer))
                await self._answers(up_reader, writer)
                up.cancel()
        writer.close()
        up_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.lose_answers:
                self.lose_answers -= 1
                return
            writer.write(data)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def unavailable_after_s(call: Awaitable[object]) -> float:
    started_s = time.monotonic()
    with pytest.raises(AmpdError) as caught:
        await call
    assert caught.value.reason is ErrorReason.STORE_UNAVAILABLE
    return time.monotonic() - started_s


def every_operation(store: StateStore) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: store.heartbeat(WORKER, WorkerLoad(), 5.0),
        lambda: store.deregister("decode-0", 1),
        lambda: store.list_workers(),
        lambda: store.load_round("s-1", "r"),
        lambda: store.create_session(SESSION, "c"),
        lambda: store.get_session("s-1"),
        lambda: store.compare_and_set(replace(SESSION, version=2), 1),
        lambda: store.list_sessions("acme", 10, ""),
        lambda: store.read_history("s-1", 0, 1),
        lambda: store.read_rounds("s-1"),
        lambda: store.get_policy(),
        lambda: store.set_policy(PolicySpec("ampd", version=1), 0),
        lambda: store.ping(),
    ]


# --- round trips


async def test_every_operation_is_one_command(
    store: RedisStateStore, raw: Redis, prefix: str
) -> None:
    for operation in every_operation(store):
        with contextlib.suppress(AmpdError):
            await operation()  # connects, and loads the scripts
    async with raw.monitor() as monitor:
        for operation in every_operation(store):
            with contextlib.suppress(AmpdError):
                await operation()
        await store.get_session("the-end")
        sent: list[str] = []
        while True:
            entry = await monitor.next_command()
            if "the-end" in entry["command"]:
                break
            if entry["client_type"] != "lua":
                sent.append(entry["command"])

    assert len(sent) == len(every_operation(store))
    assert sent[3].startswith("EVALSHA")
    assert f"{prefix}:session:s-1" in sent[3]


async def test_loading_a_round_does_not_grow_with_the_history(store: RedisStateStore) -> None:
    async def seconds() -> float:
        started_s = time.perf_counter()
        await store.load_round("s-1", "r")
        return time.perf_counter() - started_s

    await store.create_session(SESSION, "")
    await store.compare_and_set(
        replace(SESSION, version=2), 1, SessionWrites(0, array("I", range(10)))
    )
    short = [await seconds() for _ in range(300)]
    await store.compare_and_set(
        replace(SESSION, version=3), 2, SessionWrites(0, array("I", range(100_000)))
    )
    long = [await seconds() for _ in range(300)]

    assert median(long) < 3 * median(short)
    started_s = time.perf_counter()
    await store.read_history("s-1", 0, 100_000)
    assert time.perf_counter() - started_s < 0.5


async def test_scripts_are_loaded_again_when_the_server_forgot_them(
    store: RedisStateStore, raw: Redis
) -> None:
    await store.load_round("s-1", "r")
    await raw.script_flush()
    assert (await store.load_round("s-1", "r")).session is None


async def test_more_operations_than_connections_take_turns(valkey_url: str, prefix: str) -> None:
    store = RedisStateStore(valkey_url, prefix=prefix, max_connections=2, timeout_s=5.0)
    try:
        await asyncio.gather(*(store.ping() for _ in range(200)))
    finally:
        await store.close()


# --- outages


async def test_a_killed_server_is_unavailable_at_once_and_then_back(
    own_server: EmbeddedStore,
) -> None:
    store = RedisStateStore(own_server.url, timeout_s=TIMEOUT_S)
    try:
        await store.create_session(SESSION, "c-1")
        await asyncio.sleep(1.2)  # the append-only file is synced every second
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGKILL)

        for operation in every_operation(store):
            assert await unavailable_after_s(operation()) < TIMEOUT_S + MARGIN_S

        await own_server.start()
        assert await store.get_session("s-1") == SESSION
        assert await store.create_session(replace(SESSION, session_id="s-2"), "c-1") == SESSION
        assert await store.compare_and_set(replace(SESSION, version=2), 1)
    finally:
        await store.close()


async def test_a_restart_is_not_seen_by_the_next_operation(own_server: EmbeddedStore) -> None:
    store = RedisStateStore(own_server.url, timeout_s=5.0)
    try:
        await store.create_session(SESSION, "")
        await asyncio.gather(*(store.ping() for _ in range(10)))  # ten pooled connections
        await own_server.stop()
        await own_server.start()
        assert (
            await asyncio.gather(*(store.get_session("s-1") for _ in range(10))) == [SESSION] * 10
        )
    finally:
        await store.close()


async def test_a_restart_is_another_life(own_server: EmbeddedStore) -> None:
    store = RedisStateStore(own_server.url)
    assert store.life == ""
    await store.heartbeat(WORKER, WorkerLoad(), 5.0)
    first = store.life
    await store.heartbeat(WORKER, WorkerLoad(), 5.0)
    assert store.life == first != ""
    await own_server.stop()
    await own_server.start()
    await store.heartbeat(WORKER, WorkerLoad(), 5.0)
    assert store.life not in {first, ""}
    await store.close()


async def test_a_frozen_server_costs_the_timeout_and_mixes_no_answers(
    own_server: EmbeddedStore,
) -> None:
    store = RedisStateStore(own_server.url, timeout_s=TIMEOUT_S, max_connections=2)
    assert own_server.pid is not None
    try:
        await store.create_session(SESSION, "")
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            took_s = await asyncio.gather(
                *(unavailable_after_s(operation()) for operation in every_operation(store))
            )
        finally:
            os.kill(own_server.pid, signal.SIGCONT)

        assert max(took_s) < TIMEOUT_S + MARGIN_S
        for _ in range(5):
            assert await store.get_policy() is None
            assert await store.get_session("nobody") is None
            await store.ping()
    finally:
        await store.close()


async def test_a_cancelled_operation_leaves_no_answer_behind(store: RedisStateStore) -> None:
    await store.create_session(SESSION, "")
    for step in range(60):
        call = asyncio.ensure_future(store.get_session("s-1"))
        for _ in range(step % 12):
            await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        assert await store.get_policy() is None


async def test_nobody_listening_is_unavailable(prefix: str) -> None:
    store = RedisStateStore("redis://:secret@127.0.0.1:1/0", prefix=prefix, timeout_s=TIMEOUT_S)
    with pytest.raises(AmpdError) as caught:
        await store.ping()
    assert caught.value.reason is ErrorReason.STORE_UNAVAILABLE
    assert "secret" not in str(caught.value)
    await store.close()


async def test_a_wrong_password_is_unavailable(valkey_url: str) -> None:
    store = RedisStateStore(re.sub(r":[0-9a-f]+@", ":wrong@", valkey_url))
    await unavailable_after_s(store.load_round("s", "r"))
    await store.close()


async def test_a_full_server_refuses_a_write_whole(tmp_path: Path) -> None:
    async with EmbeddedStore() as server, Redis.from_url(server.url) as raw:
        store = RedisStateStore(server.url)
        await store.create_session(SESSION, "")
        await raw.config_set("maxmemory", 1)
        await unavailable_after_s(
            store.compare_and_set(replace(SESSION, version=2), 1, SessionWrites(0, array("I", [1])))
        )
        assert await store.get_session("s-1") == SESSION
        await store.close()


async def test_a_write_whose_answer_was_lost_counts_once(valkey_url: str, prefix: str) -> None:
    proxy = Proxy(valkey_url)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        url = f"redis://:{proxy.password}@127.0.0.1:{port_of(server)}/0"
        store = RedisStateStore(url, prefix=prefix, timeout_s=5.0)
        try:
            await store.ping()
            proxy.lose_answers = 1
            assert await store.create_session(SESSION, "") == SESSION
            proxy.lose_answers = 1
            assert await store.compare_and_set(replace(SESSION, version=2), 1)
            proxy.lose_answers = 1
            assert await store.set_policy(PolicySpec("ampd", version=1), 0)
            assert not await store.compare_and_set(replace(SESSION, version=2), 1)
        finally:
            await store.close()


# --- expiry and size of what is kept


async def ttls_s(raw: Redis, prefix: str) -> dict[str, float]:
    keys = [key async for key in raw.scan_iter(match=f"{prefix}:*")]
    return {key.decode().removeprefix(prefix + ":"): await raw.pttl(key) / 1000 for key in keys}


async def test_every_key_of_sessions_expires(valkey_url: str, raw: Redis, prefix: str) -> None:
    store = RedisStateStore(valkey_url, prefix=prefix, idle_ttl_s=5000.0)
    writes = SessionWrites(0, array("I", [1]), None, "r-0", b"x")
    await store.heartbeat(WORKER, WorkerLoad(), 30.0)
    await store.set_policy(PolicySpec("ampd", version=1), 0)
    await store.create_session(SESSION, "c-1")
    await store.compare_and_set(replace(SESSION, version=2), 1, writes)

    ttl_s = await ttls_s(raw, prefix)
    assert ttl_s == pytest.approx(
        {
            "workers": -0.001,
            "infos": -0.001,
            "infos-version": -0.001,
            "policy": -0.001,
            "born": -0.001,
            "session:s-1": 5000.0,
            "tokens:s-1": 5000.0,
            "sessions:acme": 5000.0,
            "replay:s-1:r-0": REPLAY_TTL_S,
            "create:acme:c-1": CREATE_REQUEST_TTL_S,
        },
        abs=5.0,
    )

    await store.compare_and_set(replace(SESSION, version=3, state=SessionState.CLOSED), 2)
    ttl_s = await ttls_s(raw, prefix)
    assert ttl_s["session:s-1"] == pytest.approx(CLOSED_TTL_S, abs=5.0)
    assert "tokens:s-1" not in ttl_s
    assert "sessions:acme" not in ttl_s
    await store.close()


async def test_the_index_sheds_expired_sessions_though_nobody_lists_them(
    valkey_url: str, raw: Redis, prefix: str
) -> None:
    lasting = RedisStateStore(valkey_url, prefix=prefix)
    brief = RedisStateStore(valkey_url, prefix=prefix, idle_ttl_s=0.001)
    await lasting.create_session(SESSION, "")  # keeps the index itself alive
    for i in range(500):
        await brief.create_session(replace(SESSION, session_id=f"b-{i}"), "")
    assert await raw.zcard(f"{prefix}:sessions:acme") < 50
    await lasting.close()
    await brief.close()


async def test_an_unreadable_worker_hides_no_other(
    store: RedisStateStore, raw: Redis, prefix: str
) -> None:
    await store.heartbeat(WORKER, WorkerLoad(), 30.0)
    await store.heartbeat(replace(WORKER, worker_id="alien"), WorkerLoad(), 30.0)
    entry = await raw.hget(f"{prefix}:workers", "alien")
    await raw.hset(f"{prefix}:infos", "alien", b"\xc1")
    assert [view.info.worker_id for view in await store.list_workers()] == ["decode-0"]
    await store.heartbeat(replace(WORKER, worker_id="other"), WorkerLoad(), 30.0)
    await raw.hset(f"{prefix}:workers", "other", entry[:50] + b"\xc1")
    context = await store.load_round("s", "r")
    assert [view.info.worker_id for view in context.workers] == ["decode-0"]


# --- workers


async def test_what_has_no_lease_is_shed_when_it_is_met(
    store: RedisStateStore, raw: Redis, prefix: str
) -> None:
    await store.heartbeat(WORKER, WorkerLoad(), 30.0)
    await store.heartbeat(replace(WORKER, worker_id="gone"), WorkerLoad(), 0.001)
    await asyncio.sleep(0.05)
    assert [view.info.worker_id for view in await store.list_workers()] == ["decode-0"]
    for key in ("workers", "infos"):
        assert await raw.hkeys(f"{prefix}:{key}") == [b"decode-0"]


async def test_infos_are_read_once_and_again_when_one_changes(
    store: RedisStateStore, raw: Redis, valkey_url: str, prefix: str
) -> None:
    async def address(worker_id: str) -> list[str]:
        context = await store.load_round("s", "r")
        return [v.info.address for v in context.workers if v.info.worker_id == worker_id]

    other = RedisStateStore(valkey_url, prefix=prefix)
    await other.heartbeat(WORKER, WorkerLoad(), 30.0)
    assert await address("decode-0") == [WORKER.address]
    version = await raw.get(f"{prefix}:infos-version")
    await other.heartbeat(WORKER, WorkerLoad(sessions=1), 30.0)
    assert await raw.get(f"{prefix}:infos-version") == version
    for incarnation, place in (
        (WORKER.incarnation + 1, "moved:1"),
        (WORKER.incarnation + 2, "b:2"),
    ):
        moved = replace(WORKER, incarnation=incarnation, address=place)
        await other.heartbeat(moved, WorkerLoad(), 30.0)
        # Two reads at once: each knows what it asked with.
        assert await asyncio.gather(address("decode-0"), address("decode-0")) == [[place]] * 2
    await other.close()


# --- transports


async def test_over_a_unix_socket(valkey_url: str, prefix: str, tmp_path: Path) -> None:
    proxy = Proxy(valkey_url)
    path = tmp_path / "s"
    async with await asyncio.start_unix_server(proxy.serve, path):
        store = RedisStateStore(f"unix://:{proxy.password}@{path}", prefix=prefix)
        await store.create_session(SESSION, "")
        assert await store.get_session("s-1") == SESSION
        await store.close()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, key) of a localhost that nobody vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    files = (tmp_path / "cert.pem", tmp_path / "key.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    subprocess.run(
        [
            *command.split(),
            "-addext",
            "subjectAltName=DNS:localhost",
            "-out",
            str(files[0]),
            "-keyout",
            str(files[1]),
        ],
        check=True,
        capture_output=True,
    )
    return files


async def test_over_tls(valkey_url: str, prefix: str, certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    proxy = Proxy(valkey_url)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=context) as server:
        address = f"rediss://:{proxy.password}@localhost:{port_of(server)}/0"
        trusting = RedisStateStore(f"{address}?ssl_ca_certs={certificate[0]}", prefix=prefix)
        wary = RedisStateStore(address, prefix=prefix)
        await trusting.create_session(SESSION, "")
        assert await trusting.get_session("s-1") == SESSION
        await unavailable_after_s(wary.ping())
        await trusting.close()
        await wary.close()
