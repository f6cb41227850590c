"""Stored values across versions of AMPD."""

from array import array

import msgspec
import pytest

from ampd.adapters.state_codec import (
    POLICY,
    SESSION,
    WORKER_INFO,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import PolicySpec, Role, Slo, WorkerInfo


def test_fields_of_a_newer_version_are_ignored() -> None:
    record = SessionRecord("s", "t", "m", Slo(1.0, 0.1), 1.0, 2.0)
    newer = msgspec.msgpack.decode(encode(record))
    newer |= {"colour": "red"}
    newer["slo"]["e2e_s"] = 9.0
    assert decode(SESSION, msgspec.msgpack.encode(newer)) == record


def test_fields_that_an_older_version_did_not_write_take_their_default() -> None:
    info = WorkerInfo("w", Role.PREFILL, 1, "a:1", "h")
    older = {"worker_id": "w", "role": "prefill", "incarnation": 1, "address": "a:1", "host": "h"}
    assert decode(WORKER_INFO, msgspec.msgpack.encode(older)) == info


def test_settings_keep_their_types() -> None:
    settings: dict[str, float | int | bool | str] = {"f": 1.0, "i": 1, "b": True, "s": "1"}
    decoded = decode(POLICY, encode(PolicySpec("p", settings, 3)))
    assert {name: type(value) for name, value in decoded.settings.items()} == {
        "f": float,
        "i": int,
        "b": bool,
        "s": str,
    }


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"{}", encode(PolicySpec("p"))])
def test_what_is_no_session_is_an_internal_error(raw: bytes) -> None:
    with pytest.raises(AmpdError) as caught:
        decode(SESSION, raw)
    assert caught.value.reason is ErrorReason.INTERNAL


def test_tokens_are_little_endian_32_bit() -> None:
    tokens = array("I", [1, 2**32 - 1])
    assert pack_tokens(tokens) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack_tokens(pack_tokens(tokens)) == tokens
