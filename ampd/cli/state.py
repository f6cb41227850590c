"""What `ampdctl up` writes down of the cluster it started, for `down` and for every command."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import msgspec
import psutil

from ampd.cli.errors import CliError
from ampd.models import cache_dir

_START_TOLERANCE_S: Final = 1.0
"""How far two readings of a process's start may differ when the clock was set in between."""


class ProcessId(msgspec.Struct, frozen=True):
    """A process beyond its number, which the system gives out again."""

    name: str
    pid: int
    start_unix_s: float

    @classmethod
    def of(cls, name: str, pid: int) -> Self:
        """The process that runs under `pid` now."""
        return cls(name, pid, psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        """Whether the very process still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.start_unix_s) < _START_TOLERANCE_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class ClusterState(msgspec.Struct, frozen=True):
    """The local cluster: its supervisor (`ampdctl up --foreground`) and its services."""

    supervisor: ProcessId
    address: str = ""
    """host:port of the coordinator; empty until the cluster is ready."""
    model: str = ""
    services: tuple[ProcessId, ...] = ()


def run_dir() -> Path:
    """Where the local cluster keeps its state and its logs."""
    return cache_dir() / "run" / "local"


def read_state() -> ClusterState | None:
    """The running local cluster; None where none runs (an old file means nothing)."""
    try:
        state = msgspec.json.decode(_state_file().read_bytes(), type=ClusterState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    alive = state.supervisor.is_alive() or any(service.is_alive() for service in state.services)
    return state if alive else None


def write_state(state: ClusterState) -> None:
    """Replace the state in one step: a reader never sees half of it."""
    target = _state_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".new")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
    scratch.replace(target)


def remove_state() -> None:
    """Forget the cluster. Idempotent."""
    _state_file().unlink(missing_ok=True)


@contextmanager
def sole_supervisor() -> Iterator[None]:
    """Held for as long as the local cluster runs; CliError where another one does."""
    lock = run_dir() / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise already_running() from None
        yield


def already_running() -> CliError:
    """There is one local cluster at a time."""
    return CliError(
        "a local cluster is running already",
        hint="`ampdctl status` shows it, `ampdctl down` stops it",
    )


def _state_file() -> Path:
    return run_dir() / "state.json"
