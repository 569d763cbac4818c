"""The match of a turn's conversation in the trie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from middleware_hub.chat.call_ids import is_of
from middleware_hub.chat.keys import call_ids
from middleware_hub.chat.messages import Message
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode

MOST_EDITED = 4
"""How many of the last messages are considered as edited echoes; for each, twice as many samples."""


class EditedMessage(NamedTuple):
    """An assistant's message that was not sampled here and has sampled siblings: perhaps an edited echo of one of them.

    Attributes:
        at: the number of messages of the request up to and including it.
        samples: of its siblings: those that its calls name, then the newest.
    """

    at: int
    samples: tuple[Checkpoint, ...]


class PreparedTurn(msgspec.Struct, frozen=True, gc=False):
    """The match of a request's conversation in the trie.

    Attributes:
        node: its last message.
        checkpoint: the sample that it continues; None if nothing on its path was sampled here.
        covered: the number of its messages that the checkpoint's chain contains.
        ambiguous: whether several samples could have been continued, and the request did not name one.
        unknown_parent: whether the request named a sample that is not on the request's path under this setting.
        named: the name.
        elsewhere: a sample of the same messages under other tools or options: the named one, or else a deeper one.
        edited: messages that may be edited echoes, last message first.
        prefix_changed: whether a message after `covered` was sampled in this trie, behind other messages.
        setting: the key of the tools and options that render it.
    """

    node: MessageNode
    checkpoint: Checkpoint | None
    covered: int
    ambiguous: bool = False
    unknown_parent: bool = False
    named: str | None = None
    elsewhere: Checkpoint | None = None
    edited: tuple[EditedMessage, ...] = ()
    prefix_changed: bool = False
    setting: bytes = b""

    def names(self, sample: Checkpoint) -> bool:
        """Whether the request names this sample."""
        return self.named is not None and sample.span.named(self.named)


def choose(node: MessageNode, echo: Message, reply: str = "") -> tuple[Checkpoint, bool]:
    """Return the sample of a node to continue, and whether the request may mean another.

    The sample is the one of the id `reply`, else the one whose calls the echo has, by their ids, else the newest with the
    reasoning of the echo, which clients may have stripped, else the newest.
    """
    equal = samples = node.samples or []
    if reply and (named := next((sample for sample in samples if sample.span.named(reply)), None)):
        return named, False
    if len(samples) > 1:
        called = [sample for sample in samples if any(is_of(name, sample.id) for name in call_ids(echo))]
        if called:
            return called[-1], False
    if len(samples) > 1 and (reasoning := echo.get("reasoning_content")):
        alike = [sample for sample in samples if sample.reasoning.strip() == reasoning.strip()]
        equal = [sample for sample in alike if sample.reasoning == reasoning] or alike or samples
    return equal[-1], len(equal) > 1


def edited_messages(node: MessageNode, depth: int) -> Iterator[EditedMessage]:
    """Yield the assistant's messages below `depth` that were not sampled here and have sampled siblings, deepest first."""
    passed = node
    while passed.depth > depth and (above := passed.parent) is not None:
        if passed.role == "assistant" and len(above.children or ()) > 1:
            siblings = (one for one in reversed((above.children or {}).values()) if one.samples)
            samples = [sample for one in siblings for sample in reversed(one.samples or ())]
            found = tuple(_likeliest(samples, passed))
            if found:
                yield EditedMessage(passed.depth, found)
        passed = above


def _likeliest(samples: Sequence[Checkpoint], echo: MessageNode) -> Sequence[Checkpoint]:
    """Return the samples to compare an edited echo with: those that its calls name, then the newest."""
    if len(samples) > 2 * MOST_EDITED and (ids := call_ids(msgspec.json.decode(echo.message))):
        samples = sorted(samples, key=lambda sample: not any(is_of(name, sample.id) for name in ids))
    return samples[: 2 * MOST_EDITED]
