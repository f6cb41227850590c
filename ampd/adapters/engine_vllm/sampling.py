"""`ampd.core.model.SamplingParams` as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampd.core.errors import invalid_field
from ampd.core.model import SamplingParams


def to_vllm(sampling: SamplingParams, transfer: Mapping[str, Any], *, has_tokenizer: bool) -> Any:
    """vLLM's parameters, with `transfer` for the connector.

    AmpdError INVALID_FIELD `sampling...`: a value vLLM refuses, or text without a tokenizer.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    if not has_tokenizer:
        for name in ("stop", "bad_words"):
            if getattr(sampling, name):
                raise invalid_field(f"sampling.{name}", "the model has no tokenizer")
    try:
        return VllmSamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
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
            extra_args={"kv_transfer_params": dict(transfer)},
        )
    except (VLLMClientError, ValueError, TypeError) as error:
        parameter = getattr(error, "parameter", None)
        field = f"sampling.{parameter}" if parameter else "sampling"
        raise invalid_field(field, str(error)) from error


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
    from types import SimpleNamespace

    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer,
        SimpleNamespace(
            request_id="",
            prompt_token_ids=prompt_token_ids,
            prompt_embeds=None,
            sampling_params=VllmSamplingParams(skip_special_tokens=skip_special_tokens),
        ),
    )
    kept = characters = kept_text = 0
    for count, token_id in enumerate(output_token_ids, 1):
        detokenizer.update([token_id], False)
        characters = len(detokenizer.output_text)
        if characters > kept_characters:
            break
        if characters > kept_text:
            kept, kept_text = count, characters
    return kept
