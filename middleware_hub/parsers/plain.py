"""`none`: no calls at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import Text, Tool
from middleware_hub.parsers.base import Sampled


class Plain:
    """Everything is text."""

    names: ClassVar[tuple[str, ...]] = ("none",)
    template_tags: ClassVar[tuple[str, ...]] = ()
    needs_special: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        pass

    def feed(self, text: str) -> list[Sampled]:
        return [Text(text)] if text else []

    def finish(self) -> list[Sampled]:
        return []
