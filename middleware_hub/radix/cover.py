"""The fewest chains that hold a list of replies whole, no sampled token trained twice.

A chain is a path up the forest that spans make, so two replies are on one chain only if one of them is in front of the other.
What is needed is therefore each listed reply that no other listed reply's chain, nor the first sequence, holds whole.

    first     [context][reply 1][context][half of reply 2][context][reply 3]
    needed    [context][reply 1][context][reply 2, whole]                     mask 1 for reply 2 only
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from middleware_hub.radix.node import Generation
from middleware_hub.radix.tree import Namespace, RadixTree
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.trajectory import Trajectory


def needed(tree: RadixTree, namespace: Namespace, first: Trajectory, expected: Sequence[str]) -> list[Generation]:
    """The replies whose chains, beside `first`, hold all of these replies whole; in the order of their recording.

    Args:
        tree: what is recorded.
        namespace: where to look.
        first: the sequence that is there in any case.
        expected: request ids. A name that is not known is left out.
    """
    held = {turn.span for turn in first.turns if turn.end - turn.start == len(turn.span)}
    listed: dict[TokenSpan, Generation] = {}
    for name in expected:
        generation = None if any(span.named(name) for span in held) else tree.reply(namespace, name)
        if generation is not None and generation.span not in held:
            listed[generation.span] = generation
    inside: set[TokenSpan] = set()
    for span in listed:
        inside.update(part for part, take in links(span.parent, span.take) if take == len(part))
    return sorted((one for span, one in listed.items() if span not in inside), key=lambda one: one.serial)


class SharedMask:
    """Leaves mask 1 of each reply to one sequence: the first of those that hold the most of it.

    Args:
        first: a sequence that was laid flat.
        others: the replies that the other sequences end with.
    """

    def __init__(self, first: Trajectory, others: Sequence[Generation]) -> None:
        self._most: dict[TokenSpan, tuple[int, int]] = {}
        self._note(0, ((turn.span, turn.end - turn.start) for turn in first.turns))
        for number, generation in enumerate(others, 1):
            span = generation.span
            self._note(number, ((part, take) for part, take in links(span, len(span)) if part.sampled))

    def _note(self, number: int, turns: Iterable[tuple[TokenSpan, int]]) -> None:
        for span, size in turns:
            if size > self._most.get(span, (0, 0))[0]:
                self._most[span] = size, number

    def apply(self, number: int, sequence: Trajectory) -> None:
        """Set the mask of replies that belong to another sequence to 0; `number` counts the sequences, the first is 0."""
        for turn in sequence.turns:
            if self._most[turn.span][1] != number:
                sequence.loss_mask[turn.start : turn.end] = 0
