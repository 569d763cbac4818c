"""Thought, speech and calls of one reply; and the parsers by their names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.chat.messages import Reasoning, SampledCall, Text
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
from middleware_hub.parsers.think import Gemma4Think, MistralThink, SeedThink, Think
from router.errors import BadRequestError
from tests.conftest import examples
from tests.middleware_hub.parsers import naive
from tests.middleware_hub.parsers.formats import CHARACTERS, TOOLS, chunked, run
from tests.support.family_templates import FAMILIES

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = SampledCall("f", '{"a": 1}')


def thinking(kind: type[Think]) -> st.SearchStrategy[str]:
    begin, end = kind.begin.tags[0], kind.end.tags[0]
    pieces = (
        st.sampled_from(
            [
                begin,
                end,
                begin[:3],
                end[:4],
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


@pytest.mark.parametrize("kind", [Think, Gemma4Think, MistralThink, SeedThink])
@pytest.mark.parametrize("inside", [False, True])
def test_thought_and_speech_are_told_apart_however_the_text_is_cut(kind: type[Think], inside: bool) -> None:
    @settings(max_examples=examples(200))
    @given(chunked(thinking(kind)))
    def check(given: tuple[str, list[str]]) -> None:
        text, pieces = given
        whole = run(kind(starts_inside=inside), [text])
        assert run(kind(starts_inside=inside), pieces) == whole
        assert run(kind(starts_inside=inside), list(text)) == whole
        thought, said = naive.think(text, kind.begin.tags[0], kind.end.tags[0], inside=inside)
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
        (f"Hm. {CALL}\n", True, [Reasoning("Hm. "), F]),
        (f"<think>Hm. {CALL}", False, [Reasoning("Hm. "), F]),
        ("Yes.</think> No.", False, [Text("Yes.</think> No.")]),
        ("Yes. <think>No.</think>", False, [Text("Yes. <think>No.</think>")]),
        ("<think>a</think>b<think>c</think>", False, [Reasoning("a"), Text("b<think>c</think>")]),
        ("", True, []),
    ],
)
def test_what_is_thought_said_and_called(text: str, inside: bool, found: list[Sampled]) -> None:
    assert run(create("hermes", "think", TOOLS, starts_inside=inside), [text]) == found


KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
UNCLOSED = {
    "hermes": CALL,
    "qwen-coder": "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi-k2": f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>",
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}


@pytest.mark.parametrize("calls", UNCLOSED)
def test_a_call_ends_reasoning_that_is_never_closed(calls: str) -> None:
    text = UNCLOSED[calls]
    found = run(create(calls, "none", TOOLS, starts_inside=False), [text])
    assert [type(one) for one in found] == [SampledCall]

    def read(whole: str) -> list[Sampled]:
        read = [run(create(calls, "think", TOOLS, starts_inside=True), pieces) for pieces in ([whole], list(whole))]
        assert read[0] == read[1]
        return read[0]

    assert read(f"I look.\n{text}") == [Reasoning("I look."), *found]
    assert read(f"I look.\n{text}\n{text}") == [Reasoning("I look."), *found, *found]
    assert read(f"I look.\n{text}\n\nDone.") == [Reasoning("I look."), *found, Text("\n\nDone.")]
    assert read(text) == found
    assert read(f"Write {text}?\n</think>\n\nYes.") == [Reasoning(f"Write {text}?"), Text("Yes.")]
    assert read(f"A draft:\n{text}\n</think>\n\n{text}") == [Reasoning(f"A draft:\n{text}"), *found]
    assert read(f"A draft:\n{text}\n</think>") == [Reasoning(f"A draft:\n{text}")]
    assert read(f"A cut call: {text[: len(text) // 2]}") == [Reasoning(f"A cut call: {text[: len(text) // 2]}")]
    assert read(f"The tag {text[:11]} is none.\n{text}") == [Reasoning(f"The tag {text[:11]} is none."), *found]
    assert run(create(calls, "think", None, starts_inside=True), [text]) == [Reasoning(text)]


@settings(max_examples=examples(300))
@given(given=chunked(thinking(Think)))
def test_reasoning_that_is_never_closed_is_read_as_text_would_be_up_to_its_first_call(
    given: tuple[str, list[str]],
) -> None:
    text, pieces = given

    def called(text: str) -> list[Sampled]:
        return run(create("hermes", "none", TOOLS, starts_inside=False), [text])

    thought, said = naive.think(text, "<think>", "</think>", inside=True)
    if "</think>" in text.lstrip().removeprefix("<think>"):
        expected = [*([Reasoning(thought)] if thought else []), *called(said)]
    else:
        expected = called(thought)
        if expected and isinstance(expected[0], Text):
            expected[0] = Reasoning(expected[0].text)
    assert run(create("hermes", "think", TOOLS, starts_inside=True), pieces) == expected


def test_a_stream_holds_back_only_what_a_call_in_open_reasoning_decides() -> None:
    parser = create("hermes", "think", TOOLS, starts_inside=True)
    assert parser.feed("I look. <tool_") == [Reasoning("I look. ")]
    assert parser.feed("call> is a tag. ") == [Reasoning("<tool_call> is a tag. ")]
    assert parser.feed(f"{CALL} Or") == []
    assert parser.feed(" not.") == []
    assert parser.feed("</think>No.") == [Reasoning(f"{CALL} Or not."), Text("No.")]
    assert parser.finish() == []


class Others:
    """A reasoning parser that does not say whether it is inside."""

    needs_special = False

    def __init__(self, *, starts_inside: bool) -> None:
        self._inner = Think(starts_inside=starts_inside)

    def feed(self, text: str) -> list[Text | Reasoning]:
        return self._inner.feed(text)

    def finish(self) -> list[Text | Reasoning]:
        return self._inner.finish()


def test_a_reasoning_parser_that_does_not_say_whether_it_is_open_keeps_calls_as_reasoning() -> None:
    made = create("hermes", f"{__name__}:Others", TOOLS, starts_inside=True)
    assert run(made, [f"I look. {CALL}"]) == [Reasoning(f"I look. {CALL}")]


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
    **{"kimi-k2": "think", "minimax-m2": "think", "mistral": "mistral", "deepseek-v32": "think"},
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
