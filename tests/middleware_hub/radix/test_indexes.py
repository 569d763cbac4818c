"""A reply is found by its name for as long as it is there; of several with one name, the newest answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.spans.chain import names_of, pack_ids
from tests.middleware_hub.radix.talk import NS, Talk
from tests.middleware_hub.toy import EOS, SPACE, A, B


@given(st.lists(st.sampled_from(["x", "y", "x y", "", "z"]), max_size=12), st.integers(0, 40))
def test_names_are_those_of_the_replies_that_are_left(names: list[str], budget: int) -> None:
    talk = Talk()
    made = [(name, talk.say("a" * (number % 3 + 1), [B, EOS], name)) for number, name in enumerate(names)]
    talk.tree.max_tokens = budget
    talk.tree.collect()
    left = [(name, turn.generation) for name, turn in made if turn.generation.span.owner is turn.generation]
    for name in ("x", "y", "z", "gone"):
        newest = next((one for names, one in reversed(left) if name in names.split()), None)
        assert talk.tree.reply(NS, name) is newest
        assert talk.tree.reply(("other", "", ""), name) is None


def test_the_prefix_of_a_dialect_is_no_part_of_a_name() -> None:
    assert names_of("chatcmpl-1") == ("chatcmpl-1", "1")
    assert names_of("cmpl-1") == ("cmpl-1", "1")
    assert names_of("msg_1") == ("msg_1", "1")
    assert names_of("rollout-1") == ("rollout-1",)
    talk = Talk()
    turn = talk.say("a", [A], "chatcmpl-1")
    assert talk.tree.reply(NS, "chatcmpl-1") is turn.generation, "a client's own name may look like one"
    assert talk.tree.reply(NS, "1") is None


def test_nothing_is_left_when_the_tree_is_cleared() -> None:
    talk = Talk()
    talk.say("a", [A], "x")
    talk.tree.clear()
    assert talk.tree.reply(NS, "x") is None


class Asked(dict[int, Any]):
    """Chains that count how often one is looked for."""

    count = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.lists(st.sampled_from([A, B, EOS]), min_size=1, max_size=4)), max_size=12),
    st.integers(0, 12),
)
def test_a_prompt_of_many_ids_costs_what_there_are_chains(turns: list[tuple[int, list[int]]], at: int) -> None:
    """And finds what it would find by all of its prefixes, which a short prompt is looked for by."""
    talk = Talk()
    made = [[A]]
    for number, (after, sampled) in enumerate(turns):
        made.append(talk.say_ids([*made[after % len(made)], SPACE], sampled, f"r{number}").ids)
    index, ids = talk.tree.by_ids, made[at % len(made)]
    found = index.longest(NS, pack_ids([*ids, SPACE]), None)
    if index._chains:
        index._chains[NS] = chains = Asked(index._chains[NS])
        assert index.longest(NS, pack_ids([*ids, *[SPACE] * 500]), None) == found
        assert chains.count <= 2 * len(turns)


class Equal(list[Any]):
    """Replies of one chain, which are not gone through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("each of the equal replies is looked at")


@pytest.mark.parametrize("sampled", [[B], [B, EOS]])
def test_a_prompt_of_many_ids_does_not_cost_what_there_are_equal_replies(sampled: list[int]) -> None:
    """A prompt of ids that is asked again and again, and has the same reply each time."""
    talk = Talk()
    for number in range(3):
        talk.say_ids([A, SPACE], sampled, f"r{number}")
    index, ids = talk.tree.by_ids, pack_ids([A, SPACE, *sampled, *[SPACE] * 500])
    found = index.longest(NS, ids, None)
    assert found is not None
    assert found[0].span.named("r2")
    index._chains[NS] = {key: Equal(ones) for key, ones in index._chains[NS].items()}
    assert index.longest(NS, ids, None) == found
