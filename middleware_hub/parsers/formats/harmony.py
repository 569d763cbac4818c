"""`harmony`: gpt-oss, whose replies are messages in channels. The prompt ends with `<|start|>assistant`.

    <|channel|>analysis<|message|>Need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
    <|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

(without the newlines). `analysis` is reasoning; a message with a recipient is a call; `final` and other `commentary` is text.
Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import SampledCall, Tool
from middleware_hub.parsers.grammar import GrammarParser
from middleware_hub.parsers.json_text import json_object
from middleware_hub.parsers.reader import Malformed, Reading, Tags

_START, _CHANNEL, _TO = "<|start|>assistant", "<|channel|>", " to="
_ANALYSIS = "analysis"
_CHANNELS = Tags(_ANALYSIS, "commentary", "final")

_FIRST = Tags(_START, _CHANNEL, _TO)
_HEADER = Tags(_START, _CHANNEL)
_CHANNEL_OR_TO = Tags(_CHANNEL, _TO)
_CHANNEL_ONLY = Tags(_CHANNEL)
_KIND = Tags("to=", "<|constrain|>", "<|message|>")
_CONSTRAIN = Tags("<|constrain|>", "<|message|>")
_MESSAGE = Tags("<|message|>")
_CALL = Tags("<|call|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
# A message without an end is over where the next one begins.
_BODY_END = Tags(*_ENDS, _START, _CHANNEL)

_RECIPIENT = re.compile(r"[^\s<>\"]+")
_WORD = re.compile(r"[A-Za-z]+")


class Harmony(GrammarParser):
    """Yields reasoning too.

    The tags of a message that was understood are dropped. `<|call|>` is a stop token, which engines remove, so a call is also
    complete at the end of the text, if its JSON is.
    """

    names: ClassVar[tuple[str, ...]] = ("harmony", "gpt-oss", "openai")
    template_tags: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|message|>", "functions")
    needs_special: ClassVar[bool] = True
    opening: ClassVar[str] = _START
    """Begins each message of a reply; the prompt has the first one."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = tools

    def read(self) -> Reading[None]:
        self.reader.begin()
        opening = yield from self.reader.maybe(_FIRST)
        while True:
            if not opening:
                opening = yield from self.text_before(_HEADER)
                if not opening:
                    return
            opening = yield from self._message(opening)

    def _message(self, opening: str) -> Reading[str]:
        """Read a message, and return the tag that begins the next one, if it was read."""
        try:
            channel, recipient = yield from self._header(opening)
            if recipient:
                self.pieces.call((yield from self._call(recipient)))
                return ""
        except Malformed:
            self.pieces.text(self.reader.taken())
            return ""
        return (yield from self._body(channel))

    def _header(self, opening: str) -> Reading[tuple[str, str]]:
        """Read everything up to `<|message|>`, and return channel and recipient."""
        reader, recipient = self.reader, ""
        if opening == _START:
            opening = yield from reader.expect(_CHANNEL_OR_TO)
        if opening == _TO:
            recipient = yield from reader.run(_RECIPIENT)
            yield from reader.expect(_CHANNEL_ONLY)
        channel = yield from reader.expect(_CHANNELS)
        yield from reader.white()
        kind = yield from reader.maybe(_KIND)
        if kind == "to=":
            recipient = yield from reader.run(_RECIPIENT)
            yield from reader.white()
            kind = yield from reader.maybe(_CONSTRAIN)
        if kind != "<|message|>":
            yield from reader.run(_WORD)  # json, or another type of the body
            yield from reader.white()
            yield from reader.expect(_MESSAGE)
        return channel, recipient

    def _call(self, recipient: str) -> Reading[SampledCall]:
        reader, name = self.reader, recipient.removeprefix("functions.")
        if not self._tools or not name:
            raise Malformed
        yield from reader.white()
        arguments = yield from json_object(reader)
        yield from reader.white()
        if not (yield from reader.at_end()):
            yield from reader.expect(_CALL)
        return SampledCall(name, arguments)

    def _body(self, channel: str) -> Reading[str]:
        """Read text or reasoning as it arrives, and return the tag that begins the next message, if that ended this one."""
        reader = self.reader
        while True:
            before, tag = reader.ahead(_BODY_END)
            if channel == _ANALYSIS:
                self.pieces.reasoning(before)
            else:
                self.pieces.text(before)
            reader.begin()
            if tag:
                tag = yield from reader.expect(_BODY_END)
                return "" if tag in _ENDS else tag
            if reader.ended:
                return ""
            yield
