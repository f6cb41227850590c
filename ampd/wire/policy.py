"""Policies: a named set of settings, as google.protobuf.Struct on the wire."""

from __future__ import annotations

import math
from typing import Final

from google.protobuf.struct_pb2 import Struct, Value

from ampd.core.errors import invalid_field
from ampd.core.model import PolicySpec
from ampd.v1 import policy_pb2
from ampd.wire import names

MAX_SETTINGS: Final = 64
MAX_SETTING_CHARS: Final = 256

_MAX_EXACT_INT: Final = 2**53
"""A Struct's numbers are doubles: integers are exact up to here."""


def policy_from_proto(message: policy_pb2.Policy) -> PolicySpec:
    """The policy by shape alone: whether its name and settings exist is the core's to say.

    A whole number becomes an int. AmpdError INVALID_FIELD `policy.name`, `policy.settings.<name>`.
    """
    if len(message.settings.fields) > MAX_SETTINGS:
        raise invalid_field("policy.settings", f"at most {MAX_SETTINGS} are allowed")
    return PolicySpec(
        name=names.required_id(message.name, "policy.name"),
        settings={
            name: _setting(value, f"policy.settings.{names.short_text(name, 'policy.settings')}")
            for name, value in message.settings.fields.items()
        },
        version=message.version,
    )


def policy_to_proto(policy: PolicySpec) -> policy_pb2.Policy:
    """The wire form with every setting that the spec has."""
    settings = Struct()
    settings.update(dict(policy.settings))
    return policy_pb2.Policy(name=policy.name, settings=settings, version=policy.version)


def _setting(value: Value, path: str) -> float | int | bool | str:
    match value.WhichOneof("kind"):
        case "bool_value":
            return value.bool_value
        case "string_value":
            return names.short_text(value.string_value, path, max_chars=MAX_SETTING_CHARS)
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise invalid_field(path, f"{number} is no number that a setting can have")
            whole = number.is_integer() and abs(number) <= _MAX_EXACT_INT
            return int(number) if whole else number
        case _:
            raise invalid_field(path, "a setting is a number, a string or a boolean")
