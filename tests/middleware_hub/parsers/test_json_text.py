"""Where a JSON value ends, in text that comes in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.parsers.json_text import DEEPEST, JsonScanner, is_json
from tests.conftest import examples
from tests.middleware_hub.parsers.formats import CHARACTERS, chunked, dumps, spoiled, values

JSON = values(plain=False).map(dumps) | values(plain=False).map(json.dumps)


def scan(pieces: list[str]) -> tuple[str, int]:
    """How it ended, and where."""
    scanner, window, read = JsonScanner(), "", 0
    for number, piece in enumerate(pieces):
        window += piece
        at = scanner.scan(window, 0, ended=number == len(pieces) - 1)
        window, read = window[at:], read + at
    return ("done" if scanner.done else "bad" if scanner.bad else "open"), read


def strictly(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.dumps(json.loads(text, parse_constant=refuse), ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


@settings(max_examples=examples(300))
@given(JSON, CHARACTERS)
def test_a_value_ends_where_it_ends(text: str, after: str) -> None:
    if text[0] in '{["tfn':
        assert scan([text + after]) == ("done", len(text))
    assert is_json(f" {text}\n")


@settings(max_examples=examples(300))
@given(spoiled(JSON) | CHARACTERS | st.text())
def test_it_is_json_if_and_only_if_the_standard_library_says_so(text: str) -> None:
    """But for halves of surrogate pairs, which cannot be encoded."""
    assert is_json(text) == strictly(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1,}', 8),
        ("[1,]", 3),
        ("[,", 1),
        ('{"a" 1}', 5),
        ('{"a": 1 "b"', 8),
        ("{1: 2}", 1),
        ("[1}", 2),
        ('{"a": 1]', 7),
        ('["a\n"]', 3),
        ('["\\x"]', 2),
        ('["\\ud83d\\u0041"]', 2),
        ("[01]", 1),
        ("[+1]", 1),
        ("[nul]", 1),
        ("[NaN]", 1),
        ("x", 0),
    ],
)
def test_it_is_left_at_the_token_that_does_not_fit(text: str, fault: int) -> None:
    assert scan([text + "  " * 10]) == ("bad", fault)
    assert scan(list(text + "  " * 10)) == ("bad", fault)


@settings(max_examples=examples(300))
@given(chunked(spoiled(JSON)))
def test_it_does_not_matter_how_the_text_is_cut(given: tuple[str, list[str]]) -> None:
    text, pieces = given
    assert scan(pieces) == scan([text])
    assert scan([*text, ""]) == scan([text])


@settings(max_examples=examples(300))
@given(JSON.filter(lambda text: text[0] in '{["'), st.data())
def test_the_beginning_of_a_value_is_not_refused(text: str, data: st.DataObject) -> None:
    scanner = JsonScanner()
    scanner.scan(text[: data.draw(st.integers(0, len(text) - 1))], 0, ended=False)
    assert not scanner.bad
    assert not scanner.done


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_has_a_limit(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    assert is_json(opening * DEEPEST + ("" if opening == "[" else "1") + closing * DEEPEST)
    assert not is_json(opening * (DEEPEST + 1) + "1" + closing * (DEEPEST + 1))
    assert scan([opening * 100_000]) == ("bad", len(opening) * DEEPEST)


def test_a_scanner_tells_its_state() -> None:
    scanner = JsonScanner()
    scanner.scan('{"a', 0, ended=False)
    assert repr(scanner) == "JsonScanner(FIRST_KEY, depth=1, quoted)"
