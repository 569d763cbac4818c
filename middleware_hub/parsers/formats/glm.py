"""`glm`: GLM 4.5 and later (4.7 leaves the newlines out).

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>

A model may leave out the end of a value. It then ends where the next key begins, or the call ends.
"""

from __future__ import annotations

import re
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import NEWLINES, TaggedParser
from middleware_hub.parsers.reader import WHITE, Malformed, Reading, Tags
from middleware_hub.parsers.schema import spell_arguments

_NAME = re.compile(r"[^\s<>{}\"]+")
_END = "</tool_call>"
_KEY, _VALUE_CLOSE = "<arg_key>", "</arg_value>"
_KEY_OR_END = Tags(_KEY, _END)
_KEY_END = Tags("</arg_key>", _END)
_VALUE = Tags("<arg_value>")
_VALUE_END = Tags(_VALUE_CLOSE, _KEY, _END)


class Glm(TaggedParser):
    """Reads a string as it is written, any other value as JSON. `</tool_call>` and `<arg_key>` never occur inside a value."""

    names: ClassVar[tuple[str, ...]] = ("glm", "glm45", "glm47")
    template_tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "<arg_key>", "<arg_value>")
    needs_special: ClassVar[bool] = True
    opening = Tags("<tool_call>")

    def call(self, opening: str) -> Reading[SampledCall]:
        reader, values = self.reader, dict[str, str]()
        yield from reader.white()
        name = yield from reader.run(_NAME)
        yield from reader.white()
        tag = yield from reader.expect(_KEY_OR_END)
        while tag == _KEY:
            key = (yield from reader.until(_KEY_END)).strip(WHITE)
            if (yield from reader.expect(_KEY_END)) == _END or not key:
                raise Malformed
            yield from reader.white()
            yield from reader.expect(_VALUE)
            value = yield from reader.until(_VALUE_END)
            tag = yield from reader.expect(_VALUE_END)
            if tag == _VALUE_CLOSE:
                yield from reader.white()
                tag = yield from reader.expect(_KEY_OR_END)
            else:
                value = value.rstrip(NEWLINES)
            values[key] = self.schemas.spell(name, key, value)
        return SampledCall(name, spell_arguments(values))
