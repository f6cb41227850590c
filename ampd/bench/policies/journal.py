"""What was run already: one line of JSON per run, in a file per state of the deciding code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ampd.bench.policies.runs import Outcome, Run

MAX_JOURNALS: Final = 8
"""Files that are kept: of the code states that were used last."""
CODE_DIGITS: Final = 16


class _Known(msgspec.Struct):
    key: str
    outcome: Outcome


class _Line(_Known):
    run: Run
    """For who reads the file."""


class Journal:
    """Outcomes by run. Every one is on disk as soon as it is known; a line that was cut short by
    a crash is run again. Several processes may write to one folder."""

    def __init__(self, folder: Path, code: str, costs: Callable[[str], str]) -> None:
        """`costs`: the fingerprint of a profile by name. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{code[:CODE_DIGITS]}.jsonl"
        self._costs = costs
        self._known = _read(self.path)
        self.path.touch()
        others = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in others[:-MAX_JOURNALS]:
            path.unlink(missing_ok=True)

    def get(self, run: Run) -> Outcome | None:
        """What it came to, if it was run."""
        return self._known.get(self._key(run))

    def add(self, run: Run, outcome: Outcome) -> None:
        """Keep it. Raises OSError."""
        key = self._key(run)
        self._known[key] = outcome
        line = b"\n" + msgspec.json.encode(_Line(key, outcome, run))
        # One write to a file that is opened to append: lines of two processes do not mix. The
        # newline leads, so that nothing is lost behind a line that was cut short.
        with self.path.open("ab", buffering=0) as file:
            file.write(line)

    def _key(self, run: Run) -> str:
        return run.key(self._costs(run.profile))


def _read(path: Path) -> dict[str, Outcome]:
    known: dict[str, Outcome] = {}
    if not path.exists():
        return known
    decoder = msgspec.json.Decoder(_Known)
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError:  # cut short, or empty
                continue
            known[entry.key] = entry.outcome
    return known
