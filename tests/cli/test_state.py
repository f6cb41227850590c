from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.options import resolve_address
from ampd.cli.state import (
    ClusterState,
    ProcessId,
    read_state,
    remove_state,
    run_dir,
    sole_supervisor,
    write_state,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPD_CACHE_DIR", str(tmp_path))


@pytest.fixture
def this_process() -> ProcessId:
    return ProcessId.of("supervisor", os.getpid())


def test_a_state_is_read_as_it_was_written(this_process: ProcessId) -> None:
    assert read_state() is None
    state = ClusterState(this_process, "127.0.0.1:1", "tiny", (this_process,))
    write_state(state)
    assert read_state() == state
    assert resolve_address("") == "127.0.0.1:1"
    assert resolve_address("elsewhere:7070") == "elsewhere:7070"
    remove_state()
    remove_state()
    assert read_state() is None


def test_a_state_left_by_a_dead_cluster_is_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ProcessId.of("supervisor", child.pid)
        assert process.is_alive()
        write_state(ClusterState(process, "127.0.0.1:1"))
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert not process.is_alive()
    assert read_state() is None
    with pytest.raises(CliError) as refused:
        resolve_address("")
    assert refused.value.exit_code is ExitCode.UNAVAILABLE


def test_a_number_given_out_again_is_another_process(this_process: ProcessId) -> None:
    reused = ProcessId("supervisor", this_process.pid, this_process.start_unix_s - 60)
    assert not reused.is_alive()


def test_a_broken_state_file_is_none(this_process: ProcessId) -> None:
    write_state(ClusterState(this_process))
    (run_dir() / "state.json").write_text("{")
    assert read_state() is None


def test_there_is_one_supervisor_at_a_time() -> None:
    with sole_supervisor(), pytest.raises(CliError, match="running already"), sole_supervisor():
        pass
    with sole_supervisor():
        pass
