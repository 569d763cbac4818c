"""A small model of the router's matching: which sampled tokens of earlier replies would a request's ids begin with?

Only ends of tokens matter here, so a chain is a text, the end of each token in it, and which of them were sampled.
Covered: a match that ends anywhere, whole tokens only, a hidden tail that the later text spells, a hidden special token
that it does not spell, context reused only in front of a sampled token, and the longest complete reply, or what
continues it, before another chain's longer partial match.
"""

import dataclasses
from bisect import bisect_right

from proxy import Turn
from vocabulary import Vocabulary

SPECIAL = ("<|im_end|>", "<|endoftext|>")


@dataclasses.dataclass
class Chain:
    """One generation: `text` holds prompt, reply and hidden tail; `visible` is where the reply's own text ends."""

    text: str
    visible: int
    ends: list[int]
    sampled: list[bool]
    chars: list[int]
    """Of each sampled token, how many characters the client saw."""
    finished: bool
    """Ended by the model or a stop string, not by an abort or a limit."""
    parent: "Chain | None" = None
    """The last chain whose whole reply this one contains: not always the one it was cut from."""

    def continues(self, other: "Chain") -> bool:
        """Return whether this is the other chain, or begins with the whole of it."""
        chain: Chain | None = self
        while chain is not None and chain is not other:
            chain = chain.parent
        return chain is other


@dataclasses.dataclass(frozen=True)
class Match:
    """The first `count` tokens of `chain`, which stand for the first `consumed` characters of the request."""

    chain: Chain | None = None
    count: int = 0
    consumed: int = 0
    complete: bool = False
    cut_in_token: bool = False

    @property
    def tokens(self) -> int:
        """Count the sampled tokens that are reused."""
        return sum(self.chain.sampled[: self.count]) if self.chain else 0

    @property
    def chars(self) -> int:
        """Count the sampled and visible characters that are reused."""
        return sum(self.chain.chars[: self.count]) if self.chain else 0


def common_prefix(a: str, b: str) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def match_one(chain: Chain, text: str) -> Match:
    """Return how far a text follows one chain."""
    common = common_prefix(chain.text, text)
    complete = common >= chain.visible and chain.visible > 0
    count = bisect_right(chain.ends, common)
    consumed = chain.ends[count - 1] if count else 0
    crossing = count < len(chain.ends) and chain.sampled[count] and consumed < common
    if complete and len(text) > chain.visible and chain.text[consumed:] in SPECIAL:
        count = len(chain.ends)
    while count and not chain.sampled[count - 1]:
        count -= 1
    consumed = min(chain.ends[count - 1], common) if count else 0
    return Match(chain, count, consumed, complete, crossing)


def match(chains: list[Chain], text: str, finished_only: bool = False) -> Match:
    """Return the parent of a request.

    The longest complete reply that the text begins with decides, with all that continues it; without one, whatever
    matches furthest. With `finished_only`, only a reply that ended by itself may decide.
    """
    found = [(chain, match_one(chain, text)) for chain in chains]
    whole = [chain for chain, m in found if m.complete and (chain.finished or not finished_only)]
    if whole:
        longest = max(whole, key=lambda chain: chain.visible)
        found = [(chain, m) for chain, m in found if chain.continues(longest)]
    return max((m for _, m in found), key=lambda m: (m.tokens, m.complete), default=Match())


def extend(parent: Match, turn: Turn, vocabulary: Vocabulary) -> Chain:
    """Return the chain of one more generation."""
    ends, sampled, chars = [], [], []
    if parent.chain and parent.tokens:
        ends = [min(end, parent.consumed) for end in parent.chain.ends[: parent.count]]
        sampled, chars = parent.chain.sampled[: parent.count], parent.chain.chars[: parent.count]
    start = parent.consumed if ends else 0
    for end in vocabulary.context(turn.text[start:]).ends:
        ends.append(start + end)
        sampled.append(False)
        chars.append(0)
    reply = vocabulary.sampled(turn.output_ids)
    assert reply.text.startswith(turn.reply), (reply.text, turn.reply)
    before = 0
    for end in reply.ends:
        ends.append(len(turn.text) + end)
        sampled.append(True)
        chars.append(max(0, min(end, len(turn.reply)) - before))
        before = max(before, min(end, len(turn.reply)))
    visible = len(turn.text) + len(turn.reply)
    finished = turn.finish["type"] == "stop"
    whole = parent.chain
    while whole is not None and parent.count < bisect_right(whole.ends, whole.visible):
        whole = whole.parent
    return Chain(turn.text + reply.text, visible, ends, sampled, chars, finished, whole)
