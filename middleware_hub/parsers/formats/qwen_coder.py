"""`qwen-coder`: Qwen3-Coder, Qwen 3.5 and later, Nemotron 3. `seed-oss`: Seed-OSS, with `<seed:tool_call>` around the same.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>

A model may leave out the end of a parameter. The value then ends where the next parameter begins, or the function ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall, Tool
from middleware_hub.parsers.grammar import TaggedParser
from middleware_hub.parsers.reader import Malformed, Reading, Tags
from middleware_hub.parsers.schema import spell_arguments

_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^<>\r\n]+")
_FUNCTION = Tags("<function=")
_CLOSE = Tags(">")
_PARAMETER, _FUNCTION_END, _PARAMETER_END = "<parameter=", "</function>", "</parameter>"
_PARAMETER_OR_END = Tags(_PARAMETER, _FUNCTION_END)


class QwenCoder(TaggedParser):
    """Strips one newline from each side of a value. `</tool_call>` and `<parameter=` never occur inside a value."""

    names: ClassVar[tuple[str, ...]] = ("qwen-coder", "qwen3_coder", "qwen3_xml")
    template_tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=", "<parameter=")
    opening = Tags("<tool_call>")
    ending: ClassVar[Tags] = Tags("</tool_call>")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._value_end = Tags(_PARAMETER_END, _PARAMETER, _FUNCTION_END, *self.ending.tags)

    def call(self, opening: str) -> Reading[SampledCall]:
        reader, values = self.reader, dict[str, str]()
        yield from reader.white()
        yield from reader.expect(_FUNCTION)
        name = yield from reader.run(_NAME)
        yield from reader.expect(_CLOSE)
        yield from reader.white()
        tag = yield from reader.expect(_PARAMETER_OR_END)
        while tag == _PARAMETER:
            key = yield from reader.run(_KEY)
            yield from reader.expect(_CLOSE)
            value, tag = yield from self._value()
            values[key] = self.schemas.spell(name, key, value.removeprefix("\n").removesuffix("\n"))
            if tag == _PARAMETER_END:
                yield from reader.white()
                tag = yield from reader.expect(_PARAMETER_OR_END)
        yield from reader.white()
        yield from reader.expect(self.ending)
        return SampledCall(name, spell_arguments(values))

    def _value(self) -> Reading[tuple[str, str]]:
        """Return a value, and the tag that ended it. `</function>` does so only at the end of the call."""
        reader, pieces = self.reader, list[str]()
        while True:
            pieces.append((yield from reader.until(self._value_end)))
            tag = yield from reader.expect(self._value_end)
            if tag in self.ending.tags:
                raise Malformed
            if tag != _FUNCTION_END or (yield from reader.comes(self.ending)):
                return "".join(pieces), tag
            pieces.append(tag)


class SeedOss(QwenCoder):
    """As `qwen-coder`, in tags of its own, which may be special tokens."""

    names: ClassVar[tuple[str, ...]] = ("seed-oss", "seed_oss")
    template_tags: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "<function=", "<parameter=")
    needs_special: ClassVar[bool] = True
    opening = Tags("<seed:tool_call>")
    ending: ClassVar[Tags] = Tags("</seed:tool_call>")
