"""`ampdctl bench data-path` at the smallest size: a cluster comes, is measured, goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cli_harness import Ampdctl

from ampd.bench.kv_path import BLOCK_BYTES

SMALL = ("--rounds", "16", "--streams", "4", "--tokens", "32", "--kv-mib", "4")


def test_every_way_is_measured(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AMPD_")}
    ampdctl = Ampdctl({**environment, "AMPD_CACHE_DIR": str(tmp_path / "cache")})
    path = tmp_path / "result.json"
    table = ampdctl.ok("bench", "data-path", *SMALL, "--json", str(path))
    assert table.startswith("WHAT"), "nothing but the result is on stdout"
    for shown in ("added latency", "rounds/s", "tokens/s a coordinator core", "KV BLOCK"):
        assert shown in table
    result = json.loads(path.read_text())
    assert set(result["latency"]) == set(result["concurrent"]) == {"echo", "proxy", "home", "ampd"}
    for run in result["concurrent"].values():
        assert run["tokens"] == 16
    for way in ("proxy", "home", "ampd"):
        run = result["streams"][way]
        assert run["tokens"] == 4 * 32
        assert 4 <= run["messages"] <= run["tokens"]
    assert result["streams"]["ampd"]["cpu_s"]["coordinator"] > 0
    assert [cell["block_bytes"] for cell in result["kv"]] == list(BLOCK_BYTES)
    assert all(cell["nixl_bytes_per_s"] > 0 for cell in result["kv"])
