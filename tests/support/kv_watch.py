"""No KV is read before it was written: a checker of emulated engines, apart from what they compute.

It keeps books of its own. A place of a block is *written* from the write of its token's KV on,
until the block is taken for other KV; what a transfer copies is as written as it was at its
source at that moment, and of that source's owner then. Read is what a step digests, what is lent,
and what a transfer brought when its reader takes it for KV: bytes that are read too early and
thrown away again are no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sim_engine import SimEngines

from ampd.adapters.engine_emulated import EmulatedEngine
from ampd.adapters.engine_emulated.blocks import BlockStore
from ampd.adapters.engine_emulated.handles import Loan
from ampd.adapters.engine_emulated.requests import Request
from ampd.ports import KvPiece

Owner = tuple[bytes, int, int]
"""Of a block's KV: whose memory, the block, and the how manieth owner of it."""


@dataclass(eq=False)
class _Books:
    """Of one engine's memory."""

    store: BlockStore
    written: NDArray[np.bool_]
    """By block and place."""
    owners: NDArray[np.int64]
    """How often each block was taken."""
    copied: dict[int, Owner] = field(default_factory=dict)
    """Whose KV a transfer has put into a block, since it was taken."""
    lent: dict[int, list[int]] = field(default_factory=dict)
    """`owners` of the blocks of each loan when it began."""

    def block_at(self, offset: int) -> int | None:
        """Of an offset in the memory; None: no KV lies there."""
        offset -= self.store.data_offset
        return None if offset < 0 else offset // self.store.block_bytes


class KvWatch:
    """Every engine that starts from now on is watched; `violate` is told what was wrong."""

    def __init__(self, engines: SimEngines, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self._books: dict[bytes, _Books] = {}
        self.reads = 0
        """Digests, loans and pulls that were looked at."""
        engines.on_start = self._watch
        engines.on_copy = self._copied

    def _watch(self, engine: EmulatedEngine, locator: bytes) -> None:
        store = engine._store
        books = _Books(
            store,
            np.zeros((store.blocks, store.block_tokens), np.bool_),
            np.zeros(store.blocks, np.int64),
        )
        self._books[locator] = books
        name = locator.decode().partition("/")[0]
        _wrap(store, "take", after=lambda taken, _count: _taken(books, taken))
        _wrap(store, "write", after=lambda _, *args: _written(books, *args))
        _wrap(store, "write_one", after=lambda _, *args: _written_one(books, *args))
        _wrap(
            store,
            "digest",
            before=lambda blocks, tokens: self._read(books, blocks, tokens, f"a step of {name}"),
        )
        _wrap(engine, "_lend", after=lambda _, pin, tokens: self._lent(books, pin, tokens, name))
        pull = engine._puller.pull

        async def watched(request: Request, loan: Loan, lent_tokens: int) -> None:
            before = request.kv_tokens
            await pull(request, loan, lent_tokens)
            if request.kv_tokens > before:
                self._pulled(books, request, loan, before, name)

        engine._puller.pull = watched  # type: ignore[method-assign]

    def _read(self, books: _Books, blocks: Sequence[int], tokens: int, who: str) -> None:
        self.reads += 1
        places = books.written[np.asarray(blocks[: -(-tokens // books.store.block_tokens)], int)]
        early = np.flatnonzero(~places.ravel()[:tokens])
        if len(early):
            position = int(early[0])
            block = blocks[position // books.store.block_tokens]
            self._violate(f"{who} reads block {block} before position {position} was written")

    def _lent(self, books: _Books, pin: Any, tokens: int, name: str) -> None:
        blocks = pin.blocks[: -(-tokens // books.store.block_tokens)]
        self._read(books, blocks, tokens, f"a loan of {name}")
        books.lent[pin.loan_id] = books.owners[blocks].tolist()

    def _copied(self, source: bytes, target: bytes, piece: KvPiece) -> None:
        theirs, mine = self._books[source], self._books[target]
        their, my = theirs.block_at(piece.remote_offset), mine.block_at(piece.local_offset)
        if their is None or my is None:
            return
        if np.array_equal(theirs.store.data[their], mine.store.data[my]):
            mine.written[my] = theirs.written[their]
            mine.copied[my] = (source, their, int(theirs.owners[their]))

    def _pulled(self, books: _Books, request: Request, loan: Loan, before: int, name: str) -> None:
        """The request takes what was pulled for the KV of its tokens."""
        self._read(books, request.blocks, request.kv_tokens, f"a pull of {name}")
        block_tokens = books.store.block_tokens
        theirs = np.frombuffer(loan.blocks, "<u4").tolist()
        owners = self._books[loan.locator].lent[loan.loan_id]
        for index in range(before // block_tokens, -(-request.kv_tokens // block_tokens)):
            lent = (loan.locator, theirs[index], owners[index])
            came = books.copied.get(request.blocks[index])
            if came != lent:
                self._violate(f"a pull of {name} believes KV of {came}, lent was that of {lent}")


def _taken(books: _Books, blocks: list[int]) -> None:
    books.written[blocks] = False
    books.owners[blocks] += 1
    for block in blocks:
        books.copied.pop(block, None)


def _written(books: _Books, blocks: NDArray[np.intp], start: int, keys: Sequence[int]) -> None:
    places = np.arange(start, start + len(keys))
    size = books.store.block_tokens
    books.written[blocks[places // size], places % size] = True


def _written_one(books: _Books, block: int, place: int, _key: int) -> None:
    books.written[block, place] = True


def _wrap(
    thing: Any,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Look at every call of a method: its arguments before it, its result behind it."""
    method = getattr(thing, name)

    def watched(*args: Any) -> Any:
        if before is not None:
            before(*args)
        result = method(*args)
        if after is not None:
            after(result, *args)
        return result

    setattr(thing, name, watched)
