"""`route` is fast and `plain_route` is plain: they decide the same, to the last bit."""

from hypothesis import given
from hypothesis import strategies as st
from plain_routing import plain_route

from ampd.core.cost_model import CostModel, DecodeCost, KvCost, MixedCost, PrefillCost
from ampd.core.model import PolicySpec, Role, Slo, WorkerInfo, WorkerLoad, WorkerView
from ampd.core.policies import POLICIES, resolve
from ampd.core.routing import RouteTask, route

COSTS = tuple(
    CostModel(
        prefill=PrefillCost(0.007, token_s, 1e-8, 1.7e-8, ((512, 1e-5),)),
        decode=DecodeCost(0.02, 1e-4),
        mixed=MixedCost(0.02, token_s / 8, 1e-4, 1e-7, 1.7e-8, ((32.0, 1e-4),)),
        kv=KvCost(1e-3, token_s / 50),
    )
    for token_s in (4e-4, 1.3e-4)
)
POLICY_SPECS = tuple(
    resolve(PolicySpec(name, settings))
    for name, settings in [
        *((name, {}) for name in POLICIES),
        ("ampd-paper", {"literal": True}),
        ("ampd-paper", {"alpha": 0.1, "beta": 0.5}),
        ("always-remote", {"choice": "round-robin"}),
        ("ampd-paper", {"chunk": "fixed", "chunk_tokens": 256}),
        ("cheapest", {"chunk": "fixed"}),
        ("colocated", {"chunk": "itl-safe"}),
    ]
)
SECONDS = st.one_of(st.sampled_from([0.0, 0.5, 2.7]), st.floats(0, 10))
"""Equal values are as likely as not: ties must break alike."""
TOKENS = st.one_of(st.just(0), st.integers(0, 200_000))


@st.composite
def views(draw: st.DrawFn, role: Role, name: str) -> WorkerView:
    info = WorkerInfo(
        worker_id=name,
        role=role,
        incarnation=1,
        address="",
        host="",
        kv_capacity_tokens=draw(st.sampled_from([0, 10_000, 500_000])),
        cost=draw(st.sampled_from(COSTS if role is Role.DECODE else (*COSTS, None))),
    )
    load = WorkerLoad(
        draining=draw(st.integers(0, 9)) == 9,
        queued_prefill_s=draw(SECONDS),
        ttft_window_s=draw(SECONDS),
        itl_window_s=draw(st.floats(0, 0.1)),
        running_rounds=draw(st.integers(0, 64)),
        running_context_tokens=draw(TOKENS),
        kv_running_tokens=draw(TOKENS),
    )
    return WorkerView(info, load, draw(SECONDS))


@st.composite
def decisions(draw: st.DrawFn) -> tuple[RouteTask, WorkerView, list[WorkerView]]:
    names = draw(st.lists(st.integers(0, 99), max_size=24, unique=True))
    workers = [draw(views(Role.PREFILL, f"p{number}")) for number in names]
    cached = draw(st.dictionaries(st.sampled_from(range(100)), TOKENS, max_size=4))
    task = RouteTask(
        draw(TOKENS),
        draw(st.integers(1, 20_000)),
        Slo(draw(st.sampled_from([0.3, 3.0])), draw(st.sampled_from([0.03, 0.05]))),
        {f"p{number}": tokens for number, tokens in cached.items()},
    )
    return task, draw(views(Role.DECODE, draw(st.sampled_from(["d0", "z"])))), workers


@given(decisions(), st.sampled_from(POLICY_SPECS), st.integers(0, 2**32))
def test_the_decision_is_that_of_the_plain_rules(
    decision: tuple[RouteTask, WorkerView, list[WorkerView]], policy: PolicySpec, tie_seed: int
) -> None:
    task, home, workers = decision
    seen = route(task, home=home, prefill_workers=workers, policy=policy, tie_seed=tie_seed)
    plain = plain_route(task, home=home, prefill_workers=workers, policy=policy, tie_seed=tie_seed)
    assert seen == plain
