"""Policies on a live cluster: the very sessions of a simulation, in real time, on emulated engines.

Real services, gRPC, store and KV transport; only the engines' computing is a profile. A modelled
second takes `time_scale` real ones, as the machine allows: arrivals, tool times and SLOs are
stretched alike. Every policy gets the same sessions, one policy after the other in one run, and
the simulator runs them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from ampd.bench.provenance import Provenance, provenance
from ampd.client import AmpdClient
from ampd.core.errors import AmpdError
from ampd.core.model import PolicySpec, RoundTimings, Slo
from ampd.core.slo import Attainment, attainment
from ampd.sim.cluster import simulate
from ampd.sim.settings import SimSettings
from ampd.sim.workload import SessionPlan, Workload
from ampd.v1.policy_pb2 import Policy
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_pb2 import Slo as SloMessage
from ampd.v1.session_service_pb2 import GenerateRequest, RoundFinished, TokenIds
from ampd.wire import times

SETTLE_S: Final = 3.0
"""Between two policies: workers hear of the new one with a heartbeat."""
FIRST_TOKEN_ID: Final = 1000


@dataclass(frozen=True, slots=True)
class LivePlan:
    """Sessions per modelled second for `horizon_s` modelled seconds; those that arrive after
    `warm_up_s` count."""

    rate: float
    horizon_s: float
    warm_up_s: float
    time_scale: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LivePoint:
    """One policy. Times are modelled seconds."""

    policy: str
    live: Attainment
    simulated: Attainment
    failed_rounds: int
    """Whose client got an error; their sessions end, and count as not attained."""
    ttft_mean_s: float
    itl_mean_s: float
    local_share: float
    simulated_local_share: float
    late_s: float
    """How late the client began rounds, at most: what an overloaded machine does."""


@dataclass(frozen=True, slots=True)
class LiveResult:
    """One run."""

    provenance: Provenance
    plan: LivePlan
    workload: str
    profile: str
    prefill: int
    decode: int
    points: tuple[LivePoint, ...]


@dataclass(slots=True)
class _Session:
    plan: SessionPlan
    timings: list[RoundTimings]
    local_rounds: int = 0
    failed: bool = False


async def measure_live(
    client: AmpdClient,
    *,
    policies: Sequence[str],
    workload: Workload,
    settings: SimSettings,
    plan: LivePlan,
    profile: str,
) -> LiveResult:
    """Run every policy on the cluster behind `client`, whose workers are those of `settings`."""
    began = provenance()
    points = []
    for policy in policies:
        await client.set_policy(Policy(name=policy))
        await asyncio.sleep(SETTLE_S)
        points.append(await _point(client, policy, workload, settings, plan))
    return LiveResult(
        began,
        plan,
        workload.name,
        profile,
        len(settings.prefill),
        len(settings.decode),
        tuple(points),
    )


async def _point(
    client: AmpdClient, policy: str, workload: Workload, settings: SimSettings, plan: LivePlan
) -> LivePoint:
    sessions = [
        _Session(drawn, [])
        for drawn in workload.sessions(rate=plan.rate, horizon_s=plan.horizon_s, seed=plan.seed)
    ]
    lateness = _Lateness(time.monotonic(), plan.time_scale)
    async with asyncio.TaskGroup() as clients:
        for session in sessions:
            clients.create_task(_run(client, session, workload.slo, lateness))
    counted = [s for s in sessions if s.plan.arrival_s >= plan.warm_up_s]
    timings = [t for session in counted for t in session.timings]
    slo = workload.slo
    simulated = simulate(
        _with_policy(settings, policy),
        workload,
        rate=plan.rate,
        horizon_s=plan.horizon_s,
        warm_up_s=plan.warm_up_s,
        seed=plan.seed,
    )
    failed = RoundTimings(ttft_s=float("inf"))
    return LivePoint(
        policy=policy,
        live=attainment((slo, s.timings + [failed] * s.failed) for s in counted),
        simulated=simulated.attainment,
        failed_rounds=sum(session.failed for session in sessions),
        ttft_mean_s=sum(t.ttft_s for t in timings) / max(1, len(timings)),
        itl_mean_s=sum(t.itl_mean_s for t in timings) / max(1, len(timings)),
        local_share=sum(s.local_rounds for s in counted) / max(1, len(timings)),
        simulated_local_share=simulated.local_share,
        late_s=lateness.worst_s / plan.time_scale,
    )


def _with_policy(settings: SimSettings, policy: str) -> SimSettings:
    return SimSettings(
        prefill=settings.prefill,
        decode=settings.decode,
        policy=PolicySpec(policy),
        kv_bytes_per_token=settings.kv_bytes_per_token,
    )


class _Lateness:
    """The clock of one policy's run, in modelled seconds."""

    def __init__(self, start_s: float, time_scale: float) -> None:
        self._start_s = start_s
        self.time_scale = time_scale
        self.worst_s = 0.0

    def now_s(self) -> float:
        return (time.monotonic() - self._start_s) / self.time_scale

    async def until(self, at_s: float) -> None:
        """Sleep until a modelled instant; how much later it became is remembered."""
        await asyncio.sleep(max(0.0, at_s - self.now_s()) * self.time_scale)
        self.worst_s = max(self.worst_s, (self.now_s() - at_s) * self.time_scale)


async def _run(client: AmpdClient, session: _Session, slo: Slo, clock: _Lateness) -> None:
    """One agent: its rounds, each after its tool's time. An error ends it."""
    scale = clock.time_scale
    message = SloMessage(
        ttft=times.duration_to_proto(slo.ttft_s * scale),
        itl=times.duration_to_proto(slo.itl_s * scale),
    )
    begin_s = session.plan.arrival_s
    try:
        await clock.until(begin_s)
        session_id = (await client.create_session(slo=message)).session_id
        for round_ in session.plan.rounds:
            await clock.until(begin_s + round_.think_s)
            finished = await _round(
                client, session_id, round_.increment_tokens, round_.output_tokens
            )
            session.timings.append(_timings(finished, scale))
            session.local_rounds += not finished.usage.prefill_computed_tokens
            begin_s = clock.now_s()
        await client.close_session(session_id)
    except AmpdError:
        session.failed = True


async def _round(client: AmpdClient, session_id: str, tokens: int, output: int) -> RoundFinished:
    request = GenerateRequest(
        session_id=session_id,
        token_ids=TokenIds(ids=range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + tokens)),
        sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
    )
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, RoundFinished):
                return event
    raise AssertionError("a stream ends with its round")


def _timings(finished: RoundFinished, scale: float) -> RoundTimings:
    measured = finished.timings
    return RoundTimings(
        ttft_s=times.duration_from_proto(measured.ttft) / scale,
        itl_mean_s=times.duration_from_proto(measured.itl_mean) / scale,
    )
