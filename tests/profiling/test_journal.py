from pathlib import Path

import pytest

from ampd.core.errors import AmpdError, ErrorReason
from ampd.profiling.journal import Entry, Journal, Point, Subject

SUBJECT = Subject("m", "cpu-1", "e 1", 1, "dtype float32")
ENTRY = Entry("prefill 16,0", 0.5, (Point("prefill", "prefill 16,0", 16, 0, 0, 0, (0.1, 0.2)),))
OTHER = Entry("batch 1,64", 1.5, ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "p.yaml.part"
    journal = Journal.open(path, SUBJECT)
    journal.add(ENTRY)
    journal.add(OTHER)
    return path


def test_what_was_added_is_there_again(path: Path) -> None:
    journal = Journal.open(path, SUBJECT)
    assert list(journal) == [ENTRY, OTHER]
    assert journal.get(ENTRY.key) == ENTRY
    assert journal.get("prefill 17,0") is None
    assert journal.spent_s == 2.0
    journal.remove()
    assert not path.exists()
    journal.remove()


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_was_cut_off_is_left_out(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal.open(path, SUBJECT)
    assert list(journal) == [ENTRY]
    journal.add(OTHER)
    assert list(Journal.open(path, SUBJECT)) == [ENTRY, OTHER]


@pytest.mark.parametrize("left", [b"", b'{"model": "m"'])
def test_a_journal_cut_off_in_its_first_line_begins_anew(path: Path, left: bytes) -> None:
    path.write_bytes(left)
    Journal.open(path, SUBJECT).add(ENTRY)
    assert list(Journal.open(path, SUBJECT)) == [ENTRY]


@pytest.mark.parametrize(
    ("line", "content", "expected"),
    [
        (0, b"model: m\n", "FILE: line 1: not a measurement's journal"),
        (0, b"\xff\xfe\n", "FILE: line 1: not a measurement's journal"),
        (1, b"{}\n", "FILE: line 2: Object missing required field"),
        (1, b"[\n", "FILE: line 2: "),
    ],
)
def test_what_is_no_journal_says_where(
    path: Path, line: int, content: bytes, expected: str
) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = content
    path.write_bytes(b"".join(lines))
    with pytest.raises(AmpdError) as caught:
        Journal.open(path, SUBJECT)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert caught.value.message.replace(str(path), "FILE").startswith(expected)


def test_the_journal_of_another_engine_is_refused(path: Path) -> None:
    other = Subject("m", "cpu-2", "e 1", 1, "dtype float32")
    with pytest.raises(AmpdError, match="is of another engine: device 'cpu-1', not 'cpu-2'"):
        Journal.open(path, other)
    assert list(Journal.open(path, SUBJECT)) == [ENTRY, OTHER]
