"""What an emulated engine says, computed from tokens alone: no engine, no KV, no time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampd.adapters.emulated_vocabulary import VOCAB_SIZE
from ampd.adapters.engine_emulated import digest
from ampd.adapters.engine_emulated.output import Output
from ampd.adapters.engine_emulated.sampling import Chooser
from ampd.core.model import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Expected:
    """The end of a generation as `GenerateDone` has it; `tokens` and `text` are what is new,
    `kept_output_tokens` counts the output that was given as well."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str
    kept_output_tokens: int


def expect(
    tokens: Sequence[int],
    sampling: SamplingParams,
    *,
    output: Sequence[int] = (),
    text_chars: int = 0,
    vocab_size: int = VOCAB_SIZE,
    max_model_tokens: int,
) -> Expected:
    """What `GenerateRequest(tokens, sampling, output, text_chars)` gives, whatever the route.

    Time grows with the context once, and with the output. ValueError for parameters whose
    tokens nobody can know: a temperature without a seed.
    """
    if sampling.temperature > 0 and sampling.seed is None:
        raise ValueError("without a seed every engine draws for itself")
    sequence = array("I", tokens)
    said = Output(
        sampling, context_left_tokens=max_model_tokens - len(sequence), text_chars=text_chars
    )
    for token_id in output:
        said.add(token_id)
    sequence.extend(output)
    _, state = digest.keys(np.frombuffer(sequence, np.uint32), 0, 0)
    chooser = Chooser(sampling, vocab_size, 0)
    position = len(sequence)
    table = digest.tables(max_model_tokens)
    new: list[int] = []
    while said.finish_reason is None:
        token_id = chooser.choose(state, position, said.tokens)
        new.append(token_id)
        said.add(token_id)
        _, state = digest.next_key(token_id, position, state, table)
        position += 1
    return Expected(new, said.take_text(), said.finish_reason, said.stop_reason, said.kept_tokens)


def oracle(
    tokens: Sequence[int],
    sampling: SamplingParams,
    *,
    output: Sequence[int] = (),
    vocab_size: int = VOCAB_SIZE,
    max_model_tokens: int,
) -> list[int]:
    """The tokens that follow `tokens` and `output`: see `expect`."""
    expected = expect(
        tokens,
        sampling,
        output=output,
        vocab_size=vocab_size,
        max_model_tokens=max_model_tokens,
    )
    return expected.tokens
