"""One run of chaos: a cluster of real processes under load, broken for a while, then left alone;
a report, and every promise that was broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from chaos_adversary import Adversary, FaultShape
from chaos_agents import Agent, Endpoints, PolicyFlipper, Times, WorkShape
from chaos_judge import Judge
from chaos_oracles import EmulatedOracle, EngineOracle, Oracle
from engine_harness import RemoteEngine, free_port

from ampd.adapters.engine_vllm.settings import VllmSettings
from ampd.cli.cluster import ClusterSpec, EngineKind, LocalCluster
from ampd.core.model import Role
from ampd.models import prepare
from ampd.v1 import admin_service_pb2 as admin_pb
from ampd.v1.worker_pb2 import Worker

ENDS_WITHIN_S: Final = 60.0
"""Every call and round has ended so long after the last fault."""
FREE_WITHIN_S: Final = 30.0
"""Nothing holds KV so long after the last session was closed: a home that could not be told of a
close asks the store for what is its own."""
FORGOTTEN_WITHIN_S: Final = 75.0
"""Nothing is left of a session so long after: a home keeps what a lost round has said for a
minute, without KV."""
LOOK_EVERY_S: Final = 0.5
MAX_GROWTH_BYTES: Final = 300 << 20
"""Of a process that outlives the faults, from when it is warm to the end."""
MAX_GROWTH_FDS: Final = 64
WARM_SHARE: Final = 0.25
"""Of the run: a process that has worked for so long has what it keeps."""


@dataclass(frozen=True, slots=True)
class ChaosShape:
    """A run: the cluster, what its clients do, and what is done to it."""

    cluster: ClusterSpec
    work: WorkShape
    faults: FaultShape


def emulated(seconds: float) -> ChaosShape:
    """A large cluster of small processes; a GPU's times, so that rounds last long enough to be
    hit; KV so small that rounds wait for it."""
    return ChaosShape(
        cluster=ClusterSpec(
            model="emulated",
            engine=EngineKind.EMULATED,
            prefill=2,
            decode=3,
            coordinators=2,
            profile="gpu:h100_sxm/Qwen3-32B/tp1",
            kv_cache_bytes=5 << 28,
            max_model_tokens=4096,
        ),
        work=WorkShape(agents=12),
        faults=FaultShape(every_s=min(2.0, seconds / 12)),
    )


def vllm(_seconds: float) -> ChaosShape:
    """The real engine with the tiny model; greedy, because nobody else knows its random numbers."""
    return ChaosShape(
        cluster=ClusterSpec(
            model=prepare("tiny"),
            prefill=1,
            decode=2,
            coordinators=2,
            kv_cache_bytes=1 << 28,
            max_model_tokens=4096,
            ttft_slo_s=10.0,
            itl_slo_s=1.0,
        ),
        work=replace(
            WorkShape(),
            agents=5,
            vocabulary=range(100, 40_000),
            sampled_share=0.0,
            stall_s=(8.0, 15.0),
        ),
        faults=FaultShape(every_s=10.0, gone_s=(0.0, 1.0)),
    )


SHAPES: Final = {EngineKind.EMULATED: emulated, EngineKind.VLLM: vllm}


@dataclass(slots=True)
class ChaosReport:
    """What a run came to."""

    engine: str
    seed: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    """Refusals that clients saw, by reason."""
    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    longest_stall_s: float = 0.0
    stalled_round: str = ""
    ended_s: float = 0.0
    """From the last fault to the last client's end."""
    free_s: float = 0.0
    """From there until no worker held KV or work."""
    forgotten_s: float = 0.0
    """From there until no worker knew a session."""
    growth: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of processes that were warm before the end: bytes of memory and descriptors."""
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


async def run_chaos(
    engine: EngineKind, *, seconds: float, seed: int, run_dir: Path, quiet: bool = False
) -> ChaosReport:
    """Run it. The seed chooses what clients and adversary do; when it happens, the machine."""
    shape = SHAPES[engine](seconds)
    report = ChaosReport(engine, seed, seconds)
    async with (
        _oracle(shape.cluster) as oracle,
        LocalCluster(shape.cluster, run_dir, progress=print) as cluster,
    ):
        await _Chaos(shape, cluster, oracle, report, quiet=quiet).run()
    return report


@asynccontextmanager
async def _oracle(spec: ClusterSpec) -> AsyncIterator[Oracle]:
    if spec.engine is EngineKind.EMULATED:
        yield EmulatedOracle(spec.max_model_tokens)
        return
    settings = VllmSettings(
        model=str(spec.model),
        role=Role.DECODE,
        max_model_tokens=spec.max_model_tokens,
        kv_cache_bytes=1 << 28,
        side_channel_port=free_port(),
    )
    engine = RemoteEngine(settings, "reference", 1)
    try:
        await engine.connect()
        yield EngineOracle(engine)
    finally:
        await engine.stop()


class _Chaos:
    def __init__(
        self,
        shape: ChaosShape,
        cluster: LocalCluster,
        oracle: Oracle,
        report: ChaosReport,
        *,
        quiet: bool,
    ) -> None:
        self._shape = shape
        self._cluster = cluster
        self._report = report
        self._quiet = quiet
        self._judge = Judge(oracle)
        self._times = Times()
        self._endpoints = Endpoints(cluster.addresses)
        self._adversary = Adversary(
            cluster, report.seed, shape.faults, self._judge.violate, self._say
        )
        self._stop = asyncio.Event()
        self._whole_since_s: dict[int, float] = {}
        self._warm: dict[int, tuple[str, int, int]] = {}

    def _say(self, what: str) -> None:
        if not self._quiet:
            print(f"  {self._judge.elapsed_s:7.2f} s: {what}", flush=True)

    async def run(self) -> None:
        seed, work = self._report.seed, self._shape.work
        agents = [
            Agent(n, seed, work, self._endpoints, self._judge, self._times, self._stop)
            for n in range(work.agents)
        ]
        flipper = PolicyFlipper(seed, work, self._endpoints, self._judge)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(agent.run()) for agent in agents]
            around = [
                group.create_task(flipper.run()),
                group.create_task(self._adversary.run()),
                group.create_task(self._watch()),
            ]
            await asyncio.sleep(self._report.seconds)
            for task in around:
                task.cancel()
            await self._adversary.mend()
            self._say("no more faults")
            quiet_s = time.monotonic()
            self._stop.set()
            _, late = await asyncio.wait(running, timeout=ENDS_WITHIN_S)
            if late:
                doing = [agent.doing for agent in agents if agent.doing]
                self._judge.violate(f"not ended after {ENDS_WITHIN_S:.0f} s: {doing}")
                for task in late:
                    task.cancel()
            self._report.ended_s = time.monotonic() - quiet_s
            if not late:
                await self._comes_back()
        self._weigh()
        await self._endpoints.close()
        self._fill_report()

    async def _watch(self) -> None:
        """Processes that end by themselves; and what each takes when it is warm."""
        warm_s = WARM_SHARE * self._report.seconds
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._adversary.look()
            for service in self._cluster.services:
                if self._adversary.is_whole(service.name) and service.pid not in self._warm:
                    since_s = self._whole_since_s.setdefault(service.pid, time.monotonic())
                    if time.monotonic() - since_s > warm_s:
                        with contextlib.suppress(psutil.NoSuchProcess):  # the next look tells
                            self._warm[service.pid] = (service.name, *_takes(service.pid))

    def _weigh(self) -> None:
        running = {service.pid for service in self._cluster.services if service.is_running}
        for pid, (name, memory, descriptors) in self._warm.items():
            if pid not in running:
                continue
            memory_now, descriptors_now = _takes(pid)
            grown = {"bytes": memory_now - memory, "descriptors": descriptors_now - descriptors}
            self._report.growth[name] = grown
            if grown["bytes"] > MAX_GROWTH_BYTES or grown["descriptors"] > MAX_GROWTH_FDS:
                self._judge.violate(f"{name} has grown by {grown}")

    async def _comes_back(self) -> None:
        """With no session left nobody holds anything, within a bound."""
        started_s = time.monotonic()
        while True:
            left, sessions = await self._left_over()
            waited_s = time.monotonic() - started_s
            if not left and not self._report.free_s:
                self._report.free_s = waited_s
            if not left and self._report.seconds < FORGOTTEN_WITHIN_S:
                return  # a short run does not wait for that
            if not left and not sessions:
                self._report.forgotten_s = waited_s
                return
            bound_s = FREE_WITHIN_S if left else FORGOTTEN_WITHIN_S
            if waited_s > bound_s:
                self._judge.violate(f"left over after {bound_s:.0f} s: {left or sessions}")
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _left_over(self) -> tuple[list[str], list[str]]:
        """Work and KV that workers hold; sessions that they know."""
        stub = self._endpoints.admin(self._cluster.address)
        try:
            answer = await stub.ListWorkers(admin_pb.ListWorkersRequest(), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            return [f"ListWorkers: {error.code().name} {error.details()}"], []
        workers = {worker.worker_id: worker for worker in answer.workers}
        missing = [s.name for s in self._cluster.services if s.name not in workers]
        left = [f"{name} is not registered" for name in missing]
        for worker in workers.values():
            held = {name: count for name, count in _held(worker).items() if count}
            if held:
                left.append(f"{worker.worker_id}: {held}")
        sessions = {w.worker_id: w.load.sessions for w in workers.values()}
        return left, [f"{name}: {count} sessions" for name, count in sessions.items() if count]

    def _fill_report(self) -> None:
        report, ttft_s = self._report, self._times.ttft_s
        report.counts = dict(sorted(self._judge.counts.items()))
        report.errors = dict(self._judge.errors.most_common())
        report.faults = dict(sorted(self._adversary.faults.items()))
        report.restarts = dict(sorted(self._adversary.restarts.items()))
        report.violations = self._judge.violations
        report.longest_stall_s = self._times.longest_stall_s
        report.stalled_round = self._times.stalled_round
        if len(ttft_s) > 1:
            report.ttft_p50_s = statistics.median(ttft_s)
            report.ttft_p95_s = statistics.quantiles(ttft_s, n=20)[-1]


def _held(worker: Worker) -> dict[str, int]:
    load = worker.load
    return {
        "running rounds": load.running_rounds,
        "queued tasks": load.queued_tasks,
        "running KV tokens": load.kv_running_tokens,
        "pinned KV tokens": load.kv_pinned_tokens,
    }


def _takes(pid: int) -> tuple[int, int]:
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds()
