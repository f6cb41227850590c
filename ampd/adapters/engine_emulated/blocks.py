"""The paged KV memory of an emulated engine: blocks, who holds them, and the prefix cache.

One buffer, which the transport has registered:

    generations   a 64-bit counter per block: raised whenever the block is taken for other KV
    found         what a reader finds in a peer's `generations`, by its own block
    alive         what a reader finds in a peer's `loans`, by its own block
    loans         the ids of the loans that are alive (see `pins.py`)
    data          the KV, `block_tokens` times `token_bytes` per block

A block is *used* if a running request holds it, else *pinned* if a pin does, else *free*; free
ones may be *cached*: their KV is found by its tokens until the block is needed, the one that
was free longest first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ampd.adapters.engine_emulated import digest
from ampd.adapters.engine_emulated.digest import Words

WORD_BYTES: Final = 8
MAX_LOANS: Final = 8192
"""Loans of one engine at a time; more are refused."""
HASH_BYTES: Final = 16


def extend_hashes(hashes: list[bytes], tokens: array[int], block_tokens: int) -> None:
    """Append the hashes of the whole blocks of `tokens` that are not in `hashes` yet; each
    covers all tokens up to its block's end."""
    parent = hashes[-1] if hashes else b""
    size = block_tokens * tokens.itemsize
    with memoryview(tokens) as ids, ids.cast("B") as content:
        for start in range(len(hashes) * size, len(content) - size + 1, size):
            state = hashlib.blake2b(parent, digest_size=HASH_BYTES)
            state.update(content[start : start + size])
            parent = state.digest()
            hashes.append(parent)


class BlockStore:
    """The memory of one engine. Nothing in it waits, and time has no part in it."""

    def __init__(self, *, blocks: int, block_tokens: int, token_bytes: int, positions: int) -> None:
        """`positions` is the longest sequence."""
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.token_words = token_bytes // WORD_BYTES
        block_words = block_tokens * self.token_words
        self._buffer = np.zeros(3 * blocks + MAX_LOANS + blocks * block_words, dtype=np.uint64)
        self.generations = self._buffer[:blocks]
        self.found = self._buffer[blocks : 2 * blocks]
        self.alive = self._buffer[2 * blocks : 3 * blocks]
        self.loans = self._buffer[3 * blocks : 3 * blocks + MAX_LOANS]
        self._flat = self._buffer[3 * blocks + MAX_LOANS :]
        self.data = self._flat.reshape(blocks, block_words)
        self.found_offset = blocks * WORD_BYTES
        self.alive_offset = 2 * blocks * WORD_BYTES
        self.loans_offset = 3 * blocks * WORD_BYTES
        self.data_offset = (3 * blocks + MAX_LOANS) * WORD_BYTES
        self.block_bytes = block_words * WORD_BYTES
        self._spread, _ = digest.multipliers(self.token_words)
        self._weights = digest.word_weights(positions + block_tokens, self.token_words)
        self._requests = [0] * blocks
        self._pins = [0] * blocks
        self._hashes: list[bytes | None] = [None] * blocks
        self._cached: dict[bytes, int] = {}
        self._empty = list(range(blocks))[::-1]
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.used_blocks = 0
        self.pinned_blocks = 0

    @property
    def memory(self) -> memoryview:
        """All of it, for the transport."""
        return self._buffer.data

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._evictable)

    # --- who holds what -------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest beginning."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these nobody holds."""
        return sum(block in self._evictable for block in blocks)

    def take(self, count: int) -> list[int]:
        """Blocks for new KV, held by a request. There must be as many free ones."""
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._requests[block] = 1
            taken.append(block)
        if taken:
            self.generations[taken] += np.uint64(1)
        self.used_blocks += count
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more request holds them."""
        requests, pins = self._requests, self._pins
        for block in blocks:
            if not requests[block]:
                self.used_blocks += 1
                if pins[block]:
                    self.pinned_blocks -= 1
                else:
                    del self._evictable[block]
            requests[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One request less holds them."""
        requests, pins = self._requests, self._pins
        # Last blocks first: a beginning is worth more than what follows it.
        for block in reversed(blocks):
            requests[block] -= 1
            if not requests[block]:
                self.used_blocks -= 1
                if pins[block]:
                    self.pinned_blocks += 1
                else:
                    self._free(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """One more pin holds them. A request or a pin must do so already."""
        for block in blocks:
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        """One pin less holds them."""
        requests, pins = self._requests, self._pins
        for block in reversed(blocks):
            pins[block] -= 1
            if not pins[block] and not requests[block]:
                self.pinned_blocks -= 1
                self._free(block)

    def _free(self, block: int) -> None:
        if self._hashes[block] is None:
            self._empty.append(block)
        else:
            self._evictable[block] = None

    def cache(self, block: int, block_hash: bytes) -> None:
        """The block is full, of the KV that the hash stands for."""
        if block_hash not in self._cached and self._hashes[block] is None:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None

    def evict(self) -> None:
        """Forget all cached KV that nobody holds."""
        for block in reversed(self._evictable):
            self._forget(block)
            self._empty.append(block)
        self._evictable.clear()

    # --- KV -------------------------------------------------------------------------------

    def digest(self, blocks: NDArray[np.intp], tokens: int) -> int:
        """F(tokens): the digest of the KV that lies there now."""
        if not tokens:
            return 0
        count = -(-tokens // self.block_tokens)
        words = self.data.take(blocks[:count], axis=0).ravel()[: tokens * self.token_words]
        return int(words.dot(self._weights[: len(words)]))

    def write(self, blocks: NDArray[np.intp], start: int, keys: Words) -> None:
        """Store the KV of the positions from `start` on."""
        rows = np.multiply.outer(keys, self._spread)
        places = np.arange(start, start + len(keys))
        block_of = blocks[places // self.block_tokens]
        where = block_of * self.block_tokens + places % self.block_tokens
        self._flat.reshape(-1, self.token_words)[where] = rows

    def write_one(self, block: int, place: int, key: int) -> None:
        """Store the KV of the position at `place` in its block."""
        start = place * self.token_words
        np.multiply(
            self._spread, np.uint64(key), out=self.data[block, start : start + self.token_words]
        )

    # --- the books ------------------------------------------------------------------------

    def check(self, requests: Iterable[Sequence[int]], pins: Iterable[Sequence[int]]) -> None:
        """AssertionError unless all that is kept follows from what these hold."""
        by_request = Counter(block for blocks in requests for block in blocks)
        by_pin = Counter(block for blocks in pins for block in blocks)
        every = range(self.blocks)
        _same("request references", self._requests, [by_request[block] for block in every])
        _same("pin references", self._pins, [by_pin[block] for block in every])
        _same("used blocks", self.used_blocks, len(by_request))
        _same("pinned blocks", self.pinned_blocks, len(by_pin.keys() - by_request.keys()))
        free = [block for block in every if block not in by_request and block not in by_pin]
        _same("free blocks", sorted([*self._empty, *self._evictable]), free)
        _same("cached blocks", {b for b in self._evictable if self._hashes[b] is None}, set())
        _same("empty blocks", {b for b in self._empty if self._hashes[b] is not None}, set())
        hashes = {h: block for block, h in enumerate(self._hashes) if h is not None}
        _same("the prefix cache", self._cached, hashes)
        total = self.used_blocks + self.pinned_blocks + self.free_blocks
        _same("free + used + pinned", total, self.blocks)


def _same(what: str, kept: object, right: object) -> None:
    if kept != right:
        raise AssertionError(f"{what}: {kept} is kept, {right} is right")
