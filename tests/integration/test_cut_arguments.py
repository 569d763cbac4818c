"""Arguments of a past call that are no JSON object: no turn is refused for them, and a sampled turn stays whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.test_late_system import WAYS, Place, place, reasons, serve
from tests.support import three_dialects
from tests.support.agents import TOOLS, ids_of, system, user
from tests.support.stack import Stack
from tests.support.three_dialects import PLACES, Message
from tests.support.usual import usual

OBJECTS = ("qwen3_5_think", "glm4moe", "minimax_m2", "seed_oss")
"""Templates that write each argument by itself."""
QUOTING = ("qwen2_5", "gptoss")
"""Templates that write an object of arguments, and a text as a JSON string."""
WRITING = ("qwen3",)
"""Templates that write a text as it is."""
CUT = '{"where": "/a'
NO_OBJECTS = [CUT, "null", '["/a"]', '{"where": "/a"} and more', "/all", "57"]


@pytest.fixture(
    scope="module", params=usual([*OBJECTS, *QUOTING, *WRITING], "qwen3_5_think", "glm4moe", "gptoss", "qwen3")
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    with ExitStack() as entered:
        yield request.param, serve(entered, request.param)


def called(arguments: Any, *, name: str = "call_of_others", content: str = "I look.") -> Message:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def answered(message: Message) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"Flour {number}."}
        for number, call in enumerate(message["tool_calls"])
    ]


def with_arguments(message: Message, *given: Any) -> Message:
    """An echo with these arguments in its calls; None stands for those that it has."""
    echo = copy.deepcopy(message)
    for call, arguments in zip(echo["tool_calls"], given, strict=True):
        if arguments is not None:
            call["function"]["arguments"] = arguments
    return echo


@pytest.mark.parametrize("arguments", usual(NO_OBJECTS, CUT, "null"))
@pytest.mark.parametrize(("dialect", "stream", "session"), WAYS)
def test_a_call_that_was_not_sampled_here(
    served: tuple[str, Stack], dialect: str, stream: bool, session: bool, arguments: str
) -> None:
    at = place(served, dialect, stream=stream, session=session)
    # gpt-oss's template drops the text beside a call from earlier turns.
    message = called(arguments, content="" if served[0] == "gptoss" else "I look.")
    messages = [user(f"What is there? {dialect} {stream} {session}"), message, *answered(message)]
    first = at.ask(messages, tools=TOOLS)
    chain = at.chain
    assert reasons(first) == ([] if served[0] in WRITING else ["arguments_text"])
    if arguments == "null":
        assert "null" not in at.text
    else:
        shown = arguments if served[0] not in QUOTING else json.dumps(arguments, ensure_ascii=False)
        assert at.text.count(shown) == 1
    assert at.text.count("I look.") == (served[0] != "gptoss")
    second = at.ask([*messages, at.reply(first), user("And?")], tools=TOOLS)
    assert reasons(second) == []
    assert at.sent[: len(chain)] == chain


@pytest.mark.parametrize("arguments", usual(NO_OBJECTS, CUT, "null"))
@pytest.mark.parametrize("served", usual([*OBJECTS, "qwen2_5", *WRITING], *OBJECTS[:2], *WRITING), indirect=True)
@pytest.mark.parametrize(("dialect", "stream", "session"), WAYS)
def test_a_sampled_call_stays_whole(
    served: tuple[str, Stack], dialect: str, stream: bool, session: bool, arguments: str
) -> None:
    """At the next turn and at every later one, with all of its ids, as one trajectory."""
    at = place(served, dialect, stream=stream, session=session)
    opening = [system("You look."), user(f"What is there? {dialect} {stream} {session} {arguments}")]
    first = at.ask(opening, says=at.model.calls("look", "where", "/a"), tools=TOOLS)
    chain = at.chain
    echo = with_arguments(at.reply(first), arguments)
    messages = [*opening, echo, *answered(echo)]
    second = at.ask(messages, says="Flour.", tools=TOOLS)
    assert at.sent[: len(chain)] == chain
    assert reasons(second) == []
    assert second.headers["x-radix-reused-tokens"] == str(len(chain))
    chain = at.chain
    for question in ("And?", "So?"):
        messages += [at.reply(second), user(question)]
        second = at.ask(messages, says="Two.", tools=TOOLS)
        assert at.sent[: len(chain)] == chain
        chain = at.chain
    if session:
        (only,) = at.served.post(f"/sessions/{at.session}/finalize", {}).json()["trajectories"]
        assert (only["exact"], ids_of(only), only["num_turns"]) == (True, chain, 4)


@pytest.mark.parametrize("served", ["qwen3_5_think", "glm4moe", "qwen2_5", "qwen3"], indirect=True)
def test_one_of_two_calls(served: tuple[str, Stack]) -> None:
    at = place(served)
    opening = [user("What is there?")]
    both = "\n".join((at.model.calls("look", "where", "/a"), at.model.calls("look", "where", "/b")))
    first = at.ask(opening, says=both, tools=TOOLS)
    chain = at.chain
    for given in ((None, CUT), (CUT, None), (CUT, "null")):
        echo = with_arguments(at.reply(first), *given)
        answer = at.ask([*opening, echo, *answered(echo)], says="Flour.", tools=TOOLS)
        assert at.sent[: len(chain)] == chain
        assert reasons(answer) == []


@pytest.mark.parametrize("served", ["qwen3_5_think", "glm4moe", "qwen2_5", "qwen3"], indirect=True)
@pytest.mark.parametrize("edit", ["text", "other arguments", "other id", "calls", "name"])
def test_what_else_was_edited_is_an_edit(served: tuple[str, Stack], edit: str) -> None:
    """The id names a turn; a client that changes more than the arguments has written another one."""
    at = place(served)
    opening = [user("What is there?")]
    both = "\n".join((at.model.calls("look", "where", "/a"), at.model.calls("look", "where", "/b")))
    first = at.ask(opening, says=both, tools=TOOLS)
    echo = with_arguments(at.reply(first), CUT, '{"where": "/c"}' if edit == "other arguments" else None)
    if edit == "text":
        echo["content"] = "I look."
    elif edit == "other id":
        echo["tool_calls"][0]["id"] = "call_of_others"
    elif edit == "calls":
        del echo["tool_calls"][1]
    elif edit == "name":
        echo["tool_calls"][0]["function"]["name"] = "find"
    answer = at.ask([*opening, echo, *answered(echo)], says="Flour.", tools=TOOLS)
    assert {"edited_turn", "rewritten_turn"} & set(reasons(answer))


@pytest.mark.parametrize("dialect", PLACES)
@pytest.mark.parametrize("served", ["qwen3_5_think", "glm4moe"], indirect=True)
def test_arguments_that_are_no_text(served: tuple[str, Stack], dialect: str) -> None:
    """A client may have read them: a list is sent as a list."""
    at = place(served, dialect)
    for given in (["/a"], 5, None, {"where": "/a"}):
        message = called("{}")
        message["tool_calls"][0]["function"]["arguments"] = given
        messages = [user("What is there?"), message, *answered(message)]
        answer = _ask_as_it_is(at, messages)
        assert reasons(answer) == ([] if isinstance(given, dict) else ["arguments_text"])


def _ask_as_it_is(at: Place, messages: list[Message]) -> Any:
    """Asks with arguments that are no text, which no dialect's SDK would send."""
    kept = messages[1]["tool_calls"][0]["function"]["arguments"]
    messages[1]["tool_calls"][0]["function"]["arguments"] = "KEPT"
    body = json.dumps(three_dialects.body(at.dialect, messages, tools=TOOLS)).replace('"KEPT"', json.dumps(kept))
    at.served.workers[0].script(text="One.")
    answer = at.served.post(at.path + PLACES[at.dialect], json.loads(body))
    assert answer.status == 200, answer.content
    return answer


@pytest.mark.parametrize("served", ["qwen3_5_think", "qwen3"], indirect=True)
@pytest.mark.parametrize("history", ["keep", "template"])
def test_it_stays_whole_where_all_is_rendered_again(served: tuple[str, Stack], history: str) -> None:
    with ExitStack() as entered:
        name = served[0]
        at = place((name, serve(entered, name, history=history)))
        opening = [user("What is there?")]
        first = at.ask(opening, says=at.model.calls("look", "where", "/a"), tools=TOOLS)
        sampled = list(at.served.workers[0].log[-1].output_ids)
        echo = with_arguments(at.reply(first), CUT)
        at.ask([*opening, echo, *answered(echo), user("Say it.")], says="Flour.", tools=TOOLS)
        sent = at.sent
        assert any(sent[start : start + len(sampled)] == sampled for start in range(len(sent)))
