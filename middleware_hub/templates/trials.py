"""Short conversations to try chat templates with."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.chat.messages import Message, Tool


def calling(*arguments: object) -> Message:
    """Return an assistant's message with calls of one tool."""
    # Mistral's templates want ids of nine letters and digits.
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "look_up", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SHORT: list[Message] = [{"role": "user", "content": "Hi"}]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASKED: Message = {"role": "user", "content": "Go on."}
SAID: Message = {"role": "assistant", "content": "Well."}
RESULT: Message = {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "look_up"}
SECOND: Message = {**RESULT, "content": "43", "tool_call_id": "call00001"}
ONE = calling({"a": 1})
TWO = calling({"a": 1}, {"a": 2})
CALL: Message = ONE["tool_calls"][0]
TOOL: Tool = {
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

EARLIER: tuple[list[Message], ...] = (
    [*SHORT, SAID, ASKED],
    [SYSTEM, *SHORT, SAID, ASKED],
    [*SHORT, SAID, ASKED, ONE, RESULT, SAID, ASKED],
    [SYSTEM, *SHORT, SAID, ASKED, ONE, RESULT, ONE, RESULT],
)

Shape = tuple[Sequence[Message], list[Message]]
SPOKEN: tuple[Shape, ...] = (((), []), ((), [ASKED]), ((), [ASKED, SAID, ASKED]))
CALLED: tuple[Shape, ...] = (
    (ONE["tool_calls"], [RESULT]),
    (ONE["tool_calls"], [RESULT, ASKED]),
    (ONE["tool_calls"], [ASKED]),
    (TWO["tool_calls"], [RESULT, SECOND]),
    ((), [ASKED, ONE, RESULT]),
)
