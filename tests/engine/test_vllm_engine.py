"""What only the vLLM engine promises, on the engines of the contract."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from engine_contract import GREEDY, Pair, generate, oracle, settled, token_ids

from ampd.core.model import FinishReason
from ampd.ports import PrefillRequest

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_pins_alone_cost_no_cpu(pair: Pair) -> None:
    await pair.clean()
    rng = random.Random(20)
    pins = [(await generate(pair.decode, token_ids(rng, 200))).done.kv for _ in range(5)]
    await asyncio.sleep(0.2)
    before_s = await pair.decode.cpu_s()  # type: ignore[attr-defined]
    await asyncio.sleep(3.0)
    idle = (await pair.decode.cpu_s() - before_s) / 3.0  # type: ignore[attr-defined]
    await pair.decode.lend(pins[0], 100)
    before_s = await pair.decode.cpu_s()  # type: ignore[attr-defined]
    await asyncio.sleep(2.0)
    lent = (await pair.decode.cpu_s() - before_s) / 2.0  # type: ignore[attr-defined]
    print(f"CPU with pins {idle:.2%} of a core, with one lent {lent:.2%}")  # noqa: T201
    # torch's own threads take about 2 %; polling would take 10 % and more.
    assert idle < 0.06
    assert lent < 0.5
    for kv in pins:
        await pair.decode.release(kv)
    await pair.clean()


async def test_a_stop_string_cuts_text_tokens_and_kv(pair: Pair) -> None:
    await pair.clean()
    prompt = token_ids(random.Random(21), 90)
    whole = await generate(pair.decode, prompt, sampling=replace(GREEDY, max_tokens=16))
    # The text of every token, from one-token-longer generations of the same greedy stream.
    ends = []
    for count in range(1, 17):
        part = await generate(pair.decode, prompt, sampling=replace(GREEDY, max_tokens=count))
        ends.append(len(part.text))
        await pair.decode.release(part.done.kv)
    full = whole.text
    # A stop string that begins inside a token and ends inside the next.
    token = next(i for i in range(6, 14) if ends[i] - ends[i - 1] > 2 and ends[i + 1] > ends[i])
    stop = full[ends[token] - 2 : ends[token] + 1]
    cut = full.find(stop)
    kept = max((i + 1 for i, end in enumerate(ends) if end <= cut), default=0)
    stopping = replace(GREEDY, max_tokens=16, stop=(stop,))
    stopped = await generate(pair.decode, prompt, sampling=stopping)
    assert stopped.text == full[:cut]
    assert stopped.done.finish_reason is FinishReason.STOP
    assert stopped.done.stop_reason == stop
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert stopped.done.kept_output_tokens == kept < len(stopped.tokens)
    assert stopped.done.kv.tokens == len(prompt) + kept
    included = await generate(
        pair.decode, prompt, sampling=replace(stopping, include_stop_str_in_output=True)
    )
    assert included.text == full[: cut + len(stop)]
    # The history goes on from the cut, on another engine.
    history = prompt + type(prompt)("I", stopped.tokens[:kept])
    tokens = history + token_ids(random.Random(22), 10)
    lent = await pair.decode.lend(stopped.done.kv, len(history))
    result = await pair.prefill.prefill(PrefillRequest("p", tokens, lent))
    assert result.stats.pulled_tokens == len(history)
    after = await generate(pair.decode, tokens, result.kv)
    for done in (whole, stopped, included, after):
        await pair.decode.release(done.done.kv)
    assert after.tokens == await oracle(pair.decode, tokens)
    await pair.clean()


async def test_sampling_parameters_reach_vllm(pair: Pair) -> None:
    prompt = token_ids(random.Random(23), 40)

    async def tokens_of(**changes: object) -> tuple[list[int], str, FinishReason]:
        sampling = replace(GREEDY, max_tokens=6, **changes)  # type: ignore[arg-type]
        result = await generate(pair.decode, prompt, sampling=sampling)
        await pair.decode.release(result.done.kv)
        return result.tokens, result.done.stop_reason, result.done.finish_reason

    greedy, _, reason = await tokens_of()
    assert reason is FinishReason.LENGTH
    assert (await tokens_of(logit_bias={777: 100.0}))[0] == [777] * 6
    allowed = (await tokens_of(allowed_token_ids=(500, 501)))[0]
    assert set(allowed) <= {500, 501}
    stopped = await tokens_of(stop_token_ids=(greedy[2],))
    assert stopped == (greedy[:3], str(greedy[2]), FinishReason.STOP)
    assert (await tokens_of(stop_token_ids=(greedy[2],), min_tokens=5))[0][:2] == greedy[:2]
    hot = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 7}
    assert (await tokens_of(**hot))[0] == (await tokens_of(**hot))[0]
    assert (await tokens_of(**(hot | {"top_k": 1})))[0] == greedy
    biased = {"logit_bias": {777: 50.0}}
    for penalty in (
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 50.0},
    ):
        assert (await tokens_of(logit_bias={777: 12.0, 778: 11.9}, **penalty))[0] != [777] * 6
    assert (await tokens_of(**biased, bad_words=()))[0] == [777] * 6
    eos_id = 2
    assert (await tokens_of(logit_bias={eos_id: 100.0}))[0] == [eos_id] * 6
    ended, _, reason = await tokens_of(logit_bias={eos_id: 100.0}, ignore_eos=False)
    assert (ended, reason) == ([eos_id], FinishReason.STOP)
    await pair.clean()


async def test_text_streams_with_every_token(pair: Pair) -> None:
    result = await generate(pair.decode, token_ids(random.Random(24), 50))
    assert len(result.text) > len(result.tokens)
    assert len(result.event_times_s) >= len(result.tokens)
    await pair.decode.release(result.done.kv)
    await settled(pair.decode)
