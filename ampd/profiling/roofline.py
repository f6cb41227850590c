"""Cost models of GPUs that no public table has, from a roofline: an estimate, not a measurement.

Per step: linear work at the GPU's rate, but not less than reading the weights that it touches;
attention; reading the context's KV; two all-reduces per layer; a floor per layer and the host's
overhead. The steps are laid on the grid of the published tables, with more mixed steps, and
fitted like them.

The constants come from data sheets and public measurements. With those of an H100 and an H200
the same roofline meets their tables within a third in the median of every kind of step, decode
steps within 10 % (tests/profiling/test_catalogue.py); single steps are up to 60 % off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ampd.ports import StepSample
from ampd.profiling.gpu_tables import StepTable

BYTES_PER_VALUE: Final = 2
"""bf16, of weights and KV."""
HISTORIES: Final = (0, 1024, 4096, 16384, 65536)
INCREMENTS: Final = (128, 512, 2048, 8192)
BATCHES: Final = (1, 8, 32, 64, 128)
CONTEXTS: Final = (1024, 4096, 16384, 65536)
MIXED_BATCHES: Final = (8, 32, 64)
MIXED_CONTEXTS: Final = (4096, 16384)
MIXED_CHUNKS: Final = (16, 32, 64, 128, 512, 2048)
"""Smaller ones than the tables have: the weights are read in the time that some 40 tokens of
computation take on an H20, and the line bends there."""
TP_DEGREES: Final = (1, 2, 4, 8)

ALL_REDUCES_PER_LAYER: Final = 2
ALL_REDUCE_S: Final[Mapping[int, float]] = {2: 8e-6, 4: 1e-5, 8: 1.2e-5}
ALL_REDUCE_BYTES_PER_S: Final[Mapping[int, float]] = {2: 157e9, 4: 116e9, 8: 127e9}
"""By TP degree, measured on H100."""
LAYER_FLOOR_S: Final = 14e-6
"""Kernel launches: they do not shrink with TP."""
HOST_PREFILL_S: Final = 6e-3
HOST_DECODE_S: Final = 1e-3
HOST_SEQUENCE_S: Final = 15e-6
HOST_MIXED_S: Final = 3e-3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: FLOP/s (bf16), bytes of HBM per second, and the shares of them that engines
    reach: matrix products, attention, memory reads."""

    name: str
    flops: float
    hbm_bytes_per_s: float
    mfu_gemm: float
    mfu_attention: float
    mbu: float


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer's sizes; `name` as the tables have it."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 1
    experts_per_token: int = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    def parameters(self, experts: float) -> float:
        """With so many experts per layer; the input embedding is looked up, not multiplied."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + experts * 3 * self.hidden * self.ffn) + (
            self.hidden * self.vocab
        )

    def experts_touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer that `tokens` go through."""
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)


GPUS: Final = (
    Gpu("h20", 148e12, 4.0e12, mfu_gemm=0.92, mfu_attention=0.85, mbu=0.85),
    Gpu("h20_3e", 148e12, 4.8e12, mfu_gemm=0.92, mfu_attention=0.85, mbu=0.85),
)
MODELS: Final = (
    Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
    Model("Meta-Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    Model("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, experts=8, experts_per_token=2),
)


def roofline_table(gpu: Gpu, model: Model, tp: int) -> StepTable:
    """The steps of the published tables' grid and more, estimated."""
    roofline = _Roofline(gpu, model, tp)
    return StepTable(
        prefills=tuple(
            StepSample(chunk, history, 0, 0, HOST_PREFILL_S + roofline.step_s(chunk, history, 0, 0))
            for history in HISTORIES
            for chunk in INCREMENTS
        ),
        decodes=tuple(
            StepSample(0, 0, batch, batch * context, roofline.decode_s(batch, batch * context))
            for batch in BATCHES
            for context in CONTEXTS
        ),
        mixed=tuple(
            StepSample(
                chunk,
                context,
                batch,
                batch * context,
                HOST_MIXED_S + roofline.step_s(chunk, context, batch, batch * context),
            )
            for batch in MIXED_BATCHES
            for context in MIXED_CONTEXTS
            for chunk in MIXED_CHUNKS
        ),
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class _Roofline:
    gpu: Gpu
    model: Model
    tp: int

    def decode_s(self, batch: int, context_tokens: int) -> float:
        host_s = HOST_DECODE_S + HOST_SEQUENCE_S * batch
        return host_s + self.step_s(0, 0, batch, context_tokens)

    def step_s(self, chunk: int, history: int, batch: int, context_tokens: int) -> float:
        """Without the host's part."""
        gpu, model, tokens = self.gpu, self.model, chunk + batch
        work = 2 * tokens * model.parameters(model.experts_per_token)
        weights = BYTES_PER_VALUE * model.parameters(model.experts_touched(tokens))
        hbm = self.tp * gpu.hbm_bytes_per_s * gpu.mbu
        linear_s = max(work / (self.tp * gpu.flops * gpu.mfu_gemm), weights / hbm)
        attention = (
            4 * model.layers * model.heads * model.head_dim * chunk * (history + (chunk + 1) / 2)
        )
        attention_s = attention / (self.tp * gpu.flops * gpu.mfu_attention)
        context_s = context_tokens * model.kv_bytes_per_token / hbm
        layer_s = LAYER_FLOOR_S
        if self.tp > 1:
            moved = tokens * model.hidden * BYTES_PER_VALUE
            layer_s += ALL_REDUCES_PER_LAYER * (
                ALL_REDUCE_S[self.tp] + moved / ALL_REDUCE_BYTES_PER_S[self.tp]
            )
        return linear_s + attention_s + context_s + model.layers * layer_s
