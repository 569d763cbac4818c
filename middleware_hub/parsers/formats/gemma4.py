"""`gemma4`: Gemma 4, which has its own notation, with a token for quotation marks.

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],units:{wind:<|"|>m/s<|"|>}}<tool_call|>
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import is_json
from middleware_hub.parsers.nested import Notation, nested
from middleware_hub.parsers.reader import WHITE, Malformed, Reading, Tags, TextReader

_QUOTE, _END = '<|"|>', "<tool_call|>"
_CALL = Tags("call:")
_BRACE = Tags("{")
_VALUE = Tags(_QUOTE, "{", "[")
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

    def call(self, opening: str) -> Reading[SampledCall]:
        reader = self.reader
        yield from reader.expect(_CALL)
        name = yield from reader.run(_NAME)
        yield from reader.expect(_BRACE)
        arguments = yield from nested(reader, "}", _NOTATION)
        yield from reader.white()
        yield from reader.expect(_CALL_END)
        return SampledCall(name, arguments)


def _key(reader: TextReader, closer: str) -> Reading[str]:
    if (yield from reader.maybe(_KEY_QUOTE)):
        key = yield from _string(reader)
        yield from reader.white()
    else:
        key = json.dumps((yield from reader.run(_KEY)).strip(WHITE), ensure_ascii=False)
    yield from reader.expect(_COLON)
    return key


def _string(reader: TextReader) -> Reading[str]:
    """Return the JSON text of the string whose opening quote has been read."""
    text = yield from reader.until(_STRING_END)
    if (yield from reader.expect(_STRING_END)) == _END:
        raise Malformed
    return json.dumps(text, ensure_ascii=False)


def _scalar(reader: TextReader, opened: str) -> Reading[str]:
    """Return a string, or a number, true, false or null; some versions of the template print null as `None`."""
    if opened:
        return (yield from _string(reader))
    word = yield from reader.run(_BARE)
    word = "null" if word == "None" else word
    if not is_json(word):
        raise Malformed
    return word


_NOTATION = Notation(_VALUE, Tags("}", "]"), Tags(",", "}", "]"), _key, _scalar)
