"""Durations and timestamps as float seconds. On the wire: whole nanoseconds."""

from __future__ import annotations

import math
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ampd.core.errors import invalid_field

MAX_DURATION_S: Final = 315_576_000_000
"""The proto's own bound (10,000 years): an unbounded prediction is sent as this."""

_NANOS: Final = 1_000_000_000
_MAX_TIMESTAMP_S: Final = 253_402_300_799
"""9999-12-31T23:59:59Z, the proto's last second."""


def duration_to_proto(seconds: float) -> Duration:
    """`seconds` rounded to nanoseconds, infinities as the longest duration. ValueError: NaN."""
    if math.isnan(seconds):
        raise ValueError("a duration that is not a number")
    seconds = max(-MAX_DURATION_S, min(MAX_DURATION_S, seconds))
    whole = math.trunc(seconds)
    nanos = round((seconds - whole) * _NANOS)
    if abs(nanos) == _NANOS:
        whole, nanos = whole + (1 if nanos > 0 else -1), 0
    return Duration(seconds=whole, nanos=nanos)


def duration_from_proto(value: Duration) -> float:
    """Seconds, of a duration that AMPD itself has made."""
    return value.seconds + value.nanos / _NANOS


def checked_duration(value: Duration, path: str, *, max_s: float) -> float:
    """Seconds, from above 0 to `max_s`; else AmpdError INVALID_FIELD `path`."""
    seconds = valid_duration(value, path)
    if not 0 < seconds <= max_s:
        raise invalid_field(path, f"{seconds:g} s is not above 0 s and at most {max_s:g} s")
    return seconds


def age_from_proto(value: Duration, path: str) -> float:
    """Seconds, 0 or more; else AmpdError INVALID_FIELD `path`."""
    seconds = valid_duration(value, path)
    if seconds < 0:
        raise invalid_field(path, f"an age cannot be negative ({seconds:g} s)")
    return seconds


def valid_duration(value: Duration, path: str) -> float:
    """Seconds, of a duration within the proto's own rules; else AmpdError INVALID_FIELD."""
    if not (
        abs(value.seconds) <= MAX_DURATION_S
        and abs(value.nanos) < _NANOS
        and value.seconds * value.nanos >= 0
    ):
        raise invalid_field(path, "not a valid google.protobuf.Duration")
    return duration_from_proto(value)


def timestamp_to_proto(unix_s: float) -> Timestamp:
    """A wall-clock time. ValueError outside 1970 to 9999."""
    if not 0 <= unix_s <= _MAX_TIMESTAMP_S:
        raise ValueError(f"{unix_s} is no wall-clock time")
    whole = math.floor(unix_s)
    nanos = min(round((unix_s - whole) * _NANOS), _NANOS - 1)
    return Timestamp(seconds=whole, nanos=nanos)


def timestamp_from_proto(value: Timestamp) -> float:
    """Seconds since 1970."""
    return value.seconds + value.nanos / _NANOS
