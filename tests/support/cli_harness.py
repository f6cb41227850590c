"""`ampdctl` as a user runs it, and whether processes are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

COMMAND = (sys.executable, "-m", "ampd.cli")
START_S = 240


@dataclass(frozen=True)
class Ampdctl:
    """`ampdctl` with a cache of its own, so that its local cluster is nobody else's."""

    environment: dict[str, str]

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def ok(self, *arguments: str, stdin: str = "") -> str:
        """What it prints; it must succeed."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """The command while it runs, in a process group of its own as a shell gives it one."""
        with subprocess.Popen(
            [*COMMAND, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def alive(pids: list[int]) -> list[int]:
    """Those that still run, after a moment for the dying."""
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        left = [pid for pid in pids if _runs(pid)]
        if not left:
            return []
        time.sleep(0.1)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
