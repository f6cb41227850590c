"""The tools of the demo's agents: retrieval over Markdown documents, and a calculator.

Both are small but real: what they return depends on the documents and the numbers alone.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PASSAGE_WORDS: Final = 100
"""Passages are cut at the first line end beyond this many words."""

_SKIPPED_FOLDERS: Final = {"node_modules", "dist", "build"}


class ToolError(Exception):
    """The tool cannot do what it was asked; an agent gets the message as the result."""


# --- retrieval ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document."""

    source: str
    heading: str
    text: str

    def __str__(self) -> str:
        return f"[{self.source}: {self.heading}]\n{self.text}"


def load_passages(folder: Path) -> list[Passage]:
    """The passages of every *.md file below `folder`, hidden and vendored folders left out."""
    passages: list[Passage] = []
    for path in sorted(folder.rglob("*.md")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in relative.parts):
            continue
        passages.extend(_cut(str(relative), path.read_text(errors="replace")))
    return passages


def _cut(source: str, text: str) -> Iterator[Passage]:
    heading, lines, words = source, list[str](), 0
    for line in (*text.splitlines(), "# "):
        if line.startswith("#") or words > PASSAGE_WORDS:
            if words:
                yield Passage(source, heading, "\n".join(lines).strip())
            lines, words = [], 0
        if line.startswith("#"):
            heading = line.lstrip("#").strip()
        else:
            lines.append(line)
            words += len(line.split())


class Retriever:
    """Okapi BM25 over passages."""

    _K1: Final = 1.5
    _B: Final = 0.75

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._counts = [Counter(_terms(f"{p.heading} {p.text}")) for p in passages]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean_length = sum(self._lengths) / len(passages) if passages else 0.0
        self._documents_with = Counter(term for counts in self._counts for term in counts)

    def search(self, query: str, limit: int = 3) -> list[Passage]:
        """The best passages, best first; none that shares no word with the query."""
        terms = set(_terms(query))
        scored = [(self._score(index, terms), index) for index in range(len(self._passages))]
        best = sorted((-score, index) for score, index in scored if score > 0)
        return [self._passages[index] for _score, index in best[:limit]]

    def _score(self, index: int, terms: set[str]) -> float:
        counts = self._counts[index]
        norm = self._K1 * (1 - self._B + self._B * self._lengths[index] / self._mean_length)
        return sum(
            self._rarity(term) * counts[term] * (self._K1 + 1) / (counts[term] + norm)
            for term in sorted(terms)
            if term in counts
        )

    def _rarity(self, term: str) -> float:
        documents = self._documents_with[term]
        return math.log(1 + (len(self._passages) - documents + 0.5) / (documents + 0.5))


def _terms(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


# --- calculator ---------------------------------------------------------------------------

MAX_EXPRESSION_CHARS: Final = 200
_MAX_POWER: Final = 64
_MAX_RESULT: Final = 1e30

_BINARY: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[float], float]]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / // % ** and parentheses.

    Raises ToolError for anything else: no name, call or attribute is ever evaluated.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"longer than {MAX_EXPRESSION_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the parser thinks of bad style
            tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"not an arithmetic expression: {expression!r}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            base, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(other) > _MAX_POWER:
                raise OverflowError
            return _bounded(_BINARY[type(op)](base, other))
    raise ToolError(f"only numbers, + - * / // % ** and parentheses, not {ast.unparse(node)!r}")


def _bounded(number: float | complex) -> float:
    # Checked at every step: a tower of powers would otherwise run for ever.
    if isinstance(number, complex):
        raise ToolError("the result is not a real number")
    if not abs(number) <= _MAX_RESULT:
        raise OverflowError
    return number
