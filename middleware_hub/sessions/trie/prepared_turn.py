"""What the conversation of a turn met in the trie."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode


class EditedMessage(NamedTuple):
    """An assistant's message that was not sampled here and has sampled siblings: perhaps an edited echo of one of them.

    Attributes:
        at: the number of messages of the request up to and including it.
        samples: of its siblings, newest first.
    """

    at: int
    samples: tuple[Checkpoint, ...]


class PreparedTurn(msgspec.Struct, frozen=True, gc=False):
    """What a request's conversation met in the trie.

    Attributes:
        node: its last message.
        checkpoint: the sample that it continues; None if nothing on its path was sampled here.
        covered: the number of its messages that the checkpoint's chain contains.
        ambiguous: whether several samples could have been continued, and the request did not name one.
        unknown_parent: whether the request named a sample that is not on its path.
        named: the name.
        elsewhere: a deeper sample of the same messages under other tools or options, if there is one.
        edited: messages that may be edited echoes, last message first.
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
    setting: bytes = b""
