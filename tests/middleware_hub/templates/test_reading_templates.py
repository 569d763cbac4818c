"""Templates that read their messages: at every turn a worker gets what was sampled, and what a rendering of the whole says.

The oracle knows nothing of tails. All templates here write what was said as it was said, so behind the last reply a prompt is
the end of a rendering of the whole conversation, made with jinja2 alone, from that reply's own words on:

    rendered  ...Hi /no_think<|im_end|>\\n<|im_start|>assistant\\nReply 3.<|im_end|>\\n ...assistant\\n<think></think>
    sent      the chain: all that was sent and sampled                 `-- encoded behind it ----------------'
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.conftest import examples
from tests.middleware_hub.sessions.in_process import Room, tokenizer
from tests.support.agents import TOOLS, call_text
from tests.support.templates import READING, source

STOP = "<|im_end|>"
Message = dict[str, Any]
OPENAI, ANTHROPIC = "v1/chat/completions", "v1/messages"
SYSTEMS = st.sampled_from(
    [
        "Be brief.",
        "Be brief. /no_think",
        "/think",
        "Answer as JSON.",
        "Be quick.",
        "/quiet, please",
        "Be as brief as anyone can be.",
    ]
)
SAYS = st.sampled_from(["Hello", "And then? /no_think", "/think", "json?", "Well!!", "/quiet", "Be quick.", "x" * 30])


def rendered(name: str, messages: list[Message], tools: Any, options: dict[str, Any]) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    shown = [{**one, "content": one.get("content") or ""} for one in messages]
    for one in shown:
        if "tool_calls" in one:
            one["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in one["tool_calls"]
            ]
    template = environment.from_string(source(name))
    return template.render(messages=shown, tools=tools, add_generation_prompt=True, **options)


@dataclass
class Agent:
    """A conversation with a template that appends; it writes down what should have been sent."""

    room: Room
    name: str
    path: str
    dialect: str = OPENAI
    tools: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    messages: list[Message] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    """All that the engine got and said, up to the last reply."""
    replies: int = 0

    async def say(self, *behind: Message, calls: bool = False, right: bool = True) -> None:
        """Ask, and hold what was sent against the oracle; `right`: whether it is what the template writes."""
        self.messages += behind
        self.replies += 1
        text = rendered(self.name, self.messages, self.tools, self.options)
        expected = self.expected(text)
        words = f"Reply {self.replies}{'!!' if self.replies % 2 else '.'}"
        thinks = text.endswith("<think>\n")
        said = words + call_text(f"here {self.replies}") if calls else words
        self.room.engine.says(f"Hm.\n</think>\n\n{said}" if thinks else said)
        before = len(self.room.engine.log)
        client = self.room.ask(self.body(), self.path + self.dialect)
        status, answer = await client.answer()
        assert status == 200, answer
        ((sent, sampled),) = self.room.engine.log[before:]
        spell = tokenizer().vocabulary.spell
        assert (sent["input_ids"] == expected) is right, (spell(sent["input_ids"]), spell(expected))
        self.chain = [*sent["input_ids"], *sampled]
        message = self.told(answer)
        assert message.pop("reasoning_content", None) == ("Hm." if thinks else None)
        assert (message["content"] or "").strip() == words
        assert bool(message.get("tool_calls")) == calls
        self.messages.append(message)
        self.reasons = dict(client.out[0]["headers"]).get(b"x-radix-reasons", b"").decode()

    def expected(self, text: str) -> list[int]:
        last = max((at for at, one in enumerate(self.messages) if one["role"] == "assistant"), default=None)
        if not self.chain or last is None:
            return list(tokenizer().encode_start(text))
        calls = self.messages[last].get("tool_calls")
        mark = calls[-1]["function"]["arguments"] + "}\n</tool_call>" if calls else self.messages[last]["content"]
        behind = text[text.rindex(mark) + len(mark) :]
        assert behind.startswith(STOP)
        return [*self.chain, *tokenizer().encode_tail(behind.removeprefix(STOP))]

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 200, "stream": self.stream}
        if self.options:
            body["chat_template_kwargs"] = self.options
        if self.dialect == OPENAI:
            return {**body, "messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        system, *rest = self.messages
        return {**body, "system": system["content"], "messages": rest}

    def told(self, answer: Any) -> Message:
        if self.dialect == OPENAI and not self.stream:
            found: Message = answer["choices"][0]["message"]
            return {key: found[key] for key in ("role", "content", "reasoning_content", "tool_calls") if found.get(key)}
        message: Message = {"role": "assistant", "content": ""}
        thought, calls = "", []
        if self.dialect == OPENAI:
            for event in answer[:-1]:
                for choice in event["choices"]:
                    message["content"] += choice["delta"].get("content") or ""
                    thought += choice["delta"].get("reasoning_content") or ""
                    calls += choice["delta"].get("tool_calls") or ()
        elif self.stream:
            deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
            message["content"] = "".join(delta.get("text", "") for delta in deltas)
            thought = "".join(delta.get("thinking", "") for delta in deltas)
        else:
            message["content"] = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
            thought = "".join(block["thinking"] for block in answer["content"] if block["type"] == "thinking")
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {**message, **({"reasoning_content": thought} if thought else {})}


def room_of(name: str, folder: Path, **options: Any) -> Room:
    file = folder / f"{name}.jinja"
    file.write_text(source(name))
    options = {"reasoning_parser": "think", "tool_call_parser": "hermes", "verify_rate": 0.0, **options}
    return Room(chat_template=str(file), **options)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", list(READING))
@pytest.mark.parametrize("history", ["keep", "template"])
def test_every_turn_is_what_was_sampled_and_what_the_whole_says(name: str, history: str, tmp_path: Path) -> None:
    """With and without a session, in both dialects, streamed or not, with tools, forks, and sessions that begin again."""

    @settings(
        max_examples=examples(10),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        asyncio.run(work(data))

    async def work(data: st.DataObject) -> None:
        draw = data.draw
        room = room_of(name, tmp_path, history=history, verify_rate=draw(st.sampled_from([0.0, 1.0])))
        await room.open()
        dialect, stream = draw(st.sampled_from([OPENAI, ANTHROPIC])), draw(st.booleans())
        tools = TOOLS if dialect == OPENAI and draw(st.booleans()) else None
        options = {"word": "brief"} if name == "named_word" and draw(st.booleans()) else {}
        path = draw(st.sampled_from(["/sessions/s/", "/"]))
        agent = Agent(room, name, path, dialect, tools, options, stream)
        system: Message = {"role": "system", "content": draw(SYSTEMS)}
        if name == "hidden" and dialect == OPENAI and draw(st.booleans()):
            system["name"] = "quick"
        behind = [system, user(draw(SAYS))]
        kept: list[tuple[list[Message], list[int]]] = []
        for _ in range(draw(st.integers(2, 6))):
            calls = tools is not None and draw(st.booleans())
            await agent.say(*behind, calls=calls)
            kept.append(([*agent.messages], [*agent.chain]))
            if draw(st.integers(0, 3)) == 0:  # a fork
                messages, chain = draw(st.sampled_from(kept))
                agent.messages, agent.chain = [*messages], [*chain]
            made = agent.messages[-1].get("tool_calls")
            answers = [{"role": "tool", "tool_call_id": call["id"], "content": draw(SAYS)} for call in made or ()]
            behind = [*answers, *([] if answers and draw(st.booleans()) else [user(draw(SAYS))])]

    check()


def test_a_session_that_begins_again_is_rendered_whole(tmp_path: Path) -> None:
    """And goes on with what is then its own."""

    async def work() -> None:
        room = room_of("nemotron_nano_2", tmp_path)
        await room.open()
        agent = Agent(room, "nemotron_nano_2", "/sessions/s/")
        await agent.say({"role": "system", "content": "Be brief. /no_think"}, user("Hello"))
        await agent.say(user("And?"))
        await room.call("DELETE", "/sessions/s")
        await room.open()
        agent.chain = []
        await agent.say(user("And then?"))
        await agent.say(user("So?"))
        assert tokenizer().vocabulary.spell(agent.chain).count("<think></think>") == 2

    asyncio.run(work())


def test_the_answer_of_a_turn_that_was_told_not_to_think_is_no_thought(tmp_path: Path) -> None:
    """As it was first seen: from the second turn on `<think>` stood open, and the answer came back as reasoning."""

    async def work() -> None:
        room = room_of("nemotron_nano_2", tmp_path)
        await room.open()
        agent = Agent(room, "nemotron_nano_2", "/sessions/s/")
        await agent.say({"role": "system", "content": "/no_think"}, user("Hello"))
        for number in range(3):
            await agent.say(user(f"And {number}?"))
            assert agent.messages[-1]["content"].startswith("Reply")
            assert agent.reasons == ""
        _, found = await room.call("POST", "/sessions/s/finalize")
        assert [(one["exact"], one["reasons"]) for one in found["trajectories"]] == [(True, [])]

    asyncio.run(work())


class TestHealing:
    """What nothing in a template gives away is found by comparing, before it is sent."""

    def quick(self, room: Room, name: str = "hidden") -> Agent:
        agent = Agent(room, name, "/sessions/s/")
        agent.messages = [{"role": "system", "content": "Be quick.", "name": "quick"}]
        return agent

    def test_it_is_told_once_and_all_is_rendered_from_then_on(self, tmp_path: Path) -> None:
        async def work() -> None:
            room = room_of("hidden", tmp_path)
            await room.open()
            plain, quick = Agent(room, "hidden", "/sessions/s/"), self.quick(room)
            await plain.say(user("Hello"))
            await plain.say(user("And?"))
            assert plain.reasons == ""
            await quick.say(user("Hello"))
            assert quick.reasons == ""
            await quick.say(user("And?"))
            assert quick.reasons == "rendered_whole"
            for agent in (quick, plain):
                await agent.say(user("And then?"))
                assert agent.reasons == ""
            assert room.metric("tito_session_turns_total", kind="rendered_whole", reason="") == 1
            _, found = await room.call("POST", "/sessions/s/finalize")
            assert all(one["exact"] for one in found["trajectories"]), "what was sent was right"

        asyncio.run(work())

    def test_a_conversation_that_has_grown_is_compared_again(self, tmp_path: Path) -> None:
        """What the first turns did not have is found at the latest when there are 16 messages, and 64, 256, ..."""

        async def work() -> None:
            room = room_of("hidden_later", tmp_path)
            await room.open()
            agent = Agent(room, "hidden_later", "/sessions/s/")
            await agent.say({"role": "system", "content": "Be brief."}, user("Hello"))
            await agent.say(user("And?"))
            await agent.say({"role": "system", "content": "Quick!"}, right=False)
            told = []
            while len(agent.messages) < 18:
                await agent.say(user("And then?"), right=len(agent.messages) >= 14)
                told.append(agent.reasons)
            assert told == ["", "", "", "", "rendered_whole", ""]

        asyncio.run(work())

    def test_other_tools_are_compared_again(self, tmp_path: Path) -> None:
        """The template looks for one that no trial shows."""

        async def work() -> None:
            room = room_of("tool_names", tmp_path)
            await room.open()
            plain, looking = (Agent(room, "tool_names", "/sessions/s/", tools=tools) for tools in (None, TOOLS))
            for agent, told in ((plain, ""), (looking, "rendered_whole")):
                await agent.say({"role": "system", "content": "Be brief."}, user("Hello"))
                await agent.say(user("And?"))
                assert agent.reasons == told

        asyncio.run(work())
