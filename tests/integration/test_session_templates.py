"""Seams: what stands between two sampled turns is what each published template writes there, every marker once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from middleware_hub.templates.chat_template import ChatTemplate
from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, call_text, ids_of, system, tool, user
from tests.support.chat_models import MODELS, chat_model
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"where": "here", "times": 2}}}
APPEND_ONLY = ("qwen2_5", "llama3_1", "glm4moe", "gemma4")
"""These write a reply of earlier turns as it was sampled."""
LOOPING = [name for name in MODELS if name != "gemma4"]
"""Gemma writes a tool's answer into the turn of the model: what it has sampled does not end there."""


@dataclass
class Model:
    """A stack with one model's template, and what is needed to say what that model would."""

    name: str
    stack: Stack
    template: ChatTemplate
    tokenizer: Tokenizer

    def spell(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def said(
        self, messages: list[dict[str, Any]], reply: dict[str, Any], behind: list[dict[str, Any]], tools: Any
    ) -> str:
        """What the model has to sample for the template to write this reply: all between the prompt and the tail."""
        prompt = self.template.whole(messages, tools, {})
        whole = self.template.whole([*messages, reply, *behind], tools, {})
        tail = self.template.tail(reply, behind, tools, {}, earlier=messages)
        assert whole.endswith(tail)
        # Where the prompt opens a thought that the template leaves out of earlier turns, the model closes it first.
        closed = "\n</think>\n\n" if prompt.endswith("<think>\n") and not whole.startswith(prompt) else ""
        same = next((at for at, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
        return closed + whole[same : len(whole) - len(tail)]

    def stop(self, behind: list[dict[str, Any]], reply: dict[str, Any], tools: Any) -> int:
        """The token that the model stops with, for this to come behind its turn."""
        tail = self.template.tail(reply, behind, tools, {}, earlier=[user("a")])
        return self.encode(tail)[0]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    name = request.param
    folder = chat_model(name)
    with stack("qwen", styles=("cumulative",), folder=folder, radix={"tokenizer_backend": "huggingface"}) as made:
        special = {key: value for key in ("bos", "eos") if (value := getattr(MODELS[name], key))}
        template = ChatTemplate(templates.source(name), {f"{key}_token": value for key, value in special.items()})
        yield Model(name, made, template, Tokenizer.from_file(str(folder / "tokenizer.json")))


def ask(model: Model, agent: AgentSession, messages: list[dict[str, Any]], text: str, stop: int) -> Any:
    (worker,) = model.stack.workers
    worker.script(ids=[*model.encode(text), stop], finish=None)
    return agent.must(*messages, stop_token_ids=[stop], max_tokens=400, skip_special_tokens=False)


@pytest.mark.parametrize("model", list(MODELS), indirect=True)
def test_plain_turns(model: Model) -> None:
    agent = AgentSession.make(model.stack)
    messages: list[dict[str, Any]] = [system("Be brief."), user("Hello")]
    chain: list[int] = []
    for number in range(3):
        reply, behind = {"role": "assistant", "content": f"Reply {number}."}, [user(f"And {number}?")]
        stop = model.stop(behind, reply, None)
        text = model.said([user("Hello")], reply, behind, None)
        turn = ask(model, agent, messages, text, stop)
        assert turn.sent[: len(chain)] == chain
        chain = turn.chain
        messages += [turn.message, *behind]
    last = agent.must(*messages, says="Bye.")
    assert last.sent[: len(chain)] == chain
    (only,) = agent.finalize()
    assert only["exact"], only["reasons"]
    spelled = model.spell(last.sent)
    for number in range(3):
        assert spelled.count(f"Reply {number}.") == 1
    if model.name in APPEND_ONLY:
        assert spelled == model.template.whole(messages, None, {})


@pytest.mark.parametrize("content", ["text", "parts"])
@pytest.mark.parametrize("name", ["smolvlm", "idefics3", "llava_next"])
def test_a_template_that_takes_only_parts(name: str, content: str) -> None:
    """It writes nothing of a content that is a text, so the router writes each text as a part."""

    def asked(text: str) -> dict[str, Any]:
        return user(text) if content == "text" else user([{"type": "text", "text": text}])  # type: ignore[arg-type]

    with stack("qwen", styles=("cumulative",), folder=chat_model(name)) as made:
        agent, tokenizer = AgentSession.make(made), Tokenizer.from_file(str(chat_model(name) / "tokenizer.json"))
        messages = [asked("What is two plus two?")]
        for number in range(3):
            turn = agent.must(*messages, says=f"Reply {number}.")
            spelled = tokenizer.decode(turn.sent, skip_special_tokens=False)
            assert spelled.count("What is two plus two?") == 1
            assert all(spelled.count(f"And {before}?") == 1 for before in range(number))
            messages += [turn.message, asked(f"And {number}?")]
        (only,) = agent.finalize()
        assert (only["exact"], only["num_turns"]) == (True, 3)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_a_template_that_takes_only_parts_is_given_those_of_tools_as_well(name: str) -> None:
    with stack(
        "qwen", folder=chat_model(name), styles=("cumulative",), sessions={"tool_call_parser": "hermes"}
    ) as made:
        agent = AgentSession.make(made, tools=TOOLS)
        first = agent.must(user("Where is it?"), says=call_text("here"))
        (call,) = first.message["tool_calls"]
        messages = [user("Where is it?"), first.message, tool(call, "It is in the garden.")]
        second = agent.must(*messages, says="In the garden.")
        assert second.sent[: len(first.chain)] == first.chain
        tokenizer = Tokenizer.from_file(str(chat_model(name) / "tokenizer.json"))
        assert "It is in the garden." in tokenizer.decode(second.sent)


@pytest.mark.parametrize("model", LOOPING, indirect=True)
def test_a_tool_loop(model: Model) -> None:
    agent = AgentSession.make(model.stack, tools=TOOLS)
    messages: list[dict[str, Any]] = [user("Where is it?")]
    chain: list[int] = []
    for number in range(3):
        reply = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        result = {"role": "tool", "content": f"nothing {number}", "tool_call_id": "call_1"}
        text = model.said([user("Where is it?")], reply, [result], TOOLS)
        turn = ask(model, agent, messages, text, model.stop([result], reply, TOOLS))
        assert turn.sent[: len(chain)] == chain
        chain = turn.chain
        (call,) = turn.message["tool_calls"]
        assert call["function"]["name"] == "look"
        messages += [turn.message, {**result, "tool_call_id": call["id"]}]
    last = agent.must(*messages, says="Nowhere.")
    assert last.sent[: len(chain)] == chain
    (only,) = agent.finalize()
    assert only["exact"], only["reasons"]
    assert ids_of(only) == last.chain


@pytest.mark.parametrize("model", ["glm4moe"], indirect=True)
def test_a_turn_that_stopped_for_another_role_gives_way_to_what_came(model: Model) -> None:
    """GLM stops with the marker of the role that it expects next: where another one comes, its own is left out."""
    agent = AgentSession.make(model.stack)
    expected, came = model.encode("<|observation|>")[0], model.encode("<|user|>")[0]
    first = ask(model, agent, [user("Hello")], "\n<think></think>\nWell.", expected)
    second = agent.must(user("Hello"), first.message, user("No tools."), says="Right.")
    assert second.sent[: len(first.chain) - 1] == first.chain[:-1]
    assert second.sent[len(first.chain) - 1] == came
    assert expected not in second.sent
    (only,) = agent.finalize()
    assert only["exact"], only["reasons"]


@pytest.mark.parametrize("options", [{}, {"chat_template_kwargs": {"x": 1}}], ids=["appended", "spliced"])
@pytest.mark.parametrize("model", ["llama3_1"], indirect=True)
def test_a_turn_with_more_calls_than_the_template_takes_goes_on(model: Model, options: dict[str, Any]) -> None:
    """Llama's template refuses a turn with two calls. Its model samples such turns all the same."""
    agent = AgentSession.make(model.stack, tools=TOOLS)
    call = '{"name": "look", "parameters": {"where": "WHERE"}}'
    first = agent.must(user("Where?"), says=f"{call.replace('WHERE', 'here')}; {call.replace('WHERE', 'there')}")
    reply = first.message
    results = [tool(one, said) for one, said in zip(reply["tool_calls"], ("nothing", "a door"), strict=True)]
    messages = [user("Where?"), reply, *results]
    second = agent.must(*messages, says="A door.", **options)
    assert second.sent[: len(first.chain)] == first.chain
    written = model.spell(second.sent[len(first.sent) + len(first.sampled) - 1 :])
    alone = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert written == model.template.tail(alone, results, TOOLS, {}, earlier=[user("Where?")])
    third = agent.must(*messages, second.message, user("Open it."), says="It is open.", **options)
    assert third.sent[: len(second.chain)] == second.chain
    assert all(one["exact"] for one in agent.finalize())


@pytest.mark.parametrize("model", ["glm4moe"], indirect=True)
def test_reasoning_that_nobody_sampled_here_may_be_dropped_later(model: Model) -> None:
    """GLM's template writes it up to the next question, and an empty thought in its place where thinking is off."""
    agent = AgentSession.make(model.stack, tools=TOOLS, options={"chat_template_kwargs": {"enable_thinking": False}})
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    messages = [user("Where is it?"), thought, tool(CALL, "nothing")]
    first = agent.must(*messages, says="Nowhere.")
    assert "Hm." in model.spell(first.sent)
    agent.must(*messages, first.message, user("And now?"), says="There.")
    (only,) = agent.finalize()
    assert only["exact"], only["reasons"]


_SAYS = "{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
ENDS_LINES = f"""{{%- for m in messages %}}{_SAYS}{{{{- '\\n<|im_end|>\\n' }}}}{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""
"""As Nemotron Nano 2, Apriel and Llama 4's for vLLM: what ends a turn stands on a line of its own."""
ASKS_ALWAYS = f"""{{%- for m in messages %}}{_SAYS}{{{{- '<|im_end|>\\n' }}}}{{%- endfor %}}
{{{{- '<|im_start|>assistant\\n<|endoftext|>' }}}}"""
"""As Command R7B: `add_generation_prompt` is not looked at, and the model is asked with a token that no history has."""


def played(made: Stack, *replies: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The prompts of a conversation with these replies, and what is exported of it."""
    agent, messages, prompts = AgentSession.make(made), [user("Hello")], []
    chain: list[int] = []
    for number, reply in enumerate(replies):
        turn = agent.must(*messages, says=reply)
        assert turn.sent[: len(chain)] == chain
        chain = turn.chain
        prompts.append(made.spelling.spell(turn.sent, skip_special=False).text)
        messages += [turn.message, user(f"And {number}?")]
    return prompts, agent.finalize()


@pytest.mark.parametrize("reply", ["Well.", "Well.\n"])
def test_a_turn_that_ends_on_a_line_of_its_own_ends_once(tmp_path: Path, reply: str) -> None:
    template = tmp_path / "ends_lines.jinja"
    template.write_text(ENDS_LINES)
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": str(template)}) as made:
        prompts, (only,) = played(made, reply, reply, reply)
    assert only["exact"], only["reasons"]
    for number, prompt in enumerate(prompts):
        assert prompt.count("<|im_end|>") == 1 + 2 * number
    turn = f"<|im_start|>assistant\n{reply}<|im_end|>\n"
    asked = "<|im_start|>user\n{}\n<|im_end|>\n"
    between = [asked.format(text) + turn for text in ("Hello", "And 0?")]
    assert prompts[-1] == "".join(between) + asked.format("And 1?") + "<|im_start|>assistant\n"


def test_a_generation_prompt_that_is_always_written_need_not_be_in_the_history(tmp_path: Path) -> None:
    template = tmp_path / "asks_always.jinja"
    template.write_text(ASKS_ALWAYS)
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": str(template)}) as made:
        prompts, (only,) = played(made, "One.", "Two.", "Three.")
    assert only["exact"], only["reasons"]
    assert prompts[-1].count("<|endoftext|>") == 3


NUMBERS = """{%- set ns = namespace(calls=0) %}{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.tool_calls %}{%- for c in m.tool_calls %}
{{- '<tool_call>' ~ ns.calls ~ ': ' ~ c.function.arguments | tojson ~ '</tool_call>' }}{%- set ns.calls = ns.calls + 1 %}
{%- endfor %}{%- elif m.role == 'assistant' %}{{- '<response>' ~ m.content ~ '</response>' }}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""
"""As Command R7B's with tools: it numbers all calls of a conversation, and always asks."""


@pytest.mark.parametrize("history", ["keep", "template"])
def test_calls_that_the_template_numbers_keep_their_place(tmp_path: Path, history: str) -> None:
    template = tmp_path / "numbers.jinja"
    template.write_text(NUMBERS)
    sessions = {"chat_template": str(template), "tool_call_parser": "hermes", "verify_rate": 1.0, "history": history}
    with stack("qwen", styles=("cumulative",), sessions=sessions) as made:
        agent, messages, chain = AgentSession.make(made, tools=TOOLS), [user("Where is it?")], list[int]()
        for number in range(5):
            turn = agent.must(*messages, says=call_text(f"place {number}"))
            assert turn.sent[: len(chain)] == chain
            chain = turn.chain
            messages += [turn.message, tool(turn.message["tool_calls"][0], "nothing")]
        last = agent.finalize()[-1]
    assert (last["exact"], last["num_turns"]) == (True, 5), last["reasons"]


def test_a_template_for_tools_is_taken_only_where_there_are_tools(tmp_path: Path) -> None:
    """As in Hermes 3's tokenizer: the one for tools fails without them."""
    for_tools = "{%- for tool in tools %}{{- '(' ~ tool.function.name ~ ')' }}{%- endfor %}" + templates.CHATML
    named = [{"name": "default", "template": templates.CHATML}, {"name": "tool_use", "template": for_tools}]
    folder = Path(shutil.copytree(vocabulary("qwen"), tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    with stack("qwen", styles=("cumulative",), folder=folder) as made:
        prompts, (only,) = played(made, "Well.", "Well.")
        assert only["exact"], only["reasons"]
        assert prompts[0] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        turn = AgentSession.make(made, tools=TOOLS).must(user("Hello"), says="Well.")
        assert made.spelling.spell(turn.sent, skip_special=False).text == "(look)" + prompts[0]


_NINE = "{%- if ID | length != 9 %}{{- raise_exception('nine letters!') }}{%- endif %}"
NINE_LETTERS = f"""{{%- for m in messages %}}{_SAYS}{{%- for c in m.tool_calls or [] %}}{_NINE.replace("ID", "c.id")}
{{{{- '<tool_call>' ~ c.function.arguments | tojson ~ '</tool_call>' }}}}{{%- endfor %}}
{{%- if m.role == 'tool' %}}{_NINE.replace("ID", "m.tool_call_id")}{{%- endif %}}{{{{- '<|im_end|>\\n' }}}}{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""
"""As Mistral's: it refuses every other id."""


def test_calls_get_ids_that_the_template_takes(tmp_path: Path) -> None:
    template = tmp_path / "nine_letters.jinja"
    template.write_text(NINE_LETTERS)
    sessions = {"chat_template": str(template), "tool_call_parser": "hermes"}
    with stack("qwen", styles=("cumulative",), sessions=sessions) as made:
        agent = AgentSession.make(made, tools=TOOLS)
        first = agent.must(user("Where is it?"), says=f"{call_text('here')}\n{call_text('there')}")
        calls = first.message["tool_calls"]
        assert [len(call["id"]) for call in calls] == [9, 9]
        assert calls[0]["id"] != calls[1]["id"]
        messages = [user("Where is it?"), first.message, *[tool(call, "nothing") for call in calls]]
        second = agent.must(*messages, says="Nowhere.")
        assert second.sent[: len(first.chain)] == first.chain
        (only,) = agent.finalize()
    assert (only["exact"], only["num_turns"]) == (True, 2)


@pytest.mark.parametrize("said", ["Hello", "endoftext", "t", ""])
def test_a_generation_prompt_does_not_depend_on_the_words_before_it(said: str) -> None:
    template = ChatTemplate(ASKS_ALWAYS, {})
    whole = template.whole([user(said)], None, {})
    assert template.asked_here(whole, [user(said)], None, {}) == "<|endoftext|>"
