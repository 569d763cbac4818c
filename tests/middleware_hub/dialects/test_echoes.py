"""A reply that comes back as a client's library sends it is the message that was sampled, in each dialect and across them."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import Message as AnthropicMessage
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from middleware_hub.chat import keys
from middleware_hub.chat.answer import Answer
from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.messages import KeyedMessage, ToolCall
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.fields import DEEPEST
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.dialects.responses import Responses
from middleware_hub.parsers import json_text
from middleware_hub.sessions.trie.memo import MemoRoom, MessageMemo
from middleware_hub.sessions.trie.trie import MessageTrie
from tests.middleware_hub.dialects.drawn import ASKED, HEAD, answers, canonical, printed, without_reasoning

OPENAI, ANTHROPIC, RESPONSES = OpenAI(), Anthropic(), Responses()
USER = {"role": "user", "content": "Hi"}


def sent_back(dialect: Dialect, message: dict[str, Any]) -> dict[str, Any]:
    """What a message of the client's is understood as."""
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER, message, USER]}
    return dict(dialect.parse(json.dumps(body).encode()).messages[1])


def through_openai(answer: Answer) -> dict[str, Any]:
    reply = ChatCompletion.model_validate_json(OPENAI.whole(ASKED, HEAD, [answer]))
    return reply.choices[0].message.model_dump()


def through_anthropic(answer: Answer) -> dict[str, Any]:
    reply = AnthropicMessage.model_validate_json(ANTHROPIC.whole(ASKED, HEAD, [answer]))
    return {"role": "assistant", "content": [block.model_dump() for block in reply.content]}


@given(answers())
def test_openai_whole(answer: Answer) -> None:
    assert sent_back(OPENAI, through_openai(answer)) == canonical(answer)


@given(answers())
def test_openai_without_what_is_none(answer: Answer) -> None:
    echo = {key: value for key, value in through_openai(answer).items() if value is not None}
    assert sent_back(OPENAI, echo) == canonical(answer)


@given(answers())
def test_openai_without_reasoning(answer: Answer) -> None:
    assert sent_back(OPENAI, without_reasoning(through_openai(answer))) == without_reasoning(canonical(answer))


@given(answers())
def test_openai_with_the_other_name_of_reasoning(answer: Answer) -> None:
    echo = through_openai(answer)
    echo["reasoning"] = echo.pop("reasoning_content", None)
    assert sent_back(OPENAI, echo) == canonical(answer)


@given(answers(), st.sampled_from([None, 2]), st.booleans())
def test_openai_with_arguments_printed_anew(answer: Answer, indent: int | None, as_objects: bool) -> None:
    echo = through_openai(answer)
    for call in echo["tool_calls"] or ():
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = arguments if as_objects else json.dumps(arguments, indent=indent)
        call["index"] = 0
    assert sent_back(OPENAI, echo) == canonical(answer)


@given(answers(), st.booleans())
def test_openai_with_content_in_parts(answer: Answer, split: bool) -> None:
    echo = through_openai(answer)
    content, half = echo["content"] or "", len(echo["content"] or "") // 2
    texts = [content[:half], content[half:]] if split else [content]
    echo["content"] = [{"type": "text", "text": text} for text in texts] if content else []
    assert sent_back(OPENAI, echo) == canonical(answer)


@given(answers())
def test_anthropic_whole(answer: Answer) -> None:
    assert sent_back(ANTHROPIC, through_anthropic(answer)) == canonical(answer)


@given(answers())
def test_anthropic_without_thinking(answer: Answer) -> None:
    echo = through_anthropic(answer)
    echo["content"] = [block for block in echo["content"] if block["type"] != "thinking"]
    assert sent_back(ANTHROPIC, echo) == without_reasoning(canonical(answer))


@given(answers())
def test_anthropic_with_thinking_that_was_hidden(answer: Answer) -> None:
    echo = through_anthropic(answer)
    echo["content"] = [
        {"type": "redacted_thinking", "data": "eA=="} if block["type"] == "thinking" else block
        for block in echo["content"]
    ]
    assert sent_back(ANTHROPIC, echo) == without_reasoning(canonical(answer))


def items(answer: Answer) -> list[dict[str, Any]]:
    reply = Response.model_validate_json(RESPONSES.whole(ASKED, HEAD, [answer]))
    return [item.model_dump() for item in reply.output]


def items_sent_back(echo: list[dict[str, Any]]) -> dict[str, Any]:
    """What the items of one turn are understood as, between two messages of the user's."""
    body = {"model": "tiny", "input": [USER, *echo, USER]}
    _, message, _ = RESPONSES.parse(json.dumps(body).encode()).messages
    return dict(message)


@given(answers())
def test_responses_whole(answer: Answer) -> None:
    assert items_sent_back(items(answer)) == canonical(answer)


@given(answers())
def test_responses_without_what_is_none_and_without_ids(answer: Answer) -> None:
    echo = [
        {key: value for key, value in item.items() if value is not None and key not in ("id", "status")}
        for item in items(answer)
    ]
    assert items_sent_back(echo) == canonical(answer)


@given(answers().filter(lambda answer: bool(answer.content or answer.tool_calls)))
def test_responses_without_reasoning(answer: Answer) -> None:
    echo = [item for item in items(answer) if item["type"] != "reasoning"]
    assert items_sent_back(echo) == without_reasoning(canonical(answer))


NAMESPACE = {"type": "namespace", "name": "ns", "tools": [{"name": "in"}, {"type": "custom", "name": "text"}]}
OFFERED: list[dict[str, Any]] = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "custom"},
    NAMESPACE,
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client"},
]
OFFER = RESPONSES.parse(json.dumps({"input": "Hi", "tools": OFFERED}).encode())
NAMES = [tool["function"]["name"] for tool in OFFER.tools or ()]


class OneTurn(MessageTrie):
    """A session that has answered one turn."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def answered(self, reply: str) -> KeyedMessage | None:
        calls = [call.as_openai() for call in self._answer.tool_calls]
        message = {"role": "assistant", "content": self._answer.content, "tool_calls": calls}
        return KeyedMessage(message, None) if reply == HEAD.id else None


@given(st.lists(st.tuples(st.sampled_from(NAMES), printed()), min_size=1, max_size=4))
def test_responses_with_calls_of_all_types(drawn: list[tuple[str, str]]) -> None:
    """By the ids of its items a call has the arguments that were sampled, whatever its own form can hold."""
    calls = tuple(ToolCall(f"call_{number}", *one) for number, one in enumerate(drawn))
    answer = Answer(generation_id="g", tool_calls=calls, finish="tool_calls", pieces=calls)
    echo = json.loads(RESPONSES.whole(OFFER, HEAD, [answer]))["output"]
    memo = MessageMemo(keys.canonical, MemoRoom(), OneTurn(answer))
    body = json.dumps({"input": [USER, *echo, USER], "tools": OFFERED}).encode()
    _, message, _ = RESPONSES.parse(body, memo).messages
    assert message["tool_calls"] == canonical(answer)["tool_calls"]


@given(st.sampled_from(["custom", "ns__text"]), st.text())
def test_responses_with_a_text_for_a_custom_tool(name: str, text: str) -> None:
    call = ToolCall("call_1", name, json.dumps({"input": text}))
    answer = Answer(generation_id="g", tool_calls=(call,), finish="tool_calls", pieces=(call,))
    (item,) = json.loads(RESPONSES.whole(OFFER, HEAD, [answer]))["output"]
    del item["id"], item["status"]
    body = json.dumps({"input": [USER, item, USER], "tools": OFFERED}).encode()
    assert RESPONSES.parse(body).messages[1]["tool_calls"] == canonical(answer)["tool_calls"]


@given(st.text())
def test_openai_with_a_text_for_a_custom_tool(text: str) -> None:
    tools = [{"type": "custom", "custom": {"name": "custom"}}]
    body = {"model": "m", "messages": [USER], "tools": tools}
    call = ToolCall("call_1", "custom", json.dumps({"input": text}))
    answer = Answer(generation_id="g", tool_calls=(call,), finish="tool_calls")
    reply = ChatCompletion.model_validate_json(OPENAI.whole(OPENAI.parse(json.dumps(body).encode()), HEAD, [answer]))
    assert sent_back(OPENAI, reply.choices[0].message.model_dump()) == canonical(answer)


@given(answers())
def test_what_one_dialect_said_the_other_can_send_back(answer: Answer) -> None:
    """A client that holds conversations in one form, and talks to models in another."""
    said = sent_back(OPENAI, through_openai(answer))
    content: list[dict[str, Any]] = []
    if "reasoning_content" in said:
        content.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": ""})
    if said["content"]:
        content.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls", ()):
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    assert sent_back(ANTHROPIC, {"role": "assistant", "content": content}) == said

    spoken = sent_back(ANTHROPIC, through_anthropic(answer))
    for call in spoken.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert sent_back(OPENAI, spoken) == said


@given(st.text(min_size=1, max_size=8), st.text(max_size=8))
def test_what_a_tool_said_is_the_same_message_in_both(call_id: str, result: str) -> None:
    openai = {"role": "tool", "tool_call_id": call_id, "content": result}
    block = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": result}]}
    assert sent_back(OPENAI, openai) == sent_back(ANTHROPIC, {"role": "user", "content": [block]}) == openai


def test_every_call_that_can_be_sampled_can_come_back() -> None:
    """What parsers take for a call is not nested too deep for a request."""
    assert DEEPEST >= json_text.DEEPEST
