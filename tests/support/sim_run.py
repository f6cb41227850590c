"""One simulated run: a seed and a profile in, broken promises and a digest out."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from checkers import Allowed, Books, Judge, left_overs
from cluster_sim import SimCluster, SimShape
from kv_watch import KvWatch
from sim_engine import KvFaults
from sim_faults import Nemesis, Profile
from sim_store import StoreFaults
from sim_workload import Agent, Visitor, WorkShape
from virtual_grpc import NetworkFaults
from virtual_loop import DeadlockError, HangError, SimProcess, run_virtual

START_S: Final = 1.0
"""Until every process has registered, from the cluster's start."""
FLOOD: Final = 12
"""New clients of a flood."""
LIMIT_S: Final = 600.0
"""A run that takes longer hangs."""
_WORKERS: Final = {
    "kill_decode": 2.0,
    "kill_prefill": 2.0,
    "pause": 2.0,
    "terminate": 1.0,
    "slow": 2.0,
}
_COORDINATORS: Final = {"kill_coordinator": 3.0, "terminate": 1.0, "pause": 1.0}
_STORE: Final = {"store_outage": 2.0, "store_crash": 1.0, "cut_store": 2.0}
_NETWORK: Final = {"cut": 3.0, "pause": 0.5}
_OPERATORS: Final = {"move": 8.0, "drain": 1.0, "policy": 0.5, "evict": 1.0}
_SHAKY: Final = NetworkFaults(
    latency_s=0.002,
    slow_share=0.02,
    reset_share=0.02,
    silent_share=0.005,
    duplicate_share=0.02,
    window=4,
)
_SHAKY_KV: Final = KvFaults(
    block_s=0.03, failed_share=0.1, stuck_share=0.02, untold_share=0.1, late_s=1.0
)
# Of a lost message that a result was read, its owner learns by the result's lease: 20 s here.
_SHAKY_STORE: Final = StoreFaults(
    latency_s=0.002, slow_share=0.01, refused_share=0.01, unanswered_share=0.01
)
_RESTLESS: Final = WorkShape(
    cancel_share=0.15,
    drop_share=0.2,
    deadline_share=0.1,
    repeat_share=0.2,
    twice_share=0.1,
    close_early_share=0.05,
    tools_share=0.15,
)
_TIGHT: Final = SimShape(
    kv_tokens=1024,
    max_model_tokens=768,
    max_queued_tasks=3,
    max_sessions=5,
    max_running_rounds=6,
    kv_lease_s=1.0,
)

PROFILES: Final[Mapping[str, Profile]] = {
    "calm": Profile(
        work=replace(
            _RESTLESS,
            cancel_share=0.0,
            drop_share=0.0,
            deadline_share=0.0,
            twice_share=0.0,
            close_early_share=0.0,
        )
    ),
    "clients": Profile(work=_RESTLESS, frees_within_s=1.0),
    "workers": Profile(weights=_WORKERS, work=_RESTLESS),
    "coordinators": Profile(weights=_COORDINATORS, work=_RESTLESS),
    "store": Profile(weights=_STORE, store=_SHAKY_STORE, work=_RESTLESS),
    "network": Profile(weights=_NETWORK, network=_SHAKY, work=_RESTLESS),
    "kv": Profile(
        weights={"evict": 3.0, "cut": 4.0, "slow": 1.0, "kill_prefill": 0.5},
        every_s=0.5,
        network=NetworkFaults(slow_share=0.1, slow_s=1.0),
        kv=_SHAKY_KV,
        comes_back_s=35.0,
        frees_within_s=27.0,
        work=replace(_RESTLESS, sessions=14, cancel_share=0.3, close_early_share=0.2),
        shape=SimShape(kv_tokens=768, max_model_tokens=512, kv_lease_s=0.5, result_lease_s=20.0),
    ),
    "operators": Profile(weights=_OPERATORS, every_s=0.4, work=_RESTLESS, shape=SimShape(decode=3)),
    "pressure": Profile(
        weights={"flood": 1.0},
        every_s=8.0,
        shape=replace(_TIGHT, tenant_sessions=18),
        frees_within_s=1.0,
        work=replace(_RESTLESS, sessions=12, start_within_s=2.0, think_s=0.2, rounds=(1, 4)),
    ),
    "everything": Profile(
        weights={**_WORKERS, **_COORDINATORS, **_STORE, **_NETWORK, **_OPERATORS, "blackout": 0.7},
        every_s=1.0,
        network=_SHAKY,
        store=_SHAKY_STORE,
        kv=_SHAKY_KV,
        comes_back_s=35.0,
        frees_within_s=30.0,
        work=_RESTLESS,
        shape=replace(
            _TIGHT, coordinators=3, decode=3, kv_tokens=2048, max_sessions=8, result_lease_s=20.0
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    profile: str
    violations: tuple[str, ...]
    log: tuple[str, ...]
    digest: int
    ends: Counter[str]
    rounds: int
    virtual_s: float

    def report(self) -> str:
        """For a person: what broke, the last events, and how to see it again."""
        return "\n".join(
            (
                f"seed {self.seed}, profile {self.profile}:",
                *self.violations[:20],
                "the last events:",
                *self.log,
                "again with:",
                f"  .venv/bin/pytest tests/sim --sim-profile {self.profile} --sim-seed {self.seed}",
            )
        )


def run_seed(seed: int, profile: str, *, lines: int = 400) -> Outcome:
    """Run it. The same arguments give the same run, event by event."""
    held: list[SimCluster] = []
    ends: Counter[str] = Counter()
    rounds = 0
    with ExitStack() as edges:
        try:
            judge = run_virtual(_run(seed, profile, held, edges, lines), limit_s=LIMIT_S)
            ends, rounds = judge.ends, judge.rounds
        except (DeadlockError, HangError) as error:
            held[0].violate(str(error))
    (cluster,) = held
    for crash in cluster.loop.crashes:
        cluster.violate(f"the loop caught: {crash}")
    return Outcome(
        seed=seed,
        profile=profile,
        violations=tuple(cluster.violations),
        log=tuple(cluster.log),
        digest=cluster.digest,
        ends=ends,
        rounds=rounds,
        virtual_s=cluster.loop.time(),
    )


async def _run(seed: int, name: str, held: list[SimCluster], edges: ExitStack, lines: int) -> Judge:
    profile = _drawn(seed, PROFILES[name])
    shape = profile.shape
    cluster = SimCluster(seed, shape, lines=lines)
    held.append(cluster)
    calm = name == "calm"
    allowed = Allowed(
        faults=not calm and name not in ("clients", "pressure"),
        conflicts=not calm,
        full=not calm,
    )
    judge, books = Judge(cluster, allowed), Books(cluster, frees_within_s=profile.frees_within_s)
    KvWatch(cluster.engines, cluster.violate)
    edges.enter_context(cluster.installed())
    cluster.start_all()
    await asyncio.sleep(START_S)
    background = SimProcess("harness")
    watch = background.spawn(books.watch())
    snapshots = background.spawn(cluster.snapshots())
    agents = [
        Agent(cluster, number, seed, profile.work, judge) for number in range(profile.work.sessions)
    ]
    running = [cluster.clients.spawn(agent.run(), name=agent.name) for agent in agents]
    numbers = itertools.count(len(agents))

    async def flood() -> None:
        visitors = [
            Visitor(cluster, next(numbers), seed, profile.work, judge) for _ in range(FLOOD)
        ]
        cluster.note("flood")
        await asyncio.gather(*(cluster.clients.spawn(visitor.run()) for visitor in visitors))

    await Nemesis(cluster, seed, profile, flood).run()
    await asyncio.gather(*running)
    cluster.note("all agents are done")
    await _comes_back(cluster, profile.comes_back_s)
    for task in (watch, snapshots):
        task.cancel()
    books.look()
    return judge


def _drawn(seed: int, profile: Profile) -> Profile:
    """The run's policy, and whether messages meet in one step of the loop: each gets its share
    of the seeds."""
    rng = random.Random(f"drawn {seed}")
    policy = rng.choice(("ampd", "ampd", "ampd-paper", "always-remote", "always-local"))
    grid_s = rng.choice((0.0, 0.0, 0.001, 0.01))
    return replace(
        profile,
        shape=replace(profile.shape, policy=policy),
        network=replace(profile.network, grid_s=grid_s),
    )


async def _comes_back(cluster: SimCluster, bound_s: float) -> None:
    """With no fault and no session left, everything is free within its bound."""
    until_s = cluster.loop.time() + bound_s
    while left := left_overs(cluster):
        if cluster.loop.time() > until_s:
            cluster.violate(f"left over after {bound_s} s: " + "; ".join(left))
            return
        await asyncio.sleep(0.25)
