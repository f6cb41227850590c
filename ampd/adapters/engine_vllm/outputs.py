"""Jobs, and what vLLM's outputs mean to those who wait for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampd.adapters.engine_vllm.handles import Loan, Payload, encode, tokens_digest
from ampd.adapters.engine_vllm.pins import Pin, PinTable
from ampd.adapters.engine_vllm.progress import RequestRecord
from ampd.adapters.engine_vllm.resuming import End
from ampd.adapters.engine_vllm.sampling import kept_tokens
from ampd.adapters.engine_vllm.settings import VllmSettings
from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import FinishReason, KvHandle, SamplingParams
from ampd.ports import EngineEvent, GenerateDone, PrefillDone, PrefillResult, TokensOut

Output = EngineEvent | PrefillResult | AmpdError
Deliver = Callable[[Sequence[tuple["Job", Output]]], None]


@dataclass(eq=False, slots=True)
class Job:
    """One prefill or generation, from its submission to its last output."""

    request_id: str
    tokens: array[int]
    parameters: Any  # vllm.SamplingParams
    sampling: SamplingParams
    """The whole round's."""
    lends_result: bool
    """A prefill: its one result is a handle that is lent. Otherwise events stream out."""
    output_token_ids: list[int] = field(default_factory=list)
    """With what the round has said before."""
    characters: int = 0
    """Of text that was told, before or by this job."""
    internal_id: str = ""
    """vLLM's own name of the request."""
    end: End | None = None
    """Of a round that had ended before: the one token that vLLM makes is thrown away."""
    is_prefilled: bool = False
    pin_id: str = ""
    """The pin of the finished job: dropped again if the job is cancelled."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an engine is to its peers."""

    worker_id: str
    incarnation: int
    engine_id: str
    """Of this very start: vLLM and NIXL know it by this name."""


class Translator:
    """Makes events and handles of vLLM's outputs and of pins. Engine thread only."""

    def __init__(
        self,
        settings: VllmSettings,
        identity: Identity,
        pins: PinTable,
        tokenizer: Any,  # a tokenizer of vLLM, or None
        block_tokens: int,
        block_bytes: int,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._pins = pins
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes

    def take(self, job: Job, output: Any, record: RequestRecord) -> list[Output]:
        """What `output` (vLLM's RequestOutput) means to the job's reader. When it is the last,
        the job has its `pin_id`, and vLLM nothing of it any more."""
        completion = output.outputs[0]
        outputs: list[Output] = []
        token_ids, text = tuple(completion.token_ids), completion.text
        if token_ids and not job.lends_result and not job.is_prefilled:
            job.is_prefilled = True
            outputs.append(PrefillDone(record.prefill_stats(self._block_bytes)))
        if job.end is not None:
            token_ids, text = (), job.end.text if output.finished else ""
        if (token_ids or text) and not job.lends_result:
            job.output_token_ids.extend(token_ids)
            job.characters += len(text)
            outputs.append(TokensOut(token_ids, text))
        if not output.finished:
            return outputs
        job.pin_id = record.pin_id
        pin = self._pins.get(record.pin_id)
        if pin is None or completion.finish_reason not in ("stop", "length"):
            reason = f"vLLM ended the request with {completion.finish_reason!r}"
            outputs.append(AmpdError(ErrorReason.ENGINE_FAILED, reason))
        elif job.lends_result:
            handle = self.lend(pin, len(pin.tokens))
            outputs.append(PrefillResult(handle, record.prefill_stats(self._block_bytes)))
        else:
            outputs.append(self._done(job, pin, job.end or _end(completion)))
        return outputs

    def lend(self, pin: Pin, tokens: int) -> KvHandle:
        """A lent handle of the pin's first `tokens` tokens."""
        blocks = pin.blocks[: -(-tokens // self._block_tokens)]
        loan = Loan(
            loan_id=self._pins.lend(pin),
            engine_id=self._identity.engine_id,
            host=self._settings.side_channel_host,
            port=self._settings.side_channel_port,
            tensor_parallel=self._settings.tensor_parallel,
            blocks=tuple(block.block_id for block in blocks),
            tokens_digest=tokens_digest(pin.tokens, tokens),
        )
        return self._handle(pin.pin_id, tokens, pin.lease_s, loan)

    def _done(self, job: Job, pin: Pin, end: End) -> GenerateDone:
        outputs = len(job.output_token_ids)
        kept = outputs
        if end.by_stop_string:
            kept = kept_tokens(
                self._tokenizer,
                job.tokens.tolist(),
                job.output_token_ids,
                job.characters,
                skip_special_tokens=job.sampling.skip_special_tokens,
            )
        self._pins.truncate(pin, len(job.tokens) + kept)
        return GenerateDone(
            finish_reason=end.finish_reason,
            stop_reason="" if end.stop_reason is None else str(end.stop_reason),
            output_tokens=outputs,
            kept_output_tokens=kept,
            kv=self._handle(pin.pin_id, len(pin.tokens), pin.lease_s, None),
        )

    def _handle(self, pin_id: str, tokens: int, lease_s: float, loan: Loan | None) -> KvHandle:
        me = self._identity
        payload = encode(Payload(pin_id, loan))
        return KvHandle(me.worker_id, me.incarnation, tokens, lease_s, payload)


def _end(completion: Any) -> End:
    return End(FinishReason(completion.finish_reason), completion.stop_reason)
