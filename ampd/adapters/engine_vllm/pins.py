"""Pinned KV blocks, and their loans to peers.

A pin is one more reference on its blocks in vLLM's block pool, so it outlives requests,
survives reads, and costs nothing while it lies there. A loan makes a pin's first blocks
readable by peers for a while; only loans need NIXL to be polled.

All methods run on the engine thread, except `is_lent` (any thread).
"""

from __future__ import annotations

import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_PINS = 65_536
"""Pins of one engine; requests beyond it are refused."""
READER_TAIL_S = 1.0
"""A loan that ended unread may have a reader in the middle of it, which needs our help to end."""


class Block(Protocol):
    """A block of vLLM's pool."""

    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    """What is used of vLLM's block pool."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """One more holder for each."""
        ...

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        """One holder less; those without any are reused in this order."""
        ...

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        ...


@dataclass(slots=True)
class Pin:
    """KV of `tokens` (token ids), held until `expires_s` (the table's clock)."""

    pin_id: str
    tokens: array[int]
    blocks: list[Block]
    lease_s: float
    expires_s: float
    release_on_read: bool
    loan_id: str = ""


class PinTable:
    """The pins of one engine; `clock` in seconds."""

    def __init__(self, pool: BlockPool, block_tokens: int, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._loans: dict[str, str] = {}  # loan_id -> pin_id
        self._references: Counter[int] = Counter()  # block_id -> pins that hold it
        self._blocks: dict[int, Block] = {}
        self._readers_until_s = 0.0
        self.version = 0
        """Counts the changes of what is pinned."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def may_be_read(self) -> bool:
        """Whether a peer may be reading."""
        return bool(self._loans) or self._clock() < self._readers_until_s

    def is_lent(self, loan_id: str) -> bool:
        """Whether the loan is alive. Loan ids are never reused, so blocks that were read under
        a loan that is alive afterwards held the right KV all the time. Any thread."""
        return loan_id in self._loans

    def get(self, pin_id: str) -> Pin | None:
        """None: released, or run out."""
        return self._pins.get(pin_id)

    def pin(
        self,
        tokens: array[int],
        blocks: Sequence[Block],
        lease_s: float,
        *,
        release_on_read: bool,
    ) -> Pin:
        """Hold the blocks of `tokens` for `lease_s`."""
        held = list(blocks)
        self._pool.touch(held)
        for block in held:
            self._references[block.block_id] += 1
            self._blocks[block.block_id] = block
        expires_s = self._clock() + lease_s
        pin = Pin(uuid.uuid4().hex, tokens, held, lease_s, expires_s, release_on_read)
        self._pins[pin.pin_id] = pin
        self.version += 1
        return pin

    def truncate(self, pin: Pin, tokens: int) -> None:
        """Keep the first `tokens` tokens only."""
        if tokens >= len(pin.tokens):
            return
        keep = -(-tokens // self._block_tokens)
        self._drop_blocks(pin.blocks[keep:])
        del pin.blocks[keep:]
        del pin.tokens[tokens:]

    def lend(self, pin: Pin) -> str:
        """A new loan of the pin, whose lease is renewed; an earlier loan ends."""
        self.reclaim(pin.pin_id)
        pin.expires_s = self._clock() + pin.lease_s
        pin.loan_id = uuid.uuid4().hex
        self._loans[pin.loan_id] = pin.pin_id
        return pin.loan_id

    def reclaim(self, pin_id: str) -> None:
        """End the pin's loan, if any."""
        pin = self._pins.get(pin_id)
        if pin is None or not pin.loan_id:
            return
        del self._loans[pin.loan_id]
        pin.loan_id = ""
        self._readers_until_s = self._clock() + READER_TAIL_S

    def release(self, pin_id: str) -> None:
        """Drop the pin and its loan; unknown pins are ignored."""
        self.reclaim(pin_id)
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._drop_blocks(pin.blocks)

    def read_done(self, loan_id: str) -> None:
        """The loan's reader has what it wanted."""
        pin_id = self._loans.get(loan_id)
        if pin_id is None:
            return
        readers_until_s = self._readers_until_s
        if self._pins[pin_id].release_on_read:
            self.release(pin_id)
        else:
            self.reclaim(pin_id)
        self._readers_until_s = readers_until_s

    def expire(self) -> None:
        """Release every pin whose lease has run out."""
        now_s = self._clock()
        for pin_id in [p.pin_id for p in self._pins.values() if p.expires_s <= now_s]:
            self.release(pin_id)

    def next_expiry_s(self) -> float | None:
        """When the first lease runs out."""
        return min((pin.expires_s for pin in self._pins.values()), default=None)

    def pinned_blocks(self) -> int:
        """Blocks that nothing but pins holds."""
        return sum(
            self._blocks[block_id].ref_cnt == count for block_id, count in self._references.items()
        )

    def _drop_blocks(self, blocks: Sequence[Block]) -> None:
        self.version += 1
        for block in blocks:
            self._references[block.block_id] -= 1
            if not self._references[block.block_id]:
                del self._references[block.block_id]
                del self._blocks[block.block_id]
        # Last blocks first: a prefix is worth more than what follows it.
        self._pool.free_blocks(blocks[::-1])
