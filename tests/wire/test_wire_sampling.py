import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import SamplingParams
from ampd.v1.sampling_params_pb2 import SamplingParams as Message
from ampd.wire.sampling import sampling_from_proto, sampling_to_proto

VOCAB = 1000


def refused_field(message: Message) -> str:
    with pytest.raises(AmpdError) as caught:
        sampling_from_proto(message, vocab_size=VOCAB)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    return caught.value.violations[0].field


def test_unset_fields_take_the_defaults() -> None:
    request = sampling_from_proto(Message(), vocab_size=VOCAB)
    assert request.max_tokens is None
    assert request.params == SamplingParams()


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("temperature", 0.0, 100.0),
        ("top_k", 0, 1_000_000),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("top_p", 1e-30, 1.0),
        ("repetition_penalty", 1e-30, 10.0),
        ("seed", -(2**63), 2**63 - 1),
    ],
)
def test_both_ends_of_a_range_are_in_it(name: str, lowest: Any, highest: Any) -> None:
    for value in (lowest, highest):
        params = sampling_from_proto(Message(**{name: value}), vocab_size=VOCAB).params
        assert getattr(params, name) == pytest.approx(value)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"temperature": -0.001}, "sampling.temperature"),
        ({"temperature": 100.1}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.001}, "sampling.top_p"),
        ({"top_k": 1_000_001}, "sampling.top_k"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"min_p": 1.1}, "sampling.min_p"),
        ({"presence_penalty": 2.1}, "sampling.presence_penalty"),
        ({"frequency_penalty": -2.1}, "sampling.frequency_penalty"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 10.1}, "sampling.repetition_penalty"),
        ({"stop": ["a", ""]}, "sampling.stop[1]"),
        ({"stop": ["x" * 257]}, "sampling.stop[0]"),
        ({"stop": ["x"] * 17}, "sampling.stop"),
        ({"stop_token_ids": [0, VOCAB]}, "sampling.stop_token_ids[1]"),
        ({"stop_token_ids": [0] * 65}, "sampling.stop_token_ids"),
        ({"bad_words": [""]}, "sampling.bad_words[0]"),
        ({"bad_words": ["x"] * 65}, "sampling.bad_words"),
        ({"logit_bias": {1: 100.5}}, "sampling.logit_bias[1]"),
        ({"logit_bias": {1: math.nan}}, "sampling.logit_bias[1]"),
        ({"logit_bias": {VOCAB: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "sampling.logit_bias"),
        ({"allowed_token_ids": [VOCAB]}, "sampling.allowed_token_ids[0]"),
        ({"allowed_token_ids": [1] * 4097}, "sampling.allowed_token_ids"),
    ],
)
def test_out_of_range_names_the_field(fields: dict[str, Any], path: str) -> None:
    assert refused_field(Message(**fields)) == path


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_in_no_range(name: str, value: Any) -> None:
    assert refused_field(Message(**{name: value})) == f"sampling.{name}"


def test_an_unknown_field_is_refused_by_number() -> None:
    varint_field_99 = b"\x98\x06\x01"
    assert refused_field(Message.FromString(varint_field_99)) == "sampling.99"


@pytest.mark.parametrize(
    ("asked", "left", "resolved"),
    [
        (None, 1000, 256),
        (None, 256, 256),
        (None, 12, 12),
        (None, 0, 1),
        (None, -5, 1),
        (40, 12, 40),
    ],
)
def test_max_tokens(asked: int | None, left: int, resolved: int) -> None:
    request = sampling_from_proto(
        Message() if asked is None else Message(max_tokens=asked), vocab_size=VOCAB
    )
    assert request.resolve(left).max_tokens == resolved


def test_min_tokens_beyond_max_tokens() -> None:
    request = sampling_from_proto(Message(min_tokens=5, max_tokens=5), vocab_size=VOCAB)
    assert request.resolve(100).min_tokens == 5
    for message in (Message(min_tokens=6, max_tokens=5), Message(min_tokens=257)):
        request = sampling_from_proto(message, vocab_size=VOCAB)
        with pytest.raises(AmpdError) as caught:
            request.resolve(1000)
        assert caught.value.violations[0].field == "sampling.min_tokens"


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**20),
    min_tokens=st.integers(0, 10),
    temperature=floats(0, 100),
    top_p=floats(0.125, 1),
    top_k=st.integers(0, 1_000_000),
    min_p=floats(0, 1),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    repetition_penalty=floats(0.125, 10),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=16).map(tuple),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=64).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    bad_words=st.lists(st.text(min_size=1, max_size=8), max_size=8).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), floats(-100, 100), max_size=8),
    allowed_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=64).map(tuple),
)


@given(PARAMS)
def test_resolved_parameters_come_back(params: SamplingParams) -> None:
    message = Message.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message, vocab_size=VOCAB).resolve(0) == params
