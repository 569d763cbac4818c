"""`llama3`: Llama 3.1 and later, which write only a JSON object, or one after a special token.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": ...}

An object without `<|python_tag|>` is a call only at the beginning, or after another call: elsewhere a model shows what JSON
looks like. Anything else after the tag (Python, `brave_search.call(...)`) is text, with the tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall, Tool
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import json_call
from middleware_hub.parsers.reader import Reading, Tags

_TAG = "<|python_tag|>"
_BARE = Tags("{", _TAG)
_BRACE = Tags("{")


class Llama3(TaggedParser):
    """Drops `;` and white space between calls."""

    names: ClassVar[tuple[str, ...]] = ("llama3", "llama3_json", "llama4_json")
    template_tags: ClassVar[tuple[str, ...]] = ("<|start_header_id|>", '{"name": ', '"parameters": ')
    needs_special: ClassVar[bool] = True
    opening = Tags(_TAG)
    trailer = Tags(";")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._bare = True

    def next_opening(self) -> Reading[str]:
        if self._bare:
            self._bare = False
            self.pieces.text((yield from self.reader.white()))
            self.reader.begin()
            found = yield from self.reader.maybe(_BARE)
            if found:
                return found
        return (yield from super().next_opening())

    def call(self, opening: str) -> Reading[SampledCall]:
        if opening == _TAG:
            yield from self.reader.white()
            yield from self.reader.expect(_BRACE)
        call = yield from json_call(self.reader, strict=True)
        self._bare = True
        return call
