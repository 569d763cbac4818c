"""The names under which notes on chats are found.

    the generation's id
    the path of the messages up to the reply's own            a client that goes on sends just these messages
    that path, with the reasoning of the reply                of several equal replies, the client means this one
    the path of the messages before the reply                 a client that edited the reply sends only these

A path is a digest of the adapter and the keys of messages, in their order.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from middleware_hub.chat.keys import adapter_of
from middleware_hub.chat.messages import Message, MessageKey
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode

_DIGEST: Final = 16


class Noted(NamedTuple):
    """What a sampled span of a chat keeps of its note (`TokenSpan.stored`).

    Attributes:
        record: the id of the reply's record.
        path: that of the messages up to the reply's own; empty until it is needed.
        rewritten: that of the record when the note was written, see `Stored`.
    """

    record: bytes
    path: bytes = b""
    rewritten: int = 0


def path_to(node: MessageNode) -> bytes:
    """Return the path of the messages up to a node."""
    behind: list[MessageNode] = []
    path = adapter_of(node.setting)
    for passed in node.ancestors():
        noted = next((one.span.stored for one in passed.samples or () if one.span.stored is not None), None)
        if noted is not None and noted.path:
            path = noted.path
            break
        behind.append(passed)
    for passed in reversed(behind):
        path = longer(path, passed.key)
    return path


def names_of_turn(checkpoint: Checkpoint) -> list[str]:
    """Return all names of the note on a turn."""
    above = checkpoint.node.parent
    assert above is not None
    return [checkpoint.id, *names_on(path_to(checkpoint.node), checkpoint.reasoning), name_before(path_to(above))]


def reasoning_in(message: Message) -> str:
    """Return the reasoning that a client sent with a message; empty without any."""
    found = message.get("reasoning_content")
    return found if isinstance(found, str) else ""


def longer(path: bytes, key: MessageKey) -> bytes:
    """Return the path of one more message."""
    said = key if isinstance(key, bytes) else repr(key).encode("utf-8", "surrogatepass")
    return blake2b(path + said, digest_size=_DIGEST).digest()


def names_on(path: bytes, reasoning: str) -> tuple[str, ...]:
    """Return the names of turns whose messages have this path, and whose reply this reasoning, or this one stripped."""
    texts = [text.encode("utf-8", "surrogatepass") for text in dict.fromkeys((reasoning, reasoning.strip())) if text]
    return path.hex(), *(longer(path, text).hex() for text in texts)


def name_before(path: bytes) -> str:
    """Return the name of turns whose prompt has this path."""
    return f"before {path.hex()}"
