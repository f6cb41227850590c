from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.core.tool_calls import ParsedCall, hermes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def block(name: object, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("text", ["", "no call", "<tool_calls>", "</tool_call>", "<tool_call"])
def test_text_without_a_call(text: str) -> None:
    assert hermes(text) == []


def test_several_calls_in_order() -> None:
    text = f"Let me see. {block('a', {'x': 1})} and {block('b', {})}{block('a', {'x': 1})}"
    one = ParsedCall("a", '{"x": 1}')
    assert hermes(text) == [one, ParsedCall("b", "{}"), one]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"arguments": {"a": [1, "\u00e9"]}, "name": "f"}', {"a": [1, "é"]}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
    ],
)
def test_forms_of_arguments(call: str, arguments: object) -> None:
    (parsed,) = hermes(f"<tool_call>{call}</tool_call>")
    assert (parsed.name, parsed.problem) == ("f", "")
    assert json.loads(parsed.arguments) == arguments


def test_a_closing_tag_that_a_stop_string_has_taken() -> None:
    text = block("f", {}).removesuffix("</tool_call>")
    assert hermes(text) == [ParsedCall("f", "{}")]


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("", "not JSON"),
        ("f(1)", "not JSON"),
        ('{"name": "f", "arguments": {"a": 1', "not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('["f"]', "not a JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "", "arguments": {}}', '"name"'),
        ('{"name": 7, "arguments": {}}', '"name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be'),
        ('{"name": "f", "arguments": "x"}', '"arguments" is not JSON'),
        ('{"name": "f", "arguments": "[1]"}', '"arguments" is not a JSON object'),
        ("[" * 100_000, "cannot be read"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "cannot be read"),
    ],
)
def test_a_call_that_cannot_be_read_is_told(inside: str, said: str) -> None:
    good = ParsedCall("g", "{}")
    unreadable, other = hermes(f"<tool_call> {inside} </tool_call>{block('g', {})}")
    assert (unreadable.name, unreadable.arguments) == ("", inside)
    assert said in unreadable.problem
    assert other == good


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3))
def test_what_is_written_is_read(name: str, arguments: dict[str, object]) -> None:
    text = block(name, arguments)
    if "</tool_call>" in text.removesuffix("</tool_call>"):
        return
    (parsed,) = hermes(text)
    assert (parsed.name, json.loads(parsed.arguments)) == (name, arguments)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", "a"])))
def test_any_text_is_taken(parts: list[str]) -> None:
    for call in hermes("".join(parts)):
        assert bool(call.name) != bool(call.problem)
        call.arguments.encode()
