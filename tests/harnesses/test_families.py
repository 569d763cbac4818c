"""What a family's model writes is what the router's parsers read, and its ids end a reply; needs no harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from middleware_hub import parsers
from middleware_hub.chat.messages import Reasoning, SampledCall, Text
from tests.harnesses.families import FAMILIES, Family
from tests.harnesses.plan import Turn, more, spelled, task
from tests.support import templates
from worker.vocabulary import load_vocabulary

FIRST: dict[str, Any] = {"where": "there", "times": 2}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"where": {"type": "string"}}}}}
    for name in ("look", "gaze")
]

of_each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)


def plan(family: Family) -> list[Turn]:
    return [*task(family, "look", FIRST, {"where": "here"}, {}), more()]


def read(family: Family, sampled: str) -> tuple[str, str, list[SampledCall]]:
    """Return the thought, the text and the calls that the router finds, with the parsers that it chooses by the template."""
    source = templates.source(family.template)
    names = parsers.detect_calls(source), parsers.detect_reasoning(source)
    parser = parsers.create(*names, TOOLS, starts_inside=family.name == "qwen3.5")
    pieces = [*parser.feed(sampled), *parser.finish()]
    thought = "".join(one.text for one in pieces if isinstance(one, Reasoning))
    text = "".join(one.text for one in pieces if isinstance(one, Text))
    return thought, text, [one for one in pieces if isinstance(one, SampledCall)]


@of_each_family
def test_replies_are_read_as_they_are_meant(family: Family) -> None:
    for turn in plan(family):
        sampled = family.reply(turn)
        for end in family.ends:
            sampled = sampled.removesuffix(end)
        thought, text, calls = read(family, sampled)
        said = "\n".join(part for part in (turn.text, turn.broken) if part)
        assert (thought.strip(), text.strip()) == (turn.thought, said.strip())
        assert [one.name for one in calls] == [one.name for one in turn.calls]
        assert [json.loads(one.arguments) for one in calls] == [json.loads(one.arguments) for one in turn.calls]


@of_each_family
def test_a_client_gets_the_arguments_that_a_call_says(family: Family) -> None:
    for is_odd in (True, False):
        call = family.call("look", FIRST, is_odd=is_odd)
        (found,) = read(family, family.reply(Turn("", "", "", (call,))))[2]
        assert (found.name, found.arguments) == (call.name, call.arguments)
    assert family.call("look", FIRST, is_odd=True).written != family.call("look", FIRST).written


@of_each_family
def test_a_reply_is_ids_that_no_encoder_makes_and_its_mark_ends_it(family: Family, tmp_path: Path) -> None:
    known = load_vocabulary(family.tokenizer(tmp_path))
    for seed, turn in enumerate(plan(family)):
        text = family.reply(turn)
        ids = spelled(text, known.encode_bare, seed)
        assert known.decode(ids, skip_special_tokens=False) == text
        assert ids != known.encode_bare(text)
        ended = [number for number in ids if number in known.eos_ids]
        assert ended == ids[-1:] if turn.calls and family.ends else ended in ([], ids[-1:])
