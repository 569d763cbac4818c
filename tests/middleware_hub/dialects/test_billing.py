"""Claude Code's line about billing, which differs with every request, is no part of a conversation in any dialect."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.keys import canonical
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.messages import BILLING, without_billing
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.dialects.responses import Responses

LINE = "x-anthropic-billing-header: cc_version=2.1.3; cch=NUMBER;"
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (LINE, ""),
        (f"{LINE}\n", ""),
        (f"{LINE}\nBe brief.", "Be brief."),
        (f"{LINE}\r\nBe brief.", "Be brief."),
        (f"{LINE}\n\nBe brief.\n", "\nBe brief.\n"),
        (f"Be brief.\n{LINE}", "Be brief."),
        (f"Be brief.\r\n{LINE}\n{LINE}", "Be brief."),
        (f"Be brief.\n{LINE}\n", "Be brief.\n"),
        (f"Be brief.\n  {LINE}\nBe kind.", "Be brief.\nBe kind."),
        (f"{LINE}\nBe brief.\n{LINE}\n{LINE}\nBe kind.\n{LINE}", "Be brief.\nBe kind."),
        (f"The header is `{LINE}`", f"The header is `{LINE}`"),
        ("Be brief.\n\n", "Be brief.\n\n"),
    ],
)
def test_the_line_goes_and_all_else_stays(text: str, rest: str) -> None:
    assert without_billing(text) == rest


BY_PATTERN = re.compile(rf"(?:\r?\n[ \t]*{BILLING}[^\n]*)+\Z|^[ \t]*{BILLING}[^\n]*(?:\n|\Z)", re.MULTILINE)
"""The lines, and with those at the end of a text the end of the line before them: clear, but slow with long texts."""


@given(st.lists(st.sampled_from([BILLING, "a", " ", "\t", "\r", "\n", "\r\n", "\n" + BILLING])).map("".join))
def test_lines_are_split_as_a_pattern_finds_them(text: str) -> None:
    assert without_billing(text) == BY_PATTERN.sub("", text)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def chat(*messages: Any, **fields: Any) -> Any:
    return OpenAI().parse(json.dumps({"messages": messages, **fields}).encode())


def anthropic(*messages: Any, **fields: Any) -> Any:
    return Anthropic().parse(json.dumps({"max_tokens": 9, "messages": messages, **fields}).encode())


def responses(*items: Any, **fields: Any) -> Any:
    return Responses().parse(json.dumps({"input": items, **fields}).encode())


BODIES = {
    "chat": lambda line: chat({"role": "system", "content": f"{line}\nBe brief."}, USER),
    "chat, in parts": lambda line: chat({"role": "system", "content": parts(line, "Be brief.")}, USER),
    "chat, one part": lambda line: chat({"role": "developer", "content": parts(f"Be brief.\n{line}")}, USER),
    "chat, the user": lambda line: chat({"role": "user", "content": f"{line}\nBe brief."}),
    "chat, the user's parts": lambda line: chat({"role": "user", "content": parts(line, "Be", "brief.")}),
    "chat, later": lambda line: chat(USER, {"role": "system", "content": f"{line}\nBe brief."}),
    "messages": lambda line: anthropic(USER, system=f"{line}\nBe brief."),
    "messages, in blocks": lambda line: anthropic(USER, system=parts(line, "Be brief.")),
    "messages, with a prompt": lambda line: anthropic(USER, system=parts(f"{line}\nBe brief.", "Be kind.")),
    "messages, later": lambda line: anthropic(USER, {"role": "system", "content": parts(line, "Be brief.")}),
    "messages, the user": lambda line: anthropic({"role": "user", "content": parts(f"{line}\nBe brief.")}),
    "messages, the user's text": lambda line: anthropic({"role": "user", "content": f"Be brief.\n{line}"}),
    "responses": lambda line: responses(USER, instructions=f"{line}\nBe brief."),
    "responses, only": lambda line: responses(USER, {"role": "developer", "content": "Be brief."}, instructions=line),
    "responses, an item": lambda line: responses({"role": "developer", "content": f"Be brief.\n{line}"}, USER),
    "responses, in parts": lambda line: responses(
        {"role": "system", "content": [{"type": "input_text", "text": f"{line}\nBe brief."}]}, USER
    ),
    "responses, the user": lambda line: responses({"role": "user", "content": f"{line}\nBe brief."}),
}


@pytest.mark.parametrize("place", BODIES)
def test_two_turns_that_differ_in_it_are_one_conversation(place: str) -> None:
    one, other = (BODIES[place](LINE.replace("NUMBER", number)).messages for number in ("1", "22"))
    assert list(map(canonical, one)) == list(map(canonical, other))
    said = json.dumps([dict(message) for message in one])
    assert "billing" not in said
    assert "rief." in said


def test_what_a_tool_answered_stays_as_it_is() -> None:
    """It may be a file in which somebody looks for just this line."""
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = chat(USER, asked, {"role": "tool", "tool_call_id": "c", "content": f"{LINE}\nrest"}).messages
    assert found[-1]["content"] == f"{LINE}\nrest"
