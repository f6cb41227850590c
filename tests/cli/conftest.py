"""Clusters of the real services with the tiny model, run by `ampdctl` as a user runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_harness import Ampdctl

from ampd import models


@pytest.fixture(scope="session")
def ampdctl(tmp_path_factory: pytest.TempPathFactory) -> Ampdctl:
    """With the models and profiles that earlier runs have made."""
    cache = tmp_path_factory.mktemp("cache")
    models.prepare(models.TINY)
    for name in ("models", "profiles"):
        shared = models.cache_dir() / name
        shared.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(shared)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AMPD_")}
    return Ampdctl({**environment, "AMPD_CACHE_DIR": str(cache)})


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Something to search."""
    for number in range(8):
        sentences = (
            f"Sentence {number}.{line} tells how a session's KV, its routing and its SLO work "
            f"when the prefill worker's queue holds {line} tasks."
            for line in range(20)
        )
        (tmp_path / f"{number}.md").write_text(f"# Chapter {number}\n" + "\n".join(sentences))
    return tmp_path
