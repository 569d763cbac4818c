"""`deepseek-v32`: DeepSeek V3.2, and V4, which calls its sections `tool_calls`.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

A model may also write one JSON object between the tags of `invoke`, or `<｜DSML｜invoke name="get_time"/>`. Where it leaves out
the end of a parameter, the value ends where the next parameter begins, or the call ends.
"""

from __future__ import annotations

import re
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import NEWLINES, SectionParser
from middleware_hub.parsers.json_text import json_object
from middleware_hub.parsers.reader import Malformed, Reading, Tags
from middleware_hub.parsers.schema import spell_arguments, spell_string, spell_untyped

_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^<>\"\r\n]+")
_NAME_END = Tags('">', '"/>')
_ENDS = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
_BEGINNING = '<｜DSML｜invoke name="'
_PARAMETER, _INVOKE_END = '<｜DSML｜parameter name="', "</｜DSML｜invoke>"
_PARAMETER_OR_END = Tags(_PARAMETER, _INVOKE_END)
_END = Tags(_INVOKE_END)
_STRING, _JSON = '" string="true">', '" string="false">'
_KEY_END = Tags(_STRING, _JSON, '">')
_VALUE_CLOSE = "</｜DSML｜parameter>"
_VALUE_END = Tags(_VALUE_CLOSE, _PARAMETER, _INVOKE_END, *_ENDS)
_AFTER_CALL = Tags(_BEGINNING, *_ENDS)


class DeepSeekV32(SectionParser):
    """Takes a string with all of its white space. A parameter that does not say whether it is one is typed by the schema."""

    names: ClassVar[tuple[str, ...]] = ("deepseek-v32", "deepseekv32", "deepseekv4", "deepseek_v32", "deepseek_v4")
    template_tags: ClassVar[tuple[str, ...]] = ("｜DSML｜", "invoke name=", "parameter name=")
    needs_special: ClassVar[bool] = True
    opening = Tags("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    beginning = Tags(_BEGINNING)
    trailer = Tags(*_ENDS)

    def begun(self) -> Reading[SampledCall]:
        reader = self.reader
        name = yield from reader.run(_NAME)
        if (yield from reader.expect(_NAME_END)) == '"/>':
            return SampledCall(name, "{}")
        yield from reader.white()
        if not (yield from reader.at_end()) and reader.text[reader.at] == "{":
            arguments = yield from json_object(reader)
            yield from reader.white()
            yield from reader.expect(_END)
            return SampledCall(name, arguments)
        return SampledCall(name, (yield from self._parameters(name)))

    def _parameters(self, name: str) -> Reading[str]:
        reader, values = self.reader, dict[str, str]()
        tag = yield from reader.expect(_PARAMETER_OR_END)
        while tag == _PARAMETER:
            key = yield from reader.run(_KEY)
            kind = yield from reader.expect(_KEY_END)
            value = yield from reader.until(_VALUE_END)
            tag = yield from reader.expect(_VALUE_END)
            if tag == _VALUE_CLOSE:
                yield from reader.white()
                tag = yield from reader.expect(_PARAMETER_OR_END)
            elif tag in _ENDS or (tag == _INVOKE_END and not (yield from reader.comes(_AFTER_CALL))):
                raise Malformed
            else:
                value = value.rstrip(NEWLINES)
            if kind == _STRING:
                values[key] = spell_string(value)
            elif kind == _JSON:
                values[key] = spell_untyped(value)
            else:
                values[key] = self.schemas.spell(name, key, value)
        return spell_arguments(values)
