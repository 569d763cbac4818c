"""System messages that are not the first: in every dialect they are written where they stand, and ids go on behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support import three_dialects
from tests.support.agents import TOOLS, ids_of, system, user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.lives import Router
from tests.support.shapes import ChatModel
from tests.support.stack import Stack, stack
from tests.support.three_dialects import PLACES, Message
from tests.support.usual import usual
from worker.worker import EmbeddedWorker

OTHERS = (
    "qwen3_5_think",
    "gptoss",
    "deepseekv3",
    "qwen3_6",
    "qwen3_8",
    "qwen3_vl",
    "deepseek_v32",
    "gemma3",
    "gemma",
    "cohere2",
)
"""Templates that refuse such a message, drop it, write it at the beginning, or in a form that their model does not know."""
OWN = {
    "qwen3": "<|im_start|>system\nTEXT<|im_end|>\n",
    "qwen2_5": "<|im_start|>system\nTEXT<|im_end|>\n",
    "glm4moe": "<|system|>\nTEXT",
    "llama3_1": "<|start_header_id|>system<|end_header_id|>\n\nTEXT<|eot_id|>",
}
"""Templates that write it as any system message."""
ALTERNATING = ("gemma3", "gemma", "cohere2")
FIRST, LATER, LAST = "You are Bob.", "It is late.", "It is later."


@dataclass
class Place:
    """Where a conversation is held: a stack with one model's template, a dialect, in a session or in none."""

    served: Stack
    model: ChatModel
    dialect: str = "chat"
    stream: bool = False
    session: str = ""

    @property
    def path(self) -> str:
        return f"/sessions/{self.session}/v1/" if self.session else "/v1/"

    def ask(self, messages: list[Message], says: str = "One.", status: int = 200, tools: Any = None) -> Answer:
        (worker,) = self.served.workers
        said = self.model.says([user("Hello")], tools, {}, says, "Hm.")
        # These models stop with tokens that no other model has: here they end without one.
        finish: Any = "length" if self.model.name in ("glm4moe", "gptoss") else "eos"
        worker.script(text=f"<|channel|>final<|message|>{said}" if self.model.name == "gptoss" else said, finish=finish)
        body = three_dialects.body(self.dialect, messages, stream=self.stream, tools=tools)
        answer = self.served.post(self.path + PLACES[self.dialect], body)
        assert answer.status == status, answer.content
        if status != 200:
            worker.forget_scripts()
        return answer

    def reply(self, answer: Answer) -> Message:
        return three_dialects.reply(self.dialect, answer, stream=self.stream)

    @property
    def sent(self) -> list[int]:
        return list(self.served.workers[0].log[-1].input_ids)

    @property
    def chain(self) -> list[int]:
        return [*self.sent, *self.served.workers[0].log[-1].output_ids]

    @property
    def text(self) -> str:
        return self.model.spell(self.sent)


def reasons(answer: Answer) -> list[str]:
    return [one for one in answer.headers.get("x-radix-reasons", "").split(", ") if one]


def serve(entered: ExitStack, name: str, **sessions: Any) -> Stack:
    made = stack(
        "qwen",
        styles=("cumulative",),
        folder=chat_model(name),
        radix={"tokenizer_backend": "huggingface"},
        sessions=sessions,
    )
    return entered.enter_context(made)


@pytest.fixture(scope="module", params=usual([*OTHERS, *OWN], "qwen3_5_think", "gptoss", "gemma3", "qwen3", "glm4moe"))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    with ExitStack() as entered:
        yield request.param, serve(entered, request.param)


def place(served: tuple[str, Stack], dialect: str = "chat", *, stream: bool = False, session: bool = True) -> Place:
    name, made = served
    opened = made.post("/sessions", {}).json()["session_id"] if session else ""
    return Place(made, ChatModel(name), dialect, stream, opened)


WAYS = usual(
    [
        (dialect, stream, session)
        for dialect in PLACES
        for stream in (False, True)
        for session in (True, False)
        if session or dialect != "responses"  # a worker's own, without a session
    ],
    *(("chat", False, True), ("messages", True, True), ("messages", False, False), ("responses", True, True)),
)


@pytest.mark.parametrize(("dialect", "stream", "session"), WAYS)
def test_turns_go_on_behind_system_messages_that_are_not_the_first(
    served: tuple[str, Stack], dialect: str, stream: bool, session: bool
) -> None:
    at = place(served, dialect, stream=stream, session=session)
    named = [] if served[0] in OWN else ["system_in_place"]
    asked = f"Hello {dialect} {stream} {session}."  # no other test has begun like that
    messages = [system(FIRST), user(asked), system(LATER)]
    first = at.ask(messages)
    assert reasons(first) == named
    assert at.text.index(FIRST) < at.text.index(asked) < at.text.index(LATER)
    assert (at.text.count(FIRST), at.text.count(asked), at.text.count(LATER)) == (1, 1, 1)
    chain = at.chain
    messages += [at.reply(first), user("And?"), system(LAST)]
    second = at.ask(messages, says="Two.")
    assert reasons(second) == named
    assert at.sent[: len(chain)] == chain
    assert at.text.index("And?") < at.text.index(LAST)
    chain = at.chain
    messages += [at.reply(second), user("So?")]
    third = at.ask(messages, says="Three.")
    assert reasons(third) == []
    assert at.sent[: len(chain)] == chain
    assert third.headers["x-radix-recorded"] == ("pending" if stream else "exact")
    if session:
        (only,) = at.served.post(f"/sessions/{at.session}/finalize", {}).json()["trajectories"]
        assert (only["exact"], ids_of(only), only["num_turns"]) == (True, at.chain, 3)
        assert "template_mismatch" not in only["reasons"]


def test_what_a_template_writes_as_a_system_message_stays_one(served: tuple[str, Stack]) -> None:
    at = place(served)
    at.ask([system(FIRST), user("Hello"), system(LATER)])
    if served[0] in OWN:
        assert OWN[served[0]].replace("TEXT", LATER) in at.text
        assert "<system>" not in at.text
    else:
        assert f"<system>\n{LATER}\n</system>" in at.text
        written = at.model.template.whole([system(FIRST), user("Hello")], None, {})
        said = written[: written.index("Hello") + len("Hello")]
        assert at.text.startswith(said)
    if served[0] == "qwen3_5_think":
        assert (
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>user\n<system>\nIt is late.\n</system><|im_end|>\n"
            in at.text
        )
    if served[0] in ALTERNATING:
        assert f"Hello\n\n<system>\n{LATER}\n</system>" in at.text


@pytest.mark.parametrize("dialect", PLACES)
def test_one_between_two_messages_of_the_user(served: tuple[str, Stack], dialect: str) -> None:
    """Also where the template refuses two messages of the user's in a row: they are one."""
    at = place(served, dialect)
    named = [] if served[0] in OWN else ["system_in_place"]
    messages = [system(FIRST), user("Hello"), system(LATER), user("Where?"), system(LAST), user("So?")]
    first = at.ask(messages)
    assert reasons(first) == named
    said = [FIRST, "Hello", LATER, "Where?", LAST, "So?"]
    assert sorted(said, key=at.text.index) == said
    assert [at.text.count(one) for one in said] == [1] * len(said)
    if served[0] in ALTERNATING:
        assert f"Hello\n\n<system>\n{LATER}\n</system>\n\nWhere?" in at.text
    chain = at.chain
    messages += [at.reply(first), user("And?"), system("It is dark."), user("Then?")]
    second = at.ask(messages, says="Two.")
    assert reasons(second) == named
    assert at.sent[: len(chain)] == chain


@pytest.mark.parametrize("dialect", PLACES)
def test_several_at_the_beginning_are_one(served: tuple[str, Stack], dialect: str) -> None:
    at = place(served, dialect)
    several = [system(FIRST), system("You are kind."), system("You are brief."), user("Hello")]
    answer = at.ask(several)
    chain = at.chain
    if served[0] in OWN:
        assert all(OWN[served[0]].replace("TEXT", text) in at.text for text in ("You are kind.", "You are brief."))
    elif served[0] != "gemma":
        whole = at.model.template.whole(
            [system("You are Bob.\n\nYou are kind.\n\nYou are brief."), user("Hello")], None, {}
        )
        assert at.text == whole
    assert reasons(answer) == (["system_in_place"] if served[0] == "gemma" else [])
    at.ask([*several, at.reply(answer), user("And?")], says="Two.")
    assert at.sent[: len(chain)] == chain


def called(at: Place, answer: Answer) -> tuple[Message, Message]:
    """The reply with a call, and the result of the call."""
    message = at.reply(answer)
    return message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Flour."}


@pytest.mark.parametrize("dialect", PLACES)
@pytest.mark.parametrize("order", ["between", "behind", "user between"])
@pytest.mark.parametrize("served", ["qwen3_5_think", "qwen3", "deepseekv3"], indirect=True)
def test_around_the_results_of_calls(served: tuple[str, Stack], dialect: str, order: str) -> None:
    """Results follow their call wherever the template has no place for a system message: that comes behind them."""
    at = place(served, dialect)
    messages = [system(FIRST), user("What is there?")]
    first = at.ask(messages, says=at.model.calls("look", "where", "here"), tools=TOOLS)
    chain = at.chain
    message, result = called(at, first)
    orders = {"between": [system(LATER), result], "behind": [result, system(LATER)]}
    behind = orders.get(order) or [system(LATER), result, user("Say it."), system(LAST)]
    messages += [message, *behind]
    second = at.ask(messages, says="Flour it is.", tools=TOOLS)
    assert at.sent[: len(chain)] == chain
    tail = at.model.spell(at.sent[len(chain) :])
    assert (tail.count("Flour."), tail.count(LATER)) == (1, 1)
    if served[0] in OWN:
        assert OWN[served[0]].replace("TEXT", LATER) in tail
        assert (tail.index(LATER) < tail.index("Flour.")) is (order != "behind")
    else:
        assert tail.index("Flour.") < tail.index(f"<system>\n{LATER}\n</system>")
    if order == "user between":
        assert tail.index(LATER) < tail.index("Say it.") < tail.index(LAST)
    chain = at.chain
    third = at.ask([*messages, at.reply(second), user("Thanks.")], says="Bye.", tools=TOOLS)
    assert at.sent[: len(chain)] == chain
    assert reasons(third) == []


@pytest.mark.parametrize("served", ["qwen3_5_think", "gemma3", "gemma", "gptoss"], indirect=True)
def test_before_what_the_user_says(served: tuple[str, Stack]) -> None:
    at = place(served)
    first = at.ask([system(FIRST), user("Hello")])
    chain = at.chain
    messages = [system(FIRST), user("Hello"), at.reply(first), system(LATER), system(LAST), user("And?")]
    second = at.ask(messages, says="Two.")
    assert at.sent[: len(chain)] == chain
    tail = at.model.spell(at.sent[len(chain) :])
    assert tail.index(LATER) < tail.index(LAST) < tail.index("And?")
    if served[0] in ALTERNATING:
        assert f"<system>\n{LATER}\n</system>\n\n<system>\n{LAST}\n</system>\n\nAnd?" in tail
    chain = at.chain
    at.ask([*messages, at.reply(second), system(LATER)], says="Three.")  # nothing but this behind the reply
    assert at.sent[: len(chain)] == chain
    assert f"<system>\n{LATER}\n</system>" in at.model.spell(at.sent[len(chain) :])


@pytest.mark.parametrize("served", ["qwen3_5_think", "qwen3", "gptoss"], indirect=True)
@pytest.mark.parametrize("inside", [True, False])
def test_what_is_counted_is_what_is_sent(served: tuple[str, Stack], inside: bool) -> None:
    at = place(served, "messages", session=inside)
    messages = [system(FIRST), user("Hello"), system(LATER), user("And?"), system(LAST)]
    body = three_dialects.body("messages", messages)
    counted = at.served.post(f"{at.path}messages/count_tokens", body)
    assert counted.status == 200, counted.content
    at.ask(messages)
    assert counted.json()["input_tokens"] == len(at.sent)


@pytest.mark.parametrize("served", ["qwen3_5_think", "gptoss", "qwen3"], indirect=True)
def test_samples_of_one_prompt_and_a_prompt_that_comes_again(served: tuple[str, Stack]) -> None:
    """The same request has the same ids, whatever is remembered, and says the same."""
    at = place(served)
    messages = [system(FIRST), user("Hello"), system(LATER)]
    first = at.ask(messages)
    sent = at.sent
    body = {**three_dialects.body("chat", messages), "n": 2}
    again = at.served.post(at.path + PLACES["chat"], body)
    assert again.status == 200
    assert reasons(again) == reasons(first)
    assert at.sent == sent


@pytest.mark.parametrize("dialect", PLACES)
@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "qwen3"])
def test_they_can_be_refused(name: str, dialect: str) -> None:
    with ExitStack() as entered:
        at = place((name, serve(entered, name, late_system="refuse")), dialect)
        several = [system(FIRST), system("You are kind."), user("Hello")]
        first = at.ask(several)
        messages = [*several, at.reply(first), user("And?"), system(LATER)]
        for asked in ([*several, system(LATER)], messages):
            if name in OWN:
                assert reasons(at.ask(asked)) == []
                continue
            refused = at.ask(asked, status=400)
            error = refused.json()["error"]
            assert "--late-system refuse" in error["message"]
            assert "system message" in error["message"]
        assert at.ask(messages[:-1]).headers["x-radix-reused-tokens"] != "0"


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "gemma3", "qwen3"])
def test_they_can_be_joined_to_the_first(name: str) -> None:
    with ExitStack() as entered:
        at = place((name, serve(entered, name, late_system="merge")))
        messages = [system(FIRST), user("Hello"), system(LATER)]
        first = at.ask(messages)
        assert reasons(first) == []
        assert "<system>" not in at.text
        if name in OWN:
            assert at.text.index("Hello") < at.text.index(LATER)
        else:
            assert f"{FIRST}\n\n{LATER}" in at.text
        chain = at.chain
        messages += [at.reply(first), user("And?")]
        second = at.ask(messages, says="Two.")
        assert at.sent[: len(chain)] == chain
        messages += [at.reply(second), system(LAST), user("So?")]
        third = at.ask(messages, says="Three.")
        if name not in OWN:  # the beginning is another one now: all is encoded again, and that is said
            assert f"{FIRST}\n\n{LATER}\n\n{LAST}" in at.text
            assert "divergence" in reasons(third)
        chain = at.chain
        at.ask([*messages, at.reply(third), user("Bye.")], says="Bye.")
        assert at.sent[: len(chain)] == chain


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "qwen3"])
def test_with_the_history_as_the_template_writes_it(name: str) -> None:
    with ExitStack() as entered:
        at = place((name, serve(entered, name, history="template")))
        messages = [system(FIRST), user("Hello"), system(LATER)]
        for says in ("One.", "Two.", "Three."):
            answer = at.ask(messages, says=says)
            whole = at.model.template.whole(messages, None, {})
            if name == "qwen3":
                assert OWN[name].replace("TEXT", LATER) in at.text
            assert at.text.startswith(whole[: whole.index(LATER) + len(LATER)])
            messages += [at.reply(answer), user("And?"), system(LAST)]
        assert "template_mismatch" not in reasons(answer)


@pytest.mark.parametrize("served", ["qwen3_5_think", "gptoss", "qwen3"], indirect=True)
def test_an_edited_turn_behind_one(served: tuple[str, Stack]) -> None:
    """What was not edited keeps its ids, the system message with it."""
    at = place(served)
    messages = [system(FIRST), user("Hello"), system(LATER)]
    first = at.ask(messages, says="One two three.")
    prompt = at.sent
    answer = at.ask([*messages, {**at.reply(first), "content": "One two."}, system(LAST), user("And?")], says="Two.")
    assert "edited_turn" in reasons(answer)
    assert at.sent[: len(prompt)] == prompt
    assert int(answer.headers["x-radix-reused-tokens"]) > len(prompt)
    assert at.text.count(LATER) == at.text.count(LAST) == 1


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("served", ["qwen3_5_think", "gemma3", "qwen3"], indirect=True)
def test_an_empty_one_is_nothing_to_write(served: tuple[str, Stack], content: Any) -> None:
    at = place(served)
    answer = at.ask([system(FIRST), user("Hello"), {"role": "system", "content": content}])
    assert reasons(answer) == []
    assert "<system>" not in at.text


@pytest.mark.parametrize("served", ["qwen3_5_think", "gemma3", "gptoss"], indirect=True)
def test_one_in_parts_without_one_at_the_beginning(served: tuple[str, Stack]) -> None:
    at = place(served)
    parts = [{"type": "text", "text": LATER}, {"type": "text", "text": LAST}]
    answer = at.ask([user("Hello"), {"role": "developer", "content": parts}])
    assert reasons(answer) == ["system_in_place"]
    assert f"<system>\n{LATER}\n\n{LAST}\n</system>" in at.text


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "gemma3", "qwen3"])
def test_at_another_router_and_after_a_restart(name: str, session: bool, tmp_path: Path) -> None:
    """The same ids wherever the conversation goes on: the chain, and behind it what any router writes."""
    kept = StoreConfig(url=f"sqlite:{tmp_path / 'store.db'}")
    folder = chat_model(name)
    with EmbeddedWorker(folder, token_delay=0) as worker:
        routers = [Router(worker, kept, folder=folder), Router(worker, kept, folder=folder)]
        try:
            at = Place(routers[0].stack, ChatModel(name))
            if session:
                at.session = at.served.post("/sessions", {}).json()["session_id"]
            messages, chain = [system(FIRST), system("You are kind."), user("Hello"), system(LATER)], []
            for number in range(4):
                at.served = routers[number % 2].stack
                answer = at.ask(messages, says=f"Reply {number}.")
                assert at.sent[: len(chain)] == chain
                assert reasons(answer) == ([] if name in OWN else ["system_in_place"])
                assert answer.headers["x-radix-reused-tokens"] == str(len(chain))
                chain = at.chain
                messages += [at.reply(answer), system(f"It is {number}."), user("And?")]
                if number == 1:
                    routers[0].restart()
        finally:
            for router in routers:
                router.stop()
