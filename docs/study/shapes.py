"""What a reply looks like: regular expressions the worker's grammar backend holds a random model to.

The model picks the letters and the tokens; the shape fixes what the study is about, the structure and the white space.
`clean` replies are what a well-trained model writes when all goes well. `ragged` ones add what models also do: blank
lines in front, a trailing space, a line break after the last tag, text beyond the closing tag, JSON spaced in another
way. The ragged shapes take turns, so their share is ours and says nothing about how often a model does it.
"""

import dataclasses
from collections.abc import Callable

WORDS = r"[a-z]{2,7}( [a-z]{2,7}){3,8}"
SENTENCE = r"[A-Z][a-z]{1,6}( [a-z]{2,7}){3,9}\."


@dataclasses.dataclass(frozen=True)
class Shape:
    """A name for the tables, and the regular expression of the whole reply."""

    name: str
    regex: str


Pick = Callable[[int], Shape]
"""From the number of a turn, counted from 0, to the shape of its reply."""


def _cycle(shapes: list[Shape], offset: int) -> Pick:
    return lambda turn: shapes[(turn + offset) % len(shapes)]


def _edges(clean: str, prefix: str = "") -> list[Shape]:
    """One reply with the four kinds of white space around it."""
    return [
        Shape("blank lines in front", prefix + r"\n\n" + clean),
        Shape("trailing space", prefix + clean + " "),
        Shape("trailing blank lines", prefix + clean + r"\n\n"),
        Shape("both ends", prefix + r"\n" + clean + r" \n"),
    ]


def search(ragged: bool, offset: int, last: int) -> Pick:
    """Search-R1: think, then a query; from turn `last` on, an answer. Replies open as those of reasoning models do."""
    think = r"<think>\nOkay, so I need to find " + WORDS + r"\n</think>\n"
    query = think + f"<search>{WORDS}</search>"
    made_up = r'\n\n<information>Doc 1\(Title: "' + WORDS + r'"\) ' + WORDS + r"</information>\n\n"
    kinds = [
        Shape("goes on and makes up the result", query + made_up + f"<answer>{WORDS}</answer>"),
        Shape("blank lines behind the tag", query + r"\n\n"),
        Shape("blank lines in front", r"\n\n" + query),
        Shape("no action at all", think + WORDS),
    ]
    pick = _cycle(kinds if ragged else [Shape("query", query)], offset)
    return lambda turn: pick(turn) if turn < last else Shape("answer", think + f"<answer>{WORDS}</answer>")


def chat(ragged: bool, offset: int) -> Pick:
    """A plain answer of one sentence."""
    return _cycle(_edges(SENTENCE) if ragged else [Shape("sentence", SENTENCE)], offset)


def completion_chat(ragged: bool, offset: int) -> Pick:
    """An answer behind `AI:`, so with one space in front, as a completion has there."""
    kinds = [Shape("no space in front", SENTENCE), *_edges(SENTENCE)]
    return _cycle(kinds if ragged else [Shape("one space in front", " " + SENTENCE)], offset)


def react(ragged: bool, offset: int, action: str, last: int, final: str) -> Pick:
    """Thought and action, then the model runs on into an observation of its own, where the stop string ends it.

    `action` and `final` may contain `{i}`, the number of the step from 1, `{words}` and `{end}`, the white space that
    stands in front of the stop string.
    """

    def shape(turn: int) -> Shape:
        kinds = [
            ("trailing spaces", " ", "  "),
            ("line break in front", r"\n", ""),
            ("trailing blank line", " ", r" \n"),
        ]
        name, front, end = kinds[(turn + offset) % len(kinds)] if ragged else ("step", " ", "")
        pattern = final if turn >= last else action
        filled = pattern.replace("{i}", str(turn + 1)).replace("{words}", WORDS).replace("{end}", end)
        return Shape(name, front + SENTENCE + filled)

    return shape


def thinking(ragged: bool, offset: int) -> Pick:
    """Qwen3's own form: a think block, a blank line, the answer."""
    kinds = [
        Shape("blank lines inside and behind", r"<think>\n\n" + SENTENCE + r" \n\n</think>\n\n\n" + SENTENCE),
        Shape("no line breaks at all", f"<think>{SENTENCE}</think>{SENTENCE}"),
        Shape("trailing space", r"<think>\n" + SENTENCE + r"\n</think>\n\n" + SENTENCE + " "),
        Shape("trailing line break", r"<think>\n" + SENTENCE + r"\n</think>\n\n" + SENTENCE + r"\n"),
    ]
    clean = Shape("as in the template", r"<think>\n" + SENTENCE + r"\n</think>\n\n" + SENTENCE)
    return _cycle(kinds if ragged else [clean], offset)


def tool_call(ragged: bool, offset: int, think: bool, last: int) -> Pick:
    """A hermes tool call; from turn `last` on, an answer in prose."""
    head = r"<think>\n" + SENTENCE + r"\n</think>\n\n" if think else ""

    def call(arguments: str, outer: str = r'\{"name": "search", "arguments": ARGS\}') -> str:
        return r"<tool_call>\n" + outer.replace("ARGS", arguments) + r"\n</tool_call>"

    spaced = r'\{"query": "' + WORDS + r' café", "top_k": [1-9]\}'
    compact = r'\{"query":"' + WORDS + r'","top_k":[1-9]\}'
    kinds = [
        Shape("compact JSON", head + call(compact, r'\{"name":"search","arguments":ARGS\}')),
        Shape("compact arguments only", head + call(compact)),
        Shape("unicode escapes", head + call(r'\{"query": "' + WORDS + r' caf\\u00e9", "top_k": [1-9]\}')),
        Shape("a number written 5.0e0", head + call(r'\{"query": "' + WORDS + r'", "top_k": [1-9]\.0e0\}')),
        Shape("arguments before name", head + call(spaced, r'\{"arguments": ARGS, "name": "search"\}')),
        Shape("blank line between prose and call", head + SENTENCE + r"\n\n" + call(spaced)),
        Shape("line break behind the call", head + call(spaced) + r"\n"),
    ]
    clean = [
        Shape("spaced JSON", head + call(spaced)),
        Shape("prose, one line break, spaced JSON", head + SENTENCE + r"\n" + call(spaced)),
        Shape("two calls", head + call(spaced) + r"\n" + call(spaced)),
    ]
    pick = _cycle(kinds if ragged else clean, offset)
    return lambda turn: pick(turn) if turn < last else Shape("final answer", head + SENTENCE)
