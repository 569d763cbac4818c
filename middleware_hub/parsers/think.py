"""Reasoning before everything else, between two tags.

    <think>
    Which city? Oslo.
    </think>

    It rains in Oslo.

Most templates write `<think>` themselves, at the end of the prompt; then the sampled text starts inside. Newlines directly
around the tags belong to neither side. Without an end tag the whole text is reasoning. A tag anywhere else is text.
"""

from __future__ import annotations

from typing import ClassVar

from middleware_hub.chat.messages import Reasoning, Text
from middleware_hub.parsers.reader import WHITE, Reading, Tags, TextReader

_NEWLINES = "\r\n"


class Think:
    """`think`: Qwen 3, DeepSeek R1, GLM, Nemotron, Kimi K2 and others."""

    names: ClassVar[tuple[str, ...]] = (
        "think",
        "qwen3",
        "qwen3-thinking",
        "deepseek-r1",
        "deepseek-v3",
        "glm45",
        "minimax",
        "nemotron_3",
        "kimi-k2",
        *("deepseek_r1", "deepseek_v3", "glm47", "minimax_m2", "nemotron_v3", "kimi_k2"),
    )
    template_tags: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    needs_special: ClassVar[bool] = False
    begin: ClassVar[Tags] = Tags("<think>")
    end: ClassVar[Tags] = Tags("</think>")

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self.inside = self.over = False
        self._reader = TextReader()
        self._said: list[Text | Reasoning] = []
        self._reading = self._read()

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        return prompt.rstrip(WHITE).endswith(cls.begin.tags)

    @classmethod
    def last_opening(cls, text: str) -> int:
        return max(at + len(tag) if (at := text.rfind(tag)) >= 0 else -1 for tag in cls.begin.tags)

    def feed(self, text: str) -> list[Text | Reasoning]:
        if self.over:
            return [Text(text)] if text else []
        self._reader.feed(text)
        return self._go_on()

    def finish(self) -> list[Text | Reasoning]:
        self._reader.end()
        return self._go_on()

    def _go_on(self) -> list[Text | Reasoning]:
        next(self._reading, None)
        self._reader.begin()
        said, self._said = self._said, []
        return said

    def _read(self) -> Reading[None]:
        reader = self._reader
        white = yield from reader.white()
        opened = yield from reader.maybe(self.begin)
        if opened or self._starts_inside:
            self.inside = True
            yield from self._reasoning("" if opened else white)
            white = ""
            yield from self._newlines()
        self._say(Text, white + reader.text[reader.at :])
        self.over = True

    def _reasoning(self, white: str) -> Reading[None]:
        """Read up to and including the end tag. Newlines are held back until what follows shows whether it is that tag."""
        reader, waiting, begun = self._reader, [white.lstrip(_NEWLINES)], bool(white.lstrip(_NEWLINES))
        while True:
            before, tag = reader.ahead(self.end)
            if not begun:
                before = before.lstrip(_NEWLINES)
                begun = bool(before)
            body = before.rstrip(_NEWLINES)
            if body:
                self._say(Reasoning, "".join(waiting) + body)
                waiting.clear()
            waiting.append(before[len(body) :])
            if tag:
                self.inside = False
                reader.at += len(tag)
                # White space other than newlines is reasoning, although nothing followed it.
                self._say(Reasoning, "".join(waiting).rstrip(_NEWLINES))
                return
            if reader.ended:
                self._say(Reasoning, "".join(waiting))
                return
            yield

    def _newlines(self) -> Reading[None]:
        reader = self._reader
        while not (yield from reader.at_end()) and reader.text[reader.at] in _NEWLINES:
            reader.at += 1

    def _say(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if text:
            self._said.append(kind(text))


class Gemma4Think(Think):
    """`gemma4`: the channel `thought`, which Gemma 4 opens itself."""

    names: ClassVar[tuple[str, ...]] = ("gemma4",)
    template_tags: ClassVar[tuple[str, ...]] = ("<|channel>", "<channel|>")
    needs_special: ClassVar[bool] = True
    begin: ClassVar[Tags] = Tags("<|channel>thought")
    end: ClassVar[Tags] = Tags("<channel|>")


class MistralThink(Think):
    """`mistral`: Magistral, and later models that think when they are asked to."""

    names: ClassVar[tuple[str, ...]] = ("mistral",)
    template_tags: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
    needs_special: ClassVar[bool] = True
    begin: ClassVar[Tags] = Tags("[THINK]")
    end: ClassVar[Tags] = Tags("[/THINK]")


class SeedThink(Think):
    """`seed-oss`: the prompt may end with `<seed:cot_budget_reflect>`, the model's remark on its budget."""

    names: ClassVar[tuple[str, ...]] = ("seed-oss", "seed_oss")
    template_tags: ClassVar[tuple[str, ...]] = ("<seed:think>", "</seed:think>")
    needs_special: ClassVar[bool] = True
    begin: ClassVar[Tags] = Tags("<seed:think>")
    end: ClassVar[Tags] = Tags("</seed:think>")

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        return super().is_open(prompt.rstrip(WHITE).removesuffix("<seed:cot_budget_reflect>"))
