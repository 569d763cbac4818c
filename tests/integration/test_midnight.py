"""A session over midnight: a template that writes the date has another date now, and the conversation goes on as it was."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

import pytest
import time_machine

from tests.support.agents import TOOLS, AgentSession, user
from tests.support.chat_models import chat_model
from tests.support.stack import Stack, stack
from tests.support.templates import CHATML

EVENING, MORNING = datetime(2026, 11, 26, 23, 50), datetime(2026, 11, 27, 0, 10)
DATE = "{{- 'Today: ' ~ strftime_now( '%d %b %Y' ) ~ '\\n' }}"


class Model(NamedTuple):
    """A model whose template writes the date.

    Attributes:
        template: None stands for the model's own.
        begins: what a reply begins with.
        writes_tools: whether the template writes the tools in front of all messages.
    """

    name: str
    template: str | None
    begins: str
    writes_tools: bool


GPT_OSS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
MODELS = {
    "gpt-oss": Model("gptoss", None, GPT_OSS, writes_tools=True),
    "chatml": Model("qwen2_5", DATE + CHATML, "", writes_tools=False),
    "chatml-tools": Model("qwen2_5", DATE + "{{- tools or '' }}" + CHATML, "", writes_tools=True),
}


@pytest.fixture(scope="module", params=list(MODELS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Model]]:
    model = MODELS[request.param]
    sessions = {}
    if model.template is not None:
        path = tmp_path_factory.mktemp("dated") / "chat_template.jinja"
        path.write_text(model.template)
        sessions["chat_template"] = str(path)
    with stack("qwen", styles=("cumulative",), folder=chat_model(model.name), sessions=sessions) as running:
        yield running, model


def test_a_turn_of_the_next_day_is_what_the_template_made_of_its_messages(made: tuple[Stack, Model]) -> None:
    running, model = made
    agent = AgentSession.make(running)
    messages = [user("Hello")]
    with time_machine.travel(EVENING):
        turn = agent.must(*messages, says=f"{model.begins}Hi.")
    with time_machine.travel(MORNING):
        for number in range(3):
            kept = turn.chain[:-1]  # gpt-oss ends its turns with another token than its template does
            messages += [turn.message, user(f"And {number}?")]
            turn = agent.must(*messages, says=f"{model.begins}Yes.")
            assert turn.sent[: len(kept)] == kept
    (only,) = agent.finalize()
    assert only["exact"], only["reasons"]


def test_an_edited_reply_of_yesterday_keeps_its_ids(made: tuple[Stack, Model]) -> None:
    running, model = made
    agent = AgentSession.make(running)
    with time_machine.travel(EVENING):
        first = agent.must(user("Hello"), says=f"{model.begins}The answer is four.")
    with time_machine.travel(MORNING):
        echo = {"role": "assistant", "content": "The answer is five."}
        second = agent.must(user("Hello"), echo, user("Go on."), says=f"{model.begins}Yes.")
    assert set(second.answer.headers["x-radix-reasons"].split(", ")) == {"edited_turn"}
    assert second.sent[: len(first.sent)] == first.sent


def test_other_tools_leave_yesterday_in_its_place(made: tuple[Stack, Model]) -> None:
    running, model = made
    agent = AgentSession.make(running)
    with time_machine.travel(EVENING):
        first = agent.must(user("Hello"), says=f"{model.begins}Hi.")
    with time_machine.travel(MORNING):
        second = agent.must(user("Hello"), first.message, user("Go on."), says=f"{model.begins}Yes.", tools=TOOLS)
    kept = first.chain[:-1]
    assert (second.sent[: len(kept)] == kept) is not model.writes_tools
