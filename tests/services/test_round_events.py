"""What a round tells: in order, and what waits together comes together."""

import asyncio

from ampd.core.model import Accepted, TokensOut
from services.decode.round import RoundEvents


async def test_tokens_that_wait_become_one_event() -> None:
    events = RoundEvents()
    accepted, failure = Accepted(history_rebuilt=False), RuntimeError("ended")
    events.put(accepted)
    events.put(TokensOut((1,), "a"))
    events.put(TokensOut((2, 3), ""))
    events.put(TokensOut((4,), "b"))
    events.put(failure)
    assert await events.get() == accepted
    tokens = await events.get()
    assert isinstance(tokens, TokensOut)
    assert (list(tokens.token_ids), tokens.text) == ([1, 2, 3, 4], "ab")
    assert await events.get() is failure


async def test_a_listener_that_waits_gets_each_at_once() -> None:
    events = RoundEvents()
    for token in range(3):
        waiting = asyncio.create_task(events.get())
        await asyncio.sleep(0)
        events.put(TokensOut((token,), "x"))
        assert await waiting == TokensOut((token,), "x")
