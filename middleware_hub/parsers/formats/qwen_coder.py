"""`qwen-coder`: Qwen3-Coder, Qwen 3.5 and later, Nemotron 3. `seed-oss`: Seed-OSS, with `<seed:tool_call>` around the same.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import Call, Tool
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.reader import Malformed, Reading, Tags
from middleware_hub.parsers.schema import Schemas, spell_arguments

_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^<>\r\n]+")
_FUNCTION = Tags("<function=")
_CLOSE = Tags(">")
_PARAMETER_OR_END = Tags("<parameter=", "</function>")


class QwenCoder(TaggedParser):
    """Strips one newline from each side of a value. `</tool_call>` never occurs inside a value."""

    names: ClassVar[tuple[str, ...]] = ("qwen-coder", "qwen3_coder", "qwen3_xml")
    template_tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=", "<parameter=")
    opening = Tags("<tool_call>")
    ending: ClassVar[Tags] = Tags("</tool_call>")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._schemas = Schemas(tools)
        self._value_end = Tags("</parameter>", *self.ending.tags)

    def call(self, opening: str) -> Reading[Call]:
        reader, values = self.reader, dict[str, str]()
        yield from reader.white()
        yield from reader.expect(_FUNCTION)
        name = yield from reader.run(_NAME)
        yield from reader.expect(_CLOSE)
        yield from reader.white()
        while (yield from reader.expect(_PARAMETER_OR_END)) == "<parameter=":
            key = yield from reader.run(_KEY)
            yield from reader.expect(_CLOSE)
            value = yield from reader.until(self._value_end)
            if (yield from reader.expect(self._value_end)) in self.ending.tags:
                raise Malformed
            values[key] = self._schemas.spell(name, key, value.removeprefix("\n").removesuffix("\n"))
            yield from reader.white()
        yield from reader.white()
        yield from reader.expect(self.ending)
        return Call(name, spell_arguments(values))


class SeedOss(QwenCoder):
    """As `qwen-coder`, in tags of its own, which may be special tokens."""

    names: ClassVar[tuple[str, ...]] = ("seed-oss", "seed_oss")
    template_tags: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "<function=", "<parameter=")
    needs_special: ClassVar[bool] = True
    opening = Tags("<seed:tool_call>")
    ending: ClassVar[Tags] = Tags("</seed:tool_call>")
