"""The round protocol between coordinators and homes: the order, and the stream of its events."""

from __future__ import annotations

from typing import Final

from ampd.core.errors import invalid_field
from ampd.core.model import (
    Accepted,
    Finished,
    Rerouted,
    ResumedOutput,
    RoundEvent,
    RoundOrder,
    SessionFacts,
    TokensOut,
)
from ampd.v1 import session_service_pb2
from ampd.wire import (
    enums,
    names,
    round,  # noqa: A004
    sampling,
    session,
    times,
    tokens,
    worker_protocol,
)
from ampd.worker.v1 import decode_service_pb2

MAX_TARGETS: Final = 64
MAX_DISCARDED: Final = 64

_ANY_TOKEN_ID: Final = 2**32
"""Ids are checked against the vocabulary where they enter the cluster, not again here."""


def order_to_proto(
    order: RoundOrder, *, incarnation: int, now_s: float
) -> decode_service_pb2.RunRoundRequest:
    """`incarnation`: the life of the home that is meant; `now_s`: the clock of `created_s`."""
    return decode_service_pb2.RunRoundRequest(
        incarnation=incarnation,
        session_id=order.session_id,
        request_id=order.request_id,
        round_index=order.round_index,
        keep_history_tokens=order.keep_history_tokens,
        increment=tokens.tokens_to_bytes(order.increment),
        history=None if order.history is None else tokens.tokens_to_bytes(order.history),
        sampling=sampling.sampling_to_proto(order.sampling),
        slo=session.slo_to_proto(order.slo),
        age=times.duration_to_proto(max(0.0, now_s - order.created_s)),
        targets=[worker_protocol.target_to_proto(target) for target in order.targets],
        reason=enums.ROUTE_REASON.to_proto(order.reason),
        footprint_tokens=order.footprint_tokens,
        resumed=None if order.resumed is None else _resumed_to_proto(order.resumed, now_s=now_s),
        admission_wait=(
            None
            if order.admission_wait_s is None
            else times.duration_to_proto(order.admission_wait_s)
        ),
        detached=order.detached,
        facts=None if order.facts is None else facts_to_proto(order.facts),
        discarded=order.discarded,
        attempt_id=order.attempt_id,
    )


def order_from_proto(message: decode_service_pb2.RunRoundRequest, *, now_s: float) -> RoundOrder:
    """The order on the clock of `now_s`; AmpdError INVALID_FIELD."""
    increment = tokens.tokens_from_bytes(message.increment, "increment")
    if not increment:
        raise invalid_field("increment", "at least one token")
    history = None
    if message.HasField("history"):
        history = tokens.tokens_from_bytes(message.history, "history")
        if len(history) != message.keep_history_tokens:
            raise invalid_field(
                "history",
                f"{len(history)} tokens, not keep_history_tokens = {message.keep_history_tokens}",
            )
    if not message.sampling.HasField("max_tokens"):
        raise invalid_field("sampling.max_tokens", "required in an order")
    if len(message.targets) > MAX_TARGETS:
        raise invalid_field("targets", f"at most {MAX_TARGETS}")
    if len(message.discarded) > MAX_DISCARDED:
        raise invalid_field("discarded", f"at most {MAX_DISCARDED}")
    asked = sampling.sampling_from_proto(message.sampling, vocab_size=_ANY_TOKEN_ID)
    return RoundOrder(
        session_id=names.required_id(message.session_id, "session_id"),
        request_id=names.required_id(message.request_id, "request_id"),
        round_index=message.round_index,
        keep_history_tokens=message.keep_history_tokens,
        increment=increment,
        history=history,
        sampling=asked.resolve(message.sampling.max_tokens),
        slo=session.whole_slo_from_proto(message.slo, "slo"),
        created_s=now_s - times.age_from_proto(message.age, "age"),
        targets=tuple(
            worker_protocol.target_from_proto(target, f"targets[{index}]")
            for index, target in enumerate(message.targets)
        ),
        reason=enums.ROUTE_REASON.from_proto(message.reason, "reason"),
        footprint_tokens=message.footprint_tokens,
        resumed=(
            _resumed_from_proto(message.resumed, "resumed", now_s=now_s)
            if message.HasField("resumed")
            else None
        ),
        admission_wait_s=(
            times.age_from_proto(message.admission_wait, "admission_wait")
            if message.HasField("admission_wait")
            else None
        ),
        detached=message.detached,
        facts=facts_from_proto(message.facts) if message.HasField("facts") else None,
        discarded=tuple(message.discarded),
        attempt_id=message.attempt_id,
    )


def facts_to_proto(facts: SessionFacts) -> decode_service_pb2.SessionFacts:
    """What a session is, whatever its rounds."""
    return decode_service_pb2.SessionFacts(
        tenant=facts.tenant,
        model=facts.model,
        create_time=times.timestamp_to_proto(facts.created_unix_s),
        labels=facts.labels,
    )


def facts_from_proto(message: decode_service_pb2.SessionFacts) -> SessionFacts:
    """What a session is, whatever its rounds."""
    return SessionFacts(
        tenant=message.tenant,
        model=message.model,
        created_unix_s=times.timestamp_from_proto(message.create_time),
        labels=dict(message.labels),
    )


def _resumed_to_proto(output: ResumedOutput, *, now_s: float) -> decode_service_pb2.ResumedOutput:
    return decode_service_pb2.ResumedOutput(
        token_ids=tokens.tokens_to_bytes(output.token_ids),
        text=output.text,
        first_token_age=times.duration_to_proto(max(0.0, now_s - output.first_token_s)),
        last_token_age=times.duration_to_proto(max(0.0, now_s - output.last_token_s)),
        gaps_s=output.gaps_s,
    )


def _resumed_from_proto(
    message: decode_service_pb2.ResumedOutput, path: str, *, now_s: float
) -> ResumedOutput:
    token_ids = tokens.tokens_from_bytes(message.token_ids, f"{path}.token_ids")
    if not token_ids:
        raise invalid_field(f"{path}.token_ids", "at least one token")
    return ResumedOutput(
        token_ids=token_ids,
        text=message.text,
        first_token_s=now_s - times.age_from_proto(message.first_token_age, path),
        last_token_s=now_s - times.age_from_proto(message.last_token_age, path),
        gaps_s=tuple(message.gaps_s),
    )


def event_to_proto(event: RoundEvent, *, now_s: float) -> decode_service_pb2.RunRoundResponse:
    """One event of a round. Tokens first: they are nearly all of them."""
    match event:
        case TokensOut():
            return decode_service_pb2.RunRoundResponse(tokens=batch_to_proto(event))
        case Accepted():
            resumed = event.resumed
            return decode_service_pb2.RunRoundResponse(
                accepted=decode_service_pb2.RoundAccepted(
                    history_rebuilt=event.history_rebuilt,
                    resumed=None if resumed is None else _resumed_to_proto(resumed, now_s=now_s),
                )
            )
        case Rerouted():
            return decode_service_pb2.RunRoundResponse(
                rerouted=decode_service_pb2.RoundRerouted(
                    route=enums.ROUTE.to_proto(event.route),
                    reason=enums.ROUTE_REASON.to_proto(event.reason),
                    prefill_worker=event.prefill_worker or "",
                )
            )
        case Finished():
            return decode_service_pb2.RunRoundResponse(finished=round.finished_to_proto(event))


def event_from_proto(message: decode_service_pb2.RunRoundResponse, *, now_s: float) -> RoundEvent:
    """One event of a round; AmpdError INVALID_FIELD `event` for one that is not known."""
    match message.WhichOneof("event"):
        case "tokens":
            return batch_from_proto(message.tokens)
        case "accepted":
            accepted = message.accepted
            resumed = None
            if accepted.HasField("resumed"):
                resumed = _resumed_from_proto(accepted.resumed, "accepted.resumed", now_s=now_s)
            return Accepted(history_rebuilt=accepted.history_rebuilt, resumed=resumed)
        case "rerouted":
            moved = message.rerouted
            return Rerouted(
                route=enums.ROUTE.from_proto(moved.route, "rerouted.route"),
                reason=enums.ROUTE_REASON.from_proto(moved.reason, "rerouted.reason"),
                prefill_worker=moved.prefill_worker or None,
            )
        case "finished":
            return round.finished_from_proto(message.finished)
        case _:
            raise invalid_field("event", "an event that this version does not know")


def batch_to_proto(event: TokensOut) -> session_service_pb2.TokenBatch:
    """New output tokens. The ids are copied in one pass in C, from whatever sequence it is."""
    return session_service_pb2.TokenBatch(token_ids=event.token_ids, text=event.text)


def batch_from_proto(message: session_service_pb2.TokenBatch) -> TokensOut:
    """New output tokens."""
    return TokensOut(tuple(message.token_ids), message.text)
