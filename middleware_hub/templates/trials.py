"""Short conversations to try chat templates with, and the memory of what they showed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

REMEMBERED = 1024
"""How many results of one kind are remembered. Clients choose the options and the names of tools on which they depend."""

REMEMBERED_BYTES = 8 << 20
"""The bytes of their texts. Clients choose texts of options, white space, and how many messages follow a turn."""

V = TypeVar("V")


class Remembered(dict[tuple[object, ...], V]):
    """Results by all that they depend on: `REMEMBERED` and `REMEMBERED_BYTES` at most. A larger one is not kept."""

    _bytes = 0

    def __setitem__(self, key: tuple[object, ...], value: V) -> None:
        size = _size((key, value))
        if size > REMEMBERED_BYTES:
            return
        if self._bytes + size > REMEMBERED_BYTES or (len(self) >= REMEMBERED and key not in self):
            self.clear()
            self._bytes = 0
        self._bytes += size
        super().__setitem__(key, value)


def _size(value: object) -> int:
    """Return the bytes of the texts in a value, and of what holds them."""
    if isinstance(value, tuple | frozenset):
        return sys.getsizeof(value) + sum(map(_size, value))
    return sys.getsizeof(value) if isinstance(value, str) else 0


def calling(*arguments: object) -> dict[str, Any]:
    """Return an assistant's message with calls of one tool."""
    # Mistral's templates want ids of nine letters and digits.
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "look_up", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SHORT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
ASKED: dict[str, Any] = {"role": "user", "content": "Go on."}
SAID: dict[str, Any] = {"role": "assistant", "content": "Well."}
RESULT: dict[str, Any] = {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "look_up"}
SECOND: dict[str, Any] = {**RESULT, "content": "43", "tool_call_id": "call00001"}
ONE = calling({"a": 1})
TWO = calling({"a": 1}, {"a": 2})
CALL: dict[str, Any] = ONE["tool_calls"][0]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "Where."}},
            "required": ["a"],
        },
    },
}

ASKING: tuple[list[dict[str, Any]], ...] = (
    SHORT,
    [*SHORT, ONE, RESULT],
    [*SHORT, SAID, ASKED],
    [*SHORT, ONE, RESULT, SAID, ASKED],
)
"""Conversations after which a model is asked to speak."""

EARLIER: tuple[list[dict[str, Any]], ...] = (
    [*SHORT, SAID, ASKED],
    [SYSTEM, *SHORT, SAID, ASKED],
    [*SHORT, SAID, ASKED, ONE, RESULT, SAID, ASKED],
    [SYSTEM, *SHORT, SAID, ASKED, ONE, RESULT, ONE, RESULT],
)

Shape = tuple[Sequence[dict[str, Any]], list[dict[str, Any]]]
SPOKEN: tuple[Shape, ...] = (((), []), ((), [ASKED]), ((), [ASKED, SAID, ASKED]))
CALLED: tuple[Shape, ...] = (
    (ONE["tool_calls"], [RESULT]),
    (ONE["tool_calls"], [RESULT, ASKED]),
    (ONE["tool_calls"], [ASKED]),
    (TWO["tool_calls"], [RESULT, SECOND]),
    ((), [ASKED, ONE, RESULT]),
)
