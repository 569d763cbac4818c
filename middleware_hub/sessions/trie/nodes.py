"""The nodes of a message trie: messages, their checkpoints, generations in flight, and the match of a turn's conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.call_ids import is_of
from middleware_hub.chat.keys import call_ids
from middleware_hub.chat.messages import Message, MessageKey
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, chain_ids, pack_ids
from middleware_hub.spans.hidden_tail import HiddenToken


class Root(msgspec.Struct, gc=False, eq=False):
    """What conversations begin with (see `roots`).

    Attributes:
        number: in the order of first commits, from 0.
        tools: whether it offers tools.
        system: the keys of its system messages.
        samples: the number of turns in it.
    """

    number: int
    tools: bool
    system: tuple[MessageKey, ...] = ()
    samples: int = 0

    def beside(self, head: Root) -> bool:
        """Whether its conversations are not the task's, which are `head`'s: no tools, or another system prompt."""
        return (head.tools and not self.tools) or self.system != head.system


class NewTurn(msgspec.Struct, gc=False, eq=False):
    """A turn that is about to be committed. Fields not described here are those of its `Checkpoint`.

    Attributes:
        message: the assistant's.
        span: the sampled tokens, after the prompt.
        in_place: whether the turn continued the last message of its prompt, whose place it takes.
    """

    message: Message
    span: TokenSpan
    finish: str
    in_place: bool = False
    tail: tuple[HiddenToken, ...] = ()
    shown: str = ""
    reasoning: str = ""
    scaffold: str = ""
    reasons: tuple[str, ...] = ()
    extra: dict[str, msgspec.Raw] = {}
    edited: bool = False
    time: float = 0.0
    asked: bytes = b""
    lora: str = ""


class Checkpoint(msgspec.Struct, gc=False, eq=False):
    """One sampled turn, and with it the whole exact sequence that ends there.

    Attributes:
        id: of the generation.
        node: the assistant's message.
        span: the sampled tokens; the spans before it are the prompt.
        parent: the checkpoint that its prompt continues.
        serial: its place in the session's order of commits, from 0.
        tail: the hidden tail of the reply (see `spans.hidden_tail`).
        shown: the characters of a partly hidden token that the client saw.
        finish: `stop`, `length`, `tool_calls` or `abort`.
        reasoning: the reasoning, which is no part of the message's key.
        scaffold: the generation prompt as it was sent; empty if unknown.
        reasons: why this turn is not exact, or not in every way.
        extra: per-token fields of the worker's reply, raw.
        continued: the number of checkpoints that continue this one on its branch.
        users: the number of checkpoints and generations in flight that continue this one, on any branch.
        apart: whether this turn begins a branch although its chain continues `parent`: its prompt was rendered again, because
            the tools or options differ or the template had rewritten earlier turns.
        edited: whether its path holds an edited echo in the place of `parent`'s message.
        reward: the reward attached to it.
        time: when it was committed, in seconds since 1970.
        asked: the digest of the request that it answers; empty if that is not known, or its client is known to have the reply.
        root: of its conversation.
        lora: the adapter that sampled it; empty for the base model, and in chats without a session that another router sampled.
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
    time: float = 0.0
    asked: bytes = b""
    root: Root = msgspec.field(default_factory=lambda: Root(0, tools=False))
    lora: str = ""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id}: turn {self.depth}, {self.span!r}>"

    @property
    def terminal(self) -> bool:
        return not self.continued

    @property
    def depth(self) -> int:
        """The number of sampled turns from the first to this one."""
        return sum(1 for _ in self.lineage())

    def lineage(self) -> Iterator[Checkpoint]:
        """Yield this checkpoint, the checkpoint that it continues, and so on up."""
        found: Checkpoint | None = self
        while found is not None:
            yield found
            found = found.parent

    def has_unsampled(self) -> bool:
        """Whether one of the assistant's messages on its path was not sampled here."""
        sampled = {id(turn.node) for turn in self.lineage()}
        return any(node.role == "assistant" and id(node) not in sampled for node in self.node.ancestors())


class MessageNode(msgspec.Struct, gc=False, eq=False):
    """One message of a conversation.

    The garbage collector does not track nodes: `MessageTrie.clear` unlinks them.

    Attributes:
        role: empty at a root.
        message: as the client wrote it, or as it was generated (without its reasoning, which each sample has), as JSON.
        echoes: children by the keys of other messages that were recognized as theirs (see `MessageTrie.prepare`).
        samples: the checkpoints of an assistant's message that was generated here, oldest first.
        handles: the number of generations in flight whose prompt ends here.
        committed: whether a generation was committed at this node or below it.
        contexts: the encoded text after a checkpoint's chain, for each prompt that ends here: equal requests share it.
        setting: the key of the tools and options that render it.
        path_hash: of the adapter and the keys from the root to here; the same under every setting.
    """

    key: MessageKey
    role: str
    message: bytes
    parent: MessageNode | None
    depth: int
    children: dict[MessageKey, MessageNode] | None = None
    echoes: dict[MessageKey, MessageNode] | None = None
    samples: list[Checkpoint] | None = None
    contexts: list[TokenSpan] | None = None
    handles: int = 0
    committed: bool = False
    setting: bytes = b""
    path_hash: int = 0

    def __repr__(self) -> str:
        state = "" if self.committed else ", pending"
        return f"<MessageNode {self.role or 'root'} at {self.depth}: {len(self.samples or ())} samples{state}>"

    @property
    def is_system(self) -> bool:
        return self.role == "system"

    def child(self, key: MessageKey) -> MessageNode | None:
        """Return the node of a message after this one, as it was answered or as a client has echoed it."""
        found = None if self.children is None else self.children.get(key)
        return found if found is not None or self.echoes is None else self.echoes.get(key)

    def ancestors(self) -> Iterator[MessageNode]:
        """Yield this node, its parent, and so on up; the root is left out."""
        node: MessageNode | None = self
        while node is not None and node.depth:
            yield node
            node = node.parent

    def path(self) -> list[MessageNode]:
        """Return the nodes of this conversation, first message first."""
        return list(self.ancestors())[::-1]


IsEcho = Callable[[MessageNode, Message], bool]
"""Whether an assistant's message is the sampled one of a node, although its key is another one."""


class BranchHandle(msgspec.Struct, gc=False, eq=False):
    """A generation in flight: where its reply will be attached, and the checkpoints that it may continue."""

    generation_id: str
    node: MessageNode
    checkpoint: Checkpoint | None = None
    apart: bool = False
    open: bool = True
    held: tuple[Checkpoint, ...] = ()

    def goes_on_from(self, checkpoint: Checkpoint | None, *, apart: bool) -> None:
        """Set the checkpoint that the prompt turned out to continue, and whether it still begins a branch."""
        if not self.open:
            return
        # The handle may hold just this checkpoint, of other options, without continuing it yet.
        if self.checkpoint is not checkpoint or self.held != (checkpoint,):
            self.hold(checkpoint)
        self.apart = apart and checkpoint is not None

    def hold(self, *checkpoints: Checkpoint | None) -> None:
        """Hold the checkpoints that it may continue, the likeliest first: a checkpoint that is held cannot be dropped."""
        held = []
        for one in checkpoints:
            if one is not None:
                one.users += 1
                held.append(one)
        for one in self.held:
            one.users -= 1
        self.held = tuple(held)
        self.checkpoint = checkpoints[0] if checkpoints else None


def unlink(span: TokenSpan | None) -> None:
    while span is not None:
        above = span.parent
        span.parent = None
        span = above


MOST_EDITED = 4
"""How many of the last messages are considered as edited echoes; for each, twice as many samples."""


class EditedMessage(NamedTuple):
    """An assistant's message that was not sampled here and has sampled siblings: perhaps an edited echo of one of them.

    Attributes:
        at: the number of messages of the request up to and including it.
        samples: of its siblings: first the samples that its calls name, then the newest.
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

    The sample is the one of the id `reply`, else the one whose calls the echo has, by their ids, else the one whose tokens it
    has, else the newest with the reasoning of the echo, which clients may have stripped, else the newest.
    """
    equal = samples = node.samples or []
    if reply and (named := next((sample for sample in samples if sample.span.named(reply)), None)):
        return named, False
    if len(samples) > 1:
        called = [sample for sample in samples if any(is_of(name, sample.id) for name in call_ids(echo))]
        if called:
            return called[-1], False
    if len(samples) > 1 and (told := _told_ids(echo)):
        meant = next((sample for sample in reversed(samples) if _has(sample, told)), None)
        if meant is not None:
            return meant, False
    if len(samples) > 1 and (reasoning := echo.get("reasoning_content")):
        alike = [sample for sample in samples if sample.reasoning.strip() == reasoning.strip()]
        equal = [sample for sample in alike if sample.reasoning == reasoning] or alike or samples
    return equal[-1], len(equal) > 1


def _told_ids(echo: Message) -> bytes | None:
    """Return the tokens up to the end of a turn, packed, which NeMo Gym keeps in the message; None if it does not tell them."""
    prompt, sampled = echo.get("prompt_token_ids"), echo.get("generation_token_ids")
    if type(prompt) is not list or type(sampled) is not list:
        return None
    try:
        return pack_ids(prompt) + pack_ids(sampled)
    except (TypeError, OverflowError):  # no ids
        return None


def _has(sample: Checkpoint, told: bytes) -> bool:
    """Whether these are the tokens up to the end of a sample. What is cheap to compare comes first."""
    span = sample.span
    whole = (span.offset + span.count) * ID_BYTES == len(told)
    return whole and told.endswith(span.ids) and chain_ids(span, span.count) == told


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
    """Return the samples to compare an edited echo with: first the samples that its calls name, then the newest."""
    if len(samples) > 2 * MOST_EDITED and (ids := call_ids(msgspec.json.decode(echo.message))):
        samples = sorted(samples, key=lambda sample: not any(is_of(name, sample.id) for name in ids))
    return samples[: 2 * MOST_EDITED]
