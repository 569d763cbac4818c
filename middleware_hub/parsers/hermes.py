"""`hermes`: Hermes, Qwen 2.5, Qwen 3 and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from middleware_hub.chat.messages import Call
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.json_call import json_call
from middleware_hub.parsers.reader import Reading, Tags

_BRACE = Tags("{")
_END = Tags("</tool_call>")


class Hermes(TaggedParser):
    """See the module. Tags inside of JSON strings are characters like others."""

    opening = Tags("<tool_call>")

    def call(self, opening: str) -> Reading[Call]:
        """See `TaggedParser`."""
        reader = self.reader
        yield from reader.white()
        yield from reader.expect(_BRACE)
        call = yield from json_call(reader, strict=False)
        yield from reader.white()
        yield from reader.expect(_END)
        return call
