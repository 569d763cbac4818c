"""The tree has turns that several trajectories share once."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
from rich.console import Console

from tests.worker.demo.agent.session import RESULT, ROOT, trajectories, turns
from worker.demo.agent.clients import AgentTurn
from worker.demo.agent.show import draw, forest, walk


def drawn(given: list[dict[str, Any]], known: dict[str, AgentTurn]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=76).print(draw(forest(given, known), {"two": 0.5}), highlight=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_drawing() -> None:
    assert drawn(trajectories(), turns()) == [
        "lead · openai client                   scripted sampled weights score branch",
        "  system    You lead.",
        "  user      How high?",
        "● assistant Hm.                               2       -       1",
        '            → search(query="Fuji")',
        "  tool      3,776 m",
        "├── ● assistant High.                         2       1     1+2  0.50      A",
        "└── ● assistant Higher.                       2       -       2            B",
    ]


def test_a_branch_that_goes_on_is_the_last_one_and_has_its_context_below_it() -> None:
    given, known = trajectories(), turns()
    more = given[0]
    more["messages"] += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes."}]
    more["response_ids"] += [5, 40]
    more["response_mask"] += [0, 1]
    more["weight_versions"].append({"version": "3", "start": 7, "end": 8})
    more["extra_fields"]["turns"].append({"generation_id": "four", "start": 7, "end": 8})
    more["branch"] = "four"
    known["four"] = AgentTurn("lead", "openai", "four", 0, "Yes.", (), None, 3)
    assert drawn(given, known)[-5:] == [
        "  tool      3,776 m",
        "├── ● assistant Higher.                       2       -       2            A",
        "└── ● assistant High.                         2       1     1+2  0.50",
        "      user      And?",
        "    ● assistant Yes.                          -       1       3            B",
    ]


def test_branches_with_contexts_of_their_own_show_them() -> None:
    given = trajectories()
    given[1]["messages"][3] = {"role": "user", "content": "[bold] is no markup"}
    assert drawn(given, turns())[-4:] == [
        "├──   tool      3,776 m",
        "│   ● assistant High.                         2       1     1+2  0.50      A",
        "└──   user      [bold] is no markup",
        "    ● assistant Higher.                       2       -       2            B",
    ]


def test_text_of_the_model_is_not_markup() -> None:
    known = turns()
    known["three"] = AgentTurn("lead", "openai", "three", 2, "a [bold] one", (), None, 2)
    assert "a [bold] one" in drawn(trajectories(), known)[-1]


def test_roots_come_in_the_order_of_their_requests() -> None:
    given, known = trajectories(), turns()
    for one in given:  # another conversation each
        del one["extra_fields"]["turns"][0]
        one["messages"] = [*ROOT, {"role": "assistant", "content": ""}]
    roots = forest(list(reversed(given)), known)
    assert [root.turn.generation for root in roots] == ["two", "three"]
    assert [node.branch for node in walk(roots)] == ["A", "B"]
    assert [node.trajectory for node in walk(roots)] == [1, 0]


def test_context_is_what_stands_in_front_of_a_turn() -> None:
    (root,) = forest(trajectories(), turns())
    assert root.context == ROOT
    assert [child.context for child in root.children] == [[RESULT], [RESULT]]


def test_an_unknown_turn_raises() -> None:
    with pytest.raises(KeyError, match="three"):
        forest(trajectories(), {name: turn for name, turn in turns().items() if name != "three"})


def test_an_image_is_shown_with_its_length() -> None:
    """The trajectories keep their digests: what is shown is a copy."""
    given = trajectories()
    for one in given:
        photo = {"role": "tool", "content": [{"type": "image", "digest": "sha256:1"}, {"type": "text", "text": "Fuji"}]}
        one["messages"][3] = photo
        image = {"digest": "sha256:1", "span": [4, 23], "message": 3, "part": 0}
        one["multi_modal_data"] = {"images": [image]}
    before = deepcopy(given)
    assert drawn(given, turns())[5] == "  tool      [image: 19 tokens] Fuji"
    assert given == before
