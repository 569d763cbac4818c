"""What a trie of messages is made of: messages, the turns that were sampled for them, and who is on his way to add some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.keys import KeyedMessage, MessageKey
from middleware_hub.chat.messages import Message
from middleware_hub.radix.node import HiddenToken
from middleware_hub.spans.chain import TokenSpan


class Checkpoint(msgspec.Struct, gc=False, eq=False):
    """One sampled turn, and with it the whole exact sequence that ends there.

    Attributes:
        id: of the generation.
        node: the assistant's message.
        span: what was sampled; the spans before it are the prompt.
        parent: the checkpoint that its prompt went on from.
        serial: the order of commits in the session, from 0.
        tail: the hidden tail of what was sampled (see `radix_node`).
        shown: of a token that is partly hidden, the characters that the client saw.
        finish: `stop`, `length`, `tool_calls` or `abort`.
        reasoning: what was thought, which is no part of the message's key.
        scaffold: the generation prompt that it was asked with, as it was sent; empty if that is not known.
        reasons: why this turn is not, or not in every way, exact.
        extra: per-token fields of the worker, raw.
        continued: how many checkpoints go on from here, on this branch.
        users: how many checkpoints and generations in flight go on from here, on whatever branch.
        apart: this is the first turn of a branch of its own, though its chain goes on from `parent`: its prompt was rendered
            anew, with other tools or options, or because the template had rewritten earlier turns.
        edited: on its path stands another message in the place of `parent`'s: an echo that is not quite what was sampled.
        reward: what was attached to it.
    """

    id: str
    node: MessageNode
    span: TokenSpan
    parent: Checkpoint | None
    serial: int
    finish: str
    tail: tuple[HiddenToken, ...] = ()
    shown: str = ""
    reasoning: str = ""
    scaffold: str = ""
    reasons: tuple[str, ...] = ()
    extra: dict[str, msgspec.Raw] = {}
    continued: int = 0
    users: int = 0
    apart: bool = False
    edited: bool = False
    reward: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id}: turn {self.depth}, {self.span!r}>"

    @property
    def terminal(self) -> bool:
        """Whether nothing goes on from here: the end of a branch."""
        return not self.continued

    @property
    def depth(self) -> int:
        """Sampled turns from the first to this one."""
        return sum(1 for _ in self.lineage())

    def lineage(self) -> Iterator[Checkpoint]:
        """This checkpoint, the one it goes on from, and so on up."""
        found: Checkpoint | None = self
        while found is not None:
            yield found
            found = found.parent


class MessageNode(msgspec.Struct, gc=False, eq=False):
    """One message of a conversation. Nodes are cut loose by hand (`MessageTrie.clear`): no garbage collector looks at them.

    Attributes:
        role: empty at a root.
        message: as the client wrote it, or as it was generated (less its reasoning, which is the samples' own), as JSON.
        samples: the checkpoints of an assistant's message that was generated here, oldest first.
        handles: generations in flight whose prompt ends here.
        committed: whether a generation was committed here or below.
        contexts: what prompts that end here were given, each behind its checkpoint's chain: equal requests share them.
        setting: the key of the tools and options that it is rendered with.
        path_hash: of the keys from the root to here, and of the adapter; the same under whatever setting.
    """

    key: MessageKey
    role: str
    message: bytes
    parent: MessageNode | None
    depth: int
    children: dict[MessageKey, MessageNode] | None = None
    samples: list[Checkpoint] | None = None
    contexts: list[TokenSpan] | None = None
    handles: int = 0
    committed: bool = False
    setting: bytes = b""
    path_hash: int = 0

    def __repr__(self) -> str:
        state = "" if self.committed else ", pending"
        return f"<MessageNode {self.role or 'root'} at {self.depth}: {len(self.samples or ())} samples{state}>"

    def path(self) -> list[MessageNode]:
        """The nodes of this conversation, first message first."""
        found: list[MessageNode] = []
        node: MessageNode | None = self
        while node is not None and node.depth:
            found.append(node)
            node = node.parent
        found.reverse()
        return found


class BranchHandle(msgspec.Struct, gc=False, eq=False):
    """A generation in flight: where it will be attached."""

    generation_id: str
    node: MessageNode
    checkpoint: Checkpoint | None = None
    apart: bool = False
    open: bool = True
    held: tuple[Checkpoint, ...] = ()

    def goes_on_from(self, checkpoint: Checkpoint | None, *, apart: bool) -> None:
        """What its prompt turned out to begin with, and whether it is a branch of its own all the same."""
        if not self.open:
            return
        self.hold(checkpoint)
        self.apart = apart and checkpoint is not None

    def hold(self, *checkpoints: Checkpoint | None) -> None:
        """What it may go on from, the likeliest first; it cannot be dropped as long as it is held."""
        for one in checkpoints:
            if one is not None:
                one.users += 1
        for one in self.held:
            one.users -= 1
        self.held = tuple(one for one in checkpoints if one is not None)
        self.checkpoint = checkpoints[0] if checkpoints else None


class Landmark(msgspec.Struct, gc=False, eq=False):
    """Where in a trie the messages of a conversation end that was walked before: the next turn's are nearly all of them."""

    setting: bytes = b""
    front: tuple[MessageKey, ...] = ()
    node: MessageNode | None = None


class Conversation(list[Message]):
    """Messages, of which the first ones may have been walked before.

    Args:
        front: keyed messages in front of the others (a system prompt that a dialect keeps elsewhere).
        messages: the others.
        landmark: shared by conversations of which one begins with the other, what is in front left aside.
    """

    __slots__ = ("_front", "_landmark")

    def __init__(self, front: Sequence[KeyedMessage], messages: Sequence[Message], landmark: Landmark) -> None:
        super().__init__((*front, *messages) if front else messages)
        self._front = tuple(message.key for message in front)
        self._landmark = landmark

    def walked(self, setting: bytes) -> MessageNode | None:
        """A node on its path, if one is known."""
        mark = self._landmark
        if mark.node is None or mark.setting != setting or mark.front != self._front:
            return None
        # A node that was taken out of its trie has no parent; and one below is of a longer conversation.
        return mark.node if mark.node.parent is not None and mark.node.depth <= len(self) else None

    def ends_at(self, setting: bytes, node: MessageNode) -> None:
        """Where it was found, or put."""
        mark = self._landmark
        mark.setting, mark.front, mark.node = setting, self._front, node


class EditedMessage(NamedTuple):
    """A message beside samples. Messages of the request up to it, and the samples, the newest one first."""

    at: int
    samples: tuple[Checkpoint, ...]


class PreparedTurn(msgspec.Struct, frozen=True, gc=False):
    """What a request's conversation met in the trie.

    Attributes:
        node: its last message.
        checkpoint: what it goes on from; None if nothing on its path was sampled here.
        covered: so many of its messages are in the checkpoint's chain.
        ambiguous: several samples could have been continued, and the request did not say which.
        unknown_parent: it named one that is not on its path.
        named: the name.
        elsewhere: a deeper sample of the same messages under other tools or options, if there is one.
        edited: the assistant's messages that were not sampled here, and that have samples in their place: they may be echoes of
            these that are not quite what was said. The last message first.
        setting: the key of the tools and options that it is rendered with.
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
