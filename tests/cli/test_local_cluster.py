"""`ampdctl up`, every command that talks to a cluster, and `down`: on the real services."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_harness import Ampdctl, alive

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(ampdctl: Ampdctl) -> Iterator[Ampdctl]:
    up = ampdctl.run("up", "--model", "tiny")
    assert up.returncode == 0, up.stderr
    assert up.stdout == ""
    assert "the cluster is ready at 127.0.0.1:" in up.stderr
    yield ampdctl
    ampdctl.ok("down")


def _state(ampdctl: Ampdctl) -> dict[str, object]:
    folder = Path(ampdctl.environment["AMPD_CACHE_DIR"])
    state = json.loads((folder / "run" / "local" / "state.json").read_text())
    assert isinstance(state, dict)
    return state


def test_status_and_workers(cluster: Ampdctl) -> None:
    status = json.loads(cluster.ok("status", "-o", "json"))
    assert [worker["role"] for worker in status["workers"]] == ["coordinator", "decode", "prefill"]
    assert status["policy"]["name"] == "ampd"
    table = cluster.ok("status")
    assert "prefill-0" in table
    assert status["address"] in table
    decode = yaml.safe_load(cluster.ok("worker", "list", "--role", "decode", "-o", "yaml"))
    assert [worker["worker_id"] for worker in decode] == ["decode-0"]
    assert decode[0]["kv_capacity_tokens"] > 0


def test_a_second_cluster_is_refused(cluster: Ampdctl) -> None:
    again = cluster.run("up", "--model", "tiny")
    assert again.returncode == 1
    assert "running already" in again.stderr
    assert "hint: " in again.stderr


def test_policy_is_read_and_changed(cluster: Ampdctl) -> None:
    before = json.loads(cluster.ok("policy", "get", "-o", "json"))
    changed = json.loads(
        cluster.ok("policy", "set", "ampd-paper", "alpha=0.5", "w=2", "-o", "json")
    )
    assert changed["version"] == before["version"] + 1
    assert changed["settings"]["alpha"] == 0.5
    stale = cluster.run(
        "policy", "set", "always-local", "--expected-version", str(before["version"])
    )
    assert stale.returncode == 1
    assert "ampdctl policy get" in stale.stderr
    assert cluster.run("policy", "set", "no-such-policy").returncode == 2
    assert cluster.run("policy", "set", "ampd-paper", "alpha").returncode == 2
    cluster.ok("policy", "set", "ampd")


def test_chat_is_one_session_of_many_rounds(cluster: Ampdctl) -> None:
    typed = "hello\nand more\n/undo\nsomething else\n/nonsense\nlast\n"
    chat = cluster.run("chat", "--max-tokens", "6", stdin=typed)
    assert chat.returncode == 0
    rounds = [line for line in chat.stderr.splitlines() if line.startswith("[")]
    assert len(rounds) == 4
    assert "/undo takes the last round back" in chat.stderr
    assert len(chat.stdout.splitlines()) >= 4
    # It closed its session on leaving.
    assert json.loads(cluster.ok("session", "list", "-o", "json")) == []


async def test_a_session_is_listed_shown_explained_and_closed(cluster: Ampdctl) -> None:
    from ampd.client import AmpdClient
    from ampd.v1.sampling_params_pb2 import SamplingParams
    from ampd.v1.session_service_pb2 import GenerateRequest

    async with AmpdClient(str(_state(cluster)["address"]), tenant="acme") as client:
        session = await client.create_session(labels={"who": "test"})
        for _ in range(2):
            request = GenerateRequest(
                session_id=session.session_id,
                text="one two three four",
                sampling=SamplingParams(max_tokens=4),
            )
            assert [event async for event in client.generate(request)]
    acme = ("--tenant", "acme")
    listed = json.loads(cluster.ok("session", "list", *acme, "-o", "json"))
    assert [one["session_id"] for one in listed] == [session.session_id]
    shown = json.loads(cluster.ok("session", "show", session.session_id, *acme, "-o", "json"))
    assert shown["round_count"] == 2
    assert shown["labels"] == {"who": "test"}

    rounds = json.loads(cluster.ok("session", "explain", session.session_id, *acme, "-o", "json"))
    assert [one["round"] for one in rounds] == [0, 1]
    assert rounds[0]["bind"]["worker_id"] == "decode-0"
    assert {candidate["worker_id"] for candidate in rounds[1]["decision"]["candidates"]} == {
        "prefill-0",
        "decode-0",
    }
    assert rounds[1]["usage"]["history_tokens"] == rounds[0]["usage"]["increment_tokens"] + 4
    table = cluster.ok("session", "explain", session.session_id, *acme, "--round", "1")
    assert len(table.splitlines()) == 2

    # Another tenant's session is not there.
    assert cluster.run("session", "show", session.session_id).returncode == 3
    cluster.ok("session", "close", session.session_id, *acme)
    gone = cluster.run("session", "show", session.session_id, *acme)
    assert gone.returncode == 3
    assert gone.stdout == ""
    assert "error: no session" in gone.stderr


def test_nobody_at_the_address_is_exit_4(cluster: Ampdctl) -> None:
    nobody = cluster.run("status", "--address", "127.0.0.1:1")
    assert nobody.returncode == 4
    assert "hint: " in nobody.stderr


def test_wrong_usage_is_exit_2(ampdctl: Ampdctl, tmp_path: Path) -> None:
    assert ampdctl.run("nonsense").returncode == 2
    assert ampdctl.run("status", "-o", "xml").returncode == 2
    nowhere = ampdctl.run("demo", "--model", str(tmp_path / "nowhere"))
    assert nowhere.returncode == 2
    assert "neither one of smollm2, tiny nor a folder" in nowhere.stderr


def test_down_leaves_nothing(ampdctl: Ampdctl, cluster: Ampdctl) -> None:
    state = _state(cluster)
    pids = _pids(state)
    assert len(alive(pids)) == 4
    ampdctl.ok("down")
    assert alive(pids) == []
    assert "no local cluster is running" in ampdctl.run("down").stderr
    status = ampdctl.run("status")
    assert status.returncode == 4
    assert "ampdctl up" in status.stderr


def test_nothing_outlives_a_killed_supervisor(ampdctl: Ampdctl) -> None:
    with ampdctl.started("up", "--model", "tiny", "--foreground") as supervisor:
        assert supervisor.stdout is not None
        said = []
        for line in supervisor.stdout:
            said.append(line)
            if "the cluster is ready" in line:
                break
        assert supervisor.poll() is None, "".join(said)
        pids = _pids(_state(ampdctl))
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
    assert alive(pids) == []
    assert ampdctl.run("status").returncode == 4


def test_a_service_that_cannot_start_is_told_with_its_log(ampdctl: Ampdctl, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    up = ampdctl.run("up", "--model", str(tmp_path))
    assert up.returncode == 1
    assert "ended with exit code" in up.stderr
    assert "the end of" in up.stderr
    assert ampdctl.run("status").returncode == 4


def _pids(state: dict[str, object]) -> list[int]:
    supervisor, services = state["supervisor"], state["services"]
    assert isinstance(supervisor, dict)
    assert isinstance(services, list)
    return [supervisor["pid"], *(service["pid"] for service in services)]
