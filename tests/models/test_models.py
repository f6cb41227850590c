"""The built-in models, made for real: `tiny` once per module, in a cache of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ampd import models


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPD_CACHE_DIR", str(cache))


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPD_CACHE_DIR", str(cache))
        return models.prepare(models.TINY)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny)


def test_tiny_is_a_complete_folder(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == 2
    assert config["max_position_embeddings"] == 8192
    weights = load_file(tiny / "model.safetensors")
    assert len(weights) == 2 + 9 * config["num_hidden_layers"]
    assert weights["model.embed_tokens.weight"].shape == (49152, 128)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


def test_tiny_speaks_smollm2s_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 49152
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert tokenizer.eos_token_id == 2
    text = "Prefill and decode, apart."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_second_time_builds_nothing(tiny: Path) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    said: list[str] = []
    assert models.prepare(models.TINY, progress=said.append) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before
    assert said == []


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPD_CACHE_DIR", str(tmp_path))

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt):
        models.prepare(models.TINY, progress=interrupt)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def _prepare_tiny(cache_dir: Path, results: multiprocessing.Queue[tuple[list[str], str]]) -> None:
    os.environ["AMPD_CACHE_DIR"] = str(cache_dir)
    said: list[str] = []
    folder = models.prepare(models.TINY, progress=said.append)
    results.put((said, str(folder)))


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[list[str], str]] = context.Queue()
    processes = [context.Process(target=_prepare_tiny, args=(tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert {folder for _said, folder in answers} == {
        str(path) for path in (tmp_path / "models").iterdir() if path.is_dir()
    }
    assert sum("writing the model" in said for said, _folder in answers) == 1


def test_a_path_is_taken_as_it_is(tiny: Path, tmp_path: Path) -> None:
    assert models.prepare(str(tiny)) == tiny
    with pytest.raises(models.ModelError, match="neither one of smollm2, tiny nor a folder"):
        models.prepare(str(tmp_path / "nowhere"))
    with pytest.raises(models.ModelError):
        models.prepare("")
