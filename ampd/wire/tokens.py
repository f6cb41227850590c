"""Token ids as they travel inside the cluster: little-endian unsigned 32-bit integers."""

from __future__ import annotations

import sys
from array import array
from typing import Final

from ampd.core.errors import invalid_field
from ampd.ports import Tokens

TOKEN_BYTES: Final = 4

_SWAP: Final = sys.byteorder == "big"

if array("I").itemsize != TOKEN_BYTES:  # pragma: no cover - no such platform is known
    raise ImportError('array("I") has no 4-byte items on this platform')


def tokens_to_bytes(tokens: Tokens) -> bytes:
    """The wire form of `array("I")`."""
    if _SWAP:
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def tokens_from_bytes(data: bytes, path: str) -> Tokens:
    """`array("I")` of the wire form; AmpdError INVALID_FIELD `path` for a broken length."""
    if len(data) % TOKEN_BYTES:
        raise invalid_field(path, f"{len(data)} bytes are not whole 4-byte token ids")
    tokens = array("I")
    tokens.frombytes(data)
    if _SWAP:
        tokens.byteswap()
    return tokens


def check_vocabulary(tokens: Tokens, path: str, *, vocab_size: int) -> None:
    """AmpdError INVALID_FIELD naming the first id that is outside the vocabulary."""
    # One pass in C for the normal case: an increment may hold a hundred thousand ids.
    if not tokens or max(tokens) < vocab_size:
        return
    for index, token_id in enumerate(tokens):
        if token_id >= vocab_size:
            raise invalid_field(
                f"{path}[{index}]", f"{token_id} is outside the vocabulary of {vocab_size}"
            )
