"""Scripted lines are spelled in tokens that encoding their text would not give."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from worker.demo.agent.script import Line, Prompter, tool_call
from worker.models.ngram import shipped_tokenizer

TOKENIZER = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))
PROMPTER = Prompter(TOKENIZER)


@given(st.text(st.sampled_from("abc {}\n\"'京é🐟<think>"), min_size=1, max_size=40), st.integers(0, 99))
def test_the_ids_spell_the_line(text: str, seed: int) -> None:
    assert TOKENIZER.decode(PROMPTER.ids(Line(text, seed)), skip_special_tokens=False) == text


def test_a_call_has_its_own_spelling_which_is_always_the_same() -> None:
    line = Line(tool_call("search", query="height of Mount Fuji"), seed=6)
    assert PROMPTER.ids(line) != TOKENIZER.encode(line.text, add_special_tokens=False).ids
    assert PROMPTER.ids(line) == Prompter(TOKENIZER).ids(line)


def test_a_call_is_json_between_its_tags() -> None:
    opening, call, closing = tool_call("search", query='a "b" 京').split("\n")
    assert (opening, closing) == ("<tool_call>", "</tool_call>")
    assert json.loads(call) == {"name": "search", "arguments": {"query": 'a "b" 京'}}


@pytest.mark.parametrize("free", [False, True])
def test_a_line_ends_its_turn_unless_it_is_free(free: bool) -> None:
    line = Line("Both have", seed=1, free=free)
    fields, count = PROMPTER.fields(line)
    script = fields["custom_params"]["script"]
    assert script["finish"] == (None if free else "eos")
    assert count == len(script["ids"]) + (0 if free else 1)
