"""A round that goes on: its text from where it was, and whether there is anything to go on to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ampd.core.model import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class End:
    """How a round has ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token, or the stop string."""
    text: str = ""
    """Of the known output what was not told yet."""

    @property
    def by_stop_string(self) -> bool:
        """Whether a stop string cut the text."""
        return self.finish_reason is FinishReason.STOP and isinstance(self.stop_reason, str)


def detokenizer(tokenizer: Any, prompt_token_ids: list[int], parameters: Any) -> Any:
    """vLLM's incremental detokenizer of a request with these vLLM parameters."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = SimpleNamespace(
        request_id="",
        prompt_token_ids=prompt_token_ids,
        prompt_embeds=None,
        sampling_params=parameters,
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def resume(
    tokenizer: Any,
    prompt: list[int],
    output: list[int],
    text_chars: int,
    sampling: SamplingParams,
    parameters: Any,
    max_model_tokens: int,
) -> tuple[Any, End | None]:
    """The detokenizer behind `output`, and its end if that is one.

    `parameters` are vLLM's for the rest of the round, as its request has them (with the model's
    own stop tokens); `sampling` is the whole round's. The output is taken token by token, with
    vLLM's functions and in its order, so that it ends where it would have ended.
    """
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import RequestStatus

    whole = parameters.clone()
    whole.min_tokens, whole.max_tokens = sampling.min_tokens, sampling.max_tokens
    text = detokenizer(tokenizer if whole.detokenize else None, prompt, whole)
    last = SimpleNamespace(
        pooling_params=None,
        sampling_params=whole,
        output_token_ids=output,
        num_output_tokens=len(output),
        num_tokens=len(prompt) + len(output),
        max_tokens=sampling.max_tokens,
        status=None,
        stop_reason=None,
    )
    has_ended = check_stop(last, max_model_tokens)
    stopped = last.status == RequestStatus.FINISHED_STOPPED
    stop_string = None
    for position, token_id in enumerate(output, 1):
        is_last = position == len(output)
        stop_string = stop_string or text.update([token_id], is_last and stopped)
    text._last_output_text_offset = text_chars
    if not has_ended and stop_string is None:
        return text, None
    reason = FinishReason.STOP if stopped or stop_string else FinishReason.LENGTH
    stop_reason = last.stop_reason if stop_string is None else stop_string
    rest = text.get_next_output_text(True, True)
    return text, End(reason, stop_reason, rest)
