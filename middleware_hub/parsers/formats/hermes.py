"""`hermes`: Hermes, Qwen 2.5, Qwen 3 and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import json_call
from middleware_hub.parsers.reader import Reading, Tags

_BRACE = Tags("{")
_END = Tags("</tool_call>")


class Hermes(TaggedParser):
    """Reads calls as JSON. Tags inside JSON strings are ordinary characters."""

    names: ClassVar[tuple[str, ...]] = ("hermes", "qwen", "qwen25", "qwen3_json")
    template_tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>", "arguments")
    opening = Tags("<tool_call>")

    def call(self, opening: str) -> Reading[SampledCall]:
        reader = self.reader
        yield from reader.white()
        yield from reader.expect(_BRACE)
        call = yield from json_call(reader, strict=False)
        yield from reader.white()
        yield from reader.expect(_END)
        return call
