from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord, SessionState
from ampd.core.model import (
    Binding,
    ItlStatistic,
    PolicySpec,
    Role,
    Slo,
    WaitingPrefill,
    WorkerInfo,
    WorkerLoad,
    WorkerView,
)
from ampd.v1 import policy_pb2, session_pb2, worker_pb2
from ampd.v1.session_service_pb2 import CreateSessionRequest
from ampd.wire import names
from ampd.wire.policy import policy_from_proto, policy_to_proto
from ampd.wire.session import (
    new_session_from_proto,
    session_from_proto,
    session_to_proto,
    slo_from_proto,
    slo_to_proto,
)
from ampd.wire.worker import worker_to_proto

DEFAULT = Slo(3.0, 0.1, ItlStatistic.P95)


def refused(error: pytest.ExceptionInfo[AmpdError]) -> str:
    assert error.value.reason is ErrorReason.INVALID_FIELD
    return error.value.violations[0].field


def create(**fields: Any) -> Any:
    return new_session_from_proto(CreateSessionRequest(**fields), model="m", default_slo=DEFAULT)


def test_an_empty_request_takes_the_clusters_defaults() -> None:
    new = create()
    assert (new.request_id, new.model, new.slo, new.labels) == ("", "m", DEFAULT, {})


def test_unset_parts_of_an_slo_are_the_clusters() -> None:
    slo = slo_from_proto(session_pb2.Slo(itl=Duration(nanos=50_000_000)), default=DEFAULT)
    assert slo == Slo(3.0, 0.05, ItlStatistic.P95)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": "other"}, "model"),
        ({"request_id": "x" * 65}, "request_id"),
        ({"slo": session_pb2.Slo(ttft=Duration())}, "slo.ttft"),
        ({"slo": session_pb2.Slo(ttft=Duration(seconds=-1))}, "slo.ttft"),
        ({"slo": session_pb2.Slo(itl=Duration(seconds=3600, nanos=1))}, "slo.itl"),
        ({"slo": session_pb2.Slo(itl=Duration(seconds=1, nanos=-1))}, "slo.itl"),
        ({"slo": session_pb2.Slo(itl=Duration(nanos=1_000_000_000))}, "slo.itl"),
        ({"slo": session_pb2.Slo.FromString(b"\x18\x09")}, "slo.itl_statistic"),
        ({"labels": {str(n): "" for n in range(17)}}, "labels"),
        ({"labels": {"k" * 65: "v"}}, "labels"),
        ({"labels": {"": "v"}}, "labels"),
        ({"labels": {"k": "v" * 65}}, "labels[k]"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(AmpdError) as caught:
        create(**fields)
    assert refused(caught) == path


def test_the_bounds_themselves_are_allowed() -> None:
    new = create(
        model="m",
        request_id="x" * 64,
        slo=session_pb2.Slo(ttft=Duration(seconds=3600), itl=Duration(nanos=1)),
        labels={"k" * 64: "v" * 64} | {str(n): "" for n in range(15)},
    )
    assert new.slo == Slo(3600.0, 1e-9, ItlStatistic.P95)
    assert len(new.labels) == 16


MILLISECONDS = st.integers(1, 3_600_000).map(lambda ms: ms / 1000)
SLOS = st.builds(Slo, MILLISECONDS, MILLISECONDS, st.sampled_from(ItlStatistic))


@given(SLOS)
def test_an_slo_comes_back(slo: Slo) -> None:
    back = slo_from_proto(slo_to_proto(slo), default=DEFAULT)
    assert (back.ttft_s, back.itl_s) == pytest.approx((slo.ttft_s, slo.itl_s), abs=1e-9)
    assert back.itl_statistic is slo.itl_statistic


@given(
    st.builds(
        SessionRecord,
        session_id=st.text(min_size=1),
        tenant=st.just(""),
        model=st.text(),
        slo=st.just(DEFAULT),
        created_unix_s=st.integers(0, 2**32).map(lambda s: s + 0.5),
        last_used_unix_s=st.integers(0, 2**32).map(lambda s: s + 0.25),
        state=st.sampled_from(SessionState),
        home=st.none() | st.builds(Binding, st.text(min_size=1), st.just(0)),
        history_tokens=st.integers(0, 2**32 - 1),
        rounds=st.integers(0, 2**32 - 1),
        labels=st.dictionaries(st.text(), st.text(), max_size=3),
    )
)
def test_a_session_comes_back_but_for_what_clients_are_not_told(record: SessionRecord) -> None:
    assert session_from_proto(session_to_proto(record)) == record


@pytest.mark.parametrize("tenant", ["a", "team-1.prod_x", "t" * 64])
def test_tenants(tenant: str) -> None:
    assert names.tenant_from_metadata([("other", b"x"), ("ampd-tenant", tenant)]) == tenant
    assert names.tenant_from_metadata([("other", "x")]) == "default"


@pytest.mark.parametrize("values", [[""], ["a b"], ["a:b"], ["t" * 65], [b"bin"], ["a", "a"]])
def test_tenants_that_are_none(values: list[str | bytes]) -> None:
    with pytest.raises(AmpdError) as caught:
        names.tenant_from_metadata([("ampd-tenant", value) for value in values])
    assert refused(caught) == "ampd-tenant"


def test_page_sizes() -> None:
    assert [names.page_size(n, default=100) for n in (0, 1, 1000)] == [100, 1, 1000]
    with pytest.raises(AmpdError) as caught:
        names.page_size(1001, default=100)
    assert refused(caught) == "page_size"


SETTINGS = st.dictionaries(
    st.text(min_size=1, max_size=64),
    st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=256),
    max_size=64,
)


@given(SETTINGS, st.integers(0, 2**63))
def test_a_policy_comes_back(settings: dict[str, float | int | bool | str], version: int) -> None:
    policy = PolicySpec("ampd-paper", settings, version)
    message = policy_pb2.Policy.FromString(policy_to_proto(policy).SerializeToString())
    back = policy_from_proto(message)
    assert back == policy
    assert {k: isinstance(v, bool) for k, v in back.settings.items()} == {
        k: isinstance(v, bool) for k, v in settings.items()
    }


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"alpha": None}, "policy.settings.alpha"),
        ({"alpha": [1]}, "policy.settings.alpha"),
        ({"alpha": {"x": 1}}, "policy.settings.alpha"),
        ({"alpha": float("nan")}, "policy.settings.alpha"),
        ({"alpha": "x" * 257}, "policy.settings.alpha"),
        ({str(n): n for n in range(65)}, "policy.settings"),
    ],
)
def test_a_setting_of_no_plain_kind_is_named(settings: dict[str, Any], path: str) -> None:
    struct = Struct()
    struct.update(settings)
    with pytest.raises(AmpdError) as caught:
        policy_from_proto(policy_pb2.Policy(name="p", settings=struct))
    assert refused(caught) == path


def test_a_policy_needs_a_name() -> None:
    with pytest.raises(AmpdError) as caught:
        policy_from_proto(policy_pb2.Policy())
    assert refused(caught) == "policy.name"


def test_a_worker_is_shown_whole() -> None:
    info = WorkerInfo(
        worker_id="d0",
        role=Role.DECODE,
        incarnation=2**63,
        address="h:1",
        host="h",
        model="m",
        engine="e 1",
        kv_block_tokens=16,
        kv_capacity_tokens=1000,
        kv_bytes_per_token=64,
        max_model_tokens=4096,
    )
    waiting = (WaitingPrefill("t", "s", 1, 2, 0.5, 3.0),)
    load = WorkerLoad(True, 1, 2.0, 3.0, 4.0, 5.0, 6, 7, 8, 9, 10, 11, ("t",), 12.0, 1.5, waiting)
    message = worker_to_proto(WorkerView(info, load, age_s=0.5))
    assert message.role == worker_pb2.WORKER_ROLE_DECODE
    assert message.load.age.ToMilliseconds() == 500
    named = [*message.ListFields(), *message.load.ListFields()]
    # Every field of both messages is set: none was forgotten.
    assert len(named) == len(message.DESCRIPTOR.fields) + len(message.load.DESCRIPTOR.fields)
