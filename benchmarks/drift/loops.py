"""Loops of docs/is-text-a-key.md as texts, with what a trained model writes: no grammar holds its replies to a shape.

A loop says what the next request's text is, given the last one's and its reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.drift.prompts import CALLS, FURTHER, REACT, SEARCH, TALK, THINKING

Follow = Callable[[str, str, int], str]
"""From a request's text, its reply and the number of the turn, from 0, to the next request's text."""

INFORMATION: Final = "\n\n<information>Salzburg lies on the Salzach.</information>\n\n"
OBSERVATION: Final = "\nObservation: Salzburg lies on the Salzach.\nThought:"


@dataclass(frozen=True)
class Loop:
    """A loop as one kind of user writes it; `params` are those of its sampling."""

    name: str
    prompt: str
    params: Mapping[str, Any]
    follow: Follow


def _stop(*strings: str, **further: Any) -> dict[str, Any]:
    return {"stop": list(strings), **further}


def _cut(reply: str) -> str:
    """Return a reply up to its first tag, as slime's search loop does."""
    for tag in ("</search>", "</answer>"):
        if tag in reply:
            return reply.partition(tag)[0] + tag
    return reply


def _paper(reply: str) -> str:
    """Return a step as the notebooks of the ReAct paper write it: stripped, split, joined."""
    thought, found, action = reply.strip().partition("\nAction: ")
    return f" {thought}\nAction: {action}" if found else f" {thought}"


def printed_again(call: str) -> str:
    """Return a call as a client prints it that has parsed it, or as it is if it does not parse."""
    try:
        return " " + json.dumps(json.loads(call), ensure_ascii=False)
    except ValueError:
        return call


def _user(turn: int) -> str:
    return f"\nUser: {FURTHER[turn % len(FURTHER)]}\n"


def without_thoughts(text: str, reply: str) -> str:
    """Return the text behind which a turn's thinking is left out, as chat templates of reasoning models do."""
    _, found, answer = reply.partition("</think>\n")
    return text.removesuffix("<think>") + (answer if found else reply)


_TAGS: Final = _stop("</search>", "</answer>", no_stop_trim=True)
_STEP: Final = _stop("\nObservation:")
_TURN: Final = _stop("\nUser:")
_LINE: Final = _stop("\n")

LOOPS: Final = (
    Loop("search, `stop` at the tag, not trimmed", SEARCH, _TAGS, lambda text, reply, _: text + reply + INFORMATION),
    Loop("search, cut at the tag by the workflow", SEARCH, {}, lambda text, reply, _: text + _cut(reply) + INFORMATION),
    Loop("ReAct by hand, the reply as it is", REACT, _STEP, lambda text, reply, _: text + reply + OBSERVATION),
    Loop("ReAct by hand, `reply.rstrip()`", REACT, _STEP, lambda text, reply, _: text + reply.rstrip() + OBSERVATION),
    Loop("ReAct, the paper's notebooks", REACT, _STEP, lambda text, reply, _: text + _paper(reply) + OBSERVATION),
    Loop("chat, the reply as it is", TALK, _TURN, lambda text, reply, n: f"{text}{reply}{_user(n)}Assistant:"),
    Loop(
        "chat, the application keeps `answer.strip()`",
        TALK,
        _TURN,
        lambda text, reply, n: f"{text} {reply.strip()}{_user(n)}Assistant:",
    ),
    Loop("chat, ConversationChain", TALK, _TURN, lambda text, reply, n: f"{text} {reply}{_user(n)}Assistant:"),
    Loop("tool calls, as they are", CALLS, _LINE, lambda text, reply, n: f"{text}{reply}{_user(n)}Call:"),
    Loop(
        "tool calls, parsed and printed again",
        CALLS,
        _LINE,
        lambda text, reply, n: f"{text}{printed_again(reply)}{_user(n)}Call:",
    ),
    Loop("thinking kept", THINKING, _TURN, lambda text, reply, n: f"{text}{reply}{_user(n)}<think>"),
    Loop(
        "thinking dropped",
        THINKING,
        _TURN,
        lambda text, reply, n: f"{without_thoughts(text, reply)}{_user(n)}<think>",
    ),
)
