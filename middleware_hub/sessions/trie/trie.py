"""A trie of messages, which points to the token chains that were sampled for them.

Each path from a root is a conversation. An assistant node that was generated here has *samples*: checkpoints, each of which
points to an immutable chain of spans (see `spans`), so a fork costs one node and copies no token. Each *setting*, the tools and
template options that render a conversation, has a root of its own: under another setting no token is the same.

    root(tools) -- system -- user -- assistant [sample 1, sample 2] -- tool -- (user: pending, of a generation in flight)
                                 `-- assistant [sample 3] -- user -- assistant [sample 4]

One generation is `prepare` and then `commit` or `abandon`, each synchronous; between them it holds only its `BranchHandle`.
The rules:

* A request continues the deepest sampled node on its path: the newest sample there, unless the request names another.
* An assistant's message that is known by no key may still be an echo of a sampled one, with a default argument more or other
  white space. Who calls `prepare` says so, once: from then on the key of the echo leads to the sampled node.
* What `prepare` adds is *pending* until a commit below it: never exported, never continued, and removed with its last handle.
* Samples are never joined, even if they are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from middleware_hub.chat.call_ids import is_of, place_of
from middleware_hub.chat.keys import CallIds, KeyFunction, adapter_of, answered_by, call_ids, canonical
from middleware_hub.chat.messages import KeyedMessage, Message, MessageKey
from middleware_hub.sessions.trie.memo import WalkedMessages
from middleware_hub.sessions.trie.nodes import (
    MOST_EDITED,
    BranchHandle,
    Checkpoint,
    IsEcho,
    MessageNode,
    NewTurn,
    PreparedTurn,
    Root,
    choose,
    edited_messages,
    unlink,
)
from middleware_hub.sessions.trie.roots import PathIndex, Roots, same_path
from middleware_hub.spans.chain import STORE_UNREACHABLE, names_of

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode

MOST_ECHOED = 32
"""How many of the sampled messages at one place, the newest, a message is compared with: best of N has many."""


class TrieClosedError(Exception):
    """The session has ended and takes no more turns."""


class MessageTrie:
    """See the top of this file."""

    def __init__(self, key: KeyFunction = canonical) -> None:
        self.key = key
        self._roots: dict[bytes, MessageNode] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._handles: dict[str, BranchHandle] = {}
        self._paths = PathIndex()
        self._beginnings = Roots(self._paths)
        self._sampled: Counter[tuple[bytes, MessageKey]] = Counter()
        """How many nodes with samples have each adapter and key."""
        self._commits = 0
        self.nodes = 0
        """The number of messages, pending ones included, roots left out."""
        self.closed = False

    def __repr__(self) -> str:
        return f"<MessageTrie {self.nodes} nodes, {len(self._checkpoints)} samples, {len(self._handles)} in flight>"

    # Reading -----------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """The number of generations that were prepared, and neither committed nor abandoned."""
        return len(self._handles)

    @property
    def head_root(self) -> Root | None:
        """The root of the task; None before the first turn."""
        return self._beginnings.head

    @property
    def head(self) -> Checkpoint | None:
        """The newest sample of the task; None before the first turn."""
        root = self.head_root
        return next((one for one in reversed(self._checkpoints.values()) if one.root is root), None)

    @property
    def oldest(self) -> Checkpoint | None:
        """The first sample of all."""
        return next(iter(self._checkpoints.values()), None)

    @property
    def newest(self) -> Checkpoint | None:
        """The newest sample of all."""
        return next(reversed(self._checkpoints.values()), None)

    def checkpoint(self, generation_id: str) -> Checkpoint | None:
        """Return the sample of a generation, by its id or by the id that a dialect derived from it."""
        return next((one for name in names_of(generation_id) if (one := self._checkpoints.get(name))), None)

    def answered(self, reply: str) -> KeyedMessage | None:
        """Return the turn of a generation, with its reasoning, by its id or the id that a dialect derived from it."""
        found = self.checkpoint(reply)
        return None if found is None else _said(found.node, found.reasoning)

    def conversation(self, reply: str) -> list[KeyedMessage] | None:
        """Return all messages of the conversation that a turn ends."""
        found = self.checkpoint(reply)
        if found is None:
            return None
        thoughts = {id(one.node): one.reasoning for one in found.lineage()}
        return [_said(node, thoughts.get(id(node), "")) for node in found.node.path()]

    def checkpoints(self, *, terminal: bool = False, root: Root | None = None) -> list[Checkpoint]:
        """Return all samples in the order of their commits; with `terminal`, only those at the end of a branch.

        `root`: only samples of this root.
        """
        found = self._checkpoints.values()
        return [one for one in found if (one.terminal or not terminal) and (root is None or one.root is root)]

    def each_node(self) -> Iterator[MessageNode]:
        """Yield every node but the roots, parents before their children."""
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            if node.depth:
                yield node
            stack.extend(reversed((node.children or {}).values()))

    def leads_to(self, node: MessageNode, messages: Sequence[Message]) -> bool:
        """Whether a conversation begins with the messages up to a node."""
        passed: MessageNode | None = self._roots.get(node.setting)
        for at in range(node.depth):
            passed = None if passed is None else passed.child(self.key_of(messages, at))
        return passed is node

    def last_sampled(
        self, setting: bytes, messages: Sequence[Message], is_echo: IsEcho | None = None
    ) -> MessageNode | None:
        """Return the last of these messages that was sampled here. `is_echo`: see `prepare`."""
        walked = messages if isinstance(messages, WalkedMessages) else None
        node = (None if walked is None else walked.walked(setting)) or self._roots.get(setting)
        if node is None:
            return None
        for at in range(node.depth, len(messages)):
            key = self.key_of(messages, at)
            child = node.child(key)
            if child is None and is_echo is not None and messages[at]["role"] == "assistant":
                child = self._echoed(node, key, messages[at], is_echo)
            if child is None:
                break
            node = child
        return next((one for one in node.ancestors() if one.samples), None)

    def passed_over(self, turn: Checkpoint) -> list[Checkpoint]:
        """Return the samples that may be messages of a turn's prompt, as they are or edited, and whose tokens it lacks."""
        own = set(turn.lineage())
        found: dict[Checkpoint, None] = {}
        for node in islice(turn.node.ancestors(), 1, None):
            if node.role != "assistant" or node.parent is None or own.intersection(node.samples or ()):
                continue
            others = [*(node.parent.children or {}).values()]
            if (elsewhere := self._paths.other(node)) is not None:
                others.append(elsewhere)
            for other in others:
                found.update(dict.fromkeys(one for one in other.samples or () if one not in own))
        return list(found)

    def reasons_of(self, turn: Checkpoint) -> tuple[str, ...]:
        """Return the reasons of a turn that hold now that all turns of the session are known."""
        settled = STORE_UNREACHABLE in turn.reasons and not self.passed_over(turn)
        return tuple(one for one in turn.reasons if not (settled and one == STORE_UNREACHABLE))

    def key_of(self, messages: Sequence[Message], at: int) -> MessageKey:
        message = messages[at]
        return message.key if isinstance(message, KeyedMessage) else self.key(message, answered_by(messages, at))

    # One generation ----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        setting: bytes,
        messages: Sequence[Message],
        *,
        parent: str | None = None,
        reply: str = "",
        begun: str = "",
        is_echo: IsEcho | None = None,
    ) -> PreparedTurn:
        """Walk down along a conversation and add the nodes that are missing.

        The caller opens at least one handle on the turn: without one, the added nodes would stay.

        Args:
            setting: the key of the tools and options that render it.
            parent: the id of the generation to continue, for requests that match several. It wins wherever it is.
            reply: the id of the sample that the last turn of the assistant says it is. It decides among equal samples.
            begun: the content of the last message, if it is a thought to be continued. A sample of that message is continued
                only if the message has what the sample thought, too: else the thought is begun once more.
            is_echo: recognizes echoes of the sampled messages of siblings; without it, only keys count.
        """
        if self.closed:
            raise TrieClosedError
        node = self._walk(setting, messages, is_echo)
        deepest: MessageNode | None = node
        context = False
        if begun and node.samples and messages[-1].get("content") == begun and not _thought(node, messages[-1]):
            deepest, context = node.parent, True
        while deepest is not None and not deepest.samples:
            context = context or deepest.role == "assistant"
            deepest = deepest.parent
        depth = 0 if deepest is None else deepest.depth
        named = None if parent is None else self._named(node, parent)
        chosen, elsewhere, ambiguous = None, named, False
        if named is not None and named.node.setting == setting:
            chosen, elsewhere = named, None
        elif deepest is not None:
            chosen, ambiguous = choose(deepest, messages[depth - 1], reply)
        unknown = parent is not None and (named is None or chosen is not named)
        covered = 0 if chosen is None else chosen.node.depth
        if named is None and len(self._roots) > 1:
            elsewhere = self._elsewhere(node, messages, covered, reply)
        edited = tuple(islice(edited_messages(node, depth), MOST_EDITED))
        moved = context and elsewhere is None and not edited and self._moved(node, depth)
        return PreparedTurn(node, chosen, covered, ambiguous, unknown, parent, elsewhere, edited, moved, setting)

    def retrace(
        self, setting: bytes, behind: str | None, messages: Sequence[bytes], generation_id: str
    ) -> BranchHandle:
        """Open a handle, without a checkpoint yet, at a node that another process described (`replay.sampled_above`).

        Raises KeyError for an unknown sample.
        """
        node = self._root(setting) if behind is None else self._checkpoints[behind].node
        for written in messages:
            message: Message = _decode(written)
            answers = _answered_at(node, message.get("tool_call_id")) if message.get("role") == "tool" else ()
            key = self.key(message, answers)
            child = (node.children or {}).get(key)
            if child is None:
                child = self._attach(node, key, message)
            if not child.committed:  # two clients may write one message in two ways: the committed one counts
                child.message = written
            node = child
        handle = self._handles[generation_id] = BranchHandle(generation_id, node)
        node.handles += 1
        return handle

    def open(self, turn: PreparedTurn, generation_id: str) -> BranchHandle:
        """Begin a generation of a prepared turn. An id is never used twice."""
        assert generation_id not in self._handles
        assert generation_id not in self._checkpoints
        handle = self._handles[generation_id] = BranchHandle(generation_id, turn.node)
        edited: list[Checkpoint] = []
        for one in turn.edited:
            edited += one.samples
        handle.hold(turn.checkpoint, turn.elsewhere, *edited)
        turn.node.handles += 1
        return handle

    def commit(self, handle: BranchHandle, turn: NewTurn) -> Checkpoint:
        """Attach what was sampled. Raises TrieClosedError if the session has ended in the meantime."""
        if self.closed or not handle.open:
            raise TrieClosedError
        before = handle.node
        above = before.parent if turn.in_place else before
        assert above is not None
        checkpoint = self._sample(handle, above, turn)
        self._close(handle)
        if turn.in_place:
            self._prune(before)
        return checkpoint

    def abandon(self, handle: BranchHandle) -> None:
        """End a generation that sampled nothing: the trie is as if there had been no request. May be called twice."""
        if handle.open and not self.closed:
            self._close(handle)
            self._prune(handle.node)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a sample that nothing continues, and the messages that only it needed."""
        assert not checkpoint.users
        node = checkpoint.node
        assert node.samples is not None
        node.samples.remove(checkpoint)
        if not node.samples:
            self._paths.gone(node)
            self._sampled -= Counter((_named_by(node),))
        del self._checkpoints[checkpoint.id]
        self._beginnings.dropped(checkpoint)
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
        """Take no more turns, and remove all pending nodes. Open handles can no longer be committed."""
        for handle in list(self._handles.values()):
            self.abandon(handle)
        self.closed = True

    def clear(self) -> None:
        """Forget everything, link by link: freeing a long conversation by its end would overflow the C stack."""
        self.close()
        for node in list(self.each_node()):
            for checkpoint in node.samples or ():
                unlink(checkpoint.span)
            for span in node.contexts or ():
                unlink(span)
        for checkpoint in self._checkpoints.values():
            checkpoint.parent = None
        for node in [*self.each_node(), *self._roots.values()]:
            node.parent = node.children = node.echoes = node.samples = node.contexts = None
        self._checkpoints.clear()
        self._sampled.clear()
        self._paths.clear()
        self._beginnings.clear()
        self._roots.clear()
        self.nodes = 0

    # Inside ------------------------------------------------------------------------------------------------------------

    def _walk(self, setting: bytes, messages: Sequence[Message], is_echo: IsEcho | None) -> MessageNode:
        """Return the node of the last message; nodes that are missing on the way are added.

        Echoes become what was answered, in place: so every rendering has it, and the next request, whose messages are these.
        """
        walked = messages if isinstance(messages, WalkedMessages) else None
        node = walked.walked(setting) if walked is not None else None
        if node is None:
            node = self._root(setting)
        renamed: dict[str, str] = {}
        for at in range(node.depth, len(messages)):
            message = messages[at]
            if renamed and message.get("tool_call_id") in renamed:
                message["tool_call_id"] = renamed[message["tool_call_id"]]
            key = message.key if isinstance(message, KeyedMessage) else self.key(message, answered_by(messages, at))
            child = node.child(key)
            if message["role"] == "assistant":
                several = node.children is not None and len(node.children) > 1
                if is_echo is not None and node.children and (child is None or (several and message.get("tool_calls"))):
                    child = self._echoed(node, key, message, is_echo, child)
                renamed = {}
                if child is not None and is_echo is not None and (key != child.key or message.get("tool_calls")):
                    renamed = _as_answered(child, key, message)
            elif child is not None and message["role"] == "tool":
                _name_as(child, message)
            node = child if child is not None else self._attach(node, key, message)
        if walked is not None:
            walked.ends_at(setting, node)
        return node

    def _echoed(
        self, node: MessageNode, key: MessageKey, message: Message, is_echo: IsEcho, child: MessageNode | None = None
    ) -> MessageNode | None:
        """Return the sampled message after a node that a message echoes; `child` if the message echoes none.

        `child` has the key of the message. It is another sample if the ids of the calls say so: with a default more, a client
        may have made one sample the other. An echo without a child of its key is noted.
        """
        siblings = [one for one in reversed((node.children or {}).values()) if one.samples][:MOST_ECHOED]
        ids = call_ids(message)
        named = [one for one in siblings if any(is_of(name, sample.id) for sample in one.samples or () for name in ids)]
        if child is not None:
            return child if child in named else next((one for one in named if is_echo(one, message)), child)
        found = next((one for one in (*named, *siblings) if is_echo(one, message)), None)
        if found is not None:
            node.echoes = {**(node.echoes or {}), key: found}
        return found

    def _root(self, setting: bytes) -> MessageNode:
        found = self._roots.get(setting)
        if found is None:
            found = MessageNode(setting, "", b"", None, 0, setting=setting, path_hash=hash(adapter_of(setting)))
            self._roots[setting] = found
        return found

    def _elsewhere(self, node: MessageNode, messages: Sequence[Message], depth: int, reply: str) -> Checkpoint | None:
        """Return the deepest sample of these messages under another setting, below `depth`."""
        for passed in node.ancestors():
            if passed.depth <= depth:
                break
            found = self._paths.other(passed)
            if found is not None:
                return choose(found, messages[passed.depth - 1], reply)[0]
        return None

    def _moved(self, node: MessageNode, depth: int) -> bool:
        """Whether a message below `depth` was sampled in another conversation."""
        path = node.path()
        unsampled = [
            named for one in path[depth:] if one.role == "assistant" and self._sampled[named := _named_by(one)]
        ]
        here = Counter(_named_by(one) for one in path if one.samples) if unsampled else Counter()
        return any(self._sampled[one] > here[one] for one in unsampled)

    def _named(self, node: MessageNode, generation_id: str) -> Checkpoint | None:
        """Return the sample of a generation, if it ends the messages up to this node or to one above it, under any setting."""
        found = self.checkpoint(generation_id)
        if found is None:
            return None
        passed = next((one for one in node.ancestors() if one.depth == found.node.depth), None)
        return found if passed is not None and same_path(found.node, passed) else None

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

    def _sample(self, handle: BranchHandle, above: MessageNode, turn: NewTurn) -> Checkpoint:
        key = self.key(turn.message)
        node = (above.children or {}).get(key) or self._attach(above, key, turn.message)
        checkpoint = Checkpoint(
            handle.generation_id,
            node,
            turn.span,
            handle.checkpoint,
            self._commits,
            turn.finish,
            tail=turn.tail,
            shown=turn.shown,
            reasoning=turn.reasoning,
            scaffold=turn.scaffold,
            reasons=turn.reasons,
            extra=turn.extra,
            apart=handle.apart,
            edited=turn.edited,
            time=turn.time,
            asked=turn.asked,
            root=self._beginnings.committed(above),
            lora=turn.lora,
        )
        self._commits += 1
        if checkpoint.parent is not None:
            checkpoint.parent.users += 1
            checkpoint.parent.continued += not handle.apart
        if not node.samples:
            node.samples = []
            self._sampled[_named_by(node)] += 1
        node.samples.append(checkpoint)
        self._paths.sampled(node)
        self._checkpoints[checkpoint.id] = checkpoint
        _mark_committed(node)
        return checkpoint

    def _close(self, handle: BranchHandle) -> None:
        handle.hold()
        handle.open = False
        handle.node.handles -= 1
        del self._handles[handle.generation_id]

    def _prune(self, node: MessageNode) -> None:
        """Remove pending nodes that no handle uses, from the bottom up."""
        while node.depth and not (node.committed or node.handles or node.children):
            above = node.parent
            assert above is not None
            assert above.children is not None
            del above.children[node.key]
            if above.echoes:
                above.echoes = {key: one for key, one in above.echoes.items() if one is not node} or None
            node.parent = None
            self.nodes -= 1
            node = above
        if not node.depth and not node.children and self._roots.get(node.setting) is node:
            del self._roots[node.setting]


def _mark_committed(node: MessageNode) -> None:
    """Note a commit. Siblings are in the order of their first commits, not of their requests."""
    passed: MessageNode | None = node
    while passed is not None and not passed.committed:
        passed.committed = True
        above = passed.parent
        if above is not None and above.children is not None and len(above.children) > 1:
            above.children[passed.key] = above.children.pop(passed.key)
        passed = above


def _any_committed(node: MessageNode) -> bool:
    return any(child.committed for child in (node.children or {}).values())


def _as_answered(node: MessageNode, key: MessageKey, echo: Message) -> dict[str, str]:
    """Write what a node's message says over an echo of it; return the new ids of its calls, by those that the client gave them.

    `key` is the echo's; if it is the node's, only ids are written over.
    """
    answered: Message = _decode(node.message)
    if key != node.key:
        _write_over(node, answered, echo)
    names, ids = call_ids(echo), call_ids(answered)
    samples = node.samples or ()
    if names == ids or len(names) != len(ids) or any(is_of(names[0], sample.id) for sample in samples):
        return {}
    renamed = {}
    for call, name, own in zip(echo["tool_calls"], names, ids, strict=True):
        if own is not None:
            call["id"] = own
            if name is not None:
                renamed[name] = own
    return renamed


def _name_as(node: MessageNode, echo: Message) -> None:
    """Give an echo of a result the name that the result has: some templates write it, and it may be no part of the key."""
    if "name" in echo or b'"name":' in node.message:
        name = _decode(node.message).get("name")
        echo.pop("name", None)
        if name is not None:
            echo["name"] = name


def _write_over(node: MessageNode, answered: Message, echo: Message) -> None:
    content = echo.get("content")
    if isinstance(content, str) and not echo.get("reasoning_content"):
        moved = (one.reasoning for one in reversed(node.samples or ()) if one.reasoning.strip())
        thought = next((text for text in moved if text.strip() in content), None)
        if thought is not None:
            echo["reasoning_content"] = thought
    echo["content"] = answered.get("content")
    for call, own in zip(echo.get("tool_calls") or (), answered.get("tool_calls") or (), strict=False):
        call["function"] = {**own["function"], "arguments": _parsed(own["function"].get("arguments"))}
    if isinstance(echo, KeyedMessage):
        echo.key, echo.looked_at = node.key, None


def _parsed(arguments: Any) -> Any:
    """Return arguments as templates are shown them: an object if their text is one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = _decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _answered_at(node: MessageNode, answered: object) -> CallIds:
    """Return the ids of the last calls in a conversation: a result may answer these.

    A turn that was sampled again has one message, with the ids of the first sample: `answered` may be an id of a later one.
    """
    for passed in node.ancestors():
        if passed.role == "assistant" and b'"tool_calls"' in passed.message:
            ids, place = [*call_ids(_decode(passed.message))], place_of(answered)
            again = any(is_of(answered, one.id) for one in passed.samples or ())
            if again and place is not None and place.number < len(ids):
                ids[place.number] = str(answered)
            return ids
    return ()


def _named_by(node: MessageNode) -> tuple[bytes, MessageKey]:
    return adapter_of(node.setting), node.key


def _said(node: MessageNode, reasoning: str) -> KeyedMessage:
    message: Message = _decode(node.message)
    return KeyedMessage({**message, "reasoning_content": reasoning} if reasoning else message, node.key)


def _thought(node: MessageNode, message: Message) -> bool:
    """Whether a sample of a message thought what the message has as its reasoning."""
    reasoning = message.get("reasoning_content") or ""
    return any(sample.reasoning.strip() == reasoning.strip() for sample in node.samples or ())
