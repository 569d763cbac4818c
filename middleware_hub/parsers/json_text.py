"""One JSON value in text that arrives in pieces: where it ends, or where it stops being one.

Strict (RFC 8259): no NaN, no trailing comma, no raw newline in a string; a key may come twice. Values that no reader could use
are refused too: nesting deeper than `DEEPEST`, numbers longer than `LONGEST_NUMBER`, and halves of surrogate pairs, which are
not characters. The text of a value is kept unchanged, so nothing is rounded and no key lost.

    expects         sees            then expects
    VALUE           a scalar        after()              after() is NEXT inside of something, else the value is done
    VALUE           { or [          FIRST_KEY, FIRST_VALUE
    FIRST_VALUE     as VALUE, or ]  after()
    FIRST_KEY       as KEY, or }    after()
    KEY             a string        COLON
    COLON           :               VALUE
    NEXT            ,               KEY in an object, VALUE in an array
    NEXT            the closer      after()
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.reader import WHITE, Malformed, Reading, Tags, TextReader

DEEPEST = 200
LONGEST_NUMBER = 1000

_WHITE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]'
    r"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?\Z"
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_RUN = re.compile(r"[-+.0-9eE]*")
_WORDS = ("true", "false", "null")

# Most values, in one step: a string, or a flat object, without numeric escapes. It matches nothing that the scanner would
# refuse, or that could go on in later text.
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+"'
_SCALAR = rf"(?:{_STRING}|(?:true|false|null|-?(?:0|[1-9][0-9]{{0,15}}+)(?:\.[0-9]{{1,20}}+)?)(?=[ \t\r\n,}}]))"
_MEMBER = rf"{_STRING}[ \t\r\n]*+:[ \t\r\n]*+{_SCALAR}[ \t\r\n]*+"
_FLAT_OBJECT = rf"\{{[ \t\r\n]*+(?:{_MEMBER}(?:,[ \t\r\n]*+{_MEMBER})*+)?+\}}"
_SIMPLE = re.compile(rf"{_STRING}|{_FLAT_OBJECT}")

_CLOSE = Tags("}")
_COLON = Tags(":")
_NEXT = Tags(",", "}")


class _Expects(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    NEXT = auto()


class JsonScanner:
    """Reads one value, from its first character on. See the module for the states."""

    def __init__(self) -> None:
        self.done = False
        self.bad = False
        self._expects = _Expects.VALUE
        self._closers: list[str] = []
        self._quoted = False

    def __repr__(self) -> str:
        state = "done" if self.done else "bad" if self.bad else self._expects.name
        return f"JsonScanner({state}, depth={len(self._closers)}{', quoted' if self._quoted else ''})"

    def scan(self, text: str, at: int, *, ended: bool) -> int:
        """Read on from `at` and return the end of the part that was read.

        That is after the value when `done`, at the fault when `bad`, else at the end of the text, or at the start of a token
        that may be incomplete.
        """
        while not (self.done or self.bad):
            before, quoted = at, self._quoted
            at = self._string(text, at) if self._quoted else self._token(text, at, ended)
            if at == before and self._quoted == quoted:
                # Undecided, and it stays so if there is no more text.
                self.bad = self.bad or (ended and not self.done)
                break
        return at

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None, "it also matches the empty string"
        at = found.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._quoted = False
            if self._expects in (_Expects.KEY, _Expects.FIRST_KEY):
                self._expects = _Expects.COLON
            else:
                self._after()
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            return escape.end()
        self.bad = not _ESCAPE_BEGUN.match(text, at)
        return at

    def _token(self, text: str, at: int, ended: bool) -> int:
        found = _WHITE.match(text, at)
        assert found is not None, "it also matches the empty string"
        at = found.end()
        if at == len(text):
            return at
        char, expects = text[at], self._expects
        if expects is _Expects.COLON:
            self.bad = char != ":"
            self._expects = _Expects.VALUE
        elif expects is _Expects.NEXT and char == ",":
            self._expects = _Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE
        elif expects in (_Expects.NEXT, _Expects.FIRST_KEY, _Expects.FIRST_VALUE) and char == self._closers[-1]:
            self._closers.pop()
            self._after()
        elif expects is _Expects.NEXT:
            self.bad = True
        elif char == '"':
            self._quoted = True
        elif expects in (_Expects.KEY, _Expects.FIRST_KEY) or (char in "{[" and len(self._closers) == DEEPEST):
            self.bad = True
        elif char == "{":
            self._closers.append("}")
            self._expects = _Expects.FIRST_KEY
        elif char == "[":
            self._closers.append("]")
            self._expects = _Expects.FIRST_VALUE
        else:
            return self._scalar(text, at, ended)
        return at if self.bad else at + 1

    def _scalar(self, text: str, at: int, ended: bool) -> int:
        found = _NUMBER_RUN.match(text, at)
        assert found is not None, "it also matches the empty string"
        end = found.end()
        if end > at:
            if end == len(text) and not ended and end - at <= LONGEST_NUMBER:
                return at
            self.bad = end - at > LONGEST_NUMBER or not _NUMBER.fullmatch(found[0])
        else:
            word = next((word for word in _WORDS if word[0] == text[at]), "")
            here = text[at : at + len(word)]
            if not ended and len(here) < len(word) and word.startswith(here):
                return at
            self.bad = not word or here != word
            end = at + len(word)
        if self.bad:
            return at
        self._after()
        return end

    def _after(self) -> None:
        self.done = not self._closers
        self._expects = _Expects.NEXT


def is_json(text: str) -> bool:
    """Return whether the whole text is one value, possibly surrounded by white space."""
    scanner = JsonScanner()
    end = scanner.scan(text, 0, ended=True)
    return scanner.done and not text[end:].strip(" \t\r\n")


def json_value(reader: TextReader) -> Reading[str]:
    """Return the text of the value that begins here."""
    simple = _SIMPLE.match(reader.text, reader.at)
    if simple is not None:
        reader.at = simple.end()
        return simple[0]
    scanner, pieces = JsonScanner(), []
    while True:
        begin = reader.at
        reader.at = scanner.scan(reader.text, begin, ended=reader.ended)
        pieces.append(reader.text[begin : reader.at])
        if scanner.done:
            return "".join(pieces)
        if scanner.bad:
            raise Malformed
        yield from reader.more()


def json_members(reader: TextReader, allowed: Callable[[str, str], bool]) -> Reading[dict[str, str]]:
    """Return the members of the object whose `{` has been read: keys decoded, values unchanged.

    `allowed` says whether a key may have a value that begins with this character. If not, this raises Malformed at once.
    """
    found: dict[str, str] = {}
    yield from reader.white()
    if (yield from reader.maybe(_CLOSE)):
        return found
    while True:
        if (yield from reader.at_end()) or reader.text[reader.at] != '"':
            raise Malformed
        key: str = json.loads((yield from json_value(reader)))
        yield from reader.white()
        yield from reader.expect(_COLON)
        yield from reader.white()
        if (yield from reader.at_end()) or not allowed(key, reader.text[reader.at]):
            raise Malformed
        found[key] = yield from json_value(reader)
        yield from reader.white()
        if (yield from reader.expect(_NEXT)) == "}":
            return found
        yield from reader.white()


def json_object(reader: TextReader) -> Reading[str]:
    """Return the text of the object that begins here."""
    if (yield from reader.at_end()) or reader.text[reader.at] != "{":
        raise Malformed
    return (yield from json_value(reader))


# A call written as one object: `{"name": ..., "arguments": {...}}` --------------------------------------------------------

_ARGUMENTS = ("arguments", "parameters")
_BESIDES = ("type", "id")

_W = r"[ \t\r\n]*+"
_USUAL = re.compile(
    rf'{_W}"name"{_W}:{_W}({_STRING}){_W},{_W}"({"|".join(_ARGUMENTS)})"{_W}:{_W}({_FLAT_OBJECT}){_W}\}}'
)
"""Most calls, after their `{`, in one step: a name, and arguments that are a flat object."""


def json_call(reader: TextReader, *, strict: bool, ids: re.Pattern[str] | None = None) -> Reading[SampledCall]:
    """Return the call whose `{` has been read.

    `strict` is for formats in which nothing but this object marks a call: it must have an object of arguments and no unknown
    keys. Otherwise arguments may be missing, null, or an object in a string. `ids`: the call keeps an `id` of this form.
    """

    def allowed(key: str, first: str) -> bool:
        if key == "name":
            return first == '"'
        if key in _ARGUMENTS:
            return first in ("{" if strict else '{"n')
        return not strict or key in _BESIDES

    usual = _USUAL.match(reader.text, reader.at)
    if usual is not None:
        reader.at = usual.end()
        members = {"name": usual[1], usual[2]: usual[3]}
    else:
        members = yield from json_members(reader, allowed)
    given = [members[key] for key in _ARGUMENTS if key in members]
    if "name" not in members or len(given) > 1 or (strict and not given):
        raise Malformed
    name: str = json.loads(members["name"])
    if not name.strip():
        raise Malformed
    number: Any = json.loads(members["id"]) if ids is not None and "id" in members else ""
    known = isinstance(number, str) and ids is not None and ids.fullmatch(number)
    return SampledCall(name, _arguments(given[0] if given else "null"), number if known else "")


def _arguments(value: str) -> str:
    if value.startswith('"'):
        inner: str = json.loads(value)
        value = inner.strip(WHITE) if is_json(inner) else ""
    if value == "null":
        return "{}"
    if not value.startswith("{"):
        raise Malformed
    return value
