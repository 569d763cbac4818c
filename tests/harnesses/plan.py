"""One task, as a model would do it: a reply a turn, spelled in ids as no encoder would, full of traps for harnesses."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

QUESTIONS = ("Where is it? Look with your tool until you know.", "Are you sure?")
"""What the user says: the task, and more after its end."""
ANSWERS = ("Nowhere,  it is gone.", "I am  sure.")
"""How the replies to `QUESTIONS` end."""
UNKNOWN = "gaze"
"""A tool that no harness has."""


@dataclass(frozen=True)
class Call:
    """A tool call as it is sampled; `arguments` is its JSON, written in some way."""

    name: str
    arguments: str

    @property
    def sampled(self) -> str:
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {self.arguments}}}\n</tool_call>'


@dataclass(frozen=True)
class Turn:
    """A reply: the thought, the text with its outer white space, the calls; `broken` is a call that is no JSON."""

    title: str
    thought: str
    text: str
    calls: tuple[Call, ...] = ()
    broken: str = ""

    @property
    def sampled(self) -> str:
        """The reply in the manner of Qwen 3."""
        parts = [self.text, self.broken, *(call.sampled for call in self.calls)]
        return f"<think>\n{self.thought}\n</think>\n\n" + "\n".join(part for part in parts if part)


def odd(arguments: dict[str, Any]) -> str:
    """Return JSON with a model's white space, and an escape that no serializer writes."""
    text = json.dumps(arguments, separators=(" ,  ", ":"))
    return re.sub(r'":"(\w)', lambda found: f'":"\\u{ord(found[1]):04x}', text, count=1)


def task(
    tool: str, first: dict[str, Any], second: dict[str, Any], last: dict[str, Any], *, unknown: bool = True
) -> list[Turn]:
    """Return the turns up to the first of `ANSWERS`.

    Args:
        tool: the name of a tool that the harness has.
        first: arguments of it.
        second: other arguments.
        last: the call that ends the run, if a reply without one does not; else empty.
        unknown: whether the model also calls a tool that there is not.
    """
    plain = json.dumps(first)
    broken = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"a": \n</tool_call>'
    turns = [
        Turn("odd JSON", "I begin.", "  I look. ", (Call(tool, odd(first)),)),
        Turn("two calls, no text", "Two at once.", "", (Call(tool, plain), Call(tool, json.dumps(second)))),
        Turn("the first call again, no thought", "", "Again:\n", (Call(tool, plain),)),
        Turn("a call that is no JSON, then a good one", "I err.", "", (Call(tool, plain),), broken),
    ]
    if unknown:
        turns.append(Turn("a tool that is not there", "Another.", "I gaze.", (Call(UNKNOWN, "{}"),)))
    end = (Call(last["name"], json.dumps(last["arguments"])),) if last else ()
    turns.append(Turn("the answer", "It is done.", f"  {ANSWERS[0]}\n", end))
    return turns


def more() -> Turn:
    """Return the reply to the second of `QUESTIONS`."""
    return Turn("a resume", "They ask again.", ANSWERS[1])


def spelled(text: str, encode: Callable[[str], Sequence[int]], seed: int) -> list[int]:
    """Return ids of a text, cut at random places; the marks of thoughts and calls stay the tokens that they are."""
    chance, ids = random.Random(seed), list[int]()
    for piece in re.split(r"(</?think>|</?tool_call>)", text):
        if re.fullmatch(r"</?(think|tool_call)>", piece):
            ids += encode(piece)
            continue
        while piece:
            size = chance.choice((1, 1, 2, 3, 5))
            ids += encode(piece[:size])
            piece = piece[size:]
    return ids
