"""What only the vLLM engine promises, on the engines of the contract."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engine_contract import GREEDY, Generated, Pair, generate, oracle, settled, token_ids
from tokenizers import Tokenizer

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import FinishReason, SamplingParams
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


async def _resumed_everywhere(
    pair: Pair, sampling: SamplingParams, points: Sequence[int] | None = None
) -> Generated:
    """The round in one piece, after it was found to go on alike behind each of its tokens."""
    await pair.clean()
    prompt = token_ids(random.Random(25), 45)
    whole = await generate(pair.decode, prompt, sampling=sampling)
    await pair.decode.release(whole.done.kv)
    for known in points or range(1, len(whole.tokens) + 1):
        said, told = whole.tokens[:known], whole.chars_after[known - 1]
        rest = await generate(pair.decode, prompt, None, sampling, said=said, text_chars=told)
        await pair.decode.release(rest.done.kv)
        assert (known, rest.tokens) == (known, whole.tokens[known:])
        assert (known, rest.text) == (known, whole.text[told:])
        for name in ("finish_reason", "stop_reason", "output_tokens", "kept_output_tokens"):
            assert getattr(rest.done, name) == getattr(whole.done, name), (known, name)
    return whole


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.9},
        {"frequency_penalty": 0.4},
        {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
        {"presence_penalty": -1.0, "frequency_penalty": 0.9},
        {"repetition_penalty": 1.3},
    ],
)
async def test_penalties_see_the_output_of_before(pair: Pair, penalties: dict[str, float]) -> None:
    close = {token: 12.0 - place for place, token in enumerate(range(777, 787))}
    sampling = replace(GREEDY, max_tokens=14, logit_bias=close)
    plain = await _resumed_everywhere(pair, sampling, (1, 7, 13))
    penalised = replace(sampling, **penalties)  # type: ignore[arg-type]
    whole = await _resumed_everywhere(pair, penalised)
    assert whole.tokens != plain.tokens
    await pair.clean()


async def test_penalties_of_a_resumed_round_touch_no_other(pair: Pair) -> None:
    """Several rounds in one batch, some of them resumed, come and go."""
    close = {token: 12.0 - place for place, token in enumerate(range(777, 787))}
    base = replace(GREEDY, logit_bias=close)
    plan = [
        replace(base, max_tokens=6, frequency_penalty=1.9),
        replace(base, max_tokens=12),
        replace(base, max_tokens=18, presence_penalty=1.9, repetition_penalty=1.1),
        replace(base, max_tokens=9, frequency_penalty=1.1),
    ]
    prompts = [token_ids(random.Random(30 + i), 20 + 7 * i) for i in range(len(plan))]
    await pair.clean()
    wholes = [
        await generate(pair.decode, prompt, sampling=sampling)
        for prompt, sampling in zip(prompts, plan, strict=True)
    ]
    rests = await asyncio.gather(
        *(
            generate(pair.decode, prompt, None, sampling, said=whole.tokens[:known])
            for prompt, sampling, whole in zip(prompts, plan, wholes, strict=True)
            for known in (0, 1, 5)
        )
    )
    for index, rest in enumerate(rests):
        assert rest.tokens == wholes[index // 3].tokens[(0, 1, 5)[index % 3] :]
    for done in (*wholes, *rests):
        await pair.decode.release(done.done.kv)
    await pair.clean()


async def test_bad_words_see_the_output_of_before(pair: Pair) -> None:
    tokenizer = Tokenizer.from_file(str(Path(pair.decode.info.model) / "tokenizer.json"))
    (the,), (of,) = (
        tokenizer.encode(word, add_special_tokens=False).ids for word in (" the", " of")
    )
    sampling = replace(GREEDY, max_tokens=6, logit_bias={the: 60.0, of: 40.0})
    plain = await _resumed_everywhere(pair, sampling, (3,))
    assert plain.tokens == [the] * 6
    banned = await _resumed_everywhere(pair, replace(sampling, bad_words=("the the",)))
    assert banned.tokens == [the, of] * 3
    await pair.clean()


async def test_min_tokens_count_the_output_of_before(pair: Pair) -> None:
    eos = 2
    sampling = replace(
        GREEDY, max_tokens=12, min_tokens=7, ignore_eos=False, logit_bias={eos: 60.0, 777: 40.0}
    )
    whole = await _resumed_everywhere(pair, sampling)
    assert whole.tokens == [777] * 7 + [eos]
    assert whole.done.finish_reason is FinishReason.STOP
    await pair.clean()


@pytest.mark.parametrize("include", [False, True])
async def test_text_and_stop_strings_of_before(pair: Pair, include: bool) -> None:
    """Characters of several tokens, text held back, stop strings that begin anywhere, and
    min_tokens that hide one: everything goes on behind every token."""
    await pair.clean()
    prompt = token_ids(random.Random(25), 45)
    plain = await generate(pair.decode, prompt, sampling=replace(GREEDY, max_tokens=16))
    await pair.decode.release(plain.done.kv)
    ends = plain.chars_after
    middle = next(i for i in range(8, 14) if ends[i] - ends[i - 1] > 1)
    stops = (
        plain.text[ends[4] + 1 : ends[middle] - 1],  # over several tokens
        plain.text[ends[2] : ends[2] + 2],
    )
    for stop in stops:
        for min_tokens in (0, 6):
            await _resumed_everywhere(
                pair,
                replace(
                    GREEDY,
                    max_tokens=16,
                    min_tokens=min_tokens,
                    stop=(stop, "never\x00said"),
                    include_stop_str_in_output=include,
                ),
            )
    await pair.clean()


async def test_text_that_was_not_told_yet_comes_first(pair: Pair) -> None:
    prompt = token_ids(random.Random(25), 45)
    whole = await generate(pair.decode, prompt)
    rest = await generate(
        pair.decode, prompt, said=whole.tokens[:5], text_chars=whole.chars_after[2]
    )
    assert rest.text == whole.text[whole.chars_after[2] :]
    for done in (whole, rest):
        await pair.decode.release(done.done.kv)
    await pair.clean()


async def test_a_resumed_seed_goes_on_validly(pair: Pair) -> None:
    prompt = token_ids(random.Random(25), 45)
    hot = replace(GREEDY, temperature=1.0, seed=7, allowed_token_ids=(500, 501, 502))
    whole = await generate(pair.decode, prompt, sampling=hot)
    rests = [
        await generate(pair.decode, prompt, None, hot, said=whole.tokens[:3]) for _ in range(2)
    ]
    assert rests[0].tokens == rests[1].tokens
    assert len(rests[0].tokens) == 5
    assert set(rests[0].tokens) <= {500, 501, 502}
    for done in (whole, *rests):
        await pair.decode.release(done.done.kv)
    await pair.clean()


async def test_output_that_cannot_be(pair: Pair) -> None:
    most = pair.decode.info.max_model_tokens
    prompt = token_ids(random.Random(25), 45)
    for said in (array("I", [pair.decode.info.vocab_size]), token_ids(random.Random(1), most)):
        with pytest.raises(AmpdError) as caught:
            await generate(pair.decode, prompt, said=said)
        assert caught.value.reason is ErrorReason.INVALID_FIELD
        assert caught.value.violations[0].field == "output"
