"""Small simulated clusters whose numbers can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.model import PolicySpec, Slo
from ampd.core.policies import SettingValue
from ampd.sim.cluster import simulate
from ampd.sim.report import SimReport
from ampd.sim.settings import SimSettings, WorkerSpec
from ampd.sim.workload import RoundPlan, SessionPlan, Workload

SLO = Slo(ttft_s=1.0, itl_s=0.05)
COST = CostModel(
    prefill=PrefillCost(token_s=1e-3),
    decode=DecodeCost(base_s=0.01),
    mixed=MixedCost(base_s=0.01, token_s=1e-3),
    kv=KvCost(token_s=1e-4),
)


@dataclass(frozen=True, slots=True)
class Given(Workload):
    """Just these sessions."""

    plans: tuple[SessionPlan, ...] = ()

    def sessions(self, *, rate: float, horizon_s: float, seed: int) -> Iterator[SessionPlan]:
        return iter(self.plans)


def session(name: str, arrival_s: float, *rounds: RoundPlan) -> SessionPlan:
    return SessionPlan(name, arrival_s, rounds)


def settings(
    *,
    prefill: int = 1,
    decode: int = 1,
    policy: str = "always-remote",
    policy_settings: Mapping[str, SettingValue] | None = None,
    cost: CostModel = COST,
    kv_capacity_tokens: int = 1_000_000,
    **more: object,
) -> SimSettings:
    spec = WorkerSpec(cost, kv_capacity_tokens)
    fields: dict[str, object] = {"heartbeat_s": 0.0, "decision_log": True, **more}
    return SimSettings(
        (spec,) * prefill,
        (spec,) * decode,
        PolicySpec(policy, policy_settings or {}),
        **fields,  # type: ignore[arg-type]
    )


def run(chosen: SimSettings, *plans: SessionPlan, slo: Slo = SLO) -> SimReport:
    return simulate(chosen, Given("given", slo, plans), rate=0.0, horizon_s=1e9)
