"""Tails of published templates, and of bad ones: what stands behind a sampled turn, and nothing of the turn itself."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from middleware_hub.chat.messages import Message, Tool
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.errors import BadRequestError
from tests.support.templates import CHATML, SPECIAL_TOKENS, folder, source
from tests.support.usual import usual
from tests.support.vocabularies import vocabulary

MARK = "Zq7mark"
"""Ends the turn that is taken for the sampled one, so that the tests find it in a full rendering."""


class Published(NamedTuple):
    """What is known of a published template: written down by hand, from reading it.

    Attributes:
        text: closes a turn that ends with its text.
        call: closes a turn that ends with a call.
        own: what a call writes behind the last argument, a string, before the turn is closed.
        calls: how many a turn may have.
        append_only: whether conversations without thinking are never written in another way later on.
    """

    text: str
    call: str
    stops: tuple[str, ...]
    own: str
    calls: int = 3
    append_only: bool = True


IM_END = "<|im_end|>\n"
JSON_CALL = '"}}\n</tool_call>'
XML_CALL = "\n</parameter>\n</function>\n</tool_call>"
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
DEEPSEEK_CALL = '"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
PUBLISHED = {
    "chatml": Published(IM_END, IM_END, ("<|im_end|>",), "", calls=0),
    "qwen2_5": Published(IM_END, IM_END, ("<|im_end|>",), JSON_CALL),
    "qwen3": Published(IM_END, IM_END, ("<|im_end|>",), JSON_CALL, append_only=False),
    "qwen3_5_think": Published(IM_END, IM_END, ("<|im_end|>",), XML_CALL, append_only=False),
    "qwen3_instruct_2507": Published(IM_END, IM_END, ("<|im_end|>",), JSON_CALL),
    "llama3_1": Published("<|eot_id|>", "<|eot_id|>", ("<|eot_id|>",), '"}}', calls=1),
    "glm4moe": Published("", "", ("<|user|>", "<|observation|>"), "</arg_value>\n</tool_call>"),
    "deepseekv3": Published(DEEPSEEK_END, DEEPSEEK_END, (DEEPSEEK_END,), DEEPSEEK_CALL, append_only=False),
    "gptoss": Published("<|end|>", "<|call|>", ("<|end|>", "<|call|>"), '"}', calls=1, append_only=False),
    "gemma4": Published(
        "<turn|>\n", "<|tool_response>", ("<turn|>", "<|tool_response>"), '<|"|>}<tool_call|>', append_only=False
    ),
}
NAMES = list(PUBLISHED)
FEW = ("qwen3", "llama3_1", "glm4moe", "gptoss", "gemma4")
"""Templates that differ most from each other: `make test` has these where a test makes up conversations."""
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("weather", "news")
]


@cache
def made(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), SPECIAL_TOKENS.get(name, {}))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str | None, *calls: Message, **more: str) -> Message:
    return {"role": "assistant", "content": text, **more, **({"tool_calls": list(calls)} if calls else {})}


def call(name: str, number: int = 0, **arguments: Any) -> Message:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, number: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


# Conversations -------------------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from(
        ["Hello", "Was ist das?\n\n", "  é ", '{"a": 1}', "<tool_response>x</tool_response>", "/nothink", "你好"]
    ),
    st.text(alphabet="ab \n<|>{}\"'\\", min_size=1, max_size=6).map(lambda text: f"t{text}t"),
)
NAMES_OF_TOOLS = st.sampled_from(["weather", "news", "get-it_2"])


@st.composite
def conversations(draw: st.DrawFn, name: str, *, thinking: bool = True) -> list[Message]:
    """A conversation with tool loops, as far as the template takes part in them."""
    messages: list[Message] = [system(draw(TEXTS))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        # Qwen 3.5 refuses a conversation in which no user asks anything, and takes a lone tool response for nothing.
        messages.append(user(draw(TEXTS) if turn else "So: " + draw(TEXTS)))
        for _ in range(draw(st.integers(0, 2)) if PUBLISHED[name].calls else 0):
            count = draw(st.integers(1, PUBLISHED[name].calls))
            calls = [call(draw(NAMES_OF_TOOLS), number, x=draw(TEXTS)) for number in range(count)]
            # gpt-oss takes text or thinking in front of a call; Gemma 4 writes the text behind the answers.
            thought = {"reasoning_content": draw(TEXTS)} if thinking and draw(st.booleans()) else {}
            silent = name == "gemma4" or (name == "gptoss" and thought)
            content = draw(st.sampled_from([None, ""])) if silent else draw(st.one_of(st.none(), st.just(""), TEXTS))
            messages.append(said(content, *calls, **thought))
            messages += [result(draw(TEXTS), number) for number in range(count)]
        thought = {"reasoning_content": draw(TEXTS)} if thinking and draw(st.booleans()) else {}
        messages.append(said(draw(TEXTS), **thought))
    return messages


class Case(NamedTuple):
    """A conversation cut at a sampled turn, which ends with the mark."""

    earlier: list[Message]
    last: Message
    behind: list[Message]
    tools: list[Tool] | None
    options: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, name: str, *, thinking: bool = True, usual: bool = False) -> Case:
    """`usual`: nothing but users and tools behind the sampled turn, no turn of the assistant's that was put there."""
    messages = draw(conversations(name, thinking=thinking))
    at = draw(st.sampled_from([i for i, message in enumerate(messages) if message["role"] == "assistant"]))
    last = deepcopy(messages[at])
    if "tool_calls" in last:
        last["tool_calls"][-1]["function"]["arguments"] = {"x": MARK}
    else:
        last["content"] += MARK
    behind = messages[at + 1 :]
    if usual:
        stop = next((i for i, message in enumerate(behind) if message["role"] == "assistant"), len(behind))
        behind = behind[:stop]
    else:
        answers = next((i for i, message in enumerate(behind) if message["role"] != "tool"), len(behind))
        behind = behind[: draw(st.integers(answers, len(behind)))]
    if not behind and draw(st.booleans()):
        behind = [user(draw(TEXTS))]
    options = draw(st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}]))
    return Case(messages[:at], last, behind, draw(st.sampled_from([None, TOOLS])), options)


def behind_the_mark(name: str, case: Case, text: str) -> str:
    """What stands behind the sampled turn in a full rendering."""
    before, found, rest = text.rpartition(MARK)
    assert found, "the mark is in the rendering"
    assert MARK not in before
    if "tool_calls" not in case.last:
        return rest
    own = PUBLISHED[name].own
    assert rest.startswith(own)
    return rest[len(own) :]


@pytest.mark.parametrize("name", usual(NAMES, *FEW))
def test_a_tail_is_what_the_full_rendering_has_behind_the_turn(name: str) -> None:
    """Whatever else the template did to the conversation: dropped its thinking, counted, or folded it."""
    template = made(name)

    @given(cases(name))
    def check(case: Case) -> None:
        full = template.whole([*case.earlier, case.last, *case.behind], case.tools, case.options)
        tail = template.tail(case.last, case.behind, case.tools, case.options, earlier=case.earlier)
        assert tail == behind_the_mark(name, case, full)

    check()


@pytest.mark.parametrize("name", [name for name in NAMES if PUBLISHED[name].append_only])
def test_tails_add_up_to_the_conversation(name: str) -> None:
    """History, the turn's own text, tail: where the template is append-only, that is the full rendering."""
    template = made(name)

    @given(cases(name, thinking=False, usual=True))
    def check(case: Case) -> None:
        def tail(behind: list[Message]) -> str:
            return template.tail(case.last, behind, case.tools, case.options, earlier=case.earlier)

        history = template.whole(case.earlier, case.tools, case.options)
        with_turn = template.whole([*case.earlier, case.last], case.tools, case.options)
        assert with_turn.startswith(history.removesuffix("/nothink"))
        assert with_turn.endswith(tail([]))
        full = template.whole([*case.earlier, case.last, *case.behind], case.tools, case.options)
        assert full == with_turn.removesuffix(tail([])) + tail(case.behind)

    check()


@pytest.mark.slow  # some of them, in all that can be asked, are above
def test_every_published_template_has_tails() -> None:
    """Wherever the turn is found in the full rendering, the tail ends it."""
    calling = said("", call("weather", x=MARK))
    answered = [said("", call("weather", x="y")), result("rain"), said("Wet.")]
    without = set()
    for path in sorted(folder().glob("*.jinja")):
        template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
        without.add(path.stem)
        for earlier in ([user("a")], [system("s"), user("a"), said("b"), user("c")], [user("a"), *answered, user("c")]):
            for last, behind in ((said("b " + MARK), [user("d")]), (calling, [result("rain"), user("d")])):
                for tools in (None, TOOLS):
                    try:
                        full = template.whole([*earlier, last, *behind], tools, {})
                    except BadRequestError:
                        continue
                    before, _, rest = full.rpartition(MARK)
                    if not before or MARK in before:
                        continue
                    tail = template.tail(last, behind, tools, {}, earlier=earlier)
                    own = rest.removesuffix(tail)
                    assert own + tail == rest, path.name
                    assert bool(own) is (last is calling), path.name
                    assert "d" in tail, path.name
                    without.discard(path.stem)
    assert not without


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_never_changed(name: str) -> None:
    messages = [user("Hi"), said(None, call("weather", x="é")), result("rain"), said("Take a coat.")]
    before = deepcopy(messages)
    template = made("chatml" if PUBLISHED[name].calls == 0 else name)
    template.whole(messages, TOOLS, {})
    template.tail(messages[1], messages[2:], TOOLS, {}, earlier=messages[:1])
    template.whole(messages, None, {}, continue_final=True)
    assert messages == before


# Closings and generation prompts -------------------------------------------------------------------------------------------


def closing(template: ChatTemplate, turn: Message) -> str:
    """Return what closes an assistant's turn; empty if the next role closes it."""
    return template.tail(turn, (), None, {}, earlier=[user("Hi")]).removesuffix(template.scaffolds(None, {})[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_closes_a_turn(name: str) -> None:
    known = PUBLISHED[name]
    assert closing(made(name), said("Well.")) == known.text
    assert closing(made(name), said("", call("look_up", a=1))) == known.call
    assert made(name).stop_literals({}) == known.stops


@pytest.mark.parametrize(
    ("name", "options", "scaffold"),
    [
        ("chatml", {}, "<|im_start|>assistant\n"),
        ("qwen3", {}, "<|im_start|>assistant\n"),
        ("qwen3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_5_think", {}, "<|im_start|>assistant\n<think>\n"),
        ("qwen3_5_think", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("llama3_1", {}, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("glm4moe", {}, "<|assistant|>"),
        ("glm4moe", {"enable_thinking": False}, "<|assistant|>\n<think></think>"),
        ("deepseekv3", {}, "<｜Assistant｜><think>\n"),
        ("gptoss", {}, "<|start|>assistant"),
        ("gemma4", {}, "<|turn>model\n"),
        ("phi3", {}, "<|assistant|>\n"),  # without a generation prompt it ends with EOS
        ("gemma", {}, "<start_of_turn>model\n"),
    ],
)
def test_the_scaffold_is_the_generation_prompt_of_these_options(
    name: str, options: dict[str, Any], scaffold: str
) -> None:
    for tools in (None, TOOLS):
        assert made(name).scaffolds(tools, options)[0] == scaffold
        tail = made(name).tail(said("Hi"), [user("Go")], tools, options, earlier=[user("Hello")])
        assert tail.endswith(scaffold)


class Poisoned(dict[str, Any]):
    """A message that may be looked into for words, and not rendered."""

    def values(self) -> Any:
        raise AttributeError("it was rendered")


@pytest.mark.parametrize("name", NAMES)
def test_tails_are_short_where_they_can_be(name: str) -> None:
    """Nothing earlier is rendered: only DeepSeek counts, and only calls and their answers."""
    template = made(name)
    poisoned = [Poisoned(user("Hello"))]
    template.tail(said("Hi"), [user("Go")], TOOLS, {}, earlier=poisoned)
    if PUBLISHED[name].calls and name != "deepseekv3":
        template.tail(said("", call("weather", x="y")), [result("rain")], TOOLS, {}, earlier=poisoned)


def test_options_are_tried_when_they_are_seen_again() -> None:
    """The first time all is rendered, and refused here; from the second on a short conversation does."""
    template = ChatTemplate(source("qwen3"), {})
    poisoned = [Poisoned(user("Hello"))]
    for value in (True, "a date", 3):
        with pytest.raises(AttributeError):
            template.tail(*CASE, None, {"enable_thinking": value}, earlier=poisoned)
        assert template.tail(*CASE, None, {"enable_thinking": value}, earlier=poisoned).startswith("<|im_end|>\n")


# Continuing the last message -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefill", ["Sure:", "Sure,  \n", "1. a\n2. "])
def test_a_prefill_ends_the_text(name: str, prefill: str) -> None:
    """With its whitespace, and with nothing behind it."""
    template = made(name)
    messages = [user("Hi"), said("Hello"), user("List them."), said(prefill)]
    text = template.whole(messages, TOOLS, {}, continue_final=True)
    assert text.endswith(prefill)
    tail = template.tail(messages[1], messages[2:], TOOLS, {}, earlier=messages[:1], continue_final=True)
    assert tail.endswith(prefill)
    assert text.endswith("Hello" + tail)


def test_the_sampled_turn_itself_may_go_on() -> None:
    for cut in (said("I was cut"), said("", call("weather", x="y"))):
        assert made("qwen3").tail(cut, [], None, {}, earlier=[user("Hi")], continue_final=True) == ""


def test_only_the_assistants_own_text_is_continued() -> None:
    for final in (user("Hi"), said("", call("weather", x="y"))):
        with pytest.raises(BadRequestError, match="continued"):
            made("qwen3").whole([user("Hi"), final], None, {}, continue_final=True)


def test_a_prefill_in_parts_goes_on_behind_the_last_one() -> None:
    parts = [{"type": "text", "text": "Sure, "}, {"type": "text", "text": "here: "}]
    final = {"role": "assistant", "content": parts}
    assert made("qwen3_5_think").whole([user("Hi"), final], None, {}, continue_final=True).endswith("Sure, here: ")


# What messages are given as ------------------------------------------------------------------------------------------------


def test_a_rendering_is_that_of_transformers() -> None:
    """Template and special tokens come with the tokenizer."""
    path = str(vocabulary("mistral-v1"))
    tokenizer = Tokenizer.load(path)
    assert isinstance(tokenizer.chat_template, str)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
    messages = [user("Hi"), said("Hello"), user("Go")]
    theirs = AutoTokenizer.from_pretrained(path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert template.whole(messages, None, {}) == theirs
    assert template.tail(said("Hello"), [user("Go")], None, {}, earlier=[user("Hi")]) == "</s>[INST] Go [/INST]"


@pytest.mark.parametrize(
    ("name", "written"),
    [("qwen2_5", '"arguments": {"x": "é"}'), ("glm4moe", "<arg_value>é</arg_value>"), ("deepseekv3", '\n{"x": "é"}\n')],
)
def test_arguments_are_given_in_the_form_that_a_template_takes(name: str, written: str) -> None:
    """DeepSeek's wants JSON text, the others an object."""
    assert written in made(name).whole([user("Hi"), said("", call("weather", x="é")), result("rain")], None, {})


def test_arguments_that_would_be_written_as_python_are_given_as_json() -> None:
    template = ChatTemplate(CALLS % "{{ call.function.arguments }}", {})
    assert template.whole([user("Hi"), said("", call("weather", x="é"))], None, {}).endswith('weather{"x": "é"};\n')


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    broken = said("", {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}})
    assert '"arguments": {"x": }' in made("qwen3").whole([user("Hi"), broken], None, {})


@pytest.mark.parametrize(
    ("name", "takes"),
    [("qwen3", False), ("qwen3_5_think", True), ("llama3_1", False), ("glm4moe", True), ("gemma4", True)],
)
def test_parts_are_joined_where_a_template_takes_only_text(name: str, takes: bool) -> None:
    template = made(name)
    parts = [{"type": "text", "text": "Look"}, {"type": "text", "text": "here"}]
    text = template.whole([{"role": "user", "content": parts}], None, {})
    assert ("Lookhere" if takes else "Look here") in text
    lone = [{"role": "user", "content": parts[:1]}]
    assert template.whole(lone, None, {}) == template.whole([user("Look")], None, {})


@pytest.mark.parametrize("name", ["glm4moe", "deepseekv3", "gptoss", "llama3_1"])
def test_fields_that_are_null_or_empty_are_none_at_all(name: str) -> None:
    """GLM's template writes a null content as `None`, and DeepSeek's drops a text that has an empty list of calls."""

    def whole(turn: Message, behind: Message) -> str:
        return made(name).whole([user("Hi"), turn, behind], None, {})

    spoken, calls = said("Fine."), said("", call("weather", x="y"))
    assert "weather" in whole(calls, result("ok"))
    assert whole({**calls, "content": None}, result("ok")) == whole(calls, result("ok"))
    assert "Fine." in whole(spoken, user("Go"))
    assert whole({**spoken, "tool_calls": [], "refusal": None}, user("Go")) == whole(spoken, user("Go"))


def test_a_role_that_takes_no_parts_is_given_text() -> None:
    """GLM takes parts from users, and writes those of a tool as Python."""
    answer = {**result(""), "content": [{"type": "text", "text": "rain"}]}
    assert "<tool_response>\nrain\n</tool_response>" in made("glm4moe").whole(
        [user("Hi"), said("", call("weather", x="y")), answer], None, {}
    )


@pytest.mark.parametrize(
    ("name", "role"), [("gemma3", "system"), ("llava_next", "system"), ("llava_next", "assistant")]
)
def test_no_part_is_lost_where_a_template_writes_the_first_one_alone(name: str, role: str) -> None:
    parts = {"role": role, "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]}
    messages = [parts, user("Hi")] if role == "system" else [user("Hi"), parts, user("Go")]
    assert "Be brief. Be kind." in made(name).whole(messages, None, {})


def test_pictures_need_a_template_that_takes_them() -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert "<|image_pad|>" in made("qwen3_5_think").whole(picture, None, {})
    assert "<|image|>" in made("gemma4").whole(picture, None, {})
    with pytest.raises(BadRequestError, match="nothing but text"):
        made("qwen3").whole(picture, None, {})


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(BadRequestError, match="at least one"):
        made("qwen3").whole([], None, {})


# Templates that make it hard -------------------------------------------------------------------------------------------------

LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }};\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
CALLS = (
    "{%% for m in messages %%}[{{ m.role }}]{{ m.content }}{%% for call in m.tool_calls %%}{{ call.function.name }}%s"
    "{%% endfor %%};\n{%% endfor %%}"
)
CASE = (said("Hello"), [user("Go")])


def both(template: ChatTemplate, earlier: list[Message], tools: list[Tool] | None = None) -> tuple[str, str]:
    """A tail, and what the full rendering has in its place."""
    last, behind = said("Hello" + MARK), [user("Go")]
    full = template.whole([*earlier, last, *behind], tools, {})
    return template.tail(last, behind, tools, {}, earlier=earlier), full.partition(MARK)[2]


def test_a_template_that_cannot_be_compiled() -> None:
    with pytest.raises(BadRequestError, match="line 2"):
        ChatTemplate("{% for m in messages %}\n{% endif %}", {})


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{% if messages|length > 3 %}{{ raise_exception('Too many.') }}{% endif %}" + LOOP, {})
    assert template.whole([user("Hi")], None, {}) == "[user]Hi;\n[assistant]"
    with pytest.raises(BadRequestError, match="Too many"):
        template.whole([user("Hi")] * 4, None, {})
    with pytest.raises(BadRequestError, match="Too many"):
        template.tail(said("Hello"), [user("Hi")] * 3, None, {}, earlier=[user("Hi")])


@pytest.mark.parametrize(
    "code", ["{{ messages[0].name.first }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ tools.append(1) }}"]
)
def test_a_template_that_fails_is_the_requests_fault(code: str) -> None:
    with pytest.raises(BadRequestError):
        ChatTemplate(code + LOOP, {}).whole([user("Hi")], None, {})


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(BadRequestError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).whole([user("Hi")], None, {})


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(LOOP.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), id="not at all"),
        pytest.param(LOOP.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), id="twice"),
        pytest.param(LOOP.replace("{{ m.content }}", "{{ m.content[:3] }}"), id="in part"),
    ],
)
def test_a_turn_that_is_not_there_once_has_no_tail(template: str) -> None:
    with pytest.raises(RenderingError):
        ChatTemplate(template, {}).tail(*CASE, None, {}, earlier=[user("Hi")])
    with pytest.raises(RenderingError):
        ChatTemplate(template, {}).whole([user("Hi"), said("Well")], None, {}, continue_final=True)


def test_a_template_that_counts_is_rendered_in_full() -> None:
    template = ChatTemplate(LOOP.replace("{{ m.role }}", "{{ loop.index }}{{ m.role }}"), {})
    tail, full = both(template, [user("Hi"), said("Oh"), user("Well")])
    assert tail == full == ";\n[5user]Go;\n[assistant]"


def test_a_template_that_repeats_the_system_prompt_is_rendered_in_full() -> None:
    template = ChatTemplate(LOOP + "{% if messages[0].role == 'system' %}({{ messages[0].content }}){% endif %}", {})
    tail, full = both(template, [system("Be kind."), user("Hi")])
    assert tail == full
    assert tail.endswith("(Be kind.)")


def test_a_template_that_shows_tools_to_the_last_user_is_given_them() -> None:
    """Mistral's does."""
    shown = "{% if m.role == 'user' and loop.revindex < 3 %}{{ tools | tojson }}{% endif %}{{ m.content }}"
    template = ChatTemplate(LOOP.replace("{{ m.content }}", shown), {})
    tail, full = both(template, [user("Hi")], TOOLS)
    assert tail == full
    assert '"name": "news"' in tail
    assert both(template, [user("Hi")]) == (";\n[user]nullGo;\n[assistant]",) * 2


def test_a_template_that_wants_turns_to_alternate_is_tried_with_those() -> None:
    """A user behind a call that nobody answered is refused, as by Mistral's; so are tools that nobody called."""
    strict = (
        "{% for m in messages %}{% if not loop.first and m.role == 'user' and (messages[loop.index0 - 1].role != 'assistant'"
        " or messages[loop.index0 - 1].tool_calls) %}{{ raise_exception('alternate!') }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(strict + CALLS % "({{ call.function.arguments | tojson }})", {})
    last = said("", call("weather", x=MARK))
    assert template.tail(last, [result("rain")], None, {}, earlier=[user("Hi")]) == ";\n[tool]rain;\n"
    with pytest.raises(BadRequestError, match="alternate!"):
        template.tail(last, [user("Go")], None, {}, earlier=[user("Hi")])


def test_a_template_that_writes_only_the_names_of_calls() -> None:
    template = ChatTemplate(CALLS % "", {})
    last = said("Look:", call("weather", x="y"), call("news", 1, x="y"))
    assert template.tail(last, [result("rain")], None, {}, earlier=[user("Hi")]) == ";\n[tool]rain;\n"


def test_a_template_that_closes_calls_by_what_follows_has_no_tail() -> None:
    """What is the call's own there, and what is the tail's, cannot be told."""
    closing = "{{ '/T' if messages[loop.index0 + 1].role == 'tool' else '/U' }}"
    code = LOOP.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}" + closing + "{% endif %}"
    )
    with pytest.raises(RenderingError, match="more than one way"):
        ChatTemplate(code, {}).tail(said("", call("weather", x="y")), [result("rain")], None, {}, earlier=[user("Hi")])


def test_a_template_that_writes_ids_in_earlier_turns_alone_has_tails() -> None:
    """As Apriel's: the last message has its calls without ids, so a call that nothing follows does not show them."""
    template = ChatTemplate(
        "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>' ~ m.content }}{%- set earlier = not loop.last %}"
        "{%- for c in m.tool_calls or [] %}{{- '{' ~ c.function.arguments | tojson ~ (c.id if earlier else '') ~ '}' }}"
        "{%- endfor %}{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
        {},
    )
    for number in range(3):
        turn, behind = said("", call("weather", number, x="y")), [result("rain", number), *[user("b")] * number]
        tail = template.tail(turn, behind, None, {}, earlier=[user("a")])
        assert tail == "<|end|><|tool|>rain<|end|>" + "<|user|>b<|end|>" * number + "<|assistant|>"


def test_a_template_that_refuses_all_that_it_is_tried_with_is_rendered_in_full() -> None:
    picky = "{% for m in messages if m.content == 'Hi' %}{{ raise_exception('a poor greeting') }}{% endfor %}"
    template = ChatTemplate(picky + LOOP, {})
    tail, full = both(template, [user("Good morning")])
    assert tail == full == ";\n[user]Go;\n[assistant]"


def test_a_system_message_that_is_written_at_the_head_is_not_lost_in_silence() -> None:
    """This template collects them there if there is a question behind them, which no trial shows."""
    asked = "{% for m in messages if m.role == 'system' and messages[-1].content == 'Go?' %}{{ m.content }}{% endfor %}"
    rest = "{% for m in messages if m.role != 'system' or messages[-1].content != 'Go?' %}"
    template = ChatTemplate(f"{asked}{rest};\n[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}", {})
    with pytest.raises(RenderingError, match="system"):
        template.tail(said("Hello"), [system("Be brief."), user("Go?")], None, {}, earlier=[user("Hi")])
    assert "Be brief." in made("qwen3").tail(
        *CASE[:1], [system("Be brief."), user("Go")], None, {}, earlier=[user("Hi")]
    )


def test_options_that_are_the_renderings_own_cannot_be_set() -> None:
    template = made("qwen3")
    for name in ("messages", "continue_final_message", "chat_template"):
        with pytest.raises(BadRequestError, match=name):
            template.whole([user("Hi")], None, {name: True})
        with pytest.raises(BadRequestError, match=name):
            template.tail(*CASE, None, {name: True}, earlier=[user("Hi")])


def test_equal_options_of_other_types_are_not_taken_for_each_other() -> None:
    template = ChatTemplate(LOOP.replace("[assistant]", "[assistant]{{ enable_thinking is true }}"), {})
    for value in (True, 1, False, 0, "True"):
        assert template.scaffolds(None, {"enable_thinking": value})[0] == f"[assistant]{value is True}"
        tail = template.tail(*CASE, None, {"enable_thinking": value}, earlier=[user("Hi")])
        assert tail.endswith(f"[assistant]{value is True}")


def test_plain_chatml_has_plain_tails() -> None:
    template = ChatTemplate(CHATML, {})
    assert template.tail(*CASE, TOOLS, {}, earlier=[user("Hi")]) == (
        "<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )
