"""`mistral`: Mistral, Devstral and Magistral. Older models write one list, newer ones each call on its own.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": ...}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...
[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Oslo"}
[TOOL_CALLS]get_weather{"city": "Oslo"}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall, Tool
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_text import json_call, json_object
from middleware_hub.parsers.reader import Reading, Tags

_LIST_OR_OBJECT = Tags("[", "{")
_BRACE = Tags("{")
_LIST_END = Tags("]")
_COMMA = Tags(",")
_WORD = re.compile(r"[^\s<>{}\[\]\"]+")
_ID_OR_ARGUMENTS = Tags("[CALL_ID]", "[ARGS]")
_ARGUMENTS = Tags("[ARGS]")
_ID = re.compile(r"[0-9A-Za-z]{9}")


class Mistral(TaggedParser):
    """Yields each call of a list at its own end."""

    names: ClassVar[tuple[str, ...]] = ("mistral",)
    template_tags: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[INST]")
    needs_special: ClassVar[bool] = True
    opening = Tags("[TOOL_CALLS]")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.trailer: Tags | None = None
        """Ends a list, as long as one is open."""

    def next_opening(self) -> Reading[str]:
        if self.unclosed:
            self.unclosed = False
            self.reader.begin()
            found = yield from self.reader.maybe(_COMMA)
            if found:
                return found
        self.trailer = None
        return (yield from super().next_opening())

    def call(self, opening: str) -> Reading[SampledCall]:
        reader = self.reader
        yield from reader.white()
        if opening == ",":
            yield from reader.expect(_BRACE)
            return (yield from json_call(reader, strict=False, ids=_ID))
        begun = yield from reader.maybe(_LIST_OR_OBJECT)
        if begun == "[":
            yield from reader.white()
            yield from reader.expect(_BRACE)
        if begun:
            call = yield from json_call(reader, strict=False, ids=_ID)
            self.trailer = _LIST_END if begun == "[" else None
            return call
        return (yield from self._named())

    def _named(self) -> Reading[SampledCall]:
        reader, number = self.reader, ""
        name = yield from reader.run(_WORD)
        yield from reader.white()
        tag = yield from reader.maybe(_ID_OR_ARGUMENTS)
        if tag == "[CALL_ID]":
            yield from reader.white()
            number = yield from reader.run(_WORD)
            yield from reader.white()
            yield from reader.expect(_ARGUMENTS)
        yield from reader.white()
        # The template would refuse any other id.
        return SampledCall(name, (yield from json_object(reader)), number if _ID.fullmatch(number) else "")
