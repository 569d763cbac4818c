"""`gemma4`: Gemma 4, which has its own notation, with a token for quotation marks.

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],units:{wind:<|"|>m/s<|"|>}}<tool_call|>
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from middleware_hub.chat.messages import Call
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import DEEPEST, is_json
from middleware_hub.parsers.reader import WHITE, Malformed, Reader, Reading, Tags

_QUOTE, _END = '<|"|>', "<tool_call|>"
_CALL = Tags("call:")
_BRACE = Tags("{")
_CLOSE = Tags("}", "]")
_VALUE = Tags(_QUOTE, "{", "[")
_NEXT = Tags(",", "}", "]")
_COLON = Tags(":")
_KEY_QUOTE = Tags(_QUOTE)
_STRING_END = Tags(_QUOTE, _END)
_CALL_END = Tags(_END)
_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^<>{}\[\]:,]+")
_BARE = re.compile(r"[-+.\w]+")


class Gemma4(TaggedParser):
    """Translates arguments into JSON. `<tool_call|>` never occurs inside a string."""

    names: ClassVar[tuple[str, ...]] = ("gemma4",)
    template_tags: ClassVar[tuple[str, ...]] = ("<|tool_call>call:", _QUOTE)
    needs_special: ClassVar[bool] = True
    opening = Tags("<|tool_call>")

    def call(self, opening: str) -> Reading[Call]:
        reader = self.reader
        yield from reader.expect(_CALL)
        name = yield from reader.run(_NAME)
        yield from reader.expect(_BRACE)
        arguments = yield from _object(reader)
        yield from reader.white()
        yield from reader.expect(_CALL_END)
        return Call(name, arguments)


def _object(reader: Reader) -> Reading[str]:
    """Return the JSON text of the object whose brace has been read."""
    spelled, closers = ["{"], ["}"]
    first = True
    while closers:
        yield from reader.white()
        closer = ""
        if first:
            closer = yield from reader.maybe(_CLOSE)
        if not closer:
            if closers[-1] == "}":
                spelled.append((yield from _key(reader)) + ": ")
                yield from reader.white()
            tag = yield from reader.maybe(_VALUE)
            if tag in ("{", "["):
                if len(closers) == DEEPEST:
                    raise Malformed
                spelled.append(tag)
                closers.append("}" if tag == "{" else "]")
                first = True
                continue
            spelled.append((yield from _string(reader)) if tag else (yield from _bare(reader)))
        # After a value, or in something empty: close everything that ends here.
        while closers:
            if not closer:
                yield from reader.white()
                closer = yield from reader.expect(_NEXT)
            if closer == ",":
                spelled.append(", ")
                break
            if closer != closers.pop():
                raise Malformed
            spelled.append(closer)
            closer = ""
        first = False
    return "".join(spelled)


def _key(reader: Reader) -> Reading[str]:
    if (yield from reader.maybe(_KEY_QUOTE)):
        key = yield from _string(reader)
        yield from reader.white()
    else:
        key = json.dumps((yield from reader.run(_KEY)).strip(WHITE), ensure_ascii=False)
    yield from reader.expect(_COLON)
    return key


def _string(reader: Reader) -> Reading[str]:
    """Return the JSON text of the string whose opening quote has been read."""
    text = yield from reader.until(_STRING_END)
    if (yield from reader.expect(_STRING_END)) == _END:
        raise Malformed
    return json.dumps(text, ensure_ascii=False)


def _bare(reader: Reader) -> Reading[str]:
    """Return a number, true, false or null; some versions of the template print null as `None`."""
    word = yield from reader.run(_BARE)
    word = "null" if word == "None" else word
    if not is_json(word):
        raise Malformed
    return word
