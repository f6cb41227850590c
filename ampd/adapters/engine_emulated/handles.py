"""What lies in `KvHandle.payload`: the pin on its owner, and for a lent one how to read it."""

from __future__ import annotations

import hashlib
from array import array
from typing import Final

import msgspec

from ampd.core.errors import invalid_field
from ampd.core.model import KvHandle

DIGEST_BYTES: Final = 16


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """How a peer reads lent KV. Offsets are those of the owner's memory, in bytes."""

    loan_id: int
    """Unlike any other of this life of the owner."""
    locator: bytes
    """Of the owner's transport."""
    loan_offset: int
    """Where `loan_id` stands (64 bits) as long as the loan is alive."""
    generations_offset: int
    """Of block 0; 64 bits per block."""
    data_offset: int
    """Of block 0."""
    block_tokens: int
    token_bytes: int
    blocks: bytes
    """Their numbers, 32 bits each."""
    generations: bytes
    """As they were when the loan began, 64 bits each."""
    tokens_digest: bytes
    """Of the tokens whose KV it is: a handle never serves other tokens."""
    host: str = ""
    """Of the owner, which the time of a read depends on."""


class Payload(msgspec.Struct, frozen=True, array_like=True, tag="emulated"):
    """`loan` is None for a pin that is not lent."""

    pin_id: int
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
        raise invalid_field(field, f"not a handle of an emulated engine ({error})") from error


def loan_of(
    handle: KvHandle, tokens: array[int], field: str, *, block_tokens: int, token_bytes: int
) -> Loan:
    """The loan by which the KV of `tokens`' beginning is read.

    AmpdError INVALID_FIELD `field`: not lent, malformed, longer than the tokens, the KV of
    other tokens, or KV of another form (`block_tokens`, `token_bytes`).
    """
    loan = decode(handle, field).loan
    if loan is None:
        raise invalid_field(field, "the handle is not lent: lend it first")
    if not 0 < handle.tokens <= len(tokens):
        raise invalid_field(field, f"covers {handle.tokens} tokens of {len(tokens)}")
    if tokens_digest(tokens, handle.tokens) != loan.tokens_digest:
        raise invalid_field(field, "holds the KV of other tokens")
    if (loan.block_tokens, loan.token_bytes) != (block_tokens, token_bytes):
        raise invalid_field(field, f"has blocks of {loan.block_tokens} x {loan.token_bytes} bytes")
    count = -(-handle.tokens // block_tokens)
    if (len(loan.blocks), len(loan.generations)) != (4 * count, 8 * count):
        raise invalid_field(field, f"does not name {count} blocks")
    return loan
