"""`pythonic`: Llama 4 and others that write a list of calls as Python does. `lfm2`: LFM2, with a tag of its own around it.

[get_weather(city='Oslo', days=[1, 2], units={'wind': "m/s"}), get_time()]
<|python_start|>[get_weather(city='Oslo')]<|python_end|>
<|tool_call_start|>[get_weather(city='Oslo')]<|tool_call_end|>

A list without a tag counts as calls only at the beginning of the text, or directly after other calls. Values are Python
literals or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall, Tool
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import is_json
from middleware_hub.parsers.nested import Notation, nested
from middleware_hub.parsers.reader import Malformed, Reading, Tags, TextReader

_LIST = Tags("[")
_NAME = re.compile(r"[\w.\-]+")
_ARGUMENTS = Tags("(")
_MORE_OR_END = Tags(",", "]")
_KEY = re.compile(r"\w+")
_EQUALS = Tags("=")
_COLON = Tags(":")
_QUOTES = Tags("'", '"')
_OPENINGS = Tags(*_QUOTES.tags, "{", "[")
_IN_STRING = {quote: Tags(quote, "\\") for quote in _QUOTES.tags}
_BARE = re.compile(r"[-+.\w]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "\n": "", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/"}
_NUMBERED = {"x": 2, "u": 4, "U": 8}
_OTHERS = ("N", *"01234567")
"""Names and octal numbers of characters: no template writes them."""
_ESCAPE = Tags(*_ESCAPES, *_NUMBERED, *_OTHERS)
_DIGIT = Tags(*"0123456789abcdefABCDEF")


class Pythonic(TaggedParser):
    """Yields each call with the comma or the bracket that follows it, because until then the text may be something else."""

    names: ClassVar[tuple[str, ...]] = ("pythonic", "llama4_pythonic")
    template_tags: ClassVar[tuple[str, ...]] = ("[func_name1(",)
    needs_special: ClassVar[bool] = True
    bare: ClassVar[bool] = True
    opening = Tags("<|python_start|>")
    trailer: Tags | None = Tags("<|python_end|>")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._fresh = self.bare
        self._listed = False

    def next_opening(self) -> Reading[str]:
        if self.unclosed and self._listed:
            self.unclosed = self._fresh = False
            self.reader.begin()
            return ","
        self.unclosed = False
        if self._fresh:
            self._fresh = False
            self.pieces.text((yield from self.reader.white()))
            self.reader.begin()
            found = yield from self.reader.maybe(_LIST)
            if found:
                return found
        return (yield from super().next_opening())

    def call(self, opening: str) -> Reading[SampledCall]:
        reader = self.reader
        if opening in self.opening.tags:
            yield from reader.white()
            yield from reader.expect(_LIST)
        yield from reader.white()
        name = yield from reader.run(_NAME)
        yield from reader.expect(_ARGUMENTS)
        arguments = yield from nested(reader, ")", _NOTATION)
        yield from reader.white()
        self._listed = (yield from reader.expect(_MORE_OR_END)) == ","
        self._fresh = self.bare
        return SampledCall(name, arguments)


class Lfm2(Pythonic):
    """As `pythonic`, but a list must follow the tag."""

    names: ClassVar[tuple[str, ...]] = ("lfm2",)
    template_tags: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>[", "]<|tool_call_end|>")
    bare: ClassVar[bool] = False
    opening = Tags("<|tool_call_start|>")
    trailer: Tags | None = Tags("<|tool_call_end|>")


def _key(reader: TextReader, closer: str) -> Reading[str]:
    """Return the name of an argument, or the string that is a key of a dictionary."""
    if closer == ")":
        key = json.dumps((yield from reader.run(_KEY)), ensure_ascii=False)
    else:
        key = yield from _string(reader, (yield from reader.expect(_QUOTES)))
    yield from reader.white()
    yield from reader.expect(_EQUALS if closer == ")" else _COLON)
    return key


def _scalar(reader: TextReader, opened: str) -> Reading[str]:
    if opened:
        return (yield from _string(reader, opened))
    word = yield from reader.run(_BARE)
    word = _WORDS.get(word, word)
    if not is_json(word):
        raise Malformed
    return word


def _string(reader: TextReader, quote: str) -> Reading[str]:
    """Return the JSON text of the string whose quote has been read. As in Python, an unknown escape stays as it is."""
    pieces = []
    while True:
        pieces.append((yield from reader.until(_IN_STRING[quote])))
        if (yield from reader.expect(_IN_STRING[quote])) == quote:
            break
        escape = yield from reader.maybe(_ESCAPE)
        if escape in _OTHERS:
            raise Malformed
        if escape in _NUMBERED:
            pieces.append((yield from _numbered(reader, _NUMBERED[escape])))
        else:
            # `\/` is JSON's, which has no single quotes.
            known = escape and (escape != "/" or quote == '"')
            pieces.append(_ESCAPES[escape] if known else f"\\{escape}")
    try:
        # JSON writes some characters as two halves.
        whole = "".join(pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise Malformed from None
    return json.dumps(whole, ensure_ascii=False)


def _numbered(reader: TextReader, digits: int) -> Reading[str]:
    number = ""
    for _ in range(digits):
        number += yield from reader.expect(_DIGIT)
    if int(number, 16) > 0x10FFFF:
        raise Malformed
    return chr(int(number, 16))


_NOTATION = Notation(_OPENINGS, Tags(")", "}", "]"), Tags(",", ")", "}", "]"), _key, _scalar)
