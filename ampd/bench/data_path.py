"""What a round costs on its way: client, coordinator and decode worker over real gRPC, with an
emulated engine that computes for nothing; beside it the same round straight at its home, and
raw gRPC with one proxy hop, in turns of one run. KV: NIXL beside a copy in memory.

CPU times are those of the processes: they say what a core can do where others use it too. The
engine steps as fast as it can, so tokens of a stream wait for each other and share messages;
streams whose tokens come one by one cost more, `proxy` says how much a message costs at least.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
import psutil

from ampd.adapters.homes_grpc import GrpcHomes
from ampd.bench import echo
from ampd.bench.kv_path import KvCell, measure_kv
from ampd.bench.provenance import Provenance, provenance
from ampd.bench.timing import Spread
from ampd.client import AmpdClient
from ampd.core.model import (
    Finished,
    Role,
    RoundOrder,
    RouteReason,
    SamplingParams,
    Slo,
    TokensOut,
    WorkerInfo,
)
from ampd.v1 import sampling_params_pb2, worker_pb2
from ampd.v1.policy_pb2 import Policy
from ampd.v1.session_service_pb2 import GenerateRequest, TokenBatch, TokenIds

ADDED_BAR_S: Final = 1.5e-3
ROUNDS_BAR: Final = 450.0
TOKENS_BAR: Final = 20_000.0
CONCURRENCY: Final = 16
INCREMENT: Final = 32
OUTPUT: Final = 1
ECHO_BYTES: Final = 64
KV_TURNS: Final = 5
TURNS: Final = 8
"""In which the ways a round can go are measured one after the other."""
SLO: Final = Slo(ttft_s=10.0, itl_s=1.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rounds: int = 400
    """Rounds one by one, and again as many at CONCURRENCY."""
    streams: int = 256
    tokens_per_stream: int = 256
    kv_bytes: int = 64 << 20
    """Moved for each block size, in each turn."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of one way at some concurrency."""

    rounds: int
    rounds_per_s: float
    tokens_per_s: float
    cpu_s: dict[str, float]
    """Of each process, this one is `client`."""
    messages: int
    """That the client got with tokens in them."""
    tokens: int

    def tokens_per_cpu_s(self, process: str) -> float:
        """Tokens per second of a core of that process."""
        return self.tokens / max(self.cpu_s[process], 1e-9)


@dataclass(frozen=True, slots=True)
class DataPathResult:
    """One run. Ways: `echo`, `proxy` (raw gRPC, without and with a hop), `home` (the order
    straight to the decode worker), `ampd` (all the way)."""

    provenance: Provenance
    sizes: Sizes
    latency: dict[str, Spread]
    """Of one round at a time."""
    concurrent: dict[str, Throughput]
    """At CONCURRENCY."""
    streams: dict[str, Throughput]
    """At `sizes.streams`: `proxy` passes a message per token."""
    kv: tuple[KvCell, ...]
    """Empty where NIXL is not installed."""

    @property
    def added_s(self) -> float:
        """p50 of all the way less that straight at the home."""
        return self.latency["ampd"].p50_s - self.latency["home"].p50_s

    @property
    def hop_s(self) -> float:
        """The same of raw gRPC: what one hop adds."""
        return self.latency["proxy"].p50_s - self.latency["echo"].p50_s


@dataclass(slots=True)
class _Said:
    tokens: int = 0
    messages: int = 0


_Round = Callable[[int], Awaitable[_Said]]
"""Runs one round that says so many tokens."""
_Lane = Callable[[], Awaitable[_Round]]
"""Opens a session; the rounds of one lane follow each other."""


async def measure_data_path(
    address: str, processes: dict[str, int], sizes: Sizes
) -> DataPathResult:
    """Measure the cluster behind `address`. `processes`: pids by name, `coordinator` among
    them."""
    began = provenance()
    async with AsyncExitStack() as stack:
        server, server_pid = await stack.enter_async_context(echo.started())
        proxy, proxy_pid = await stack.enter_async_context(echo.started(server))
        pids = {**processes, "echo": server_pid, "proxy": proxy_pid, "client": psutil.Process().pid}
        watched = {name: psutil.Process(pid) for name, pid in pids.items()}
        client = await stack.enter_async_context(AmpdClient(address))
        await client.set_policy(Policy(name="always-local"))
        homes = GrpcHomes(clock=time.monotonic)
        stack.push_async_callback(homes.close)
        ways: dict[str, _Lane] = {
            "echo": _echo_lane(await stack.enter_async_context(_channel(server))),
            "proxy": _echo_lane(await stack.enter_async_context(_channel(proxy))),
            "home": lambda: _home_lane(homes, home),
            "ampd": lambda: _ampd_lane(client),
        }
        home = await _home(client)
        latency: dict[str, list[float]] = {way: [] for way in ways}
        for lane in ways.values():
            await (await lane())(OUTPUT)  # connects
        for _ in range(TURNS):
            for way, lane in ways.items():
                run = await lane()
                for _ in range(-(-sizes.rounds // TURNS)):
                    began_s = time.perf_counter()
                    await run(OUTPUT)
                    latency[way].append(time.perf_counter() - began_s)
        concurrent = {
            way: await _throughput(lane, CONCURRENCY, sizes.rounds, OUTPUT, watched)
            for way, lane in ways.items()
        }
        streams = {
            way: await _throughput(
                ways[way], sizes.streams, sizes.streams, sizes.tokens_per_stream, watched
            )
            for way in ("proxy", "home", "ampd")
        }
    return DataPathResult(
        began,
        sizes,
        {way: Spread.of(times_s) for way, times_s in latency.items()},
        concurrent,
        streams,
        await measure_kv(sizes.kv_bytes, KV_TURNS),
    )


async def _throughput(
    lane: _Lane, lanes: int, rounds: int, tokens: int, watched: dict[str, psutil.Process]
) -> Throughput:
    """So many rounds in all, in lanes side by side."""
    runs = [await lane() for _ in range(lanes)]
    shares = [rounds // lanes + (number < rounds % lanes) for number in range(lanes)]
    said = _Said()

    async def drive(run: _Round, count: int) -> None:
        for _ in range(count):
            one = await run(tokens)
            said.tokens += one.tokens
            said.messages += one.messages

    before_s = {name: _cpu_s(process) for name, process in watched.items()}
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for run, count in zip(runs, shares, strict=True):
            group.create_task(drive(run, count))
    seconds = time.perf_counter() - began_s
    return Throughput(
        rounds=rounds,
        rounds_per_s=rounds / seconds,
        tokens_per_s=said.tokens / seconds,
        cpu_s={name: _cpu_s(process) - before_s[name] for name, process in watched.items()},
        messages=said.messages,
        tokens=said.tokens,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


# --- the ways ----------------------------------------------------------------------------------


@asynccontextmanager
async def _channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


def _echo_lane(channel: grpc.aio.Channel) -> _Lane:
    call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(echo.METHOD)

    async def run(tokens: int) -> _Said:
        said = _Said()
        async for _ in call(echo.COUNT.pack(tokens) + bytes(ECHO_BYTES)):
            said.tokens += 1
            said.messages += 1
        return said

    async def opened() -> _Round:
        return run

    return opened


async def _ampd_lane(client: AmpdClient) -> _Round:
    session_id = (await client.create_session()).session_id

    async def run(tokens: int) -> _Said:
        said = _Said()
        request = GenerateRequest(
            session_id=session_id,
            token_ids=TokenIds(ids=_increment()),
            sampling=sampling_params_pb2.SamplingParams(
                max_tokens=tokens, temperature=0.0, ignore_eos=True
            ),
        )
        async for event in client.generate(request):
            if isinstance(event, TokenBatch):
                said.tokens += len(event.token_ids)
                said.messages += 1
        return said

    return run


async def _home_lane(homes: GrpcHomes, home: WorkerInfo) -> _Round:
    """The orders that a coordinator would give for such a session."""
    peer, session_id = homes.home(home), f"bench-{uuid.uuid4().hex}"
    rounds = history = 0

    async def run(tokens: int) -> _Said:
        nonlocal rounds, history
        order = RoundOrder(
            session_id=session_id,
            request_id=uuid.uuid4().hex,
            round_index=rounds,
            keep_history_tokens=history,
            increment=_increment(),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            slo=SLO,
            created_s=time.monotonic(),
            reason=RouteReason.ALWAYS_LOCAL,
            history=None if rounds else array("I"),
            attempt_id=uuid.uuid4().hex,
        )
        said = _Said()
        async with aclosing(peer.run_round(order, None)) as events:
            async for event in events:
                if isinstance(event, TokensOut):
                    said.tokens += len(event.token_ids)
                    said.messages += 1
                elif isinstance(event, Finished):
                    history = event.history_tokens
        rounds += 1
        return said

    return run


def _increment() -> array[int]:
    return array("I", range(300, 300 + INCREMENT))


async def _home(client: AmpdClient) -> WorkerInfo:
    async for worker in client.list_workers(worker_pb2.WORKER_ROLE_DECODE):
        return WorkerInfo(
            worker.worker_id, Role.DECODE, worker.incarnation, worker.address, worker.host
        )
    raise LookupError("the cluster has no decode worker")
