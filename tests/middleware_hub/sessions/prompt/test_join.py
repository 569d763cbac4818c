"""Where a tail joins the sampled turn: the token that the model stopped with is used once, or left out."""

from __future__ import annotations

import pytest

from middleware_hub.radix.node import HiddenToken
from middleware_hub.sessions.prompt.join import Codec, Join, join, join_in_place
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import TokenSpan, pack_ids
from tests.middleware_hub.toy import EOS, EOT, LITERALS, A, encode, toy_vocabulary

CODEC = Codec(encode, encode, toy_vocabulary().spell, frozenset({EOS, EOT}), frozenset({EOS}), plain_starts=True)


def ended(last: int, finish: str) -> Checkpoint:
    """A turn that says `a`, and whose last token is special and hidden."""
    literal = next(text for text, token in LITERALS.items() if token == last)
    span = TokenSpan(None, 0, 0, pack_ids([A, last]), 1, versions="1", visible=1)
    node = MessageNode("1", "assistant", b"", None, 2)
    return Checkpoint("1", node, span, None, 0, finish, tail=(HiddenToken(1, literal, special=True, shown=0),))


@pytest.mark.parametrize(
    ("last", "finish", "left_out"),
    [(EOS, "stop", True), (EOT, "stop", True), (EOS, "length", True), (EOT, "length", False)],
)
def test_a_token_that_ends_no_turn_stays_where_the_limit_came_upon_it(last: int, finish: str, left_out: bool) -> None:
    """At a limit only the model's own stop tokens end a turn; any other special token is a part of it."""
    turn, take = ended(last, finish), 1 if left_out else 2
    other = "<t>" if last == EOS else "<e>"
    assert join(turn, other + "b", CODEC) == Join(take, other + "b", left_out=left_out)
    assert join_in_place(turn, CODEC) == Join(take, "", left_out=left_out)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_token_that_the_tail_spells_is_used_once(finish: str) -> None:
    assert join(ended(EOS, finish), "<e>b", CODEC) == Join(2, "b")


@pytest.mark.parametrize("blank", ["", "\n", " \n\n"])
def test_a_token_that_the_tail_spells_behind_white_space_is_used_once(blank: str) -> None:
    """Templates write `text\\n<|end|>\\n`: the white space is the turn's own, and the model has ended that."""
    assert join(ended(EOS, "stop"), f"{blank}<e>b", CODEC) == Join(2, "b")


def test_a_token_is_left_out_where_the_tail_ends_the_turn_with_another_one_behind_white_space() -> None:
    assert join(ended(EOT, "stop"), "\n<e>b", CODEC) == Join(1, "\n<e>b", left_out=True)


def test_white_space_before_anything_else_stays() -> None:
    assert join(ended(EOS, "stop"), "\nb<e>", CODEC) == Join(2, "\nb<e>")
    assert join(ended(EOS, "stop"), "\n<t>b", CODEC) == Join(2, "\n<t>b")
    assert join(ended(EOT, "length"), "\n<t>b", CODEC) == Join(2, "\n<t>b")


@pytest.mark.parametrize(
    ("tail", "joined"),
    [
        ("<t><e>b", Join(3, "b")),
        ("<t>\n<e>b", Join(3, "b")),
        ("<t>\nb", Join(2, "\nb", left_out=True)),
        ("<t><t>b", Join(2, "<t>b", left_out=True)),
        ("<e>b", Join(3, "b")),
        ("\n<e>b", Join(3, "b")),
    ],
)
def test_a_turn_with_two_end_tokens_ends_once(tail: str, joined: Join) -> None:
    """A base model under a chat template says both `<|im_end|>` and the `<|endoftext|>` that its engine stops at."""
    span = TokenSpan(None, 0, 0, pack_ids([A, EOT, EOS]), 1, versions="1", visible=1)
    hidden = HiddenToken(1, "<t>", special=True, shown=0), HiddenToken(1, "<e>", special=True, shown=0)
    turn = Checkpoint("1", MessageNode("1", "assistant", b"", None, 2), span, None, 0, "stop", tail=hidden)
    assert join(turn, tail, CODEC) == joined
