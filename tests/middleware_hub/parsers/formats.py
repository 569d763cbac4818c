"""The formats that tests go over, and texts in them: right, cut, spoiled, mixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from middleware_hub.chat.messages import Reasoning, SampledCall, Text, Tool
from middleware_hub.parsers.base import CallParser, Sampled
from middleware_hub.parsers.formats.deepseek import DeepSeek
from middleware_hub.parsers.formats.deepseek_v32 import DeepSeekV32
from middleware_hub.parsers.formats.gemma4 import Gemma4
from middleware_hub.parsers.formats.glm import Glm
from middleware_hub.parsers.formats.harmony import Harmony
from middleware_hub.parsers.formats.hermes import Hermes
from middleware_hub.parsers.formats.kimi_k2 import KimiK2
from middleware_hub.parsers.formats.llama3 import Llama3
from middleware_hub.parsers.formats.minimax_m2 import MiniMaxM2
from middleware_hub.parsers.formats.mistral import Mistral
from middleware_hub.parsers.formats.pythonic import Lfm2, Pythonic
from middleware_hub.parsers.formats.qwen_coder import QwenCoder, SeedOss
from tests.middleware_hub.parsers import naive, naive_formats

TOOLS: Sequence[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in ("s", "s1", "s two")}},
        },
    }
]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n</tool_call>'


def write_llama3(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": {dumps(name)}, "parameters": {dumps(arguments)}}}'


def write_llama3_tagged(name: str, arguments: dict[str, Any]) -> str:
    return f"<|python_tag|>{write_llama3(name, arguments)}"


def write_qwen_coder(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def write_glm(name: str, arguments: dict[str, Any], newline: str = "\n") -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>{newline}"
        f"<arg_value>{value if isinstance(value, str) else dumps(value)}</arg_value>{newline}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{newline}{values}</tool_call>"


def write_glm_47(name: str, arguments: dict[str, Any]) -> str:
    return write_glm(name, arguments, newline="")


def write_deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    inner = f"function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def write_deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    inner = f"{name}<｜tool▁sep｜>{dumps(arguments)}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def write_dsml(name: str, arguments: dict[str, Any], section: str = "function_calls") -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜{section}>\n<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n</｜DSML｜{section}>'


def write_dsml_v4(name: str, arguments: dict[str, Any]) -> str:
    return write_dsml(name, arguments, "tool_calls")


def write_dsml_json(name: str, arguments: dict[str, Any]) -> str:
    inner = f'<｜DSML｜invoke name="{name}">\n{dumps(arguments)}\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


def write_minimax(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f'<parameter name="{key}">{value if isinstance(value, str) else dumps(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{values}</invoke>\n</minimax:tool_call>'


def write_seed(name: str, arguments: dict[str, Any]) -> str:
    return write_qwen_coder(name, arguments).replace("tool_call>", "seed:tool_call>")


def write_kimi(name: str, arguments: dict[str, Any]) -> str:
    inner = f"functions.{name}:0<|tool_call_argument_begin|>{dumps(arguments)}"
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{inner}<|tool_call_end|><|tool_calls_section_end|>"


def write_kimi_alone(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call_begin|>{name}:12 <|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"


def write_mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}"


def write_mistral_with_id(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]9Ae3bDc2F[ARGS]{dumps(arguments)}"


def write_mistral_list(name: str, arguments: dict[str, Any]) -> str:
    return f'[TOOL_CALLS] [{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}]'


def write_mistral_list_with_id(name: str, arguments: dict[str, Any]) -> str:
    return f'[TOOL_CALLS] [{{"name": {dumps(name)}, "arguments": {dumps(arguments)}, "id": "9Ae3bDc2F"}}]'


def write_pythonic(name: str, arguments: dict[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def write_pythonic_tagged(name: str, arguments: dict[str, Any]) -> str:
    return f"<|python_start|>{write_pythonic(name, arguments)}<|python_end|>"


def write_lfm2(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call_start|>{write_pythonic(name, arguments)}<|tool_call_end|>"


def write_lfm2_as_json(name: str, arguments: dict[str, Any]) -> str:
    inner = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({inner})]<|tool_call_end|>"


def write_harmony(name: str, arguments: dict[str, Any]) -> str:
    body = f"<|constrain|>json<|message|>{dumps(arguments)}<|call|>"
    return f"<|start|>assistant<|channel|>commentary to=functions.{name} {body}"


def write_harmony_as_templates_do(name: str, arguments: dict[str, Any]) -> str:
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{dumps(arguments)}<|call|>"


def write_gemma4(name: str, arguments: dict[str, Any]) -> str:
    def spell(value: object) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{spell(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(spell, value)) + "]"
        return dumps(value)

    return f"<|tool_call>call:{name}{spell(arguments)}<tool_call|>"


@dataclass(frozen=True)
class Format:
    """A parser, the plain way to read the same, how calls are written, and tags that mean something in it."""

    parser: type[CallParser]
    oracle: Callable[[str], list[Sampled]]
    writers: tuple[Callable[[str, dict[str, Any]], str], ...]
    tags: tuple[str, ...]
    plain_strings: bool = field(default=False)
    """Strings stand there as they are, and cannot hold the format's own tags."""
    named: bool = False
    """Arguments have names as in Python."""
    trailers: tuple[str, ...] = ()
    """Stand around several calls, and may come after the last of them."""
    untyped: tuple[Callable[[str, dict[str, Any]], str], ...] = ()
    """Those writers whose values are strings if they are no JSON."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """The ids that writers give to their calls, by the names of the writers."""

    def up_to_the_call(self, text: str) -> str:
        """What a writer wrote, without what may come after a call."""
        found = next(filter(text.endswith, self.trailers), "")
        return text.removesuffix(found).rstrip()


def oracle(
    call: Callable[[naive.Naive], SampledCall],
    openings: Sequence[str],
    trailer: str | tuple[str, ...] = "",
    bare: str = "",
    further: str = "",
) -> Callable[[str], list[Sampled]]:
    return lambda text: naive.parse(text, call, openings, trailer, bare, further)


FORMATS = {
    "hermes": Format(
        Hermes,
        oracle(naive_formats.hermes, ["<tool_call>"]),
        (write_hermes,),
        ("<tool_call>", "</tool_call>", '{"name": "f"'),
    ),
    "qwen-coder": Format(
        QwenCoder,
        oracle(naive_formats.qwen_coder, ["<tool_call>"]),
        (write_qwen_coder,),
        (
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "</function>",
            "<parameter=a>",
            "<parameter=s>",
            "</parameter>",
        ),
        plain_strings=True,
        untyped=(write_qwen_coder,),
    ),
    "seed-oss": Format(
        SeedOss,
        oracle(naive_formats.seed_oss, ["<seed:tool_call>"]),
        (write_seed,),
        ("<seed:tool_call>", "</seed:tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>"),
        plain_strings=True,
        untyped=(write_seed,),
    ),
    "minimax-m2": Format(
        MiniMaxM2,
        oracle(
            naive_formats.minimax_m2,
            ["<minimax:tool_call>"],
            trailer="</minimax:tool_call>",
            further='<invoke name="',
        ),
        (write_minimax,),
        (
            *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', '<invoke name="f">\n</invoke>'),
            *("</invoke>", '<parameter name="a">', '<parameter name="s">', "</parameter>"),
        ),
        plain_strings=True,
        trailers=("</minimax:tool_call>",),
        untyped=(write_minimax,),
    ),
    "glm": Format(
        Glm,
        oracle(naive_formats.glm, ["<tool_call>"]),
        (write_glm, write_glm_47),
        ("<tool_call>f", "</tool_call>", "<arg_key>a", "</arg_key>", "<arg_key>s", "<arg_value>", "</arg_value>"),
        plain_strings=True,
        untyped=(write_glm, write_glm_47),
    ),
    "deepseek": Format(
        DeepSeek,
        oracle(
            naive_formats.deepseek, ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"], trailer="<｜tool▁calls▁end｜>"
        ),
        (write_deepseek_v3, write_deepseek_v31),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>f",
            "<｜tool▁sep｜>",
            "```json",
            "```",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        trailers=("<｜tool▁calls▁end｜>",),
    ),
    "deepseek-v32": Format(
        DeepSeekV32,
        oracle(
            naive_formats.deepseek_v32,
            ["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"],
            trailer=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
            further='<｜DSML｜invoke name="',
        ),
        (write_dsml_json, write_dsml_v4, write_dsml),
        (
            *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            *('<｜DSML｜invoke name="f">', '<｜DSML｜invoke name="f"/>', "</｜DSML｜invoke>"),
            *('<｜DSML｜parameter name="s">', '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"),
        ),
        plain_strings=True,
        trailers=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        untyped=(write_dsml, write_dsml_v4),
    ),
    "kimi-k2": Format(
        KimiK2,
        oracle(
            naive_formats.kimi_k2,
            ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
            trailer="<|tool_calls_section_end|>",
        ),
        (write_kimi, write_kimi_alone),
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>functions.f:0"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.", ":1"),
        ),
        trailers=("<|tool_calls_section_end|>",),
        ids={"write_kimi": "functions.f:0", "write_kimi_alone": "f:12"},
    ),
    "pythonic": Format(
        Pythonic,
        oracle(naive_formats.pythonic, ["<|python_start|>"], trailer="<|python_end|>", bare="["),
        (write_pythonic, write_pythonic_tagged),
        (
            "<|python_start|>",
            "<|python_end|>",
            "[f(",
            "f(a=",
            ")]",
            "), ",
            "'",
            "\\x41",
            "\\ud83d\\ude00",
            "\\",
            "True",
        ),
        named=True,
        trailers=("<|python_end|>",),
    ),
    "lfm2": Format(
        Lfm2,
        oracle(naive_formats.pythonic, ["<|tool_call_start|>"], trailer="<|tool_call_end|>"),
        (write_lfm2, write_lfm2_as_json),
        ("<|tool_call_start|>", "<|tool_call_end|>", "[f(", "f(a=", ")]", "), ", "'", "\\u00e9", "\\ud83d", "None"),
        named=True,
        trailers=("<|tool_call_end|>",),
    ),
    "mistral": Format(
        Mistral,
        oracle(naive_formats.mistral, ["[TOOL_CALLS]"]),
        (write_mistral, write_mistral_with_id, write_mistral_list, write_mistral_list_with_id),
        ("[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS] [", '{"name": "f"}', "[ARGS]", "[CALL_ID]", ",", "]"),
        trailers=("]",),
        ids={"write_mistral_with_id": "9Ae3bDc2F", "write_mistral_list_with_id": "9Ae3bDc2F"},
    ),
    "gemma4": Format(
        Gemma4,
        oracle(naive_formats.gemma4, ["<|tool_call>"]),
        (write_gemma4,),
        ("<|tool_call>call:f{", "<|tool_call>", '<|"|>', "<tool_call|>", "a:", "}", "None"),
        plain_strings=True,
    ),
    "llama3": Format(
        Llama3,
        oracle(naive_formats.llama3, ["<|python_tag|>"], trailer=";", bare="{"),
        (write_llama3, write_llama3_tagged),
        ("<|python_tag|>", ";", '{"name": "f"', '"parameters": {', '"name"', '"type": "function"'),
    ),
    "harmony": Format(
        Harmony,
        naive_formats.harmony,
        (write_harmony, write_harmony_as_templates_do),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|>",
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>commentary",
            "<|channel|>",
            " to=functions.f",
            " to=",
            "<|constrain|>json",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "final",
        ),
    ),
}

CHARACTERS = st.text(st.sampled_from(list('ab"\\{}[]<>:;,=|/\n\t `é😀0-.n')), max_size=6)
TAGS = [tag for made in FORMATS.values() for tag in made.tags]


WORDS = st.sampled_from(["", "x", "Oslo", "a b\nc", "5", "null", "{", "}]", 'say "hi"', "\\n", "<b>", "é😀"])
NO_TEXT = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


def containers(inner: st.SearchStrategy[Any], *, plain: bool) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "key"]) if plain else st.sampled_from(["a", "b", "name", "{"]) | CHARACTERS
    return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)


def values(*, plain: bool) -> st.SearchStrategy[Any]:
    strings = WORDS if plain else WORDS | CHARACTERS | st.sampled_from(TAGS)
    return st.recursive(NO_TEXT | strings, lambda inner: containers(inner, plain=plain), max_leaves=6)


def arguments(made: Format) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that this format can write without loss."""
    if made.named:
        return st.dictionaries(st.sampled_from(["a", "b", "s", "é_1"]), values(plain=False), max_size=3)
    if not made.plain_strings:
        return st.dictionaries(st.sampled_from(["a", "b", "s"]) | CHARACTERS, values(plain=False), max_size=3)
    if made.parser is Gemma4:
        return st.dictionaries(st.sampled_from(["a", "b", "s", "s two"]), values(plain=True), max_size=3)
    # Where a string looks like JSON only a schema can tell: such ones stand where it says that they are strings.
    unknown = NO_TEXT | containers(values(plain=True), plain=True)
    strings = WORDS | CHARACTERS
    return st.fixed_dictionaries(
        {}, optional={"a": unknown, "b": unknown, "s": strings, "s1": strings, "s two": strings}
    )


@st.composite
def spoiled(draw: st.DrawFn, right: st.SearchStrategy[str]) -> str:
    """Cut somewhere, or a character too many, or too few, or another one."""
    text = draw(right)
    at = draw(st.integers(0, len(text)))
    behind = draw(st.sampled_from([len(text), at, min(at + 1, len(text))]))
    return text[:at] + draw(CHARACTERS) + text[behind:]


def mixtures(made: Format) -> st.SearchStrategy[str]:
    """Everything that a parser may come upon, in any order."""
    right = st.builds(lambda write, given: write("f", given), st.sampled_from(made.writers), arguments(made))
    pieces = (
        right
        | spoiled(right)
        | st.sampled_from(made.tags)
        | st.sampled_from(made.tags).flatmap(lambda tag: st.integers(1, len(tag)).map(lambda end: tag[:end]))
        | st.sampled_from([" ", "\n", "\n\n", "Let me look. ", "{}", '{"a": 1}', "5", "f", '"', ", "])
        | CHARACTERS
    )
    return st.lists(pieces, max_size=8).map("".join)


@st.composite
def chunked(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text, and the same in pieces, of which some are empty."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return text, [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run(parser: Any, pieces: Sequence[str]) -> list[Sampled]:
    """What a parser makes of all of them, neighbours of a kind joined."""
    found: list[Sampled] = []
    for piece in pieces:
        found += parser.feed(piece)
    return joined([*found, *parser.finish()])


def joined(pieces: Sequence[Sampled]) -> list[Sampled]:
    found: list[Sampled] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        else:
            found.append(piece)
    return found


def reasoning_first(pieces: Sequence[Sampled]) -> list[Sampled]:
    """Reasoning joined in front; text then stands next to text, and has its margins compared no further."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    rest = joined([piece for piece in pieces if not isinstance(piece, Reasoning)])
    return [*([Reasoning(thought)] if thought else []), *rest]
