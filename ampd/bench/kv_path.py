"""Bytes of KV per second: blocks read over NIXL beside the same blocks copied by memcpy, both
ends in one process of one host, where the reader alone copies. Scattered, as blocks are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np

from ampd.ports import KvPiece

BLOCK_BYTES: Final = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""16 tokens of KV of a small model and of a large one, and what lies between and beyond."""
READ_TIMEOUT_S: Final = 60.0
_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")


@dataclass(frozen=True, slots=True)
class KvCell:
    """One block size; bytes per second, the best of the turns: others' work only slows them."""

    block_bytes: int
    nixl_bytes_per_s: float
    memcpy_bytes_per_s: float


async def measure_kv(total_bytes: int, turns: int) -> tuple[KvCell, ...]:
    """Move `total_bytes` (at least the largest block) for each block size, so many turns of
    each; nothing where NIXL is not installed."""
    if not any(find_spec(package) for package in _PACKAGES):
        return ()
    # Not above: it loads NIXL and UCX, which no other command needs.
    from ampd.adapters.kv_nixl import NixlKvTransport

    source, target = (np.full(total_bytes, fill, dtype=np.uint8) for fill in (7, 0))
    owner, reader = NixlKvTransport("bench-owner", 1), NixlKvTransport("bench-reader", 1)
    try:
        owner.register(source.data)
        reader.register(target.data)
        owner.serve(lent=True)
        cells = []
        for block_bytes in BLOCK_BYTES:
            blocks = max(1, total_bytes // block_bytes)
            pieces = [
                KvPiece(here * block_bytes, (blocks - 1 - here) * block_bytes, block_bytes)
                for here in range(blocks)
            ]
            nixl_s, memcpy_s = [], []
            for _ in range(turns):
                began_s = time.perf_counter()
                await reader.read(owner.locator, pieces, READ_TIMEOUT_S)
                nixl_s.append(time.perf_counter() - began_s)
                began_s = time.perf_counter()
                for piece in pieces:
                    here = slice(piece.local_offset, piece.local_offset + block_bytes)
                    there = slice(piece.remote_offset, piece.remote_offset + block_bytes)
                    target[here] = source[there]
                memcpy_s.append(time.perf_counter() - began_s)
            moved = blocks * block_bytes
            cells.append(KvCell(block_bytes, moved / min(nixl_s), moved / min(memcpy_s)))
        return tuple(cells)
    finally:
        await reader.close()
        await owner.close()
