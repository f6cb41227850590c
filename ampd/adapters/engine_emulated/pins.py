"""Pins of an emulated engine, and their loans to peers.

A pin holds KV between requests. A loan makes a pin's beginning readable: as long as it lives its
id stands in a slot of the engine's memory, which a reader looks at after its read. Loan ids are
never used twice, so a loan that is alive then was so all the time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from ampd.adapters.engine_emulated.blocks import MAX_LOANS, BlockStore
from ampd.core.errors import AmpdError, ErrorReason

MAX_PINS: Final = 65_536
"""Pins of one engine; requests beyond it are refused."""
READER_TAIL_S: Final = 1.0
"""A loan that ended unread may have a reader in the middle of it, which needs the transport's
help to end."""


@dataclass(slots=True, eq=False)
class Pin:
    """KV of `tokens` (token ids), held until `expires_s` (the table's clock)."""

    pin_id: int
    tokens: array[int]
    blocks: list[int]
    lease_s: float
    expires_s: float
    release_on_read: bool
    loan_id: int = 0
    """0: not lent."""
    slot: int = 0
    """Where the loan's id stands."""


class PinTable:
    """The pins of one engine; `clock` in seconds, `serve` as the transport has it."""

    def __init__(
        self, store: BlockStore, clock: Callable[[], float], serve: Callable[[bool], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._serve = serve
        self._pins: dict[int, Pin] = {}
        self._loans: dict[int, Pin] = {}
        self._slots = list(range(MAX_LOANS))[::-1]
        self._made = 0
        self._lent = 0
        self._serves = False
        self.readers_until_s = -inf
        """Until when there may be readers of loans that have ended."""
        self._next_expiry_s = inf
        """No pin expires before."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def loans(self) -> int:
        """How many are alive."""
        return len(self._loans)

    def get(self, pin_id: int) -> Pin | None:
        """None: released, or run out."""
        return self._pins.get(pin_id)

    def blocks(self) -> Iterable[list[int]]:
        """What each pin holds."""
        return (pin.blocks for pin in self._pins.values())

    def add(
        self, tokens: array[int], blocks: list[int], lease_s: float, *, release_on_read: bool
    ) -> Pin:
        """Hold the blocks of `tokens` for `lease_s`."""
        self._made += 1
        self._store.pin(blocks)
        expires_s = self._clock() + lease_s
        pin = Pin(self._made, tokens, blocks, lease_s, expires_s, release_on_read)
        self._pins[pin.pin_id] = pin
        self._next_expiry_s = min(self._next_expiry_s, expires_s)
        return pin

    def lend(self, pin: Pin) -> None:
        """Give the pin a new loan and renew its lease; an earlier loan ends. AmpdError
        QUEUE_FULL beyond MAX_LOANS."""
        if pin.loan_id:
            del self._loans[pin.loan_id]
            self.readers_until_s = self._clock() + READER_TAIL_S
        elif not self._slots:
            raise AmpdError(ErrorReason.QUEUE_FULL, "too much KV is lent", retry_after_s=1.0)
        else:
            pin.slot = self._slots.pop()
        pin.expires_s = self._clock() + pin.lease_s
        self._lent += 1
        pin.loan_id = self._lent
        self._store.loans[pin.slot] = pin.loan_id
        self._loans[pin.loan_id] = pin
        if not self._serves:
            self._serves = True
            self._serve(True)

    def reclaim(self, pin: Pin, *, is_read: bool = False) -> None:
        """End the pin's loan, if any; `is_read`: its reader has said that it is done."""
        if not pin.loan_id:
            return
        self._store.loans[pin.slot] = 0
        self._slots.append(pin.slot)
        del self._loans[pin.loan_id]
        pin.loan_id = 0
        if not is_read:
            self.readers_until_s = self._clock() + READER_TAIL_S
        if not self._loans:
            self._serves = False
            self._serve(False)

    def release(self, pin: Pin) -> None:
        """Drop the pin and its loan. Idempotent."""
        self.reclaim(pin)
        if self._pins.pop(pin.pin_id, None) is not None:
            self._store.unpin(pin.blocks)

    def read_done(self, loan_id: int) -> bool:
        """The loan's reader has what it wanted; whether there was such a loan."""
        pin = self._loans.get(loan_id)
        if pin is None:
            return False
        self.reclaim(pin, is_read=True)
        if pin.release_on_read:
            self.release(pin)
        return True

    def expire(self) -> bool:
        """Release every pin whose lease has run out; whether there was one."""
        now_s = self._clock()
        if now_s < self._next_expiry_s:
            return False
        over = [pin for pin in self._pins.values() if pin.expires_s <= now_s]
        for pin in over:
            self.release(pin)
        self._next_expiry_s = min((pin.expires_s for pin in self._pins.values()), default=inf)
        return bool(over)

    def next_loan_expiry_s(self) -> float:
        """When the first loan's lease runs out; infinite without loans."""
        return min((pin.expires_s for pin in self._loans.values()), default=inf)

    def release_all(self) -> None:
        """Drop every pin."""
        for pin in list(self._pins.values()):
            self.release(pin)

    def check(self) -> None:
        """AssertionError unless loans and slots agree."""
        lent = {pin.slot: pin.loan_id for pin in self._pins.values() if pin.loan_id}
        stands = {
            int(slot): int(self._store.loans[slot]) for slot in self._store.loans.nonzero()[0]
        }
        if lent != stands:
            raise AssertionError(f"loans: {stands} stand in memory, {lent} are alive")
        if {pin.loan_id for pin in self._loans.values()} != set(self._loans):
            raise AssertionError("loans: a pin has another loan than is kept")
        lost = len(self._slots) + len(lent) != MAX_LOANS
        if lost or (lent and not lent.keys().isdisjoint(self._slots)):
            raise AssertionError("loans: a slot is lost")
