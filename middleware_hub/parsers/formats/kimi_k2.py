"""`kimi-k2`: Kimi K2 and later, up to K2.5. A header names the function and numbers the call.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>

(without the newline). The template writes a call's result with its id, which is the whole header.
"""

from __future__ import annotations

import re
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import json_object
from middleware_hub.parsers.reader import Malformed, Reading, Tags

_CALLS = "<|tool_calls_section_begin|>"
_BEGIN = Tags("<|tool_call_begin|>")
_ARGUMENTS = Tags("<|tool_call_argument_begin|>")
_END = Tags("<|tool_call_end|>")
_WORD = re.compile(r"[^\s<>{}\"]+")
_HEADER = re.compile(r"(?:functions\.)?+(.+):[0-9]+")


class KimiK2(TaggedParser):
    """Yields each call at its own end. A header without a number, which has no function's name, is text."""

    names: ClassVar[tuple[str, ...]] = ("kimi-k2", "kimi_k2")
    template_tags: ClassVar[tuple[str, ...]] = (_CALLS, *_ARGUMENTS.tags)
    needs_special: ClassVar[bool] = True
    opening = Tags(_CALLS, *_BEGIN.tags)
    trailer = Tags("<|tool_calls_section_end|>")

    def call(self, opening: str) -> Reading[SampledCall]:
        reader = self.reader
        if opening == _CALLS:
            yield from reader.white()
            yield from reader.expect(_BEGIN)
        yield from reader.white()
        header = yield from reader.run(_WORD)
        named = _HEADER.fullmatch(header)
        if named is None:
            raise Malformed
        yield from reader.white()
        yield from reader.expect(_ARGUMENTS)
        yield from reader.white()
        arguments = yield from json_object(reader)
        yield from reader.white()
        yield from reader.expect(_END)
        return SampledCall(named[1], arguments, header)
