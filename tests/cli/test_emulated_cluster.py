"""`ampdctl up` and `demo` with the emulated engine: real processes, real KV over NIXL, no model."""

from __future__ import annotations

import asyncio
import json
import os
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli_harness import Ampdctl

from ampd.adapters.engine_emulated import expect
from ampd.adapters.tokenizer_emulated import EmulatedTokenizer
from ampd.client import AmpdClient
from ampd.core.model import SamplingParams as CoreSamplingParams
from ampd.v1.policy_pb2 import Policy
from ampd.v1.round_pb2 import (
    ROUTE_REASON_IDLE_PREFILL_WORKER,
    ROUTE_REASON_LATE_BINDING,
    ROUTE_REASON_PULLED,
    ROUTE_REMOTE,
)
from ampd.v1.sampling_params_pb2 import SamplingParams
from ampd.v1.session_service_pb2 import (
    GenerateRequest,
    RoundFinished,
    RoundPlaced,
    TokenBatch,
    TokenIds,
)
from ampd.v1.worker_pb2 import WORKER_ROLE_PREFILL

MAX_MODEL_TOKENS = 8192
MAX_RSS_BYTES = 200 << 20


@pytest.fixture(scope="module")
def ampdctl(tmp_path_factory: pytest.TempPathFactory) -> Ampdctl:
    """With a cache that holds no model."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AMPD_")}
    cache = tmp_path_factory.mktemp("cache")
    return Ampdctl({**environment, "AMPD_CACHE_DIR": str(cache)})


@pytest.fixture(scope="module")
def cluster(ampdctl: Ampdctl) -> Iterator[dict[str, object]]:
    """The state of a cluster whose time is an H100's, ten times as fast."""
    profile = ("--profile", "gpu:h100_sxm/Qwen3-32B/tp1", "--time-scale", "0.1")
    up = ampdctl.run("up", "--engine", "emulated", "--prefill", "2", *profile)
    assert up.returncode == 0, up.stderr
    folder = Path(ampdctl.environment["AMPD_CACHE_DIR"])
    yield json.loads((folder / "run" / "local" / "state.json").read_text())
    ampdctl.ok("down")


@pytest.mark.parametrize("policy", ["always-remote", "always-local", "ampd-paper", "ampd"])
async def test_every_token_is_the_oracles(cluster: dict[str, object], policy: str) -> None:
    tokenizer = EmulatedTokenizer()
    async with AmpdClient(str(cluster["address"])) as client:
        await client.set_policy(Policy(name=policy))
        session = await client.create_session()
        history = array("I")
        pulled = 0
        for index in range(4):
            request = GenerateRequest(
                session_id=session.session_id,
                sampling=SamplingParams(max_tokens=12, temperature=0.0),
            )
            if index == 2:
                # A rewind, to where no block ends, and ids in place of text.
                increment = array("I", range(300, 400))
                history = history[:333]
                request.keep_history_tokens = len(history)
                request.token_ids.CopyFrom(TokenIds(ids=increment))
            else:
                request.text = f"increment {index}: " + "the tool said so. " * 40
                increment = tokenizer.encode_text(request.text, first=index == 0)
            tokens = history + increment
            said: list[int] = []
            text = ""
            async for event in client.generate(request):
                if isinstance(event, TokenBatch):
                    said += event.token_ids
                    text += event.text
                elif isinstance(event, RoundFinished):
                    usage = event.usage
                    pulled += usage.history_pulled_bytes + usage.increment_pulled_bytes
            expected = expect(
                tokens,
                CoreSamplingParams(max_tokens=12, temperature=0.0),
                max_model_tokens=MAX_MODEL_TOKENS,
            )
            assert (said, text) == (expected.tokens, expected.text)
            history = tokens + array("I", said[: expected.kept_output_tokens])
        await client.close_session(session.session_id)
    if policy == "always-remote":
        assert pulled > 0
    elif policy == "always-local":
        assert pulled == 0


async def _session_of_the_oracle(address: str, seed: int) -> Counter[int]:
    """Three rounds, every token as expected; how often each reason was the last."""
    rng, reasons = random.Random(seed), Counter[int]()
    async with AmpdClient(address) as client:
        session = await client.create_session()
        history = array("I")
        for _ in range(3):
            increment = array("I", rng.choices(range(300, 1000), k=rng.randint(200, 1500)))
            request = GenerateRequest(
                session_id=session.session_id,
                token_ids=TokenIds(ids=increment),
                sampling=SamplingParams(max_tokens=32, temperature=0.0),
            )
            said: list[int] = []
            where = RoundPlaced()
            async for event in client.generate(request):
                if isinstance(event, TokenBatch):
                    said += event.token_ids
                elif isinstance(event, RoundPlaced):
                    where = event
            expected = expect(
                history + increment,
                CoreSamplingParams(max_tokens=32, temperature=0.0),
                max_model_tokens=MAX_MODEL_TOKENS,
            )
            assert said == expected.tokens
            assert (where.route == ROUTE_REMOTE) == bool(where.prefill_worker)
            reasons[where.reason] += 1
            history += increment + array("I", said[: expected.kept_output_tokens])
        await client.close_session(session.session_id)
    return reasons


async def test_late_binding_under_load(cluster: dict[str, object]) -> None:
    """Tasks wait at home: prefill workers and the home take them, and every token is right."""
    address = str(cluster["address"])
    async with AmpdClient(address) as client:
        await client.set_policy(Policy(name="ampd"))
        flows = [_session_of_the_oracle(address, seed) for seed in range(24)]
        reasons = sum(await asyncio.gather(*flows), Counter[int]())
        workers = [worker async for worker in client.list_workers()]
    assert reasons.total() == 24 * 3
    assert reasons[ROUTE_REASON_PULLED] > 0
    assert reasons[ROUTE_REASON_LATE_BINDING] > 0, "the home has taken some"
    assert set(reasons) <= {
        ROUTE_REASON_PULLED,
        ROUTE_REASON_LATE_BINDING,
        ROUTE_REASON_IDLE_PREFILL_WORKER,
    }
    assert all(worker.load.waiting_tasks == 0 for worker in workers)
    # Emulated engines take what their profile says, and a little of the machine's time.
    slowness = [w.load.calibration for w in workers if w.role == WORKER_ROLE_PREFILL]
    assert len(slowness) == 2
    assert all(0.5 < calibration < 3.0 for calibration in slowness), slowness


def test_workers_say_what_they_emulate(ampdctl: Ampdctl, cluster: dict[str, object]) -> None:
    workers = json.loads(ampdctl.ok("worker", "list", "--role", "decode", "-o", "json"))
    assert [worker["worker_id"] for worker in workers] == ["decode-0"]
    # 16 GiB of what Qwen3-32B takes per token, in whole blocks.
    assert workers[0]["kv_capacity_tokens"] == (16 << 30) // 262_144
    assert workers[0]["engine"].startswith("emulated ")
    assert cluster["model"] == "emulated"


def test_workers_are_small_and_know_no_vllm(cluster: dict[str, object]) -> None:
    services = cluster["services"]
    assert isinstance(services, list)
    for service in services:
        process = psutil.Process(service["pid"])
        assert process.memory_info().rss < MAX_RSS_BYTES, service["name"]
        libraries = Path(f"/proc/{service['pid']}/maps").read_text()
        assert "vllm" not in libraries
        assert "torch" not in libraries


def test_the_demo_needs_no_model(ampdctl: Ampdctl, documents: Path) -> None:
    report = documents / "report.json"
    demo = ("demo", "--engine", "emulated", "--sessions", "3", "--rounds", "3")
    options = ("--policy", "always-remote", "--time-scale", "0.2", "--max-tokens", "8")
    done = ampdctl.run(*demo, *options, "--docs", str(documents), "--report", str(report))
    assert done.returncode == 0, done.stderr
    assert "no language" in done.stderr
    rounds = json.loads(report.read_text())["rounds"]
    assert {(one["session"], one["round"]) for one in rounds} == {
        (f"agent-{agent}", index) for agent in range(3) for index in range(3)
    }
    assert all(one["route"] == "remote" for one in rounds)
    for one in rounds:
        assert one["increment_pulled_bytes"] > 0
        assert (one["history_pulled_bytes"] > 0) == (one["round"] > 0)
    assert not (Path(ampdctl.environment["AMPD_CACHE_DIR"]) / "models").exists()


def test_what_cannot_be_emulated_is_refused_before_anything_starts(ampdctl: Ampdctl) -> None:
    for command in ("up", "demo"):
        refused = ampdctl.run(command, "--engine", "emulated", "--profile", "gpu:none")
        assert refused.returncode == 2
        assert "--profile" in refused.stderr
        assert "is up" not in refused.stderr


def test_a_script_that_chats_ends_at_a_refused_round(
    ampdctl: Ampdctl, cluster: dict[str, object]
) -> None:
    chat = ampdctl.run("chat", "--max-tokens", str(MAX_MODEL_TOKENS), stdin="one\ntwo\n")
    assert chat.returncode == 2
    assert chat.stderr.count("error: ") == 1
    assert json.loads(ampdctl.ok("session", "list", "-o", "json")) == []


def test_settings_of_the_policy_stand_in_order(
    ampdctl: Ampdctl, cluster: dict[str, object]
) -> None:
    settings = list(json.loads(ampdctl.ok("policy", "get", "-o", "json"))["settings"])
    assert settings == sorted(settings)


@pytest.mark.parametrize(
    ("flag", "value"), [("--policy", "nonesuch"), ("--ttft-slo-s", "0"), ("--itl-slo-s", "0")]
)
def test_what_up_cannot_start_with_is_usage(ampdctl: Ampdctl, flag: str, value: str) -> None:
    up = ampdctl.run("up", "--engine", "emulated", flag, value)
    assert up.returncode == 2
    assert flag in up.stderr
    assert "store is up" not in up.stderr
