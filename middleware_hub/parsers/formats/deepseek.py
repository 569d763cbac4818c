"""`deepseek`: DeepSeek V3, R1 and V3.1, which write calls in two ways.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import json_object
from middleware_hub.parsers.reader import Reading, Tags

_CALLS = "<｜tool▁calls▁begin｜>"
_BEGIN = Tags("<｜tool▁call▁begin｜>")
_SEPARATOR = Tags("<｜tool▁sep｜>")
_END = Tags("<｜tool▁call▁end｜>")
_FENCE = Tags("```json")
_FENCE_END = Tags("```")
_WORD = re.compile(r"[^\s<>{}`\"]+")


class DeepSeek(TaggedParser):
    """Yields each call at its own end. The tags around all calls are dropped with the call."""

    names: ClassVar[tuple[str, ...]] = (
        *("deepseek", "deepseekv3", "deepseekv31"),
        *("deepseek_v3", "deepseek_v31"),
    )
    template_tags: ClassVar[tuple[str, ...]] = (_CALLS, *_SEPARATOR.tags)
    needs_special: ClassVar[bool] = True
    opening = Tags(_CALLS, *_BEGIN.tags)
    trailer = Tags("<｜tool▁calls▁end｜>")

    def call(self, opening: str) -> Reading[SampledCall]:
        reader = self.reader
        if opening == _CALLS:
            yield from reader.white()
            yield from reader.expect(_BEGIN)
        name = yield from reader.run(_WORD)
        yield from reader.expect(_SEPARATOR)
        yield from reader.white()
        fenced = not (yield from reader.at_end()) and reader.text[reader.at] != "{"
        if fenced:
            name = yield from reader.run(_WORD)
            yield from reader.white()
            yield from reader.expect(_FENCE)
            yield from reader.white()
        arguments = yield from json_object(reader)
        yield from reader.white()
        if fenced:
            yield from reader.expect(_FENCE_END)
            yield from reader.white()
        yield from reader.expect(_END)
        return SampledCall(name, arguments)
