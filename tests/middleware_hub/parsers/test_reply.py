"""Thought, speech and calls of one reply; and the parsers by their names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.chat.messages import Call, Reasoning, Text
from middleware_hub.parsers import (
    NAMES,
    REASONING_NAMES,
    call_parser,
    create,
    detect_calls,
    detect_reasoning,
    reasoning_parser,
)
from middleware_hub.parsers.base import Sampled
from middleware_hub.parsers.think import Gemma4Think, KimiK2Think, MistralThink, SeedThink, Think
from router.errors import BadRequestError
from tests.conftest import examples
from tests.middleware_hub.parsers import naive
from tests.middleware_hub.parsers.formats import CHARACTERS, TOOLS, chunked, run
from tests.support.family_templates import FAMILIES

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = Call("f", '{"a": 1}')


def thinking(kind: type[Think]) -> st.SearchStrategy[str]:
    begin, end = kind.begin.tags[0], kind.end.tags[0]
    pieces = (
        st.sampled_from(
            [
                begin,
                end,
                begin[:3],
                end[:4],
                kind.end.tags[-1],
                kind.end.tags[-1][:5],
                "\n",
                "\n\n",
                " ",
                "\r\n",
                "Hm.",
                CALL,
            ]
        )
        | CHARACTERS
    )
    return st.lists(pieces, max_size=8).map("".join)


@pytest.mark.parametrize("kind", [Think, Gemma4Think, KimiK2Think, MistralThink, SeedThink])
@pytest.mark.parametrize("inside", [False, True])
def test_thought_and_speech_are_told_apart_however_the_text_is_cut(kind: type[Think], inside: bool) -> None:
    @settings(max_examples=examples(200))
    @given(chunked(thinking(kind)))
    def check(given: tuple[str, list[str]]) -> None:
        text, pieces = given
        whole = run(kind(starts_inside=inside), [text])
        assert run(kind(starts_inside=inside), pieces) == whole
        assert run(kind(starts_inside=inside), list(text)) == whole
        begin, (end, *_) = kind.begin.tags[0], kind.end.tags
        thought, said = naive.think(text, begin, end, inside=inside, following="".join(kind.following))
        assert whole == [*([Reasoning(thought)] if thought else []), *([Text(said)] if said else [])]

    check()


@pytest.mark.parametrize("inside", [False, True])
@settings(max_examples=examples(200))
@given(given=chunked(thinking(Think)))
def test_a_reply_does_not_depend_on_how_it_is_cut(inside: bool, given: tuple[str, list[str]]) -> None:
    text, pieces = given
    whole = run(create("hermes", "think", TOOLS, starts_inside=inside), [text])
    assert run(create("hermes", "think", TOOLS, starts_inside=inside), pieces) == whole
    assert run(create("hermes", "think", TOOLS, starts_inside=inside), list(text)) == whole


@pytest.mark.parametrize(
    ("text", "inside", "found"),
    [
        (f"<think>\nHm.\n</think>\n\nLook.\n{CALL}", False, [Reasoning("Hm."), Text("Look."), F]),
        (f"\n<think>Hm.</think>{CALL}", False, [Reasoning("Hm."), F]),
        ("Hm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Text("Yes.")]),
        ("<think>\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Text("Yes.")]),
        ("\n\n</think>\n\nYes.", True, [Text("Yes.")]),
        (" \n</think>Yes.", True, [Reasoning(" "), Text("Yes.")]),
        ("<think>\n\n</think>\n\n", False, []),
        (f"Hm. {CALL}\n", True, [Reasoning(f"Hm. {CALL}\n")]),
        (f"<think>Hm. {CALL}", False, [Reasoning(f"Hm. {CALL}")]),
        ("Yes.</think> No.", False, [Text("Yes.</think> No.")]),
        ("Yes. <think>No.</think>", False, [Text("Yes. <think>No.</think>")]),
        ("<think>a</think>b<think>c</think>", False, [Reasoning("a"), Text("b<think>c</think>")]),
        ("", True, []),
    ],
)
def test_what_is_thought_said_and_called(text: str, inside: bool, found: list[Sampled]) -> None:
    assert run(create("hermes", "think", TOOLS, starts_inside=inside), [text]) == found


def test_calls_end_a_thought_that_kimi_did_not_end() -> None:
    call = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    text = f"<think>Hm.\n<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    expected = [Reasoning("Hm."), Call("f", '{"a": 1}', "functions.f:0")]
    for pieces in ([text], list(text)):
        assert run(create("kimi-k2", "kimi-k2", TOOLS, starts_inside=False), pieces) == expected
    assert run(create("kimi-k2", "think", TOOLS, starts_inside=False), [text]) == [Reasoning(text[len("<think>") :])]


def test_thought_is_streamed() -> None:
    parser = create("hermes", "think", TOOLS, starts_inside=True)
    assert parser.feed("\nHm") == [Reasoning("Hm")]
    assert parser.feed(", so.\n") == [Reasoning(", so.")]
    assert parser.feed("And</thi") == [Reasoning("\nAnd")]
    assert parser.feed("nk>\n\nIt") == [Text("It")]
    assert parser.feed(" is <tool") == [Text(" is ")]
    assert parser.finish() == [Text("<tool")]


@pytest.mark.parametrize(
    ("kind", "prompt", "inside"),
    [
        (Think, "<|im_start|>assistant\n<think>\n", True),
        (Think, "<|Assistant|><think>", True),
        (Think, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        (Think, "<|im_start|>assistant\n", False),
        (Gemma4Think, "<tool_response|><|channel>thought\n", True),
        (Gemma4Think, "<|turn>model\n", False),
        (SeedThink, "<seed:bos>assistant\n<seed:think>", True),
        (SeedThink, "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>", True),
        (SeedThink, "<seed:bos>assistant\n", False),
    ],
)
def test_a_prompt_may_end_within_a_thought(kind: type[Think], prompt: str, inside: bool) -> None:
    assert kind.is_open(prompt) is inside


# Names -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", NAMES)
@pytest.mark.parametrize("reasoning", REASONING_NAMES)
def test_every_name_makes_a_parser(calls: str, reasoning: str) -> None:
    assert run(create(calls, reasoning, TOOLS, starts_inside=False), ["Yes."]) == [Text("Yes.")]
    assert run(create(calls, reasoning, None, starts_inside=False), ["Yes."]) == [Text("Yes.")]


def test_none_lets_everything_through() -> None:
    text = f"<think>\n{CALL}</think>"
    parser = create("none", "none", TOOLS, starts_inside=True)
    assert parser.feed(text) == [Text(text)]
    assert parser.feed("\n") == [Text("\n")]
    assert parser.finish() == []


def test_channels_can_be_told_apart_without_calls() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    expected = [Reasoning("Hm."), Text("Yes.")]
    assert run(create("none", "harmony", TOOLS, starts_inside=False), [text]) == expected
    assert run(create("harmony", "harmony", TOOLS, starts_inside=False), [text]) == expected


def test_a_reply_says_whether_special_tokens_are_to_be_seen() -> None:
    assert not create("hermes", "think", TOOLS, starts_inside=False).needs_special
    assert create("hermes", "gemma4", TOOLS, starts_inside=False).needs_special
    assert create("harmony", "none", TOOLS, starts_inside=False).needs_special


def test_a_class_of_ones_own() -> None:
    path = "middleware_hub.parsers"
    parser = create(f"{path}.formats.hermes:Hermes", f"{path}.think:Think", TOOLS, starts_inside=True)
    assert run(parser, [f"Hm.</think>{CALL}"]) == [Reasoning("Hm."), F]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("hermess", "choose one of hermes, "),
        ("auto", "choose one of"),
        ("no.such.module:Class", "cannot import no.such.module"),
        ("json:NoSuchClass", "has no class NoSuchClass"),
        ("json:dumps", "has no class dumps"),
        ("json:JSONDecoder", "it has no needs_special, feed, finish"),
        (":Class", "pkg.mod:Class"),
        ("json:", "pkg.mod:Class"),
        (".json:Class", "pkg.mod:Class"),
    ],
)
def test_a_parser_that_does_not_exist(name: str, complaint: str) -> None:
    with pytest.raises(BadRequestError, match=complaint):
        call_parser(name)
    with pytest.raises(BadRequestError, match=complaint.replace("hermes, ", "think")):
        reasoning_parser(name)


THOUGHTS = {
    **{"kimi-k2": "kimi-k2", "minimax-m2": "think", "mistral": "mistral", "deepseek-v32": "think"},
    **{"seed-oss": "seed-oss"},
}


def by_parser(templates: dict[str, str]) -> dict[str, str]:
    """Our templates of families by the names of their parsers; the one without thoughts is not among them."""
    return {name.replace("_", "-"): text for name, text in templates.items() if name != "mistral_list"}


# Detection ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ '<|im_start|>' + m.content }}", "none", "none"),
        (
            r"""{{ '<tool_call>\n{"name": "' }}{{ n }}{{ '", "arguments": ' }}{{ '}\n</tool_call>' }}""",
            "hermes",
            "none",
        ),
        (
            "'<think>' '</think>' '<tool_call>' '<function=' '<parameter=' arguments '</tool_call>'",
            "qwen-coder",
            "think",
        ),
        (
            "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call> <think></think>",
            "glm",
            "think",
        ),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜> '<think>' '</think>'", "deepseek", "think"),
        *((template, name, THOUGHTS[name]) for name, template in by_parser(FAMILIES).items()),
        ("'<|start|>assistant<|channel|>analysis<|message|>' 'functions.'", "harmony", "harmony"),
        ("""'<|tool_call>call:' + name '<|"|>' '<tool_call|>' '<|channel>thought' '<channel|>'""", "gemma4", "gemma4"),
        (
            """<|start_header_id|> {"name": function name, "parameters": dictionary}' '"parameters": '""",
            "llama3",
            "none",
        ),
        ("<|start_header_id|>assistant<|end_header_id|>", "none", "none"),
        (FAMILIES["mistral_list"], "mistral", "none"),
        ("<|tool_call_start|>[' calls ']<|tool_call_end|> '<think>' '</think>'", "lfm2", "think"),
        (
            """<|start_header_id|> {"name": '"parameters": ' [func_name1(params_name1=params_value1)]""",
            "pythonic",
            "none",
        ),
        ("", "none", "none"),
    ],
)
def test_a_template_tells_which_parsers_it_needs(template: str, calls: str, reasoning: str) -> None:
    assert (detect_calls(template), detect_reasoning(template)) == (calls, reasoning)
