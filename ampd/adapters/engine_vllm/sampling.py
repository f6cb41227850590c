"""`ampd.core.model.SamplingParams` as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ampd.adapters.engine_vllm.resuming import detokenizer
from ampd.core.errors import invalid_field
from ampd.core.model import SamplingParams

RESUMED_KEY: Final = "ampd_resumed"
"""Where `penalties.ResumedPenalties` finds in `extra_args` what it has to apply."""


def to_vllm(
    sampling: SamplingParams,
    transfer: Mapping[str, Any],
    *,
    has_tokenizer: bool,
    output: Sequence[int] = (),
) -> Any:
    """vLLM's parameters for the rest of a round behind `output`, with `transfer` for the
    connector. `sampling` is the whole round's. A seed is moved on by the output, so that no
    random number comes twice; the stream is then another one than the uninterrupted round's.

    AmpdError INVALID_FIELD `sampling...`: a value vLLM refuses, or text without a tokenizer.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    if not has_tokenizer:
        for name in ("stop", "bad_words"):
            if getattr(sampling, name):
                raise invalid_field(f"sampling.{name}", "the model has no tokenizer")
    extra_args: dict[str, Any] = {"kv_transfer_params": dict(transfer)}
    penalties = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    sees_output = sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words
    if output and sees_output:
        extra_args[RESUMED_KEY] = {"output": list(output), **penalties}
    # What is left of them; vLLM refuses a round without a token, so one that has ended gets one.
    max_tokens = max(1, sampling.max_tokens - len(output)) if output else sampling.max_tokens
    min_tokens = max(0, sampling.min_tokens - len(output)) if output else sampling.min_tokens
    try:
        parameters = VllmSamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            **penalties,
            seed=None if sampling.seed is None else sampling.seed + len(output),
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=sampling.skip_special_tokens,
            bad_words=list(sampling.bad_words) or None,
            logit_bias=dict(sampling.logit_bias) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            detokenize=has_tokenizer,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args,
        )
    except (VLLMClientError, ValueError, TypeError) as error:
        parameter = getattr(error, "parameter", None)
        field = f"sampling.{parameter}" if parameter else "sampling"
        raise invalid_field(field, str(error)) from error
    if RESUMED_KEY in extra_args:
        # Not before: what vLLM refuses of them is refused here too.
        parameters.presence_penalty = parameters.frequency_penalty = 0.0
        parameters.repetition_penalty = 1.0
    return parameters


def kept_tokens(
    tokenizer: Any,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
    kept_characters: int,
    *,
    skip_special_tokens: bool,
) -> int:
    """How many output tokens make up the text that a stop string left.

    The incremental decoder runs once more over the output, since the streamed pieces do not
    say where a token ends. A token that reaches beyond the cut, or lies in it, is cut off.
    """
    from vllm import SamplingParams as VllmSamplingParams

    text = detokenizer(
        tokenizer, prompt_token_ids, VllmSamplingParams(skip_special_tokens=skip_special_tokens)
    )
    kept = characters = kept_text = 0
    for count, token_id in enumerate(output_token_ids, 1):
        text.update([token_id], False)
        characters = len(text.output_text)
        if characters > kept_characters:
            break
        if characters > kept_text:
            kept, kept_text = count, characters
    return kept
