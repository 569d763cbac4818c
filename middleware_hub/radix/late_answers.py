"""What a store answers when it is asked late: replies that a prompt would have continued if the store had answered in time.

    text      |  prompt  |  reply 1  |   observation   |  reply 2
    chain     [          context, encoded without the store    ][ sampled ]     `UNASKED`
    store     [ context ][  sampled ]                                           passed over: reply 1

The prompt is matched again, once the tree has what the store knows of its text. If that match has no sampled tokens after
those that the chain has, nothing was passed over. What was recorded since counts too: clocks of routers may differ, so nobody
can tell it from what was there.
"""

from __future__ import annotations

from typing import NamedTuple

from middleware_hub.radix.cut import Cut, end_of
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Namespace
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import SpanFlag, TokenSpan, chain_ids, links


class Doubt(NamedTuple):
    """A prompt that was made while the store could not be asked.

    Attributes:
        span: the first span after the match of the prompt; it has the flag.
        text: of the prompt, up to the end of its context.
        prompt: its chain.
        used: the sampled tokens that the prompt reused, and the character at which they end.
    """

    span: TokenSpan
    namespace: Namespace
    text: str
    prompt: Cut
    used: Cut


def doubts(namespace: Namespace, cut: Cut) -> list[Doubt]:
    """Return the doubtful prompts in a chain that is in the tree."""
    found = []
    for span, _ in links(cut.span, cut.take):
        owner = span.owner
        if not span.flags & SpanFlag.DOUBTFUL or owner is None:
            continue
        if isinstance(owner, Generation):
            text, prompt = owner.node.text[: span.start], Cut(span.parent, span.take, span.start)
        else:
            text, prompt = owner.text, end_of(span)
        base, take, start, _ = prompt.sampled_base
        found.append(Doubt(span, namespace, text, prompt, Cut(base, take, start)))
    return found


def passed_over(tree: RadixTree, doubt: Doubt) -> list[str] | None:
    """Return the names of the replies that a prompt passed over, as the tree knows its text now; None if there is none."""
    _, namespace, text, prompt, used = doubt
    if not text:
        return None
    match = tree.match(namespace, text)
    span, take, start, _ = match.cut.sampled_base
    further = start > used.start
    if not further and prompt.span is not None and prompt.span.flags & SpanFlag.GIVEN:
        # A chain may have the ids of the prompt and another text. (That of a chat is given, too: its text counts as well.)
        ids = chain_ids(prompt.span, prompt.take)
        span, take, _, _ = tree.match_ids(namespace, text, ids, lambda _: len(text)).cut.sampled_base
        further = span is not None and span.offset + take > used.tokens
    if not further:
        return None
    own = {part for part, _ in links(prompt.span, prompt.take)}
    others = [part for part, _ in links(span, take) if part.sampled and part not in own]
    return [part.request_ids[0] if part.request_ids else "" for part in reversed(others)]
