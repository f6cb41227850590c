from array import array
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import (
    Accepted,
    BindDecision,
    BindReason,
    Finished,
    FinishReason,
    ItlStatistic,
    KvHandle,
    PrefillStats,
    PrefillTarget,
    PrefillTask,
    Rerouted,
    RoundEvent,
    RoundOrder,
    RoundRecord,
    RoundTimings,
    RoundUsage,
    Route,
    RouteCandidate,
    RouteDecision,
    RouteReason,
    SamplingParams,
    Slo,
    TokensOut,
)
from ampd.ports import ClaimedTask, PrefillReport
from ampd.v1 import round_pb2
from ampd.wire import order as wire_order
from ampd.wire import round as wire_round
from ampd.wire import times, tokens, worker_protocol
from ampd.worker.v1 import decode_service_pb2, task_pb2

COUNT = st.integers(0, 2**32 - 1)
BIG = st.integers(0, 2**63 - 1)
# Eighths of seconds pass through nanoseconds and float sums unharmed.
SECONDS = st.integers(0, 80_000).map(lambda eighths: eighths / 8)
NAME = st.from_regex(r"[!-~]{1,64}", fullmatch=True)
TOKENS = st.lists(COUNT, max_size=50).map(lambda ids: array("I", ids))
SOME_TOKENS = st.lists(COUNT, min_size=1, max_size=50).map(lambda ids: array("I", ids))
SLO = st.builds(
    Slo,
    st.integers(1, 8 * 3600).map(lambda n: n / 8),
    st.integers(1, 8 * 3600).map(lambda n: n / 8),
    st.sampled_from(ItlStatistic),
)
USAGE = st.builds(RoundUsage, *[COUNT] * 8, BIG, COUNT, BIG)
TIMINGS = st.builds(RoundTimings, *[SECONDS] * 9)
KV = st.builds(KvHandle, NAME, BIG, st.integers(1, 2**32 - 1), SECONDS, st.binary(max_size=64))
STATS = st.builds(
    PrefillStats,
    computed_tokens=COUNT,
    cached_tokens=COUNT,
    pulled_tokens=COUNT,
    pulled_bytes=BIG,
    read_end_s=SECONDS,
    compute_end_s=SECONDS,
)
CANDIDATE = st.builds(RouteCandidate, st.text(), st.sampled_from(Route), *[SECONDS] * 5)
DECISION = st.builds(
    RouteDecision,
    route=st.sampled_from(Route),
    prefill_worker=st.none() | NAME,
    reason=st.sampled_from(RouteReason),
    policy=st.text(),
    predicted_ttft_s=SECONDS,
    candidates=st.lists(CANDIDATE, max_size=3).map(tuple),
    fallbacks=st.lists(NAME, max_size=3).map(tuple),
    state_age_s=SECONDS,
)
FINISHED = st.builds(
    Finished, st.sampled_from(FinishReason), st.text(), USAGE, TIMINGS, st.booleans(), COUNT
)
EVENT: st.SearchStrategy[RoundEvent] = st.one_of(
    st.builds(Accepted, st.booleans()),
    st.builds(Rerouted, st.sampled_from(Route), st.sampled_from(RouteReason), st.none() | NAME),
    st.builds(TokensOut, st.lists(COUNT, max_size=8).map(tuple), st.text()),
    FINISHED,
)


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(AmpdError) as caught:
        make()
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    return caught.value.violations[0].field


# --- tokens and times ---------------------------------------------------------------------


@given(TOKENS)
def test_tokens_come_back(ids: "array[int]") -> None:
    data = tokens.tokens_to_bytes(ids)
    assert data == b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert tokens.tokens_from_bytes(data, "x") == ids


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4095])
def test_token_bytes_are_whole(length: int) -> None:
    assert refused(lambda: tokens.tokens_from_bytes(bytes(length), "increment")) == "increment"


@given(st.floats(-1e9, 1e9))
def test_durations_keep_nanoseconds(seconds: float) -> None:
    message = times.duration_to_proto(seconds)
    assert times.valid_duration(message, "x") == pytest.approx(seconds, abs=1e-9)


def test_durations_at_their_ends() -> None:
    assert times.duration_to_proto(float("inf")).seconds == times.MAX_DURATION_S
    assert times.duration_to_proto(0.9999999999) == Duration(seconds=1)
    assert times.duration_to_proto(-0.9999999999) == Duration(seconds=-1)
    with pytest.raises(ValueError, match="not a number"):
        times.duration_to_proto(float("nan"))


@given(st.floats(0, 4e9))
def test_timestamps_keep_microseconds(unix_s: float) -> None:
    message = times.timestamp_to_proto(unix_s)
    assert 0 <= message.nanos < 10**9
    assert times.timestamp_from_proto(message) == pytest.approx(unix_s, abs=1e-6)


# --- the prefill protocol -----------------------------------------------------------------


@given(
    st.builds(
        PrefillTask,
        task_id=NAME,
        session_id=NAME,
        round_index=COUNT,
        home=NAME,
        history_tokens=COUNT,
        increment_tokens=st.integers(1, 2**32 - 1),
        created_s=SECONDS,
        slo=SLO,
    ),
    SECONDS,
    SECONDS,
)
def test_a_task_keeps_its_age_on_another_clock(
    task: PrefillTask, waited_s: float, other_clock_s: float
) -> None:
    message = worker_protocol.task_to_proto(
        task, home_address="h:1", home_incarnation=7, now_s=task.created_s + waited_s
    )
    back, address, incarnation = worker_protocol.task_from_proto(message, now_s=other_clock_s)
    assert (address, incarnation) == ("h:1", 7)
    assert back.created_s == other_clock_s - waited_s
    same = worker_protocol.task_from_proto(message, now_s=task.created_s + waited_s)[0]
    assert same == task


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"task_id": ""}, "task.task_id"),
        ({"session_id": "a b"}, "task.session_id"),
        ({"home": ""}, "task.home"),
        ({"home_address": ""}, "task.home_address"),
        ({"increment_tokens": 0}, "task.increment_tokens"),
        ({"age": Duration(seconds=-1)}, "task.age"),
        ({"slo": None}, "task.slo.ttft"),
    ],
)
def test_a_broken_task_is_refused(fields: dict[str, Any], path: str) -> None:
    task = PrefillTask("t", "s", 0, "d", 0, 1, 0.0, Slo(1.0, 0.1))
    message = worker_protocol.task_to_proto(task, home_address="h:1", home_incarnation=1, now_s=0.0)
    for name, value in fields.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if value is not None:
            message.MergeFrom(task_pb2.PrefillTask(**{name: value}))
    assert refused(lambda: worker_protocol.task_from_proto(message, now_s=0.0)) == path


@given(st.builds(PrefillReport, KV, STATS, SECONDS))
def test_a_report_comes_back(report: PrefillReport) -> None:
    assert worker_protocol.report_from_proto(worker_protocol.report_to_proto(report)) == report


def test_intervals_travel_as_lengths() -> None:
    stats = PrefillStats(read_start_s=5, read_end_s=6, compute_start_s=5.5, compute_end_s=8)
    back = worker_protocol.stats_from_proto(worker_protocol.stats_to_proto(stats))
    assert (back.read_s, back.compute_s) == (1.0, 2.5)


@given(st.builds(ClaimedTask, TOKENS, st.none() | KV))
def test_a_claim_comes_back(claimed: ClaimedTask) -> None:
    assert worker_protocol.claimed_from_proto(worker_protocol.claimed_to_proto(claimed)) == claimed


def test_broken_handles_are_refused() -> None:
    handle = worker_protocol.kv_to_proto(KvHandle("p", 1, 4, 1.0, b"x"))
    handle.tokens = 0
    assert refused(lambda: worker_protocol.kv_from_proto(handle, "kv")) == "kv.tokens"
    handle.tokens, handle.payload = 1, bytes(worker_protocol.MAX_KV_PAYLOAD_BYTES + 1)
    assert refused(lambda: worker_protocol.kv_from_proto(handle, "kv")) == "kv.payload"


# --- the round protocol -------------------------------------------------------------------

ORDERS = st.builds(
    RoundOrder,
    session_id=NAME,
    request_id=NAME,
    round_index=COUNT,
    keep_history_tokens=st.just(0),
    increment=SOME_TOKENS,
    sampling=st.just(SamplingParams(max_tokens=7, temperature=0.5, stop=("x",), seed=-1)),
    slo=SLO,
    created_s=SECONDS,
    reason=st.sampled_from(RouteReason),
    history=st.none() | TOKENS,
    targets=st.lists(st.builds(PrefillTarget, NAME, BIG, st.text()), max_size=3).map(tuple),
    footprint_tokens=BIG,
)


def with_kept_history(order: RoundOrder) -> RoundOrder:
    kept = 5 if order.history is None else len(order.history)
    return RoundOrder(
        **{name: getattr(order, name) for name in RoundOrder.__slots__}
        | {"keep_history_tokens": kept}
    )


@given(ORDERS.map(with_kept_history), SECONDS)
def test_an_order_comes_back(order: RoundOrder, waited_s: float) -> None:
    now_s = order.created_s + waited_s
    message = decode_service_pb2.RunRoundRequest.FromString(
        wire_order.order_to_proto(order, incarnation=3, now_s=now_s).SerializeToString()
    )
    assert message.incarnation == 3
    assert wire_order.order_from_proto(message, now_s=now_s) == order


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"increment": b""}, "increment"),
        ({"increment": b"abcde"}, "increment"),
        ({"history": b"abcd"}, "history"),
        ({"session_id": ""}, "session_id"),
        ({"request_id": ""}, "request_id"),
        ({"age": Duration(nanos=-1)}, "age"),
        ({"reason": 0}, "reason"),
        ({"reason": 99}, "reason"),
        ({"slo": None}, "slo.ttft"),
        ({"sampling": None}, "sampling.max_tokens"),
        ({"targets": [decode_service_pb2.PrefillTarget()]}, "targets[0].worker_id"),
        ({"targets": [decode_service_pb2.PrefillTarget(worker_id="p")] * 65}, "targets"),
    ],
)
def test_a_broken_order_is_refused(fields: dict[str, Any], path: str) -> None:
    order = RoundOrder(
        session_id="s",
        request_id="r",
        round_index=0,
        keep_history_tokens=0,
        increment=array("I", [1]),
        sampling=SamplingParams(max_tokens=7),
        slo=Slo(1.0, 0.1),
        created_s=0.0,
        reason=RouteReason.ALWAYS_LOCAL,
    )
    message = wire_order.order_to_proto(order, incarnation=1, now_s=0.0)
    for name, value in fields.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if value is not None:
            message.MergeFrom(decode_service_pb2.RunRoundRequest(**{name: value}))
    assert refused(lambda: wire_order.order_from_proto(message, now_s=0.0)) == path


@given(EVENT)
def test_an_event_comes_back(event: RoundEvent) -> None:
    message = decode_service_pb2.RunRoundResponse.FromString(
        wire_order.event_to_proto(event, now_s=5.0).SerializeToString()
    )
    assert wire_order.event_from_proto(message, now_s=5.0) == event


def test_an_unknown_event_is_refused() -> None:
    nothing = decode_service_pb2.RunRoundResponse()
    assert refused(lambda: wire_order.event_from_proto(nothing, now_s=5.0)) == "event"


def test_tokens_of_any_sequence_are_sent() -> None:
    for ids in ([1, 2], (1, 2), array("I", [1, 2])):
        assert list(wire_order.batch_to_proto(TokensOut(ids, "x")).token_ids) == [1, 2]


# --- records ------------------------------------------------------------------------------


@given(
    st.builds(
        RoundRecord,
        round_index=COUNT,
        request_id=st.text(),
        history_tokens=st.just(3),
        increment_tokens=st.just(4),
        history_rebuilt=st.booleans(),
        decode_worker=NAME,
        prefill_worker=st.none() | NAME,
        reason=st.sampled_from(RouteReason),
        decision=DECISION,
        bind=st.none()
        | st.builds(
            BindDecision,
            NAME,
            st.sampled_from(BindReason),
            st.integers(-(2**63), 2**63 - 1),
            BIG,
        ),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        usage=st.just(RoundUsage(history_tokens=3, increment_tokens=4, output_tokens=5)),
        timings=TIMINGS,
        attained=st.booleans(),
        created_unix_s=SECONDS,
    )
)
def test_a_record_comes_back(record: RoundRecord) -> None:
    message = round_pb2.RoundRecord.FromString(
        wire_round.record_to_proto(record).SerializeToString()
    )
    assert wire_round.record_from_proto(message) == record
    assert message.route == (
        round_pb2.ROUTE_REMOTE if record.prefill_worker else round_pb2.ROUTE_LOCAL
    )


@given(USAGE)
def test_usage_comes_back(usage: RoundUsage) -> None:
    assert wire_round.usage_from_proto(wire_round.usage_to_proto(usage)) == usage


def test_a_decision_with_an_unknown_reason_names_it() -> None:
    message = round_pb2.RouteDecision(route=round_pb2.ROUTE_LOCAL)
    assert refused(lambda: wire_round.decision_from_proto(message)) == "decision.reason"
