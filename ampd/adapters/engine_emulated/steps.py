"""The steps of an emulated engine: who computes in a step, how long it takes, what comes of it.

Every step:
1. requests that decode take their token each;
2. *entrants*, generations whose KV is at hand but for at most a block, join at once;
3. one other prefill gets a chunk, first come first served, as large as the ITL of the running
   streams bears (`ampd.core.local_prefill`), 0 making a pure decode step; or several share a fixed
   budget (`ampd.core.fixed_chunks`), as the rule says;
4. pulls go on all the while, whoever computes.

A step sleeps what the cost model says and computes at its end, from the bytes that lie there
then. Requests that were cancelled meanwhile are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ampd.adapters.engine_emulated import digest
from ampd.adapters.engine_emulated.blocks import BlockStore, extend_hashes
from ampd.adapters.engine_emulated.requests import Request
from ampd.adapters.engine_emulated.settings import EmulatedSettings
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import ITL_SAFE_RULE, fill_budget, joint_history_tokens
from ampd.core.local_prefill import MIN_CHUNK_TOKENS, StreamProgress, calibrate, chunk_tokens
from ampd.ports import Clock, PrefillDone, StepSample, TokensOut

MAX_STEP_SAMPLES: Final = 4096


@dataclass(slots=True)
class Step:
    """What one step computes."""

    decodes: tuple[Request, ...]
    entrants: tuple[Request, ...]
    chunks: tuple[tuple[Request, int], ...] = ()
    """The other prefills that compute something, and how many tokens of each."""

    @property
    def pieces(self) -> list[tuple[Request, int]]:
        """Whose prompt tokens are computed, and how many."""
        return [*((request, request.left_tokens) for request in self.entrants), *self.chunks]

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens, of all requests."""
        return sum(count for _, count in self.pieces)

    @property
    def history_tokens(self) -> int:
        """KV before the longest chunk; before all of them taken as one, if there are several."""
        if len(self.chunks) > 1:
            return joint_history_tokens(
                [(count, request.kv_tokens) for request, count in self.pieces]
            )
        return max((request.kv_tokens for request, _ in self.pieces), default=0)

    @property
    def context_tokens(self) -> int:
        """Contexts of the decodes, in all."""
        return sum(len(request.tokens) for request in self.decodes)


class Steps:
    """Computes the requests that are given to it, as long as there are any."""

    def __init__(
        self,
        settings: EmulatedSettings,
        store: BlockStore,
        clock: Clock,
        finish: Callable[[Request], None],
        fail: Callable[[AmpdError], None],
    ) -> None:
        """`finish` takes a request that has come to its end (its KV is there), `fail` the
        reason why there will be no more steps."""
        self.cost = settings.cost
        """By which chunks are sized."""
        self.rule = ITL_SAFE_RULE
        """How prefills beside decodes are cut and ordered."""
        self.samples: deque[StepSample] = deque(maxlen=MAX_STEP_SAMPLES)
        self.promised_blocks = 0
        """Of all requests that hold blocks."""
        self._settings = settings
        self._store = store
        self._clock = clock
        self._finish = finish
        self._fail = fail
        self._table = digest.tables(settings.max_model_tokens)
        self.calibration = 1.0
        """Measured over predicted time of the steps."""
        self._prefills: dict[Request, None] = {}
        self._decodes: dict[Request, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, request: Request) -> None:
        """Compute it from the next step on: it has all the KV that it gets from elsewhere."""
        self._prefills[request] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-steps")

    @property
    def prefill_tokens_left(self) -> int:
        """Prompt tokens to compute, of the requests that are computed here."""
        return sum(
            request.left_tokens for request in self._prefills if not self._is_entrant(request)
        )

    def remove(self, request: Request) -> None:
        """Leave it out from now on. Unknown requests are ignored."""
        self._prefills.pop(request, None)
        self._decodes.pop(request, None)

    async def close(self) -> None:
        """No more steps."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def take_samples(self) -> list[StepSample]:
        """The steps since the last call, oldest first."""
        taken = list(self.samples)
        self.samples.clear()
        return taken

    async def _run(self) -> None:
        try:
            while self._prefills or self._decodes:
                started_s = self._clock()
                step = self._plan(started_s)
                seconds = self._seconds(step) * self._settings.time_scale
                # What it costs nothing to compute still gives way to others, once.
                await asyncio.sleep(seconds)
                self._compute(step, started_s)
        except Exception as error:
            logging.getLogger(__name__).exception("the emulated engine has failed")
            self._fail(AmpdError(ErrorReason.ENGINE_FAILED, f"a step failed: {error!r}"))
        finally:
            self._task = None

    # --- the plan -------------------------------------------------------------------------

    def _plan(self, now_s: float) -> Step:
        decodes = tuple(self._decodes)
        entrants: list[Request] = []
        others: list[Request] = []
        for request in self._prefills:
            (entrants if self._is_entrant(request) else others).append(request)
        if not others:
            return Step(decodes, tuple(entrants))
        entering = sum(request.left_tokens for request in entrants)
        budget = self.rule.budget_tokens
        if budget is not None:
            others.sort(key=self._order)
            left_tokens = (self._left_tokens(request) for request in others)
            counts = fill_budget(left_tokens, budget - len(decodes) - entering)
            chunks = tuple(zip(others, counts, strict=False))
            return Step(decodes, tuple(entrants), chunks)
        head = min(others, key=self._order)
        chunk = self._itl_safe_chunk(head, decodes, entering, now_s)
        return Step(decodes, tuple(entrants), ((head, chunk),) if chunk else ())

    def _order(self, request: Request) -> tuple[bool, float, int]:
        """What has begun first, then as the rule says."""
        began_s = request.session_began_s if self.rule.by_session else 0.0
        return (request.turn > 0, began_s, request.turn)

    def _left_tokens(self, request: Request) -> int:
        if request.turn:
            self._adopt_cached(request)
        return request.left_tokens

    def _itl_safe_chunk(
        self, head: Request, decodes: tuple[Request, ...], entering: int, now_s: float
    ) -> int:
        most = min(self._left_tokens(head), self._settings.max_step_tokens)
        chunk = chunk_tokens(
            cost=self.cost,
            calibration=self.calibration,
            now_s=now_s,
            streams=[_progress(request) for request in decodes],
            context_tokens=sum(len(request.tokens) for request in decodes),
            chunk_history_tokens=head.kv_tokens,
            max_chunk_tokens=most,
        )
        # The entrants' tokens are part of the step's time.
        return max(chunk - entering, min(chunk, MIN_CHUNK_TOKENS))

    def _is_entrant(self, request: Request) -> bool:
        """Whether it joins at once: all but a block of its prompt is at hand."""
        return bool(request.decoding and request.left_tokens <= self._store.block_tokens)

    def _adopt_cached(self, request: Request) -> None:
        """Take over what the prefix cache has got since the request came."""
        store = self._store
        first = request.kv_tokens // store.block_tokens
        last = (request.prompt_tokens - 1) // store.block_tokens
        if request.pulled_tokens or first >= last:
            return
        found = store.find(request.hashes[first:last])
        if found:
            store.hold(found)
            store.drop(request.blocks[first : first + len(found)])
            request.blocks[first : first + len(found)] = found
            request.places[first : first + len(found)] = found
            request.cached_blocks = first + len(found)
            request.kv_tokens = request.cached_tokens = request.cached_blocks * store.block_tokens

    def _seconds(self, step: Step) -> float:
        """What the step takes, by the cost model, unscaled."""
        cost, batch, computed = self._settings.cost, len(step.decodes), step.computed_tokens
        if not computed:
            return cost.t_dec(batch, step.context_tokens)
        pieces = step.pieces
        if batch or len(pieces) > 1:
            return cost.t_mixed(computed, step.history_tokens, batch, step.context_tokens)
        # Alone, its steps together take what one prefill takes, however it is cut.
        ((alone, _),) = pieces
        done = alone.kv_tokens - alone.history_tokens
        whole_s = cost.t_pre(alone.history_tokens, done + computed)
        return whole_s - cost.t_pre(alone.history_tokens, done) if done else whole_s

    # --- the computation ------------------------------------------------------------------

    def _compute(self, step: Step, started_s: float) -> None:
        now_s = self._clock()
        self._note(step, now_s - started_s)
        for request in step.decodes:
            if request in self._decodes:
                self._decode(request)
        for request in step.entrants:
            if request in self._prefills:
                self._prefill(request, request.left_tokens, started_s, now_s)
        for request, count in step.chunks:
            if request in self._prefills:
                self._prefill(request, count, started_s, now_s)

    def _note(self, step: Step, seconds: float) -> None:
        shape = (
            step.computed_tokens,
            step.history_tokens,
            len(step.decodes),
            step.context_tokens,
        )
        self.samples.append(StepSample(*shape, seconds))
        self.calibration = calibrate(self.calibration, self.cost.t_mixed(*shape), seconds)

    def _prefill(self, request: Request, count: int, started_s: float, now_s: float) -> None:
        if request.turn:
            request.turn, request.compute_start_s = 0, started_s
        start = request.kv_tokens
        if count == request.left_tokens == 1:
            state = self._next_position(request)
        else:
            state = self._store.digest(request.places, start)
            chunk = np.array(request.tokens[start : start + count], np.uint32)
            keys, _ = digest.keys(chunk, start, state)
            self._store.write(request.places, start, keys)
            self._have(request, start + count)
            if request.left_tokens:
                return
            state = self._store.digest(request.places, request.kv_tokens)
        del self._prefills[request]
        request.first_token_s = now_s
        if request.decoding is None:
            self._finish(request)
            return
        request.mailbox.put(PrefillDone(request.prefill_stats()))
        if request.decoding.output.finish_reason is None:
            self._decodes[request] = None
            self._say(request, state)
            return
        text = request.decoding.output.take_text()
        if text:
            request.mailbox.put(TokensOut((), text))
        self._finish(request)

    def _decode(self, request: Request) -> None:
        """Compute the last token's KV, and the next token from all of it."""
        if request.kv_tokens < len(request.blocks) * self._store.block_tokens or self._grow(
            request
        ):
            self._say(request, self._next_position(request))

    def _next_position(self, request: Request) -> int:
        """Compute the KV of one token; the digest of all there is then."""
        store, position = self._store, request.kv_tokens
        index, place = divmod(position, store.block_tokens)
        state = store.digest(request.places, position)
        key, state = digest.next_key(request.tokens[position], position, state, self._table)
        store.write_one(request.blocks[index], place, key)
        self._have(request, position + 1)
        return state

    def _say(self, request: Request, state: int) -> None:
        decoding = request.decoding
        assert decoding is not None  # noqa: S101 - a prefill never decodes
        output = decoding.output
        token_id = decoding.chooser.choose(state, len(request.tokens), output.tokens)
        request.tokens.append(token_id)
        output.add(token_id)
        request.mailbox.put(TokensOut((token_id,), output.take_text()))
        if output.finish_reason is not None:
            del self._decodes[request]
            self._finish(request)

    def _grow(self, request: Request) -> bool:
        """One more block. Promised ones are always there; without a promise there may be none,
        and the request ends."""
        if not self._store.free_blocks:
            del self._decodes[request]
            full = AmpdError(ErrorReason.KV_EXHAUSTED, "no KV memory is free", retry_after_s=1.0)
            request.mailbox.put(full)
            return False
        (block,) = self._store.take(1)
        if len(request.blocks) == len(request.places):
            request.places = np.append(request.places, block)
        request.places[len(request.blocks)] = block
        request.blocks.append(block)
        if request.promised_blocks:
            request.promised_blocks -= 1
            self.promised_blocks -= 1
        return True

    def _have(self, request: Request, kv_tokens: int) -> None:
        """KV of so many tokens is there: tell the prefix cache of the blocks that are full."""
        request.kv_tokens = kv_tokens
        share(self._store, request)


def share(store: BlockStore, request: Request) -> None:
    """Tell the prefix cache of the request's full blocks."""
    full = request.kv_tokens // store.block_tokens
    if full == request.cached_blocks:
        return
    if full > len(request.hashes):
        extend_hashes(request.hashes, request.tokens, store.block_tokens)
    for index in range(request.cached_blocks, full):
        store.cache(request.blocks[index], request.hashes[index])
    request.cached_blocks = full


def _progress(request: Request) -> StreamProgress:
    decoding = request.decoding
    assert decoding is not None  # noqa: S101 - a prefill never decodes
    slo = decoding.slo
    emitted = len(request.tokens) - request.prompt_tokens
    return StreamProgress(emitted, request.first_token_s, slo.itl_s, slo.itl_statistic)
