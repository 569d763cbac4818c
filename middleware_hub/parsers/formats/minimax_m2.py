"""`minimax-m2`: MiniMax M2 and later, up to M2.7.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>

A model may leave out the end of a parameter. The value then ends where the next parameter begins, or the call ends.
"""

from __future__ import annotations

import re
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall
from middleware_hub.parsers.grammar import NEWLINES, SectionParser
from middleware_hub.parsers.reader import Malformed, Reading, Tags
from middleware_hub.parsers.schema import spell_arguments

_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^<>\"\r\n]+")
_CLOSE = Tags('">')
_END = "</minimax:tool_call>"
_BEGINNING, _PARAMETER, _INVOKE_END = '<invoke name="', '<parameter name="', "</invoke>"
_PARAMETER_OR_END = Tags(_PARAMETER, _INVOKE_END)
_AFTER_CALL = Tags(_BEGINNING, _END)
_VALUE_CLOSE = "</parameter>"
_VALUE_END = Tags(_VALUE_CLOSE, _PARAMETER, _INVOKE_END, _END)


class MiniMaxM2(SectionParser):
    """Takes a value with all of its white space. The tags of parameters and calls never occur inside a value."""

    names: ClassVar[tuple[str, ...]] = ("minimax-m2", "minimax_m2")
    template_tags: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "<invoke name=", "<parameter name=")
    needs_special: ClassVar[bool] = True
    opening = Tags("<minimax:tool_call>")
    beginning = Tags(_BEGINNING)
    trailer = Tags(_END)

    def begun(self) -> Reading[SampledCall]:
        reader, values = self.reader, dict[str, str]()
        name = yield from reader.run(_NAME)
        yield from reader.expect(_CLOSE)
        yield from reader.white()
        tag = yield from reader.expect(_PARAMETER_OR_END)
        while tag == _PARAMETER:
            key = yield from reader.run(_KEY)
            yield from reader.expect(_CLOSE)
            value = yield from reader.until(_VALUE_END)
            tag = yield from reader.expect(_VALUE_END)
            if tag == _VALUE_CLOSE:
                yield from reader.white()
                tag = yield from reader.expect(_PARAMETER_OR_END)
            elif tag == _END or (tag == _INVOKE_END and not (yield from reader.comes(_AFTER_CALL))):
                raise Malformed
            else:
                value = value.rstrip(NEWLINES)
            values[key] = self.schemas.spell(name, key, value)
        return SampledCall(name, spell_arguments(values))
