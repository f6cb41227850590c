"""What lies in `KvHandle.payload`: the pin on its owner, and for a lent one how to read it."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import msgspec

from ampd.core.errors import invalid_field
from ampd.core.model import KvHandle

DIGEST_BYTES = 16


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """How a peer reads lent KV: which blocks of which engine, under which loan."""

    loan_id: str
    engine_id: str
    host: str
    port: int
    """The side channel of the owner."""
    tensor_parallel: int
    blocks: tuple[int, ...]
    tokens_digest: bytes
    """Of the tokens whose KV it is: a handle never serves other tokens."""


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """`loan` is None for a pin that is not lent."""

    pin_id: str
    loan: Loan | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def tokens_digest(tokens: array[int], count: int) -> bytes:
    """Digest of the first `count` token ids."""
    with memoryview(tokens)[:count] as view:
        return hashlib.blake2b(view, digest_size=DIGEST_BYTES).digest()


def encode(payload: Payload) -> bytes:
    """The bytes of `KvHandle.payload`."""
    return _encoder.encode(payload)


def decode(handle: KvHandle, field: str) -> Payload:
    """AmpdError INVALID_FIELD `field` when the payload is not ours."""
    try:
        return _decoder.decode(handle.payload)
    except msgspec.DecodeError as error:
        raise invalid_field(field, f"not a handle of a vLLM engine ({error})") from error


def loan_of(handle: KvHandle, tokens: array[int], field: str, *, block_tokens: int) -> Loan:
    """The loan by which the KV of `tokens`' beginning is read.

    AmpdError INVALID_FIELD `field`: not lent, malformed, longer than the tokens, with more or
    fewer blocks than they take, or the KV of other tokens.
    """
    loan = decode(handle, field).loan
    if loan is None:
        raise invalid_field(field, "the handle is not lent: lend it first")
    if not 0 < handle.tokens <= len(tokens):
        raise invalid_field(field, f"covers {handle.tokens} tokens of {len(tokens)}")
    if len(loan.blocks) != -(-handle.tokens // block_tokens) or min(loan.blocks) < 0:
        raise invalid_field(field, f"has not the blocks of {handle.tokens} tokens")
    if tokens_digest(tokens, handle.tokens) != loan.tokens_digest:
        raise invalid_field(field, "holds the KV of other tokens")
    return loan


def transfer_parameters(loan: Loan, tokens: int) -> dict[str, Any]:
    """`kv_transfer_params` of a request that pulls the first `tokens` tokens from a loan."""
    return {
        "remote_engine_id": loan.engine_id,
        "remote_request_id": loan.loan_id,
        "remote_host": loan.host,
        "remote_port": loan.port,
        "tp_size": loan.tensor_parallel,
        "remote_block_ids": [list(loan.blocks)],
        "remote_num_tokens": tokens,
    }
