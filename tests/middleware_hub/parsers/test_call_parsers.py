"""Every call parser: what is a call, what is text, and that it does not matter how the text comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.chat.messages import Reasoning, SampledCall, Text
from middleware_hub.parsers.base import Sampled
from middleware_hub.parsers.formats.harmony import Harmony
from middleware_hub.parsers.formats.hermes import Hermes
from middleware_hub.parsers.grammar import GrammarParser
from tests.conftest import examples
from tests.middleware_hub.parsers.formats import (
    FORMATS,
    TOOLS,
    Format,
    arguments,
    chunked,
    joined,
    mixtures,
    reasoning_first,
    run,
)

each = pytest.mark.parametrize("made", FORMATS.values(), ids=FORMATS)
many = settings(max_examples=examples(200))


def loaded(pieces: list[Sampled]) -> list[object]:
    return [(piece.name, json.loads(piece.arguments)) if isinstance(piece, SampledCall) else piece for piece in pieces]


# Properties of all of them -----------------------------------------------------------------------------------------------


@each
def test_it_does_not_matter_how_the_text_is_cut(made: Format) -> None:
    @many
    @given(chunked(mixtures(made)))
    def check(given: tuple[str, list[str]]) -> None:
        text, pieces = given
        whole = run(made.parser(TOOLS), [text])
        assert run(made.parser(TOOLS), pieces) == whole
        assert run(made.parser(TOOLS), list(text)) == whole

    check()


@each
def test_the_plain_way_of_reading_finds_the_same(made: Format) -> None:
    @many
    @given(mixtures(made))
    def check(text: str) -> None:
        found, expected = run(made.parser(TOOLS), [text]), made.oracle(text)
        if made.parser is Harmony:
            found = margins_left_open(reasoning_first(found))
            expected = margins_left_open(expected)
        if "gemma" in made.parser.__name__.lower():
            assert loaded(found) == loaded(expected)
        else:
            assert found == expected

    check()


def margins_left_open(pieces: list[Sampled]) -> list[Sampled]:
    """Reasoning between text and a call keeps newlines, which the plain reading does not know."""
    stripped = [Text(piece.text.strip()) if isinstance(piece, Text) else piece for piece in pieces]
    return [piece for piece in stripped if piece != Text("")]


@each
def test_calls_between_texts_are_found_with_their_arguments(made: Format) -> None:
    @settings(max_examples=examples(100))
    @given(st.lists(arguments(made), min_size=1, max_size=3), st.sampled_from(made.writers))
    def check(given: list[dict[str, Any]], write: Any) -> None:
        text = "\n".join(write("f", each) for each in given)
        calls = [("f", each) for each in given]
        assert loaded(run(made.parser(TOOLS), [text])) == calls
        if write.__name__ not in ("write_llama3", "write_pythonic"):
            before = Text("Let me look.")
            assert loaded(run(made.parser(TOOLS), ["Let me look.\n\n" + text + "\n"])) == [before, *calls]

    check()


@each
def test_a_call_comes_with_its_last_character_and_not_before(made: Format) -> None:
    for write in made.writers:
        text = write("f", {"a": {"b": [1, "}"]}})
        parser, found = made.parser(TOOLS), list[Sampled]()
        end = len(made.up_to_the_call(text))
        whole = SampledCall("f", '{"a": {"b": [1, "}"]}}', made.ids.get(write.__name__, ""))
        for at, char in enumerate(text):
            assert found == ([] if at < end else [whole])
            found += parser.feed(char)
        assert loaded([*found, *parser.finish()]) == [("f", {"a": {"b": [1, "}"]}})]


@each
def test_a_call_that_is_cut_is_text_character_for_character(made: Format) -> None:
    for write in made.writers:
        text = write("f", {"a": [1, {"b": None}], "s": "x"})
        whole = made.up_to_the_call(text).removesuffix("<|call|>")  # may be missing
        for end in range(1, len(whole)):
            assert run(made.parser(TOOLS), [whole[:end]]) == [Text(whole[:end])], "no half of a call"


@each
def test_text_that_cannot_be_a_call_is_not_held_back(made: Format) -> None:
    parser = made.parser(TOOLS)
    for piece in ("Hello", " there. ", "1 < 2 {", "} <b>", " `x` "):
        assert parser.feed(piece) == [Text(piece)]
    assert parser.feed("a\n") == [Text("a")], "newlines may stand before a call"
    assert parser.feed("b") == [Text("\nb")]
    assert parser.finish() == []


@each
def test_without_tools_all_is_text(made: Format) -> None:
    for write in made.writers:
        text = " \n" + write("f", {"a": 1}) + "\n"
        assert run(made.parser([]), [text]) == [Text(text)]


@each
def test_a_name_that_is_no_tool_is_called_all_the_same(made: Format) -> None:
    for write in made.writers:
        assert loaded(run(made.parser(TOOLS), [write("unheard-of.name", {})])) == [("unheard-of.name", {})]


@each
def test_what_was_read_is_not_looked_at_again(made: Format) -> None:
    """The window stays small, however long a call or a string within it: the cost is linear."""
    parser = made.parser(TOOLS)
    assert isinstance(parser, GrammarParser)
    write = made.writers[-1]
    for char in "a\n" * 500 + write("f", {"s": "x" * 2000, "a": [1, "y"] * 500}) + "<" * 500:
        parser.feed(char)
        assert len(parser.reader.text) < 64


@each
def test_deep_nesting_is_text_and_no_error(made: Format) -> None:
    for write in made.writers:
        for bomb in ("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000):
            text = write("f", {"a": 12345}).replace("12345", bomb)
            found = run(made.parser(TOOLS), [text])
            if write in made.untyped:
                assert loaded(found) == [("f", {"a": bomb})], "these have a string there, then"
            else:
                assert [type(piece) for piece in found] == [Text]


@each
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "01", "1.", "tru", "'x'", "1" * 5000])
def test_what_is_no_json_is_no_call(made: Format, value: str) -> None:
    for write in made.writers:
        text = write("f", {"a": 12345}).replace("12345", value)
        found = run(made.parser(TOOLS), [text])
        if write in made.untyped:
            assert loaded(found) == [("f", {"a": value})]
        elif made.named and value == "'x'":
            assert loaded(found) == [("f", {"a": "x"})], "a string of Python's"
        else:
            assert [type(piece) for piece in found] == [Text]


@each
def test_a_parser_may_be_finished_without_having_been_fed(made: Format) -> None:
    assert made.parser(TOOLS).finish() == []
    assert run(made.parser(TOOLS), ["", "", ""]) == []


# Arguments ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{ "a":1.50,"a" : 1e2 }', '{ "a":1.50,"a" : 1e2 }'),
        ('{"a": "\\u00e9\\ud83d\\ude00/\\/"}', '{"a": "\\u00e9\\ud83d\\ude00/\\/"}'),
        ("null", "{}"),
        ('"{\\"a\\": 1} "', '{"a": 1}'),
        ('"[1]"', None),
        ('"{"', None),
        ('{"a": "\\ud83d"}', None),
        ('{"a": "\\ude00"}', None),
        ('{"a": "\n"}', None),
        ('{"a": "\\x"}', None),
        ('{"a": 1,}', None),
        ("[]", None),
        ("5", None),
    ],
)
def test_arguments_keep_their_very_characters(arguments: str, expected: str | None) -> None:
    """Strict JSON: half a surrogate pair, a raw newline, a trailing comma are none."""
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert run(Hermes(TOOLS), [text]) == [Text(text) if expected is None else SampledCall("f", expected)]


@pytest.mark.parametrize(
    ("inner", "call"),
    [
        ('{"name": "f"}', SampledCall("f", "{}")),
        ('{"arguments": {}, "name": "f", "id": 7}', SampledCall("f", "{}")),
        ('{"name": "f", "parameters": {"a": 1}}', SampledCall("f", '{"a": 1}')),
        ('{"name": "f", "parameters": {}, "arguments": {}}', None),
        ('{"name": " "}', None),
        ('{"name": 5}', None),
        ('{"arguments": {}}', None),
        ("{}", None),
        ('[{"name": "f"}]', None),
        ('"f"', None),
        ('{"name": "f"} x', None),
        ("", None),
    ],
)
def test_what_a_json_call_needs(inner: str, call: SampledCall | None) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert run(Hermes(TOOLS), [text]) == [call or Text(text)]


LOOSE = {
    "qwen-coder": (
        "<tool_call>\n<function=g>\n",
        "<parameter={}>\n{}\n",
        "</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "seed-oss": ("<seed:tool_call><function=g>", "<parameter={}>{}", "</parameter>", "</function></seed:tool_call>"),
    "glm": ("<tool_call>g\n", "<arg_key>{}</arg_key>\n<arg_value>{}", "</arg_value>\n", "\n</tool_call>"),
    "minimax-m2": (
        *('<minimax:tool_call>\n<invoke name="g">\n', '<parameter name="{}">{}', "</parameter>\n"),
        "\n</invoke>\n</minimax:tool_call>",
    ),
    "deepseek-v32": (
        *('<｜DSML｜function_calls>\n<｜DSML｜invoke name="g">\n', '<｜DSML｜parameter name="{}">{}'),
        *("</｜DSML｜parameter>\n", "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
    ),
}
"""A call of `g`: its beginning, a parameter and its value, the end of a parameter, and the end."""


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize("missing", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_a_parameter_without_an_end_ends_where_the_next_one_begins(name: str, missing: set[int]) -> None:
    begin, parameter, close, end = LOOSE[name]
    text = begin
    for at, (key, value) in enumerate({"path": "x", "depth": "2", "deep": "true"}.items()):
        text += parameter.format(key, value) + ("" if at in missing else close)
    text += end
    call = SampledCall("g", '{"path": "x", "depth": 2, "deep": true}')
    for pieces in ([text], list(text)):
        assert run(FORMATS[name].parser(TOOLS), pieces) == [call]
        assert run(FORMATS[name].parser(TOOLS), [*pieces, "Done."]) == [call, Text("Done.")]


def test_the_end_of_a_function_may_stand_in_a_value_that_has_its_own_end() -> None:
    value = "a </function> b\n</function>"
    text = f"<tool_call>\n<function=g>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        assert run(FORMATS["qwen-coder"].parser(TOOLS), pieces) == [SampledCall("g", json.dumps({"s": value}))]


# White space -------------------------------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "f"}</tool_call>'
F = SampledCall("f", "{}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f" \n{CALL}\n\n{CALL} \n", [F, F]),
        (f"Look: \r\n\n{CALL}", [Text("Look: "), F]),
        (f"\n\nLook{CALL}", [Text("\n\nLook"), F]),
        (f"Look\n{CALL}\nand then\n{CALL}\ndone\n", [Text("Look"), F, Text("\nand then"), F, Text("\ndone\n")]),
        (" \n ", [Text(" \n ")]),
        ("Look\n", [Text("Look\n")]),
        ("\n<tool_call> x", [Text("\n<tool_call> x")]),
    ],
)
def test_white_space_around_calls_is_nobodys(text: str, found: list[Sampled]) -> None:
    assert run(Hermes(TOOLS), [text]) == found
    assert run(Hermes(TOOLS), list(text)) == found


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"x": "unfinished\n</tool_call>\n<tool_call>'
    assert run(Hermes(TOOLS), [f"{broken}\n{CALL}"]) == [Text(broken), F]


# Single formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}};', [F, SampledCall("g", "{}")]),
        ('{"type": "function", "name": "f", "parameters": {}}', [F]),
        ('{"name": "Ada", "age": 36}', [Text('{"name": "Ada", "age": 36}')]),
        ('{"name": "f"}', [Text('{"name": "f"}')]),
        ('Like {"name": "f", "parameters": {}}', [Text('Like {"name": "f", "parameters": {}}')]),
        ('Now <|python_tag|>{"name": "f", "parameters": {}}', [Text("Now "), F]),
        ('<|python_tag|>search.call(query="x")', [Text('<|python_tag|>search.call(query="x")')]),
    ],
)
def test_llama3_takes_for_a_call_only_what_looks_like_one(text: str, found: list[Sampled]) -> None:
    parser = FORMATS["llama3"].parser
    assert run(parser(TOOLS), [text]) == found
    assert run(parser(TOOLS), list(text)) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-coder", "<tool_call><function=f><parameter=a>1</tool_call></parameter></function></tool_call>"),
        ("qwen-coder", "<tool_call><function=f><parameter=a>1</function> x</tool_call>"),
        ("qwen-coder", "<tool_call><function=f><parameter=a>1</function><parameter=b>2</tool_call>"),
        ("qwen-coder", "<tool_call><function=f><parameter=>1</parameter></function></tool_call>"),
        ("qwen-coder", "<tool_call><function=f></tool_call>"),
        ("qwen-coder", "<tool_call><function=f x></function></tool_call>"),
        ("qwen-coder", "<function=f></function>"),
        ("glm", "<tool_call>f<arg_key> </arg_key><arg_value>1</arg_value></tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</tool_call></arg_key><arg_value>1</arg_value></tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        ("glm", "<tool_call>\n</tool_call>"),
        ("gemma4", "<|tool_call>call:f{a:[1}]<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:1]<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{]<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:1,}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:x}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x}<tool_call|><|"|>}<tool_call|>'),
        ("gemma4", "<|tool_call> call:f{}<tool_call|>"),
        ("llama3", '{"a": {"name": "f", "parameters": {}}'),
        ("llama3", '{"name": "f", "parameters": {}, "besides": 1}'),
        ("deepseek", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>```json{}```<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f{}<｜tool▁call▁end｜>"),
        *(
            ("kimi-k2", f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>")
            for header in ("functions.f", "call_1a", "3", "functions.:0", ":0", "f:", "f:0 g:1", "")
        ),
        ("kimi-k2", "<|tool_calls_section_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi-k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>[]<|tool_call_end|>"),
        ("minimax-m2", '<invoke name="f"></invoke>'),
        ("minimax-m2", "<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>"),
        ("minimax-m2", '<minimax:tool_call><invoke name="f"></minimax:tool_call>'),
        (
            "minimax-m2",
            '<minimax:tool_call><invoke name="f"><parameter name="a">1</minimax:tool_call></parameter></invoke>',
        ),
        (
            "minimax-m2",
            '<minimax:tool_call><invoke name="f"><parameter name="a">1</invoke></parameter></invoke></minimax:tool_call>',
        ),
        ("mistral", "[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS][]"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]123456789{}"),
        ("mistral", '[TOOL_CALLS][[{"name": "f"}]]'),
        ("mistral", '[TOOL_CALLS] {"name": 5}'),
        ("deepseek-v32", '<｜DSML｜invoke name="f"/>'),
        ("deepseek-v32", '<｜DSML｜tool_calls><｜DSML｜invoke name="f">{}{}</｜DSML｜invoke>'),
        (
            "deepseek-v32",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="yes">1</｜DSML｜parameter>',
        ),
        (
            "deepseek-v32",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜invoke>'
            "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        ),
        *(
            ("lfm2", f"<|tool_call_start|>[{inner}]<|tool_call_end|>")
            for inner in (
                *("f", "f(1)", "f(a)", "f(a=)", "f(a=b)", "f(a=1,)", "f(,)", "f(a=(1))", "f(a={b: 1})", "f(a={1: 2})"),
                *(r"f(a='\1')", r"f(a='\ud83d')", r"f(a='\N{DASH}')", r"f(a='\xg0')", r"f(a='\U00110000')", "f(a='x)"),
                *("f(a=1]", "f(a=[1)", "f(a=1) g()", "f (a=1)", "(a=1)", "", '{"name": "f"}'),
            )
        ),
        ("lfm2", "[f()]"),
        ("lfm2", "<|tool_call_start|>f()<|tool_call_end|>"),
        ("pythonic", "[1] Smith, 2024"),
        ("pythonic", "[f(a=1) is a call]"),
        ("pythonic", "Like [f(a=1)]"),
        ("seed-oss", "<tool_call><function=f></function></tool_call>"),
        ("harmony", "<|channel|>thought<|message|>Hm."),
        ("harmony", "<|start|>user<|channel|>"),
        ("harmony", "<|start|>assistant<|message|>Hm."),
        ("harmony", "<|channel|>commentary to=functions. json<|message|>{}<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.f json<|message|>{}<|end|>"),
        ("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>"),
    ],
)
def test_what_is_malformed_is_text_character_for_character(name: str, text: str) -> None:
    made = FORMATS[name]
    assert run(made.parser(TOOLS), [text]) == [Text(text)]
    assert run(made.parser(TOOLS), list(text)) == [Text(text)]


def test_llama3_lets_go_of_json_that_is_an_answer() -> None:
    parser = FORMATS["llama3"].parser(TOOLS)
    assert parser.feed('{"answer"') == []
    assert parser.feed(": ") == []
    assert parser.feed("4") == [Text('{"answer": 4')]
    assert parser.feed("2}") == [Text("2}")]


def test_deepseek_hands_out_each_call_of_several() -> None:
    parser = FORMATS["deepseek"].parser(TOOLS)
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    assert parser.feed(f"<｜tool▁calls▁begin｜>{begin}f<｜tool▁sep｜>{{}}{end}") == [F]
    fenced = f"\n{begin}function<｜tool▁sep｜>g\n```json\n{{}}\n```{end}"
    assert parser.feed(fenced) == [SampledCall("g", "{}")]
    assert parser.feed("<｜tool▁calls▁end｜>") == []
    assert parser.finish() == []


MINIMAX = '<invoke name="f">\n</invoke>'
DSML = '<｜DSML｜invoke name="f"/>'


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("minimax-m2", f"<minimax:tool_call>\n{MINIMAX}\n{MINIMAX}\n</minimax:tool_call>\n", [F, F]),
        ("minimax-m2", f"<minimax:tool_call>{MINIMAX} x {MINIMAX}", [F, Text(f" x {MINIMAX}")]),
        (
            "minimax-m2",
            f"<minimax:tool_call>{MINIMAX}</minimax:tool_call>\n{MINIMAX}",
            [F, Text(f"\n{MINIMAX}")],
        ),
        (
            "minimax-m2",
            f'<minimax:tool_call>{MINIMAX}<invoke name="f">{MINIMAX}',
            [F, Text(f'<invoke name="f">{MINIMAX}')],
        ),
        ("deepseek-v32", f"\n\n<｜DSML｜function_calls>\n{DSML}{DSML}\n</｜DSML｜function_calls>", [F, F]),
        ("deepseek-v32", f"<｜DSML｜tool_calls>{DSML}</｜DSML｜tool_calls>{DSML}", [F, Text(DSML)]),
        ("lfm2", "<|tool_call_start|>[ f() ,\nf()]<|tool_call_end|>\n", [F, F]),
        ("lfm2", "<|tool_call_start|>[f(),]<|tool_call_end|>", [F, Text("]<|tool_call_end|>")]),
        ("lfm2", "<|tool_call_start|>[f(),<|tool_call_end|>f()]", [F, Text("f()]")]),
        ("pythonic", " [f(), f()][f()]<|python_end|>", [F, F, F]),
        ("pythonic", "[f(), [f()]", [F, Text(" [f()]")]),
        ("pythonic", "<|python_start|>[f()]<|python_end|> x [f()]", [F, Text(" x [f()]")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f"} , {"name": "f"}]', [F, F]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f"}, {"name": "f", "id": "9Ae3bDc2F"}]',
            [F, SampledCall("f", "{}", "9Ae3bDc2F")],
        ),
        ("mistral", '[TOOL_CALLS][{"name": "f"},,{"name": "f"}]', [F, Text(',,{"name": "f"}]')]),
        ("mistral", '[TOOL_CALLS][{"name": "f"}],{"name": "f"}', [F, Text(',{"name": "f"}')]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}]", [F, Text("]")]),
        ("mistral", '[TOOL_CALLS]{"name": "f"}]', [F, Text("]")]),
        ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]f{}", [F, F]),
    ],
)
def test_further_calls_count_only_inside_an_open_section_or_list(name: str, text: str, found: list[Sampled]) -> None:
    parser = FORMATS[name].parser
    assert run(parser(TOOLS), [text]) == found
    assert run(parser(TOOLS), list(text)) == found


@pytest.mark.parametrize(("given", "kept"), [("9Ae3bDc2F", "9Ae3bDc2F"), ("9Ae3bDc2", ""), ("call_1234", "")])
def test_mistral_keeps_an_id_that_its_template_takes(given: str, kept: str) -> None:
    assert run(FORMATS["mistral"].parser(TOOLS), [f"[TOOL_CALLS]f[CALL_ID]{given}[ARGS]{{}}"]) == [
        SampledCall("f", "{}", kept)
    ]


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        (' string="true"', "5", '"5"'),
        (' string="true"', " x\n", '" x\\n"'),
        (' string="false"', " 5\n", "5"),
        (' string="false"', "Oslo", '"Oslo"'),
        ("", "5", "5"),
    ],
)
@pytest.mark.parametrize("key", ["a", "s"])
def test_a_dsml_parameter_says_whether_it_is_a_string(attribute: str, value: str, expected: str, key: str) -> None:
    """If it does not, the schema does: `s` is one, of `a` nothing is known."""
    parameter = f'<｜DSML｜parameter name="{key}"{attribute}>{value}</｜DSML｜parameter>'
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="f">{parameter}</｜DSML｜invoke></｜DSML｜function_calls>'
    expected = '"5"' if key == "s" and not attribute else expected
    assert run(FORMATS["deepseek-v32"].parser(TOOLS), [text]) == [SampledCall("f", f'{{"{key}": {expected}}}')]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'\d+\n\'\"'", "\\d+\n'\""),
        (r'"\u00e9\ud83d\ude00\x41\U0001F600"', "é😀A😀"),
        ("'two\nlines'", "two\nlines"),
        ("{'a': [True, false, None, null, -1.5e3]}", {"a": [True, False, None, None, -1500.0]}),
        ("[]", []),
        ("{}", {}),
        ("''", ""),
    ],
)
def test_a_value_in_python_or_in_json_becomes_json(written: str, value: object) -> None:
    text = f"<|tool_call_start|>[f(a={written}, class='x')]<|tool_call_end|>"
    for pieces in ([text], list(text)):
        assert loaded(run(FORMATS["lfm2"].parser(TOOLS), pieces)) == [("f", {"a": value, "class": "x"})]


def test_harmony_tells_thought_speech_and_calls_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    expected = [Reasoning("Hm."), Text("Looking."), SampledCall("f", '{"a": 1}'), Text("Done.")]
    assert run(Harmony(TOOLS), [text]) == expected
    assert run(Harmony(TOOLS), list(text)) == expected


def test_harmony_streams_what_is_thought_and_said() -> None:
    parser = Harmony(TOOLS)
    assert parser.feed("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert parser.feed(", so<|en") == [Reasoning(", so")]
    assert parser.feed("d|><|start|>assistant<|channel|>final<|message|>It") == [Text("It")]
    assert parser.feed(" rains.<|return|>") == [Text(" rains.")]
    assert parser.finish() == []


def test_harmony_lacks_the_stop_token_that_ends_a_call() -> None:
    """Engines take it off. JSON that is not complete is a cut call."""
    header = " to=functions.f<|channel|>commentary json<|message|>"
    assert run(Harmony(TOOLS), [header + '{"a": 1}']) == [SampledCall("f", '{"a": 1}')]
    assert run(Harmony(TOOLS), [header + '{"a": 1']) == [Text(header + '{"a": 1')]
    assert run(Harmony(TOOLS), [header + "{} and more"]) == [Text(header + "{} and more")]


def test_harmony_without_tools_still_knows_thoughts() -> None:
    call = "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>"
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{call}"
    assert run(Harmony([]), [text]) == [Reasoning("Hm."), Text(call)]


def test_neighbours_of_a_kind_come_joined() -> None:
    found = Hermes(TOOLS).feed(f"a\n\nb<c> <tool_call> d{CALL}{CALL}e")
    assert found == joined(found)
