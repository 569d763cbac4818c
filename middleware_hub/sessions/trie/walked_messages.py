"""The messages of a request that repeat those of an earlier request, with the place in the trie where its walk ended."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from middleware_hub.chat.keys import KeyedMessage, MessageKey
from middleware_hub.chat.messages import Message
from middleware_hub.sessions.trie.nodes import MessageNode


class Landmark(msgspec.Struct, gc=False, eq=False):
    """The node at which the last walk along a conversation ended: the next turn repeats nearly all of that walk."""

    setting: bytes = b""
    front: tuple[MessageKey, ...] = ()
    node: MessageNode | None = None


class WalkedMessages(list[Message]):
    """The messages of a request, the first of which an earlier request may have walked along.

    Args:
        front: keyed messages in front of the others (a system prompt that a dialect keeps elsewhere).
        messages: the others.
        landmark: shared by requests of which one begins with the other, `front` left aside.
    """

    __slots__ = ("_front", "_landmark")

    def __init__(self, front: Sequence[KeyedMessage], messages: Sequence[Message], landmark: Landmark) -> None:
        super().__init__((*front, *messages) if front else messages)
        self._front = tuple(message.key for message in front)
        self._landmark = landmark

    def walked(self, setting: bytes) -> MessageNode | None:
        """Return a node on the path of these messages, if one is known."""
        mark = self._landmark
        if mark.node is None or mark.setting != setting or mark.front != self._front:
            return None
        # A node that was taken out of its trie has no parent. A node further down belongs to a longer conversation.
        return mark.node if mark.node.parent is not None and mark.node.depth <= len(self) else None

    def ends_at(self, setting: bytes, node: MessageNode) -> None:
        """Remember the node of the last message."""
        mark = self._landmark
        mark.setting, mark.front, mark.node = setting, self._front, node
