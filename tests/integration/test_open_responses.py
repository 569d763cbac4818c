"""What the Open Responses suite asks of a server, over HTTP in a session: requests of its kinds, and what it wants of replies.

The suite has seventeen templates. Here are those of HTTP, and those of its WebSocket that have a meaning over HTTP, as streams.
Not here: a response that the suite makes and judges itself; three templates that compact a conversation, which a session does
not (its agent summarizes); two that want a WebSocket to forget a response of `"store": false` (a session keeps all it gave).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openresponses_types.types as published
import pytest

from tests.integration.test_response_schema import check
from tests.support.agents import AgentSession
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.stack import Stack, stack
from tests.support.usual import usual

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Ulm"}}\n</tool_call>'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=location>\nUlm\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"
HARMONY = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location": "Ulm"}<|call|>'
CALLS = {"qwen3": HERMES, "qwen3_5_think": CODER, "glm4moe": GLM, "gptoss": HARMONY}
OPENED = ("qwen3_5_think",)
"""Templates whose prompt ends in an open thought."""


def said(role: str, content: Any, **more: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


ASKED: dict[str, list[dict[str, Any]]] = {
    "a text": [said("user", "Greet me.")],
    "phases": [
        said("assistant", "I recall a number.", phase="commentary"),
        said("assistant", "It is four.", phase="final_answer"),
        said("user", "Say it again."),
    ],
    "a system message": [said("system", "Talk like a sailor."), said("user", "Greet me.")],
    "several turns": [said("user", "I am Ada."), said("assistant", "Hello, Ada."), said("user", "Who am I?")],
    "parts": [said("user", [{"type": "input_text", "text": "Greet me."}])],
}


class Place:
    """A model, and what its worker says."""

    def __init__(self, name: str, served: Stack) -> None:
        self.name = name
        self.served = served
        self.worker = served.workers[0]

    def says(self, text: str) -> None:
        if self.name == "gptoss" and "<|channel|>" not in text:
            text = f"<|channel|>final<|message|>{text}"
        self.worker.script(text=f"hm\n</think>\n\n{text}" if self.name in OPENED else text)

    def ask(self, path: str, *, stream: bool, **body: Any) -> dict[str, Any]:
        """Return the response, which must be whole by the published types, and each event, too."""
        answer = self.post(path, stream=stream, **body)
        assert answer.status == 200, answer.content
        if not stream:
            found: dict[str, Any] = answer.json()
        else:
            events = [json.loads(line[6:]) for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
            for event in events:
                check(event)
            self.kinds = [(event["type"], event.get("item", {}).get("type")) for event in events]
            found = events[-1]["response"]
        published.ResponseResource.model_validate(found)
        assert (found["status"], bool(found["output"])) == ("completed", True)
        return found

    def post(self, path: str, **body: Any) -> Answer:
        return self.served.post(f"{path}/v1/responses", {"model": "m", **body})


@pytest.fixture(scope="module", params=usual(CALLS, "qwen3"))
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with stack("qwen", styles=("cumulative",), folder=chat_model(request.param)) as made:
        yield Place(request.param, made)
        assert made.idle()


@pytest.fixture
def path(place: Place) -> str:
    return AgentSession.make(place.served).path


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_conversation_is_answered(place: Place, path: str, asked: str, stream: bool) -> None:
    place.says("One.")
    found = place.ask(path, input=ASKED[asked], stream=stream)
    assert [part["text"] for item in found["output"] if item["type"] == "message" for part in item["content"]] == [
        "One."
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called(place: Place, path: str, stream: bool) -> None:
    place.says(CALLS[place.name])
    asked = [said("user", "How is the weather in Ulm?")]
    found = place.ask(path, input=asked, tools=[WEATHER], stream=stream)
    (call,) = [item for item in found["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"location": "Ulm"})
    if stream:
        wanted = [
            ("response.output_item.added", "function_call"),
            ("response.function_call_arguments.delta", None),
            ("response.function_call_arguments.done", None),
            ("response.output_item.done", "function_call"),
        ]
        assert [kind for kind in place.kinds if kind in wanted] == wanted
    place.says("Rain.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    place.ask(path, input=[*asked, *found["output"], result], tools=[WEATHER], stream=stream)


@pytest.mark.parametrize("store", [None, False])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_named_response_is_continued(place: Place, path: str, stream: bool, store: bool | None) -> None:
    """One response after the other, only with what is new, whether or not they are to be kept elsewhere."""
    kept = {} if store is None else {"store": store}
    place.says("Blue.")
    first = place.ask(path, input="The word is blue.", stream=stream, **kept)
    chain = [*place.worker.log[-1].input_ids, *place.worker.log[-1].output_ids][:-1]  # the worker's own end of a turn
    place.says("Blue.")
    second = place.ask(path, input="Which word?", previous_response_id=first["id"], stream=stream, **kept)
    assert second["previous_response_id"] == first["id"]
    assert list(place.worker.log[-1].input_ids)[: len(chain)] == chain


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_that_nobody_gave(place: Place, path: str, stream: bool) -> None:
    count = len(place.worker.log)
    answer = place.post(path, input="More.", previous_response_id="resp_of_nobody", store=False, stream=stream)
    assert (answer.status, answer.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert len(place.worker.log) == count
    place.says("One.")
    place.ask(path, input="Anew.", store=False, stream=stream)


def test_what_a_session_cannot_do_is_refused(place: Place, path: str) -> None:
    """An image: what is wrong, and where. A conversation to be compacted: there is no such place, with a model or without."""
    count = len(place.worker.log)
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    refused = place.post(path, input=[said("user", [{"type": "input_text", "text": "What is it?"}, image])])
    assert (refused.status, "input[0].content" in refused.json()["error"]["param"]) == (400, True), refused.content
    for body in ({"model": "m", "input": "Compact this."}, {"input": "Compact this."}):
        compact = place.served.post(f"{path}/v1/responses/compact", body)
        assert (compact.status, "v1/responses" in compact.json()["error"]["message"]) == (404, True)
    assert len(place.worker.log) == count
