"""How much of a sampled turn an edited echo keeps, in a vocabulary that has an id without text."""

from __future__ import annotations

import pytest

from middleware_hub.sessions.prompt.edited_turns import keep
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import TokenSpan, pack_ids
from tests.middleware_hub.toy import AB, BA, EOS, GT, LT, NOTHING, SPACE, A, B, E, toy_vocabulary


def sampled(ids: list[int]) -> Checkpoint:
    node = MessageNode("1", "assistant", b"", None, 2)
    return Checkpoint("1", node, TokenSpan(None, 0, 0, pack_ids(ids), 0, versions="1"), None, 0, "stop")


@pytest.mark.parametrize(
    ("ids", "echo", "take", "rest"),
    [
        ([A, SPACE, B], "a b", 3, ""),
        ([A, SPACE, B], "a <", 2, "<"),
        ([A, BA, B], "ab<", 1, "b<"),
        ([AB, NOTHING, B], "ab<", 1, "<"),
        ([AB, NOTHING, NOTHING, B], "ab<", 1, "<"),
        ([NOTHING, A], "b", 0, "b"),
        ([AB, NOTHING], "ab<", 2, "<"),
        ([A, LT, B], "a<e>", 1, "<e>"),
        ([A, LT, E, GT], "a<e>", 4, ""),
        ([A, EOS, B], "a<e>a", 2, "a"),
    ],
)
def test_it_keeps_the_tokens_that_lie_wholly_in_the_common_text(
    ids: list[int], echo: str, take: int, rest: str
) -> None:
    """An id without text stays only inside the common text or at the turn's end; no added token of the echo is cut."""
    kept = keep(sampled(ids), echo, toy_vocabulary())
    assert (kept.take, kept.text, kept.all) == (take, rest, take == len(ids))
