"""A trie of messages, pointing to the token chains that were sampled for them.

Each path from a root is a conversation. An assistant node that was generated here carries *samples*: checkpoints, each a handle
on an immutable chain of spans (see `spans`), so a fork costs one node and no token is copied. There is a root for each
*setting*, the tools and template options that a conversation is rendered with: under another setting no token is the same.

    root(tools) -- system -- user -- assistant [sample 1, sample 2] -- tool -- (user: pending, of a generation in flight)
                                 `-- assistant [sample 3] -- user -- assistant [sample 4]

One generation is `prepare` and then `commit` or `abandon`, each synchronous; nothing is held in between but its own
`BranchHandle`. The rules:

* A request continues the deepest sampled node on its path: of several samples there the newest, unless it says which.
* What `prepare` adds is *pending* until a commit below it: never exported, never continued, and gone with its last handle.
* Samples are never joined, however equal they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from middleware_hub.chat.keys import KeyedMessage, KeyFunction, MessageKey, adapter_of, canonical
from middleware_hub.chat.messages import Message
from middleware_hub.sessions.trie.nodes import (
    BranchHandle,
    Checkpoint,
    Conversation,
    EditedMessage,
    MessageNode,
    PreparedTurn,
)
from middleware_hub.sessions.trie.path_index import PathIndex
from middleware_hub.spans.chain import TokenSpan, names_of

MOST_EDITED = 4
"""So many messages are looked at that may be edited echoes, the last ones; and twice as many samples of each, the newest."""

_encode = msgspec.json.Encoder().encode


class TrieClosedError(Exception):
    """The session has ended: nothing is added to it any more."""


class MessageTrie:
    """See the top of this file.

    Args:
        key: when two messages are the same one.
    """

    def __init__(self, key: KeyFunction = canonical) -> None:
        self.key = key
        self._roots: dict[bytes, MessageNode] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._handles: dict[str, BranchHandle] = {}
        self._paths = PathIndex()
        self._commits = 0
        self.nodes = 0
        """Messages, pending ones counted; roots are none."""
        self.closed = False

    def __repr__(self) -> str:
        return f"<MessageTrie {self.nodes} nodes, {len(self._checkpoints)} samples, {len(self._handles)} in flight>"

    # Reading -----------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Generations that were prepared, and neither committed nor abandoned."""
        return len(self._handles)

    @property
    def head(self) -> Checkpoint | None:
        """The newest sample."""
        return next(reversed(self._checkpoints.values()), None)

    def checkpoint(self, generation_id: str) -> Checkpoint | None:
        """The sample of a generation, by its id or by the one that a dialect made of it."""
        return next((one for name in names_of(generation_id) if (one := self._checkpoints.get(name))), None)

    def checkpoints(self, *, terminal: bool = False) -> list[Checkpoint]:
        """All samples in the order of their commits; or those at the end of a branch."""
        return [found for found in self._checkpoints.values() if found.terminal or not terminal]

    def each_node(self) -> Iterator[MessageNode]:
        """Every node, roots left out: parents before their children."""
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            if node.depth:
                yield node
            stack.extend(reversed((node.children or {}).values()))

    # One generation ----------------------------------------------------------------------------------------------------

    def prepare(self, setting: bytes, messages: Sequence[Message], *, parent: str | None = None) -> PreparedTurn:
        """Walk down along a conversation, adding what is not there.

        Whoever gets a turn opens at least one handle on it: without one, what was added would stay.

        Args:
            setting: the key of the tools and options that it is rendered with.
            messages: all of it.
            parent: the id of the generation to go on from, where several could be meant.
        """
        if self.closed:
            raise TrieClosedError
        node = messages.walked(setting) if isinstance(messages, Conversation) else None
        if node is None:
            node = self._roots.get(setting)
        if node is None:
            node = MessageNode(setting, "", b"", None, 0, setting=setting, path_hash=hash(adapter_of(setting)))
            self._roots[setting] = node
        for message in messages[node.depth :] if node.depth else messages:
            key = message.key if isinstance(message, KeyedMessage) else self.key(message)
            child = None if node.children is None else node.children.get(key)
            node = child if child is not None else self._attach(node, key, message)
        if isinstance(messages, Conversation):
            messages.ends_at(setting, node)
        deepest: MessageNode | None = node
        while deepest is not None and not deepest.samples:
            deepest = deepest.parent
        named = None if parent is None or deepest is None else self._on_path(deepest, parent)
        if named is not None or deepest is None:
            chosen, ambiguous = named, False
        else:
            chosen, ambiguous = _choose(deepest, messages[deepest.depth - 1])
        return PreparedTurn(
            node,
            chosen,
            0 if chosen is None else chosen.node.depth,
            ambiguous,
            parent is not None and named is None,
            parent,
            self._elsewhere(node, messages, 0 if chosen is None else chosen.node.depth)
            if len(self._roots) > 1
            else None,
            tuple(islice(_edited(node, 0 if deepest is None else deepest.depth), MOST_EDITED)),
            setting,
        )

    def open(self, turn: PreparedTurn, generation_id: str) -> BranchHandle:
        """A generation begins from a prepared turn. Ids are never used twice."""
        assert generation_id not in self._handles
        assert generation_id not in self._checkpoints
        handle = self._handles[generation_id] = BranchHandle(generation_id, turn.node)
        edited = [sample for one in turn.edited for sample in one.samples]
        handle.hold(turn.checkpoint, turn.elsewhere, *edited)
        turn.node.handles += 1
        return handle

    def commit(self, handle: BranchHandle, message: Message, span: TokenSpan, **details: Any) -> Checkpoint:
        """Attach what was sampled; `details` are further fields of the checkpoint.

        Raises TrieClosedError if the session has ended in the meantime.
        """
        if self.closed or not handle.open:
            raise TrieClosedError
        checkpoint = self._sample(handle, handle.node, message, span, details)
        self._close(handle)
        return checkpoint

    def commit_in_place(self, handle: BranchHandle, message: Message, span: TokenSpan, **details: Any) -> Checkpoint:
        """The same for a turn that went on with the last message of its prompt: it takes that message's place."""
        if self.closed or not handle.open:
            raise TrieClosedError
        before = handle.node
        assert before.parent is not None
        checkpoint = self._sample(handle, before.parent, message, span, details)
        self._close(handle)
        self._prune(before)
        return checkpoint

    def abandon(self, handle: BranchHandle) -> None:
        """Nothing was sampled: it is as if there had been no such request. May be called twice."""
        if handle.open and not self.closed:
            self._close(handle)
            self._prune(handle.node)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a sample that nothing goes on from, and the messages that were only there for it."""
        assert not checkpoint.users
        node = checkpoint.node
        assert node.samples is not None
        node.samples.remove(checkpoint)
        if not node.samples:
            self._paths.gone(node)
        del self._checkpoints[checkpoint.id]
        if checkpoint.parent is not None:
            checkpoint.parent.users -= 1
            checkpoint.parent.continued -= not checkpoint.apart
        checkpoint.parent = None
        passed: MessageNode | None = node
        while passed is not None and not passed.samples and not _any_committed(passed):
            passed.committed = False
            passed = passed.parent
        self._prune(node)

    # The end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing is added any more, and nothing pending is left. Handles that are open cannot be committed."""
        for handle in list(self._handles.values()):
            self.abandon(handle)
        self.closed = True

    def clear(self) -> None:
        """Forget everything, link by link: a conversation may be so long that freeing it by its end overflows the C stack."""
        self.close()
        for node in list(self.each_node()):
            for checkpoint in node.samples or ():
                _unlink(checkpoint.span)
            for span in node.contexts or ():
                _unlink(span)
        for checkpoint in self._checkpoints.values():
            checkpoint.parent = None
        for node in [*self.each_node(), *self._roots.values()]:
            node.parent = node.children = node.samples = node.contexts = None
        self._checkpoints.clear()
        self._paths.clear()
        self._roots.clear()
        self.nodes = 0

    # Inside ------------------------------------------------------------------------------------------------------------

    def _elsewhere(self, node: MessageNode, messages: Sequence[Message], depth: int) -> Checkpoint | None:
        """The deepest sample of these messages under another setting, below `depth`: found by their path."""
        passed: MessageNode | None = node
        while passed is not None and passed.depth > depth:
            found = self._paths.other(passed)
            if found is not None:
                return _choose(found, messages[passed.depth - 1])[0]
            passed = passed.parent
        return None

    def _on_path(self, node: MessageNode, generation_id: str) -> Checkpoint | None:
        """The sample of a generation, if it is this node's, or of one above."""
        found = self.checkpoint(generation_id)
        if found is None:
            return None
        above: MessageNode | None = node
        while above is not None and above.depth > found.node.depth:
            above = above.parent
        return found if above is found.node else None

    def _attach(self, node: MessageNode, key: MessageKey, message: Message) -> MessageNode:
        child = MessageNode(
            key,
            message.get("role") or "",
            _encode(message),
            node,
            node.depth + 1,
            setting=node.setting,
            path_hash=hash((node.path_hash, key)),
        )
        if node.children is None:
            node.children = {}
        node.children[key] = child
        self.nodes += 1
        return child

    def _sample(
        self, handle: BranchHandle, above: MessageNode, message: Message, span: TokenSpan, details: dict[str, Any]
    ) -> Checkpoint:
        key = self.key(message)
        node = (above.children or {}).get(key) or self._attach(above, key, message)
        checkpoint = Checkpoint(
            handle.generation_id, node, span, handle.checkpoint, self._commits, apart=handle.apart, **details
        )
        self._commits += 1
        if checkpoint.parent is not None:
            checkpoint.parent.users += 1
            checkpoint.parent.continued += not handle.apart
        if node.samples is None:
            node.samples = []
        node.samples.append(checkpoint)
        self._paths.sampled(node)
        self._checkpoints[checkpoint.id] = checkpoint
        passed: MessageNode | None = node
        while passed is not None and not passed.committed:
            passed.committed = True
            passed = passed.parent
        return checkpoint

    def _close(self, handle: BranchHandle) -> None:
        handle.hold()
        handle.open = False
        handle.node.handles -= 1
        del self._handles[handle.generation_id]

    def _prune(self, node: MessageNode) -> None:
        """Take away pending nodes that nobody uses, from the bottom up."""
        while node.depth and not (node.committed or node.handles or node.children):
            above = node.parent
            assert above is not None
            assert above.children is not None
            del above.children[node.key]
            node.parent = None
            self.nodes -= 1
            node = above
        if not node.depth and not node.children and self._roots.get(_as_setting(node.key)) is node:
            del self._roots[_as_setting(node.key)]

    def check(self) -> None:
        """Recount everything and compare; AssertionError if an invariant does not hold. Slow, for tests."""
        handles: dict[int, int] = {}
        for handle in self._handles.values():
            assert handle.open
            handles[id(handle.node)] = handles.get(id(handle.node), 0) + 1
        nodes = list(self.each_node())
        assert len(nodes) == self.nodes
        assert self.in_flight == sum(handles.values())
        continued: dict[str, int] = {}
        sampled: list[Checkpoint] = []
        for node in nodes:
            above = node.parent
            assert above is not None
            assert above.children is not None
            assert above.children[node.key] is node
            assert node.depth == above.depth + 1
            assert node.handles == handles.pop(id(node), 0)
            assert node.committed == bool(
                node.samples or any(child.committed for child in (node.children or {}).values())
            )
            assert node.committed or node.handles or node.children, "a pending node that nobody uses"
            for checkpoint in node.samples or ():
                assert checkpoint.node is node
                assert self._checkpoints[checkpoint.id] is checkpoint
                sampled.append(checkpoint)
                if checkpoint.edited:
                    assert checkpoint.parent is not None
                    beside = checkpoint.parent.node
                    assert beside.parent in node.path()
                    assert beside not in node.path()
                    if not checkpoint.apart:
                        continued[checkpoint.parent.id] = continued.get(checkpoint.parent.id, 0) + 1
                elif checkpoint.apart:
                    assert checkpoint.parent is not None
                    keys = [passed.key for passed in checkpoint.parent.node.path()]
                    # One that goes on with the last message takes that one's place.
                    common = len(keys) - (len(keys) == node.depth)
                    assert keys[:common] == [passed.key for passed in node.path()[:common]]
                elif checkpoint.parent is not None:
                    continued[checkpoint.parent.id] = continued.get(checkpoint.parent.id, 0) + 1
                    above_it = {id(passed) for passed in node.path()[:-1]}
                    assert id(checkpoint.parent.node) in above_it or checkpoint.parent.node.parent in node.path()
        assert not handles, "a handle on a node that is not there"
        self._paths.check(node for node in nodes if node.samples)
        assert len(sampled) == len(self._checkpoints)
        assert [one.serial for one in self._checkpoints.values()] == sorted({one.serial for one in sampled})
        users: dict[int, int] = {}
        held = [one for handle in self._handles.values() for one in handle.held]
        for user in (*(one.parent for one in sampled if one.parent is not None), *held):
            users[id(user)] = users.get(id(user), 0) + 1
        for checkpoint in sampled:
            assert checkpoint.continued == continued.get(checkpoint.id, 0)
            assert checkpoint.users == users.pop(id(checkpoint), 0)
        assert not users, "something goes on from a sample that is not there"


def _choose(node: MessageNode, echo: Message) -> tuple[Checkpoint, bool]:
    """Which sample of a node to go on from: the one that thought what the echo says, else the newest."""
    samples = node.samples or []
    if len(samples) > 1:
        reasoning = echo.get("reasoning_content")
        if reasoning:
            equal = [sample for sample in samples if sample.reasoning == reasoning]
            if equal:
                return equal[-1], len(equal) > 1
    return samples[-1], len(samples) > 1


def _edited(node: MessageNode, depth: int) -> Iterator[EditedMessage]:
    """The assistant's messages below `depth` that were not sampled here, and have samples beside them; the deepest first."""
    passed: MessageNode | None = node
    while passed is not None and passed.depth > depth:
        above = passed.parent
        if passed.role == "assistant" and above is not None and len(above.children or ()) > 1:
            siblings = (one for one in reversed((above.children or {}).values()) if one.samples)
            samples = (sample for one in siblings for sample in reversed(one.samples or ()))
            found = tuple(islice(samples, 2 * MOST_EDITED))
            if found:
                yield EditedMessage(passed.depth, found)
        passed = above


def _any_committed(node: MessageNode) -> bool:
    return any(child.committed for child in (node.children or {}).values())


def _as_setting(key: MessageKey) -> bytes:
    assert isinstance(key, bytes)
    return key


def _unlink(span: TokenSpan | None) -> None:
    while span is not None:
        above = span.parent
        span.parent = None
        span = above
