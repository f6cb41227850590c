"""How stored values become bytes, the same for every StateStore adapter.

Values are msgpack maps keyed by field name (JSON would turn an infinite prediction into null).
Decoding ignores fields it does not know and fills missing ones from their defaults, so
processes of two versions share one store during a rolling upgrade.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from typing import Final, TypeVar

import msgspec

from ampd.core.errors import AmpdError, ErrorReason, invalid_field
from ampd.core.lifecycle import SessionRecord
from ampd.core.model import PolicySpec, RoundRecord, WorkerInfo, WorkerLoad
from ampd.ports import Tokens

T = TypeVar("T")

TOKEN_BYTES: Final = 4
"""Bytes of one stored token id: an unsigned 32-bit integer, little endian."""

_PAGE_TOKEN_VERSION: Final = b"1:"

WORKER_INFO: Final = msgspec.msgpack.Decoder(WorkerInfo)
WORKER_LOAD: Final = msgspec.msgpack.Decoder(WorkerLoad)
SESSION: Final = msgspec.msgpack.Decoder(SessionRecord)
ROUND: Final = msgspec.msgpack.Decoder(RoundRecord)
POLICY: Final = msgspec.msgpack.Decoder(PolicySpec)

_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(value: WorkerInfo | WorkerLoad | SessionRecord | RoundRecord | PolicySpec) -> bytes:
    """A stored value as bytes; equal values of one process give equal bytes."""
    return _ENCODER.encode(value)


def decode(decoder: msgspec.msgpack.Decoder[T], raw: bytes) -> T:
    """The value that `encode` stored. AmpdError INTERNAL when it is none of this kind."""
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        kind = getattr(decoder.type, "__name__", "value")
        raise AmpdError(
            ErrorReason.INTERNAL, f"the store holds an unreadable {kind}: {error}"
        ) from error


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids in their stored form."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(raw: bytes) -> Tokens:
    """The token ids of `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(raw)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def encode_page_token(last_session_id: str) -> str:
    """The opaque token of the page behind `last_session_id`."""
    return base64.urlsafe_b64encode(_PAGE_TOKEN_VERSION + last_session_id.encode()).decode()


def decode_page_token(page_token: str) -> str:
    """The session_id that the page starts behind ('': from the start). AmpdError
    INVALID_FIELD `page_token` when it is no token of ours."""
    if not page_token:
        return ""
    try:
        raw = base64.b64decode(page_token.encode(), altchars=b"-_", validate=True)
        if raw.startswith(_PAGE_TOKEN_VERSION):
            return raw.removeprefix(_PAGE_TOKEN_VERSION).decode()
    except (binascii.Error, UnicodeError):
        pass
    raise invalid_field("page_token", "not a next_page_token of ListSessions")
