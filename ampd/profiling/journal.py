"""The journal of a measurement: what was measured so far, so that an interrupted one goes on.

JSON lines beside the profile that is being made: first what is measured, then one entry per
group of points that belong together. A line that was cut off by a crash is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec

from ampd.core.errors import invalid_field

JOURNAL_VERSION: Final = 1
MAX_JOURNAL_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: two journals of one subject go together."""

    model: str
    device: str
    engine: str
    tp: int
    settings: str = ""
    """Whatever else makes its times differ, as text."""
    journal_version: int = JOURNAL_VERSION


@dataclass(frozen=True, slots=True)
class Point:
    """Sizes that were measured, several times. A KV transfer's tokens are its `chunk_tokens`."""

    kind: str
    name: str
    """As it was planned: points of one name are one."""
    chunk_tokens: int
    chunk_history_tokens: int
    batch: int
    context_tokens: int
    seconds: tuple[float, ...]
    steps: int = 1
    """Engine steps that each time took in all."""
    held_out: bool = False
    """For no fit to see."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A group of points that were measured together in `took_s` seconds."""

    key: str
    took_s: float
    points: tuple[Point, ...]
    reference_s: float = 0.0
    """What one and the same small prefill took before or after it, the longer one."""


class Journal:
    """Entries by key, in a file that grows by one line each. Without a path: in memory."""

    def __init__(self, subject: Subject, path: Path | None = None) -> None:
        self._subject = subject
        self._path = path
        self._entries: dict[str, Entry] = {}

    @classmethod
    def open(cls, path: Path, subject: Subject) -> Self:
        """The journal in the file, or a new one.

        Raises OSError, and INVALID_FIELD naming the file when it is no journal or one of
        something else.
        """
        journal = cls(subject, path)
        if path.exists():
            journal._read(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            journal._append(subject)
        return journal

    @property
    def spent_s(self) -> float:
        """Seconds that all entries took."""
        return sum(entry.took_s for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: str) -> Entry | None:
        """The entry of that key, if it was measured."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Keep an entry; it is on the disk when this returns."""
        self._entries[entry.key] = entry
        self._append(entry)

    def remove(self) -> None:
        """The profile is made: the file goes."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, line: Subject | Entry) -> None:
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        if path.stat().st_size > MAX_JOURNAL_BYTES:
            raise invalid_field(str(path), f"larger than {MAX_JOURNAL_BYTES} bytes")
        lines = path.read_bytes().split(b"\n")
        torn = lines.pop()  # whole lines end in a newline
        try:
            subject = msgspec.json.decode(lines[0], type=Subject) if lines else None
        except msgspec.DecodeError as error:
            raise invalid_field(
                f"{path}: line 1", f"not a measurement's journal: {error}"
            ) from error
        if subject is not None and subject != self._subject:
            raise invalid_field(
                str(path), f"is of another engine: {_difference(subject, self._subject)}"
            )
        for number, line in enumerate(lines[1:], 2):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError as error:
                raise invalid_field(f"{path}: line {number}", str(error)) from error
            self._entries[entry.key] = entry
        if torn or subject is None:
            # Whole again, so that what is appended begins a line.
            path.write_bytes(b"".join(line + b"\n" for line in lines))
            if subject is None:
                self._append(self._subject)


def _difference(one: Subject, other: Subject) -> str:
    found: Mapping[str, object] = msgspec.to_builtins(one)
    wanted: Mapping[str, object] = msgspec.to_builtins(other)
    return ", ".join(
        f"{name} {value!r}, not {wanted[name]!r}"
        for name, value in found.items()
        if value != wanted[name]
    )
