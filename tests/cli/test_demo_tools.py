from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.cli.demo_tools import (
    MAX_EXPRESSION_CHARS,
    PASSAGE_WORDS,
    Passage,
    Retriever,
    ToolError,
    calculate,
    load_passages,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 20", "1048576"),
        ("1 / 3", "0.333333"),
        ("300 * 46080 / 2 ** 20", "13.1836"),
        ("  +1.5e3 ", "1500"),
    ],
)
def test_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "x",
        "True",
        "'a' * 3",
        "__import__('os')",
        "(1).real",
        "[1][0]",
        "1 if 1 else 2",
        "1; 2",
        "1or 2",
        "1 is 1",
        "1\0",
        "1 / 0",
        "0 ** -1",
        "(-2) ** 0.5",
        "9 ** 9 ** 9",
        "10 ** 20 * 10 ** 20",
        "1e400",
        "(" * 90 + "1" + ")" * 90 + "x",
        "1" * (MAX_EXPRESSION_CHARS + 1),
    ],
)
def test_refuses_what_is_not_arithmetic(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_a_tool_error(text: str) -> None:
    with contextlib.suppress(ToolError):
        assert calculate(text)


PASSAGES = [
    Passage("a.md", "Routing", "the policy picks a prefill worker for every round"),
    Passage("b.md", "Store", "the shared store keeps sessions and leases"),
    Passage("c.md", "Rounds", "a round is one prefill and the decode that follows, a round"),
]


def test_finds_the_passage_with_the_rare_words_first() -> None:
    found = Retriever(PASSAGES).search("which policy picks the worker of a round?")
    assert [passage.source for passage in found] == ["a.md", "c.md", "b.md"]


def test_finds_by_heading_and_keeps_to_the_limit() -> None:
    retriever = Retriever(PASSAGES)
    assert [p.source for p in retriever.search("ROUTING", limit=1)] == ["a.md"]
    assert len(retriever.search("round prefill store", limit=2)) == 2


def test_finds_nothing_without_a_common_word() -> None:
    assert Retriever(PASSAGES).search("zebra") == []
    assert Retriever(PASSAGES).search("") == []
    assert Retriever([]).search("round") == []


def test_cuts_documents_at_headings_and_length(tmp_path: Path) -> None:
    long = "\n".join(["ten words in a line, ten words in a line"] * 25)
    (tmp_path / "one.md").write_text(f"# Title\nintro\n\n## Part\n{long}\n## Empty\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "two.md").write_text("# No\nnot this one")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "three.md").write_text("no heading here")
    (tmp_path / "four.txt").write_text("# No\nnot this one")
    passages = load_passages(tmp_path)
    assert [(p.source, p.heading) for p in passages] == [
        ("docs/three.md", "docs/three.md"),
        ("one.md", "Title"),
        ("one.md", "Part"),
        ("one.md", "Part"),
        ("one.md", "Part"),
    ]
    assert "\n".join(p.text for p in passages[2:]) == long
    assert all(len(p.text.split()) <= PASSAGE_WORDS + 10 for p in passages)
