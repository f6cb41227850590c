"""What every KV transport checks before it moves a byte."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.core.errors import invalid_field
from ampd.ports import KvPiece


def as_bytes(memory: memoryview) -> memoryview:
    """The memory as single bytes. ValueError when it is read-only, empty or not contiguous."""
    if memory.readonly or not memory.nbytes or not memory.c_contiguous:
        raise ValueError("KV memory must be writable, contiguous and not empty")
    return memory.cast("B")


def check_pieces(pieces: Sequence[KvPiece], local_bytes: int, remote_bytes: int) -> None:
    """AmpdError INVALID_FIELD `pieces[i]...` for a piece that leaves either memory (sizes in
    bytes) or moves nothing."""
    for index, piece in enumerate(pieces):
        if piece.length <= 0:
            raise invalid_field(f"pieces[{index}].length", "must be positive")
        for name, offset, size in (
            ("local_offset", piece.local_offset, local_bytes),
            ("remote_offset", piece.remote_offset, remote_bytes),
        ):
            if not 0 <= offset <= size - piece.length:
                raise invalid_field(
                    f"pieces[{index}].{name}",
                    f"[{offset}, {offset + piece.length}) leaves a memory of {size} bytes",
                )
