"""A scenario at work: sessions whose every token is compared with the oracle, loads that are
waited for, and an end at which nothing may be left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from driver import BLOCK, KV_BYTES_PER_TOKEN, Driver, Shape, names_of
from scenario_client import Ask, Client, Seen, Stream

from ampd.adapters.engine_emulated import Expected, expect
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import FinishReason, Role, SamplingParams
from ampd.v1.round_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    ROUTE_LOCAL,
    ROUTE_REMOTE,
)
from ampd.v1.session_pb2 import SESSION_STATE_IDLE, Session, Slo
from ampd.v1.worker_pb2 import Worker

FREE_WITHIN_S: Final = 1.0
"""Spec 7: what a round took is free so soon after it was given up."""
TRANSFER_FAILS_WITHIN_S: Final = 6.0
"""Spec 7: the same while a transfer is in flight."""
BEAT_S: Final = 0.25
"""Loads are published 0.22 s apart at most."""
POLL_S: Final = 0.02
FINISH_REASONS: Final = {
    FinishReason.STOP: FINISH_REASON_STOP,
    FinishReason.LENGTH: FINISH_REASON_LENGTH,
}
COMES_BACK_S: Final = 10.0
"""After the last close everything is free again, a drain's or a transfer's end included."""


@dataclass(eq=False)
class Dialogue:
    """A session and its true history."""

    scene: Scene
    session_id: str
    history: list[int] = field(default_factory=list)
    rounds: int = 0
    closed: bool = False

    def ask(
        self,
        tokens: int | Sequence[int],
        max_tokens: int = 8,
        *,
        keep: int | None = None,
        request_id: str = "",
        sampling: SamplingParams | None = None,
    ) -> Ask:
        """A round of so many new tokens, or of these; greedy by default."""
        if isinstance(tokens, int):
            tokens = self.scene.tokens(tokens)
        if sampling is None:
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Ask(self.session_id, tuple(tokens), sampling, keep, request_id)

    def expected(self, ask: Ask) -> Expected:
        """What the round has to say, by the oracle."""
        kept = self.history if ask.keep is None else self.history[: ask.keep]
        prompt = [*kept, *ask.tokens]
        longest = self.scene.shape.max_model_tokens
        return expect(prompt, ask.sampling, max_model_tokens=longest)

    def accept(self, ask: Ask, seen: Seen) -> Seen:
        """The round has ended well: it said what it had to, and that is the history now."""
        expected = self.expected(ask)
        end = seen.finished
        kept = self.history if ask.keep is None else self.history[: ask.keep]
        assert list(seen.token_ids) == expected.tokens
        assert seen.text == expected.text
        assert end.finish_reason == FINISH_REASONS[expected.finish_reason]
        assert {placed.history_tokens for placed in seen.placed} == {len(kept)}
        assert seen.where.round_index == self.rounds
        self.history = [*kept, *ask.tokens, *expected.tokens[: expected.kept_output_tokens]]
        self.rounds += 1
        assert end.history_tokens == len(self.history)
        assert end.usage.output_tokens == len(expected.tokens)
        return seen

    def accept_prefix(self, ask: Ask, seen: Seen) -> None:
        """The round has not ended: what it said is a beginning of what it has to say."""
        said = list(seen.token_ids)
        assert said == self.expected(ask).tokens[: len(said)]

    async def round(
        self,
        tokens: int | Sequence[int] = 50,
        max_tokens: int = 8,
        *,
        client: Client | None = None,
        keep: int | None = None,
    ) -> Seen:
        """One round that ends well."""
        ask = self.ask(tokens, max_tokens, keep=keep)
        return self.accept(ask, await (client or self.scene.client()).start(ask).end())

    async def get(self) -> Session:
        """As the cluster tells it."""
        return await self.scene.client().get(self.session_id)

    async def check_as_before(self) -> None:
        """Idle, in time, and nothing but the accepted rounds is in the history."""
        started_s = self.scene.now_s()
        while (session := await self.get()).state != SESSION_STATE_IDLE:
            waited_s = self.scene.now_s() - started_s
            assert waited_s <= FREE_WITHIN_S + self.scene.driver.slack_s, session
            await asyncio.sleep(POLL_S)
        assert (session.history_tokens, session.round_count) == (len(self.history), self.rounds)

    async def close(self, client: Client | None = None) -> None:
        """End the session."""
        self.closed = True
        await (client or self.scene.client()).close(self.session_id)


class Scene:
    """One scenario on one driver."""

    def __init__(self, name: str, driver: Driver) -> None:
        self.driver = driver
        self.rng = random.Random(name)
        self._clients: dict[tuple[int, str], Client] = {}
        self._dialogues: list[Dialogue] = []

    @property
    def shape(self) -> Shape:
        """Of the cluster."""
        return self.driver.shape

    def now_s(self) -> float:
        """For durations."""
        return asyncio.get_running_loop().time()

    def tokens(self, count: int) -> tuple[int, ...]:
        """So many that no other prompt begins with."""
        return tuple(self.rng.randrange(256, 60_000) for _ in range(count))

    def client(self, coordinator: int = 0, tenant: str = "default") -> Client:
        """One per coordinator and tenant."""
        key = (coordinator, tenant)
        if key not in self._clients:
            self._clients[key] = self.driver.client(coordinator, tenant)
        return self._clients[key]

    async def reconnect(self, coordinator: int = 0) -> Client:
        """A new connection: of a coordinator that has died in between."""
        client = self._clients.pop((coordinator, "default"), None)
        if client is not None:
            await client.leave()
        return self.client(coordinator)

    # --- sessions ----------------------------------------------------------------------------

    async def open(self, *, client: Client | None = None, slo: Slo | None = None) -> Dialogue:
        """A new session, without a round."""
        session = await (client or self.client()).create(slo=slo)
        return self.adopt(session.session_id)

    def adopt(self, session_id: str) -> Dialogue:
        """A session that is there already."""
        dialogue = Dialogue(self, session_id)
        self._dialogues.append(dialogue)
        return dialogue

    async def opened(self, tokens: int = 100) -> Dialogue:
        """A session with a history."""
        dialogue = await self.open()
        await dialogue.round(tokens)
        return dialogue

    async def opened_at(self, worker: str, tokens: int = 100) -> Dialogue:
        """A session with a history, at home at that worker."""
        for _ in range(8):
            dialogue = await self.open()
            seen = await dialogue.round(tokens)
            if seen.where.decode_worker == worker:
                return dialogue
            # The next one is bound by what the workers have published.
            await asyncio.sleep(BEAT_S)
        raise AssertionError(f"nothing is bound to {worker}")

    # --- loads -------------------------------------------------------------------------------

    async def until(
        self,
        reached: Callable[[dict[str, Worker]], object],
        within_s: float,
        *,
        client: Client | None = None,
    ) -> float:
        """Seconds until the workers are like that; an error when they are not in time."""
        started_s = self.now_s()
        client = client or self.client()
        while True:
            workers = {worker.worker_id: worker for worker in await client.workers()}
            waited_s = self.now_s() - started_s
            if reached(workers):
                return waited_s
            assert waited_s <= within_s + self.driver.slack_s, f"{waited_s:.2f} s: {workers}"
            await asyncio.sleep(POLL_S)

    async def free(self, within_s: float = FREE_WITHIN_S, *, client: Client | None = None) -> None:
        """No round holds anything anywhere: in the loads within that time and a heartbeat, in
        the engines at once."""
        started_s = self.now_s()
        await self.until(is_free, within_s + BEAT_S, client=client)
        await self.engines_free(within_s - (self.now_s() - started_s))

    async def engines_free(self, within_s: float) -> None:
        """No engine runs anything, and prefill engines hold nothing."""
        started_s = self.now_s()
        while held := self._held():
            assert self.now_s() - started_s <= max(0.0, within_s) + self.driver.slack_s, held
            await asyncio.sleep(POLL_S)

    def _held(self) -> list[str]:
        held = []
        for role in (Role.PREFILL, Role.DECODE):
            for name in self.shape.names(role):
                try:
                    stats = self.driver.engine(name)
                except LookupError:
                    continue
                pinned = stats.kv_pinned_tokens if role is Role.PREFILL else 0
                if stats.running_requests or stats.waiting_requests or pinned:
                    held.append(f"{name}: {stats}")
        return held

    async def gone(self, name: str) -> None:
        """The store has forgotten the process."""
        await self.until(lambda workers: name not in workers, 4.0)

    async def ready(self) -> None:
        """Every process takes work."""
        await self.until(all_live(self.shape), COMES_BACK_S)

    # --- the end -----------------------------------------------------------------------------

    async def finish(self) -> None:
        """Close what is open: all must come back, and the books balance."""
        client = self.client()
        for dialogue in self._dialogues:
            if not dialogue.closed:
                await dialogue.close(client)
        await self.until(is_empty, COMES_BACK_S)
        await self.engines_free(COMES_BACK_S)
        self.driver.check_books()

    async def abandon(self) -> None:
        """After a failure: leave nothing to the next scenario, if possible."""
        for dialogue in self._dialogues:
            with suppress(AmpdError):
                await dialogue.close()

    async def leave(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.leave()


# --- what loads say ------------------------------------------------------------------------------


def is_free(workers: dict[str, Worker]) -> bool:
    """Whether no round holds anything anywhere."""
    loads = [worker.load for worker in workers.values()]
    return not any(w.kv_running_tokens or w.running_rounds or w.queued_tasks for w in loads)


def is_empty(workers: dict[str, Worker]) -> bool:
    """Whether nothing is held anywhere."""
    loads = [worker.load for worker in workers.values()]
    return is_free(workers) and not any(w.sessions or w.kv_pinned_tokens for w in loads)


def all_live(shape: Shape) -> Callable[[dict[str, Worker]], bool]:
    """Whether every process of that shape is registered, and takes work."""
    names = set(names_of(shape))
    return lambda workers: (
        names == set(workers) and not any(worker.load.draining for worker in workers.values())
    )


# --- what rounds say -----------------------------------------------------------------------------


def check_economy(seen: Seen) -> None:
    """Tokens computed, tokens pulled and bytes moved are what the round's route implies: the
    increment is computed once, somewhere, and nothing of the history again."""
    usage, where = seen.finished.usage, seen.where
    prompt = usage.history_tokens + usage.increment_tokens
    pulled = usage.increment_pulled_tokens
    assert not where.history_rebuilt
    assert usage.decode_computed_tokens + usage.decode_cached_tokens + pulled == prompt
    if where.route == ROUTE_LOCAL:
        assert usage.decode_computed_tokens <= usage.increment_tokens + BLOCK
        assert (pulled, usage.increment_pulled_bytes, usage.history_pulled_bytes) == (0, 0, 0)
        assert usage.prefill_computed_tokens == 0
        return
    assert where.route == ROUTE_REMOTE
    # The increment, the token that had no KV yet, and of a rewind the rest of a block.
    assert usage.prefill_computed_tokens <= usage.increment_tokens + BLOCK
    assert usage.history_pulled_bytes <= _block_bytes(usage.history_pulled_tokens, 1)
    assert usage.decode_computed_tokens <= 1
    assert usage.decode_cached_tokens >= (usage.history_tokens // BLOCK - 1) * BLOCK
    assert 0 < pulled <= usage.increment_tokens + 2 * BLOCK
    assert 0 < usage.increment_pulled_bytes <= _block_bytes(pulled, 1)


def _block_bytes(tokens: int, more_blocks: int) -> int:
    """Of so many tokens in whole blocks, and a few blocks."""
    return (-(-tokens // BLOCK) + more_blocks) * BLOCK * KV_BYTES_PER_TOKEN


# --- what errors say -----------------------------------------------------------------------------


async def refused(call: Awaitable[object]) -> AmpdError:
    """The error that a call ends with; an assertion fails when it does not."""
    try:
        answer = await call
    except AmpdError as error:
        return error
    raise AssertionError(f"the call was answered: {answer}")


UNAVAILABLE: Final = frozenset(
    {
        ErrorReason.NO_DECODE_WORKER,
        ErrorReason.WORKER_UNAVAILABLE,
        ErrorReason.STORE_UNAVAILABLE,
        ErrorReason.DRAINING,
    }
)
"""The reasons that a client hears as UNAVAILABLE."""


def tight(**changes: object) -> Shape:
    """One worker of each kind, whose KV holds a few sessions."""
    base = Shape(prefill=1, decode=1, kv_tokens=2048, max_model_tokens=1024, kv_lease_s=0.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def ends(streams: Iterable[Stream]) -> Awaitable[list[Seen]]:
    """All of them."""
    return asyncio.gather(*(stream.end() for stream in streams))
