"""Penalties and bad words of a round that goes on behind output from elsewhere.

vLLM takes that output for prompt, but presence and frequency penalties and bad words look at
the output alone. So such a request has vLLM's penalties switched off and gets them here, by
vLLM's own functions and at the same place: behind all other logits processors. The repetition
penalty, which comes before the other two, moves with them. vLLM's own ban of bad words stays:
it is the part of ours that lies in the new output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from ampd.adapters.engine_vllm.sampling import RESUMED_KEY

UNKNOWN_TOKEN: Final = -1
"""What asynchronous scheduling puts where a token is not there yet."""


@dataclass(frozen=True, slots=True)
class _Row:
    known: list[int]
    """The output from elsewhere: the end of vLLM's prompt."""
    new: list[int]
    """vLLM's own list: it grows."""
    prompt: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    bad_words: list[list[int]]


class ResumedPenalties(LogitsProcessor):  # type: ignore[misc]
    """Named in `EngineArgs.logits_processors`; touches only requests with RESUMED_KEY."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Penalties change the greedy choice."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Requests have come, gone or moved in the batch."""
        process_dict_updates(self._rows, batch_update, self._row)

    def _row(self, params: Any, prompt: list[int] | None, new: list[int]) -> _Row | None:
        resumed = (params.extra_args or {}).get(RESUMED_KEY)
        if resumed is None or prompt is None:
            return None
        known: list[int] = resumed["output"]
        said_before = prompt[: len(prompt) - len(known)]

        def tensor(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        return _Row(
            known,
            new,
            tensor([said_before], torch.int64),
            tensor([resumed["presence_penalty"]], torch.float32),
            tensor([resumed["frequency_penalty"]], torch.float32),
            tensor([resumed["repetition_penalty"]], torch.float32),
            params.bad_words_token_ids or [],
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """In place."""
        for index, row in self._rows.items():
            output = row.known + [token for token in row.new if token != UNKNOWN_TOKEN]
            mine = logits[index : index + 1]
            apply_bad_words(mine, {0: row.bad_words}, [output])
            apply_all_penalties(
                mine, row.prompt, row.presence, row.frequency, row.repetition, [output]
            )
        return logits
