"""Pulling KV from a peer: read it, and then read whether it was the right one all the time.

The owner takes no part. It raises a block's generation before it writes other KV there, and
clears a loan's slot when the loan ends; so KV that was read is right if, afterwards, the
generations are those of the handle and the loan is alive. Anything else, and any failed read,
leaves the KV to be computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ampd.adapters.engine_emulated.blocks import WORD_BYTES, BlockStore
from ampd.adapters.engine_emulated.handles import Loan
from ampd.adapters.engine_emulated.requests import Request
from ampd.adapters.engine_emulated.settings import EmulatedSettings
from ampd.adapters.engine_emulated.steps import share
from ampd.core.cost_model import link_between
from ampd.core.errors import AmpdError
from ampd.ports import Clock, KvPiece, KvTransport


class Puller:
    """Pulls KV for the requests of one engine."""

    def __init__(
        self, settings: EmulatedSettings, store: BlockStore, transport: KvTransport, clock: Clock
    ) -> None:
        self.pulled_bytes_total = 0
        """Of the modelled size."""
        self._settings = settings
        self._store = store
        self._transport = transport
        self._clock = clock

    async def pull(self, request: Request, loan: Loan, lent_tokens: int) -> None:
        """Read what the request lacks of the first `lent_tokens`, if anything. The blocks are
        the request's own, so cancelling it must wait for this to end."""
        settings, store = self._settings, self._store
        # The last prompt token is computed in any case.
        tokens = min(lent_tokens, request.prompt_tokens - 1)
        if tokens <= request.kv_tokens:
            return
        first, last = request.cached_blocks, -(-tokens // settings.block_tokens)
        request.read_start_s = self._clock()
        try:
            whole = await self._read(request.blocks[first:last], loan, first, last, tokens)
        except AmpdError:
            whole = False
        request.read_end_s = self._clock()
        if not whole:
            return
        request.pulled_tokens = tokens - request.kv_tokens
        block_bytes = settings.block_tokens * settings.kv_bytes_per_token
        request.pulled_bytes = (last - first) * block_bytes
        self.pulled_bytes_total += request.pulled_bytes
        request.kv_tokens = tokens
        share(store, request)

    async def _read(
        self, mine: Sequence[int], loan: Loan, first: int, last: int, tokens: int
    ) -> bool:
        """Copy the blocks `first` to `last` into `mine`; whether they were right."""
        settings, store, transport = self._settings, self._store, self._transport
        theirs = np.frombuffer(loan.blocks, "<u4")[first:last].tolist()
        runs = _runs(theirs, mine)
        data = [
            KvPiece(
                loan.data_offset + their * store.block_bytes,
                store.data_offset + my * store.block_bytes,
                count * store.block_bytes,
            )
            for their, my, count in runs
        ]
        proofs = [
            KvPiece(
                loan.generations_offset + their * WORD_BYTES,
                store.found_offset + my * WORD_BYTES,
                count * WORD_BYTES,
            )
            for their, my, count in runs
        ]
        alive_offset = store.alive_offset + mine[0] * WORD_BYTES
        proofs.append(KvPiece(loan.loan_offset, alive_offset, WORD_BYTES))
        places = list(mine)
        store.found[places] = 0
        store.alive[mine[0]] = 0
        await transport.read(loan.locator, data, settings.read_timeout_s)
        link = link_between(settings.host, loan.host)
        moved_s = settings.cost.t_kv(tokens - first * settings.block_tokens, link)
        if moved_s:
            await asyncio.sleep(moved_s * settings.time_scale)
        await transport.read(loan.locator, proofs, settings.read_timeout_s)
        generations = np.frombuffer(loan.generations, "<u8")[first:last]
        return bool(
            store.alive[mine[0]] == loan.loan_id
            and np.array_equal(store.found[places], generations)
        )


def _runs(theirs: Sequence[int], mine: Sequence[int]) -> list[tuple[int, int, int]]:
    """(their first block, my first block, how many) of blocks that follow each other on both
    sides: one piece each."""
    runs: list[tuple[int, int, int]] = []
    for their, my in zip(theirs, mine, strict=True):
        if runs:
            start, at, count = runs[-1]
            if their == start + count and my == at + count:
                runs[-1] = (start, at, count + 1)
                continue
        runs.append((their, my, 1))
    return runs
