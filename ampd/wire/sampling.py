"""Sampling parameters from the wire, every range checked (protos/ampd/v1/sampling_params.proto)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from google.protobuf.unknown_fields import UnknownFieldSet

from ampd.core.errors import invalid_field
from ampd.core.model import SamplingParams
from ampd.v1 import sampling_params_pb2

DEFAULT_MAX_TOKENS: Final = 256

_DEFAULTS: Final = SamplingParams()
_MAX_TEMPERATURE: Final = 100.0
_MAX_TOP_K: Final = 1_000_000
_MAX_PENALTY: Final = 2.0
_MAX_REPETITION_PENALTY: Final = 10.0
_MAX_STOPS: Final = 16
_MAX_STOP_CHARS: Final = 256
_MAX_STOP_TOKENS: Final = 64
_MAX_BAD_WORDS: Final = 64
_MAX_BIASES: Final = 1024
_MAX_BIAS: Final = 100.0
_MAX_ALLOWED_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling parameters as a client asked for them: valid but for what the context decides."""

    params: SamplingParams
    """Its `max_tokens` means nothing before `resolve`."""
    max_tokens: int | None
    """None: not asked for."""

    def resolve(self, context_left_tokens: int) -> SamplingParams:
        """The parameters with `max_tokens`: what was asked for, or 256, or what the context
        leaves, whichever is less. At least 1, so that a full context is refused where a too
        long request is. AmpdError INVALID_FIELD `sampling.min_tokens` beyond `max_tokens`.
        """
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, context_left_tokens))
        if self.params.min_tokens > max_tokens:
            raise invalid_field(
                "sampling.min_tokens", f"{self.params.min_tokens} is beyond max_tokens {max_tokens}"
            )
        return replace(self.params, max_tokens=max_tokens)


def sampling_from_proto(
    message: sampling_params_pb2.SamplingParams, *, vocab_size: int, path: str = "sampling"
) -> SamplingRequest:
    """The request's parameters; AmpdError INVALID_FIELD names the first field that is wrong,
    a field this version does not know included (`sampling.<number>`)."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise invalid_field(f"{path}.{unknown[0].field_number}", "this server does not know it")
    max_tokens: int | None = None
    if message.HasField("max_tokens"):
        max_tokens = message.max_tokens
        if max_tokens < 1:
            raise invalid_field(f"{path}.max_tokens", "0 is not in the range from 1")
    return SamplingRequest(
        SamplingParams(
            min_tokens=message.min_tokens,
            temperature=_number(
                message, "temperature", path, _DEFAULTS.temperature, least=0, most=_MAX_TEMPERATURE
            ),
            top_p=_number(message, "top_p", path, _DEFAULTS.top_p, above=0, most=1),
            top_k=int(_number(message, "top_k", path, _DEFAULTS.top_k, least=0, most=_MAX_TOP_K)),
            min_p=_number(message, "min_p", path, _DEFAULTS.min_p, least=0, most=1),
            presence_penalty=_penalty(message, "presence_penalty", path),
            frequency_penalty=_penalty(message, "frequency_penalty", path),
            repetition_penalty=_number(
                message,
                "repetition_penalty",
                path,
                _DEFAULTS.repetition_penalty,
                above=0,
                most=_MAX_REPETITION_PENALTY,
            ),
            seed=message.seed if message.HasField("seed") else None,
            stop=_strings(message.stop, f"{path}.stop", _MAX_STOPS, max_chars=_MAX_STOP_CHARS),
            stop_token_ids=_ids(
                message.stop_token_ids, f"{path}.stop_token_ids", _MAX_STOP_TOKENS, vocab_size
            ),
            include_stop_str_in_output=message.include_stop_str_in_output,
            ignore_eos=message.ignore_eos,
            skip_special_tokens=(
                message.skip_special_tokens
                if message.HasField("skip_special_tokens")
                else _DEFAULTS.skip_special_tokens
            ),
            bad_words=_strings(message.bad_words, f"{path}.bad_words", _MAX_BAD_WORDS),
            logit_bias=_biases(message, f"{path}.logit_bias", vocab_size),
            allowed_token_ids=_ids(
                message.allowed_token_ids,
                f"{path}.allowed_token_ids",
                _MAX_ALLOWED_TOKENS,
                vocab_size,
            ),
        ),
        max_tokens,
    )


def sampling_to_proto(params: SamplingParams) -> sampling_params_pb2.SamplingParams:
    """The wire form, every field set that is not its default, and `max_tokens` always."""
    message = sampling_params_pb2.SamplingParams(max_tokens=params.max_tokens)
    for name in _SCALARS:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            setattr(message, name, value)
    message.stop.extend(params.stop)
    message.stop_token_ids.extend(params.stop_token_ids)
    message.bad_words.extend(params.bad_words)
    message.allowed_token_ids.extend(params.allowed_token_ids)
    for token_id, bias in params.logit_bias.items():
        message.logit_bias[token_id] = bias
    return message


_SCALARS: Final = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def _number(
    message: sampling_params_pb2.SamplingParams,
    name: str,
    path: str,
    default: float,
    *,
    most: float,
    least: float = -math.inf,
    above: float = -math.inf,
) -> float:
    """A number in [least, most], or (above, most]; not a number is in no range."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return default
    value: float = getattr(message, name)
    if not (least <= value <= most and value > above):
        start = f"above {above:g}" if above > least else f"{least:g}"
        raise invalid_field(f"{path}.{name}", f"{value:g} is not in the range {start} to {most:g}")
    return value


def _penalty(message: sampling_params_pb2.SamplingParams, name: str, path: str) -> float:
    return _number(message, name, path, 0.0, least=-_MAX_PENALTY, most=_MAX_PENALTY)


def _strings(
    values: Sequence[str], path: str, limit: int, *, max_chars: int | None = None
) -> tuple[str, ...]:
    _check_count(len(values), path, limit)
    for index, value in enumerate(values):
        if not value:
            raise invalid_field(f"{path}[{index}]", "it must not be empty")
        if max_chars is not None and len(value) > max_chars:
            raise invalid_field(
                f"{path}[{index}]", f"{len(value)} characters, at most {max_chars} are allowed"
            )
    return tuple(values)


def _ids(values: Sequence[int], path: str, limit: int, vocab_size: int) -> tuple[int, ...]:
    _check_count(len(values), path, limit)
    for index, token_id in enumerate(values):
        if token_id >= vocab_size:
            raise invalid_field(
                f"{path}[{index}]", f"{token_id} is outside the vocabulary of {vocab_size}"
            )
    return tuple(values)


def _biases(
    message: sampling_params_pb2.SamplingParams, path: str, vocab_size: int
) -> dict[int, float]:
    _check_count(len(message.logit_bias), path, _MAX_BIASES)
    for token_id, bias in message.logit_bias.items():
        if token_id >= vocab_size:
            raise invalid_field(path, f"{token_id} is outside the vocabulary of {vocab_size}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise invalid_field(
                f"{path}[{token_id}]",
                f"{bias:g} is not in the range {-_MAX_BIAS:g} to {_MAX_BIAS:g}",
            )
    return dict(message.logit_bias)


def _check_count(count: int, path: str, limit: int) -> None:
    if count > limit:
        raise invalid_field(path, f"{count} entries, at most {limit} are allowed")
