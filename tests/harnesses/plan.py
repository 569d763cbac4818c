"""One task, as a model would do it: a reply a turn, spelled in ids as no encoder would, full of traps for harnesses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.harnesses.families import Family

QUESTIONS = ("Where is it? Look with your tool until you know.", "Are you sure?")
"""What the user says: the task, and more after its end."""
ANSWERS = ("Nowhere,  it is gone.", "I am  sure.")
"""How the replies to `QUESTIONS` end."""
UNKNOWN = "gaze"
"""A tool that no harness has."""


@dataclass(frozen=True)
class Call:
    """A tool call: its JSON as a client gets it, and what is `written` to make it, in the form of a family."""

    name: str
    arguments: str
    written: str = ""


@dataclass(frozen=True)
class Turn:
    """A reply: the thought, the text with its outer white space, the calls; `broken` is a call that cannot be read."""

    title: str
    thought: str
    text: str
    calls: tuple[Call, ...] = ()
    broken: str = ""


def task(
    family: Family,
    tool: str,
    first: dict[str, Any],
    second: dict[str, Any],
    last: dict[str, Any],
    *,
    unknown: bool = True,
) -> list[Turn]:
    """Return the turns up to the first of `ANSWERS`.

    Args:
        family: how the model writes calls; it may be one whose replies have no more than one.
        tool: the name of a tool that the harness has.
        first: arguments of it.
        second: other arguments.
        last: the call that ends the run, if a reply without one does not; else empty.
        unknown: whether the model also calls a tool that there is not.
    """
    plain, other = family.call(tool, first), family.call(tool, second)
    turns = [
        Turn("odd arguments", "I begin.", "  I look. ", (family.call(tool, first, is_odd=True),)),
        Turn("two calls, no text", "Two at once.", "", (plain, other) if family.is_parallel else (other,)),
        Turn("the first call again, no thought, what is no special token", "", "<|As|> before:\n", (plain,)),
        Turn("a call that cannot be read, then a good one", "I err.", "", (plain,), family.broken(tool)),
    ]
    if unknown:
        turns.append(Turn("a tool that is not there", "Another.", "I gaze.", (family.call(UNKNOWN, {}),)))
    end = (family.call(last["name"], last["arguments"]),) if last else ()
    turns.append(Turn("the answer", "It is done.", f"  {ANSWERS[0]}\n", end))
    return turns


FOUND = "It is  not here."
"""How the other conversation of a `Scene` ends."""


@dataclass(frozen=True)
class Scene:
    """Two conversations at once: the turns of the task, and of what is beside it; the run ends with the words `answer`."""

    task: list[Turn]
    beside: list[Turn]
    answer: str


def scene(
    kind: str, family: Family, tool: str, first: dict[str, Any], then: dict[str, Any], *, asks_on: bool = False
) -> Scene:
    """Return a scene of a kind, in which both conversations use the tool.

    `agents`: the task calls an agent (`then` is the call), gets its answer, and ends. `handoff`: the call hands the task over
    to another agent, which ends it. `compaction`: the history is summed up at some time, and the task is resumed. `asks_on`:
    the harness asks for one more answer by itself, with a note that the agent is done, or that the model may go on.
    """
    call = family.call(tool, first, is_odd=True)
    begin = Turn("a call", "I begin.", "  I look. ", (call,))
    ends = [Turn("the answer", "It is done.", f"  {ANSWERS[0]}\n")] * (1 + asks_on)
    if kind == "compaction":
        words = f"<summary>\n<state_snapshot>\n{FOUND}\n</state_snapshot>\n</summary>"
        return Scene([begin, *ends, more()], [Turn("the summary", "They want it short.", words)], ANSWERS[1])
    handed = Turn("a call of an agent", "Others know.", "", (family.call(then["name"], then["arguments"]),))
    other = [Turn("its call", "My turn.", " Here?", (call,)), Turn("its answer", "So.", FOUND)]
    if kind == "handoff":
        return Scene([begin, handed], other, FOUND)
    return Scene([begin, handed, *ends], other, ANSWERS[0])


def more() -> Turn:
    """Return the reply to the second of `QUESTIONS`."""
    return Turn("a resume", "They ask again.", ANSWERS[1])


def spelled(text: str, encode: Callable[[str], Sequence[int]], seed: int) -> list[int]:
    """Return ids of a text, cut at random places; marks that are a token stay the tokens that they are."""
    chance, ids = random.Random(seed), list[int]()
    for piece in re.split(r"(<[^<>\s]+>)", text):
        if piece.startswith("<") and len(mark := encode(piece)) == 1:
            ids += mark
            continue
        while piece:
            size = chance.choice((1, 1, 2, 3, 5))
            ids += encode(piece[:size])
            piece = piece[size:]
    return ids
