"""Transcripts: a rendering cut at some of its turns, and put together again."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.chat.messages import Message, Tool
from middleware_hub.templates.chat_template import ChatTemplate, CutRendering
from middleware_hub.templates.renderer import RenderingError
from router.errors import BadRequestError
from tests.conftest import examples
from tests.middleware_hub.templates.test_chat_template import (
    FEW,
    LOOP,
    MARK,
    NAMES,
    PUBLISHED,
    TEXTS,
    TOOLS,
    call,
    conversations,
    made,
    result,
    said,
    system,
    user,
)
from tests.support.templates import SPECIAL_TOKENS, folder
from tests.support.usual import usual

CHATML = ("<|im_start|>assistant\n",)
HEADERS: dict[str, tuple[str, ...]] = {
    "llama3_1": ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
    "glm4moe": ("<|assistant|>",),
    "deepseekv3": ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", ""),
    "gptoss": ("<|start|>assistant",),
    "gemma4": ("<|turn>model\n", ""),
}
"""How turns are opened: written down by hand, from reading the templates. An empty one goes on behind a tool's answer."""


class Case(NamedTuple):
    """A conversation, and the turns at which it is to be cut."""

    messages: list[Message]
    marked: list[int]
    tools: list[Tool] | None
    options: dict[str, Any]

    def transcript(self, template: ChatTemplate, **more: bool) -> CutRendering:
        return template.transcript(self.messages, self.marked, self.tools, self.options, **more)


def assistants(messages: list[Message]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


@st.composite
def cases(draw: st.DrawFn, name: str, *, thinking: bool = True) -> Case:
    messages = draw(conversations(name, thinking=thinking))
    marked = sorted(draw(st.sets(st.sampled_from(assistants(messages)), min_size=1)))
    # Of all of it, the turns may be the last ones, too: what is asked for then is another turn behind them.
    if draw(st.booleans()):
        messages.append(user(draw(TEXTS)))
    options = draw(st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}]))
    return Case(messages, marked, draw(st.sampled_from([None, TOOLS])), options)


def with_marks(case: Case) -> list[Message]:
    """The conversation with a mark at the end of what each of its marked turns says."""
    messages = deepcopy(case.messages)
    for number, at in enumerate(case.marked):
        calls = messages[at].get("tool_calls")
        if calls:
            calls[-1]["function"]["arguments"] = {"x": mark(number)}
        else:
            messages[at]["content"] += mark(number)
    return messages


def mark(number: int) -> str:
    return f"{MARK}{number:03}"


@pytest.mark.parametrize("name", usual(NAMES, *FEW))
def test_the_cuts_are_around_the_turns_of_the_full_rendering(name: str) -> None:
    """Each piece is what the rendering of the whole has between the end of one turn and what opens the next."""
    template, headers = made(name), HEADERS.get(name, CHATML)

    @given(cases(name))
    def check(case: Case) -> None:
        found = case.transcript(template)
        full = template.whole(with_marks(case), case.tools, case.options)
        assert len(found.pieces) == len(case.marked)
        for number, (at, piece) in enumerate(zip(case.marked, found.pieces, strict=True)):
            before, marked, full = full.partition(mark(number))
            assert marked
            assert before.startswith(piece)
            assert before[len(piece) :].startswith(headers)
            assert MARK not in before
            if case.messages[at].get("tool_calls"):
                assert full.startswith(PUBLISHED[name].own)
                full = full[len(PUBLISHED[name].own) :]
        assert full == found.tail

    check()


@pytest.mark.parametrize("name", usual(NAMES, *FEW))
def test_nothing_but_turns_of_the_assistant_is_cut_out(name: str) -> None:
    """What users and tools said is in the pieces and the tail, as often as it is in the rendering."""
    template = made(name)

    @settings(max_examples=examples(30))
    @given(cases(name))
    def check(case: Case) -> None:
        messages = deepcopy(case.messages)
        for number, message in enumerate(messages):
            if message["role"] in ("user", "tool"):
                message["content"] += mark(number)
        found = case._replace(messages=messages).transcript(template)
        together = "".join((*found.pieces, found.tail))
        full = template.whole(messages, case.tools, case.options)
        for number in range(len(messages)):
            assert together.count(mark(number)) == full.count(mark(number))

    check()


@pytest.mark.parametrize("name", [name for name in NAMES if PUBLISHED[name].append_only])
def test_cut_and_put_together_again(name: str) -> None:
    """Where the template is append-only, pieces, real turns and tail are the whole rendering, letter for letter."""
    template = made(name)

    @given(cases(name, thinking=False))
    def check(case: Case) -> None:
        def turn(at: int) -> str:
            """All that a turn is, but for what closes it."""
            message = case.messages[at]
            before = template.whole(case.messages[:at], case.tools, case.options)
            after = template.whole(case.messages[: at + 1], case.tools, case.options)
            tail = template.tail(message, [], case.tools, case.options, earlier=case.messages[:at])
            front = before.removesuffix(template.scaffolds(case.tools, case.options)[0])
            assert after.startswith(front)
            assert after.endswith(tail)
            return after[len(front) : len(after) - len(tail)]

        found = case.transcript(template)
        whole = template.whole(case.messages, case.tools, case.options)
        pieces = zip(found.pieces, case.marked, strict=True)
        assert "".join(piece + turn(at) for piece, at in pieces) + found.tail == whole

    check()


@pytest.mark.parametrize("name", usual(NAMES, *FEW))
def test_the_last_message_may_be_gone_on_with(name: str) -> None:
    template = made(name)

    @settings(max_examples=examples(30))
    @given(cases(name), TEXTS)
    def check(case: Case, prefill: str) -> None:
        messages = [*case.messages[: case.marked[-1] + 1], user("And now?"), said(prefill)]
        if messages[case.marked[-1]].get("tool_calls"):
            answers = [result("rain", number) for number in range(len(messages[case.marked[-1]]["tool_calls"]))]
            messages[case.marked[-1] + 1 : -2] = answers
        case = case._replace(messages=messages)
        found = case.transcript(template, continue_final=True)
        full = template.whole(with_marks(case), case.tools, case.options, continue_final=True)
        assert full.endswith(found.tail)
        assert found.tail.endswith(prefill.lstrip())  # which some templates trim

    check()


# Which templates splice -----------------------------------------------------------------------------------------------------

REWRITE_ANSWERS = ("deepseekv3",)
"""DeepSeek closes a tool's answers in front of what the model says, but not in front of its next call."""
LOOKED_UP: list[Message] = [
    user("a"),
    said("", call("weather", 0, x="y")),
    result("rain", 0),
    said("", call("news", 1, x="z")),
    result("bad", 1),
    said("d"),
    user("e"),
]
CHATTED = [user("a"), said("b", reasoning_content="Hm."), user("c"), said("d"), user("e")]
RULED = [system("s"), *CHATTED]


def resident(template: ChatTemplate, messages: list[Message], tools: list[Tool] | None) -> list[bool] | None:
    """For each turn, whether what a new rendering has in front of it is what stood there when it was asked for.

    None: the template refuses the conversation.
    """
    at = assistants(messages)
    try:
        template.whole(messages, tools, {})
        found = template.transcript(messages, at, tools, {})
    except BadRequestError:
        return None
    sent = [template.whole(messages[: at[0]], tools, {})]
    for before, now in pairwise(at):
        behind = messages[before + 1 : now]
        sent.append(template.tail(messages[before], behind, tools, {}, earlier=messages[:before]))
    kinds = template.scaffolds(tools, {})
    return [any(piece + one == text for one in kinds) for piece, text in zip(found.pieces, sent, strict=True)]


@pytest.mark.slow  # some of them, in all that can be asked, are above
def test_which_published_templates_splice() -> None:
    """All of them, in all that they do not refuse, but for one."""
    for path in sorted(folder().glob("*.jinja")):
        name = path.stem.removesuffix("_training")
        special = SPECIAL_TOKENS.get(name, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
        template = ChatTemplate(path.read_text(), special)
        assert resident(template, CHATTED, None) == [True, True], path.name
        assert resident(template, RULED, None) in ([True, True], None), path.name
        loop = [True, False, True] if name in REWRITE_ANSWERS else [True, True, True]
        assert resident(template, LOOKED_UP, TOOLS) in (loop, None), path.name


# Templates that make it hard ------------------------------------------------------------------------------------------------

TALK = [user("a"), said("b"), user("c"), said("d"), user("e"), said("f"), user("g")]
MARKED = [1, 3, 5]
CONTENT = "{{ m.content }}"


def refused(code: str, messages: list[Message] = TALK, marked: list[int] = MARKED) -> RenderingError:
    with pytest.raises(RenderingError) as caught:
        ChatTemplate(code, {}).transcript(messages, marked, None, {})
    return caught.value


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(
    "written",
    [
        pytest.param("", id="not at all"),
        pytest.param(CONTENT + CONTENT, id="twice"),
        pytest.param("{{ m.content[:3] }}", id="in part"),
        pytest.param("{{ m.content | upper }}", id="in capitals"),
    ],
)
def test_a_turn_that_is_not_there_once_ends_what_can_be_told(written: str, turn: int) -> None:
    """And as far as it can be told, there is a transcript."""
    changed = f"{{% if loop.index0 == {MARKED[turn]} %}}{written}{{% else %}}{CONTENT}{{% endif %}}"
    code = LOOP.replace(CONTENT, changed)
    error = refused(code)
    assert error.reason == "sentinel_collision"
    assert error.turns == turn
    kept = MARKED[:turn]
    if kept:
        found = ChatTemplate(code, {}).transcript(TALK, kept, None, {})
        assert found.pieces == ("[user]a;\n", ";\n[user]c;\n")[:turn]


def test_turns_in_another_order_are_not_told() -> None:
    code = LOOP.replace("in messages", "in (messages | reverse if messages[-1].content == 'g' else messages)")
    error = refused(code)
    assert (error.reason, error.turns) == ("sentinel_collision", 1)
    assert ChatTemplate(code, {}).transcript(TALK, [3], None, {}).pieces == ("[user]g;\n[assistant]f;\n[user]e;\n",)


@pytest.mark.parametrize("turn", range(3))
def test_an_opening_that_short_conversations_have_not_is_unknown(turn: int) -> None:
    """Nor has this one, as far as it goes without what comes later: the template writes its beginning in another way then."""
    ends = "messages[-1].content == 'g'"
    told = f"{{{{ '?' if loop.first and {ends} }}}}{{{{ '!' if loop.index0 == {MARKED[turn]} and {ends} }}}}{CONTENT}"
    error = refused(LOOP.replace(CONTENT, told))
    assert (error.reason, error.turns) == ("scaffold", turn)


@pytest.mark.parametrize("turn", range(3))
def test_an_opening_that_only_this_conversation_has_is_found_in_it(turn: int) -> None:
    """The template reads a message far away, and opens a turn as no short conversation shows."""
    told = f"{{{{ '!' if loop.index0 == {MARKED[turn]} and 'a' in messages[0].content }}}}{CONTENT}"
    found = ChatTemplate(LOOP.replace(CONTENT, told), {}).transcript(TALK, MARKED, None, {})
    assert found == ChatTemplate(LOOP, {}).transcript(TALK, MARKED, None, {})


def test_an_opening_is_found_where_prompt_and_history_go_on_with_tokens_that_look_alike() -> None:
    """As in Cohere's: what all turns begin with ends between tokens, not behind the letters that two tokens share."""
    template = ChatTemplate(
        "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>' }}{%- if m.tool_calls %}"
        "{{- '<|call|>' ~ loop.index ~ ' ' ~ m.tool_calls[0].function.arguments | tojson }}"
        "{%- else %}{{- ('<|text|>' if m.role == 'assistant' else '') ~ m.content }}{%- endif %}{{- '<|end|>' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|><|think|>' }}{%- endif %}",
        {},
    )
    assert template.header(None, {}) == "<|assistant|>"
    messages = [user("a"), *[said("b"), user("c")] * 5, said("", call("weather", x="y")), result("rain")]
    found = template.transcript(messages, [1, 11], None, {})
    assert found.pieces[0] == "<|user|>a<|end|>"
    assert found.pieces[1].endswith("<|assistant|><|text|>b<|end|><|user|>c<|end|>")


def test_what_looks_like_a_sentinel_is_a_text() -> None:
    """Clients may have seen one in a log; the number in it is drawn by each process for itself."""
    template = ChatTemplate(LOOP, {})
    looks = f"sentinel{'0' * 24}000001"
    found = template.transcript([user(looks), said(looks), user(looks), said("d"), user("e")], [1, 3], None, {})
    assert found == CutRendering((f"[user]{looks};\n", f";\n[user]{looks};\n"), ";\n[user]e;\n[assistant]")


@pytest.mark.parametrize("opening", ["[assistant]", "[user]", ";\n", "[assistant]b"])
def test_what_looks_like_an_opening_is_a_text(opening: str) -> None:
    """At the end of what a user says, in front of the real one."""
    messages = [user("a" + opening), said("b"), user(opening), said(opening), user("e")]
    found = ChatTemplate(LOOP, {}).transcript(messages, [1, 3], None, {})
    assert found.pieces == (f"[user]a{opening};\n", f";\n[user]{opening};\n")


NINE = "{% if c.id | length != 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
INSTRUCTED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}WRITTEN{{ ', ' if not loop.last }}{% endfor %}]"
    "{{ eos_token }}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ARGUMENTS = "{{ c.function.arguments | tojson }}"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "written",
    [
        pytest.param(NINE + ARGUMENTS + " by {{ c.id }}", id="behind"),
        pytest.param(NINE + "{{ c.id }}: " + ARGUMENTS, id="in front"),
        pytest.param(NINE + ARGUMENTS, id="nowhere"),
    ],
)
def test_calls_that_are_written_with_their_ids(written: str, tools: list[Tool] | None) -> None:
    """As Mistral's templates do it, who want nine letters: no two calls are closed, or opened, by the same text."""
    template = ChatTemplate(INSTRUCTED.replace("WRITTEN", written), {"bos_token": "<s>", "eos_token": "</s>"})
    two = said("", call("weather", 3, x="y"), call("news", 4, x="y"))
    messages = [user("a"), said("", call("weather", 1, x="y")), result("rain", 1), said("", call("weather", 2, x="y"))]
    messages += [result("sun", 2), two, result("wind", 3), result("bad", 4), said("d"), user("e")]
    answers = ("</s>[TOOL_RESULTS] rain[/TOOL_RESULTS]", "</s>[TOOL_RESULTS] sun[/TOOL_RESULTS]")
    found = template.transcript(messages, [1, 3, 5], tools, {})
    assert found.pieces == ("<s>[INST] a[/INST]", *answers)
    for at, answer in zip((1, 3), answers, strict=True):
        assert template.tail(messages[at], messages[at + 1 : at + 2], tools, {}, earlier=messages[:at]) == answer
