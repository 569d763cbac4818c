"""No calls at all: `none`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from middleware_hub.chat.messages import Text, Tool
from middleware_hub.parsers.base import Sampled


class Plain:
    """Everything is text."""

    needs_special: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        pass

    def feed(self, text: str) -> list[Sampled]:
        """See `base`."""
        return [Text(text)] if text else []

    def finish(self) -> list[Sampled]:
        """See `base`."""
        return []
