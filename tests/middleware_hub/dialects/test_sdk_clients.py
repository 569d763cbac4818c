"""OpenAI's and Anthropic's own clients, over a canned transport: what they send is understood, and they understand the reply.

A stream that such a client put together is sent back by it, and has to be the message that was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.chat.answer import Answer
from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.messages import ChatRequest, Piece, Text
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.dialects.responses import Responses
from router.errors import BadRequestError, NoWorkerError, QueueFullError, RouterError
from tests.conftest import examples
from tests.middleware_hub.dialects.drawn import HEAD, answers, canonical, pieces, streamed

Reply = Callable[[ChatRequest], tuple[int, bytes]]
Told = tuple[Answer, list[Piece]]


def served(dialect: Dialect, reply: Reply, asked: list[ChatRequest]) -> httpx2.Client:
    """A client of a server that reads requests in a dialect, and answers with `reply`."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(dialect.parse(request.read()))
        status, body = reply(asked[-1])
        kind = "text/event-stream" if asked[-1].stream else "application/json"
        return httpx2.Response(status, content=body, headers={"content-type": kind})

    return httpx2.Client(transport=httpx2.MockTransport(handle))


def openai_client(reply: Reply, asked: list[ChatRequest], dialect: Dialect | None = None) -> openai.OpenAI:
    http = served(dialect or OpenAI(), reply, asked)
    return openai.OpenAI(api_key="k", base_url="http://router/v1", http_client=http, max_retries=0)


def anthropic_client(reply: Reply, asked: list[ChatRequest]) -> anthropic.Anthropic:
    http = served(Anthropic(), reply, asked)
    return anthropic.Anthropic(api_key="k", base_url="http://router", http_client=http, max_retries=0)


def telling(dialect: Dialect, told: Told) -> Reply:
    """A stream with a ping behind every event, or the whole reply."""

    def reply(request: ChatRequest) -> tuple[int, bytes]:
        if not request.stream:
            return 200, dialect.whole(request, HEAD, [told[0]])
        stream = dialect.stream(request, HEAD)
        *events, end = streamed(stream, [told])
        return 200, b"".join(event + stream.ping() for event in events) + end

    return reply


@st.composite
def tellings(draw: st.DrawFn) -> Told:
    answer = draw(answers().filter(lambda answer: answer.finish != "length"))
    return answer, draw(pieces(answer))


USER: Any = {"role": "user", "content": "Hi"}
few = settings(max_examples=examples(40))


@few
@given(tellings(), st.booleans())
def test_openai_stream_comes_back_as_it_was_sampled(told: Told, bare: bool) -> None:
    asked: list[ChatRequest] = []
    with openai_client(telling(OpenAI(), told), asked) as client:
        with client.chat.completions.stream(
            model="tiny", messages=[USER], stream_options={"include_usage": True}
        ) as stream:
            final = stream.get_final_completion()
        echo: Any = final.choices[0].message.model_dump(exclude_none=bare)
        client.chat.completions.create(model="tiny", messages=[USER, echo, USER])
    assert asked[1].messages[1] == canonical(told[0])
    assert final.choices[0].finish_reason == told[0].finish
    assert final.usage is not None
    assert final.usage.completion_tokens == told[0].completion_tokens


@few
@given(tellings(), st.booleans())
def test_openai_whole_comes_back_as_it_was_sampled(told: Told, as_model: bool) -> None:
    asked: list[ChatRequest] = []
    with openai_client(telling(OpenAI(), told), asked) as client:
        message = client.chat.completions.create(model="tiny", messages=[USER]).choices[0].message
        echo: Any = message if as_model else message.to_dict()
        client.chat.completions.create(model="tiny", messages=[USER, echo, USER])
    assert asked[1].messages[1] == canonical(told[0])


def test_openai_clients_may_ask_for_thoughts_where_there_are_none() -> None:
    """As they do of SGLang, which has the field in every message and every delta: the library raises if it is missing."""
    told: Told = (Answer(generation_id="g", content="Hi."), [Text("Hi.")])
    with openai_client(telling(OpenAI(), told), []) as client:
        found: list[Any] = [client.chat.completions.create(model="tiny", messages=[USER]).choices[0].message]
        found += [
            chunk.choices[0].delta
            for chunk in client.chat.completions.create(model="tiny", messages=[USER], stream=True)
        ]
    assert [one.reasoning_content for one in found] == [None] * 4


@few
@given(tellings())
def test_anthropic_stream_comes_back_as_it_was_sampled(told: Told) -> None:
    asked: list[ChatRequest] = []
    with anthropic_client(telling(Anthropic(), told), asked) as client:
        with client.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as stream:
            final = stream.get_final_message()
        echo: Any = {"role": "assistant", "content": final.content}
        client.messages.create(model="tiny", max_tokens=9, messages=[USER, echo, USER])
    assert asked[1].messages[1] == canonical(told[0])
    assert final.stop_reason == ("tool_use" if told[0].tool_calls else "end_turn")
    usage = final.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == told[0].prompt_tokens
    assert usage.output_tokens == told[0].completion_tokens


@few
@given(tellings())
def test_anthropic_whole_comes_back_as_it_was_sampled(told: Told) -> None:
    asked: list[ChatRequest] = []
    with anthropic_client(telling(Anthropic(), told), asked) as client:
        reply = client.messages.create(model="tiny", max_tokens=9, messages=[USER])
        echo: Any = {"role": "assistant", "content": reply.content}
        client.messages.create(model="tiny", max_tokens=9, messages=[USER, echo, USER])
    assert asked[1].messages[1] == canonical(told[0])
    assert reply.model_extra is not None
    assert reply.model_extra["generation_id"] == told[0].generation_id


@few
@given(tellings())
def test_a_streamed_response_comes_back_as_it_was_sampled(told: Told) -> None:
    dialect, asked = Responses(), list[ChatRequest]()
    with openai_client(telling(dialect, told), asked, dialect) as client:
        with client.responses.stream(model="tiny", input="Hi") as stream:
            final = stream.get_final_response()
        client.responses.create(model="tiny", input=[USER, *final.output, USER])
    assert asked[1].messages[1] == canonical(told[0])
    assert (final.status, final.output_text) == ("completed", told[0].content)
    assert final.usage is not None
    assert final.usage.output_tokens == told[0].completion_tokens


@few
@given(tellings())
def test_a_whole_response_comes_back_as_it_was_sampled(told: Told) -> None:
    dialect, asked = Responses(), list[ChatRequest]()
    with openai_client(telling(dialect, told), asked, dialect) as client:
        reply = client.responses.create(model="tiny", input="Hi")
        client.responses.create(model="tiny", input=[USER, *reply.output, USER])
    assert asked[1].messages[1] == canonical(told[0])
    assert reply.model_extra is not None
    assert reply.model_extra["generation_id"] == told[0].generation_id


def test_openai_sees_what_it_has_no_field_for() -> None:
    told: Told = (Answer(generation_id="g1", content="x", weight_version="7"), [])
    with openai_client(telling(OpenAI(), told), []) as client:
        choice = client.chat.completions.create(model="tiny", messages=[USER]).choices[0]
    assert choice.model_extra is not None
    assert choice.model_extra["meta_info"] == {"generation_id": "g1", "weight_version": "7"}


def refusing(dialect: Dialect, error: RouterError) -> Reply:
    return lambda _: (error.status, dialect.error(error))


def test_openai_tells_errors_apart() -> None:
    long = BadRequestError("too long", code="context_length_exceeded", param="messages")
    with (
        openai_client(refusing(OpenAI(), long), []) as client,
        pytest.raises(openai.BadRequestError, match="too long") as caught,
    ):
        client.chat.completions.create(model="tiny", messages=[USER])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_anthropic_tells_errors_apart() -> None:
    with (
        anthropic_client(refusing(Anthropic(), QueueFullError("all are busy")), []) as client,
        pytest.raises(anthropic.RateLimitError, match="all are busy"),
    ):
        client.messages.create(model="tiny", max_tokens=9, messages=[USER])


def failing(dialect: Dialect) -> Reply:
    """A stream that breaks off in the middle."""

    def reply(request: ChatRequest) -> tuple[int, bytes]:
        stream = dialect.stream(request, HEAD)
        return 200, stream.begin(1) + stream.piece(0, Text("On")) + stream.failed(NoWorkerError("no worker is left"))

    return reply


def test_openai_hears_of_a_stream_that_fails() -> None:
    with openai_client(failing(OpenAI()), []) as client, pytest.raises(openai.APIError, match="no worker is left"):
        list(client.chat.completions.create(model="tiny", messages=[USER], stream=True))


def test_openai_hears_of_a_streamed_response_that_fails() -> None:
    dialect = Responses()
    with (
        openai_client(failing(dialect), [], dialect) as client,
        pytest.raises(openai.APIError, match="no worker is left"),
    ):
        list(client.responses.create(model="tiny", input="Hi", stream=True))


def test_anthropic_hears_of_a_stream_that_fails() -> None:
    with (
        anthropic_client(failing(Anthropic()), []) as client,
        pytest.raises(anthropic.APIError, match="no worker is left"),
    ):
        list(client.messages.create(model="tiny", max_tokens=9, messages=[USER], stream=True))


def test_what_the_clients_send_for_tools_is_understood() -> None:
    told: Told = (Answer(generation_id="g"), [])
    asked: list[ChatRequest] = []
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with openai_client(telling(OpenAI(), told), asked) as client:
        client.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=[{"type": "function", "function": {"name": "add", "parameters": schema}}],
            tool_choice={"type": "function", "function": {"name": "add"}},
            extra_body={"top_k": 5, "lora_path": "a"},
        )
    with openai_client(telling(Responses(), told), asked, Responses()) as client:
        client.responses.create(
            model="tiny",
            input="Hi",
            tools=[{"type": "function", "name": "add", "parameters": schema, "strict": True}],
            tool_choice={"type": "function", "name": "add"},
            extra_body={"top_k": 5, "lora_path": "a"},
        )
    with anthropic_client(telling(Anthropic(), told), asked) as other:
        other.messages.create(
            model="tiny",
            max_tokens=9,
            messages=[USER],
            tools=[{"name": "add", "input_schema": schema}],
            tool_choice={"type": "tool", "name": "add"},
            extra_body={"top_k": 5, "lora_path": "a"},
        )
    for request in asked:
        assert json.dumps(request.tools) == json.dumps(
            [{"type": "function", "function": {"name": "add", "parameters": schema}}]
        )
        assert (request.call_choice, request.sampling["top_k"], bytes(request.extra["lora_path"])) == ("add", 5, b'"a"')
