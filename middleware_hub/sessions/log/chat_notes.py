"""Chats without a session in a store: any router recognizes a conversation by its messages, also after a restart.

The layers inside record each reply with its tokens. A *note* beside that record has the messages: the same event as
in a session's log, which is applied by the same code. Notes are found by names:

    the generation's id
    the path of the messages up to the reply's own            a client that goes on sends just these messages
    that path, with the reasoning of the reply                of several equal replies, the client means this one
    the path of the messages before the reply                 a client that edited the reply sends only these

A path is a digest of the adapter and the keys of messages, in their order. A request asks for the names of those assistant's
messages on its path that this process does not know, and of the last one that it knows: another router may have sampled it
once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from middleware_hub.chat.keys import adapter_of
from middleware_hub.chat.messages import ChatRequest, Message, MessageKey
from middleware_hub.hub import Hub
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.node import Generation
from middleware_hub.radix.tree import RadixTree
from middleware_hub.sessions.events import TurnCommitted
from middleware_hub.sessions.log import replay
from middleware_hub.sessions.trie.memo import setting_in
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, IsEcho, MessageNode
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, chain_ids, names_of
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.spans.media import chain_media
from middleware_hub.store.errors import DamagedRecordError, MissingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.protocol import Batch, Refill

logger = logging.getLogger(__name__)

PLACE: Final = "messages"
"""The last part of the namespaces of notes."""
_AT_ONCE: Final = 512
"""Names that are asked for at once."""
_WRITTEN_AT_ONCE: Final = 32
"""Notes that are appended at once after a store has lost them."""
_DIGEST: Final = 16
"""Bytes of the name of a path."""


class ChatNote(msgspec.Struct, frozen=True, array_like=True):
    """The content of a note. The tokens are in the reply's record.

    Attributes:
        turn: as in the log of a session; its `span` and `context` mean nothing.
        take: how many tokens of the turn's `parent` its prompt begins with.
        flags, tail: those of the reply.
    """

    turn: TurnCommitted
    take: int
    flags: int
    tail: tuple[HiddenToken, ...] = ()


class Noted(NamedTuple):
    """The part of its note that a sampled span of a chat keeps (`TokenSpan.stored`).

    Attributes:
        record: the id of the reply's record.
        path: that of the messages up to the reply's own; empty until it is needed.
        rewritten: that of the record when the note was written, see `Stored`.
    """

    record: bytes
    path: bytes = b""
    rewritten: int = 0


class _Said(NamedTuple):
    """An assistant's message of a request: the number of messages up to it, and the names of notes on it."""

    depth: int
    names: tuple[str, ...]
    prompt: str


class ChatNotes:
    """The notes on the chats of one tenant and namespace; implements `TurnNotes`.

    Args:
        committed: called with each checkpoint that another process sampled.

    Attributes:
        whole: whether the trie still has everything that this process noted or found.
    """

    def __init__(
        self,
        hub: Hub,
        tenant: str,
        namespace: str,
        trie: MessageTrie,
        committed: Callable[[Checkpoint], object],
    ) -> None:
        self._hub = hub
        self._owner = tenant, namespace
        self._trie = trie
        self._committed = committed
        self.whole = True

    # Before a turn -----------------------------------------------------------------------------------------------------

    async def recall(
        self,
        request: ChatRequest,
        parent: str | None = None,
        is_echo: IsEcho | None = None,
        *,
        replies: bool = False,
    ) -> bool:
        tree, memory, lora = self._hub.tree, self._hub.memory, request.lora
        if tree is None or memory is None or lora is None:
            return True
        setting, messages = setting_in(request), request.messages
        named = [*names_of(parent)] if parent else []
        known = self._trie.last_sampled(setting, messages, is_echo)
        try:
            while True:
                said = list(self._said(setting, messages, known))
                await self._bring(tree, memory, lora, [*named, *(name for one in reversed(said) for name in one.names)])
                node = self._trie.last_sampled(setting, messages)
                edited = [one for one in said if node is None or one.depth > node.depth]
                await self._bring(tree, memory, lora, [one.prompt for one in edited][-_AT_ONCE:])
                known = self._trie.last_sampled(setting, messages, is_echo)
                # Behind an echo that was found now, the names of all messages are others.
                if known is node or known is None or known.depth >= said[-1].depth:
                    break
                named = []
            if replies:
                await self._bring(tree, memory, lora, [_name_before(self._path(setting, messages, known))])
            return True
        except StoreError as error:
            self.whole = False
            memory.saving.complain("this process knows chats only as far as it served them: %s", error)
            return False

    def _said(self, setting: bytes, messages: Sequence[Message], last: MessageNode | None) -> Iterator[_Said]:
        """Yield the assistant's messages from the last one that is known on."""
        begin, path = (0, adapter_of(setting)) if last is None else (last.depth, _path_to(last))
        if last is not None:
            yield _Said(begin, _names_on(path, _reasoning_in(messages[begin - 1])), "")
        for depth, message in enumerate(messages[begin:], begin + 1):
            before, path = path, _longer(path, self._trie.key_of(messages, depth - 1))
            if message.get("role") == "assistant":
                yield _Said(depth, _names_on(path, _reasoning_in(message)), _name_before(before))

    def _path(self, setting: bytes, messages: Sequence[Message], last: MessageNode | None) -> bytes:
        """Return the path of all messages, of which the last one that is known is `last`."""
        begin, path = (0, adapter_of(setting)) if last is None else (last.depth, _path_to(last))
        for at in range(begin, len(messages)):
            path = _longer(path, self._trie.key_of(messages, at))
        return path

    async def _bring(self, tree: RadixTree, memory: Memory, lora: str, names: Sequence[str]) -> None:
        """Commit the turns with these names, the likeliest first, and those that they continue. Raises StoreError.

        The names of a long conversation are asked for in parts, until nothing is missing.
        """
        found: dict[str, tuple[ChatNote, TokenSpan]] = {}
        asked: set[str] = set()
        wanted, rest = names[:_AT_ONCE], names[_AT_ONCE:]
        while wanted:
            asked.update(wanted)
            for record, data in await memory.notes(self._place(lora), wanted, whole=self.whole):
                note, reply = _decode(data), tree.stored.get(record)  # it may be collected while other notes are read
                if reply is None:
                    raise DamagedRecordError(f"the reply of generation {note.turn.generation} cannot be read")
                found.setdefault(note.turn.generation, (note, reply))
            needed = {name for note, _ in found.values() for name in _continued(note)}
            wanted = [name for name in needed - asked - found.keys() if self._trie.checkpoint(name) is None]
            if wanted:
                wanted, rest = [*wanted, *rest[:_AT_ONCE]], rest[_AT_ONCE:]
        if not self._trie.closed:
            self._commit_all(found)

    def _commit_all(self, found: Mapping[str, tuple[ChatNote, TokenSpan]]) -> None:
        """Commit turns, each after those that it continues. Raises DamagedRecordError for one that contradicts the store."""
        waiting = {name: one for name, one in found.items() if self._trie.checkpoint(name) is None}
        while waiting:
            count = len(waiting)
            for name, (note, reply) in list(waiting.items()):
                if waiting.keys().isdisjoint(before := _continued(note)):
                    del waiting[name]
                    if all(map(self._trie.checkpoint, before)):  # else the store has forgotten them, or waits for them
                        self._commit(note, reply)
            if len(waiting) == count:
                raise DamagedRecordError("turns of a chat continue each other in a circle")

    def _commit(self, note: ChatNote, reply: TokenSpan) -> None:
        turn = note.turn
        parent = None if turn.parent is None else self._trie.checkpoint(turn.parent)
        span, take = None if parent is None else parent.span, note.take
        prompt, before = chain_ids(reply.parent, reply.take), chain_ids(span, take)
        if not prompt.startswith(before):
            raise DamagedRecordError(f"the prompt of generation {turn.generation} does not continue {turn.parent}")
        if len(prompt) > len(before):
            count = len(before) // ID_BYTES
            shown = (one for one in chain_media(reply.parent, reply.take) if one.start >= count)
            media = tuple((start - count, length, digest) for start, length, digest in shown)
            span = TokenSpan(span, take, 0, prompt[len(before) :], 0, flags=turn.flags, media=media)
            take = span.count
        sampled = TokenSpan(
            span,
            take,
            0,
            reply.ids,
            0,
            versions=reply.versions,
            flags=note.flags,
            visible=reply.visible,
            request_ids=reply.request_ids,
            finish=reply.finish,
            kv_version=reply.kv_version,
            stored=Noted(reply.stored.id, rewritten=reply.stored.rewritten),
        )
        checkpoint = replay.commit(self._trie, turn, sampled, note.tail)
        self._committed(checkpoint)
        if checkpoint.node.samples is not None:
            checkpoint.node.samples.sort(key=lambda one: one.time)  # this process may have sampled it again meanwhile

    # After a turn ------------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, lora: str, reply: Generation) -> Awaitable[bool]:
        assert self._hub.memory is not None, "the layers inside have recorded the reply"
        memory = self._hub.memory

        def notes() -> list[Batch]:
            if self._trie.checkpoint(checkpoint.id) is None:
                return []  # dropped, while its note was waiting for the store
            before = [self._noting(memory, one, span, lora) for one, span in self._forgotten(checkpoint)]
            return [*before, self._noting(memory, checkpoint, reply.span, lora)]

        return memory.note(reply, notes)

    def _noting(self, memory: Memory, checkpoint: Checkpoint, reply: TokenSpan, lora: str) -> Batch:
        checkpoint.span.stored = Noted(reply.stored.id, _path_to(checkpoint.node), reply.stored.rewritten)
        return memory.noting(reply, self._place(lora), _names_of_turn(checkpoint), _encode(_note(checkpoint)))

    def _forgotten(self, checkpoint: Checkpoint) -> Iterator[tuple[Checkpoint, TokenSpan]]:
        """Yield the turns before this one, and their replies, that were written again after their notes had been lost."""
        tree, waiting = self._hub.tree, _noted_before(checkpoint)
        while waiting and tree is not None:
            one = waiting.pop()
            reply = tree.stored.get(one.span.stored.record)
            if reply is not None and reply.stored.rewritten != one.span.stored.rewritten:
                yield one, reply
                waiting += _noted_before(one)

    async def refill(self, store: Refill) -> None:
        """Write the notes that a store has lost, if their replies are here and in the store. Raises StoreUnreachableError."""
        tree, memory = self._hub.tree, self._hub.memory
        if tree is None or memory is None:
            return
        checkpoints = self._trie.checkpoints()
        for at in range(0, len(checkpoints), _WRITTEN_AT_ONCE):
            notes = []
            for checkpoint in checkpoints[at : at + _WRITTEN_AT_ONCE]:
                noted: Noted | None = checkpoint.span.stored
                reply = None if noted is None else tree.stored.get(noted.record)
                if reply is not None and self._trie.checkpoint(checkpoint.id) is not None:  # not dropped meanwhile
                    notes.append(self._noting(memory, checkpoint, reply, reply.owner.namespace[1]))
            # Each by itself: one whose reply still waits for the store must not hold up the others.
            for done in await asyncio.gather(*map(store.append, notes), return_exceptions=True):
                if isinstance(done, MissingRecordError):
                    logger.debug("a reply still waits for the store, and its note behind it: %s", done)
                elif isinstance(done, StoreError | ValueError) and not isinstance(done, StoreUnreachableError):
                    logger.error("a note on a chat that the store has lost cannot be written again: %s", done)
                elif done is not None:
                    raise done

    def _place(self, lora: str) -> tuple[str, ...]:
        tenant, namespace = self._owner
        return tenant, lora, namespace, PLACE


def _continued(note: ChatNote) -> set[str]:
    """Return the generations whose turns come before this one."""
    return {name for name in (note.turn.behind, note.turn.parent) if name is not None}


def _note(checkpoint: Checkpoint) -> ChatNote:
    """Return the note on a turn, with all messages and tokens since the last turn that has a note."""
    span, context = checkpoint.span, replay.context_of(checkpoint.span)
    handle = BranchHandle(checkpoint.id, _prompt_of(checkpoint), checkpoint.parent, apart=checkpoint.apart)
    turn = replay.event_of(handle, checkpoint.node.message, checkpoint, known=_is_noted)
    take = 0 if turn.parent is None else (context or span).take
    return ChatNote(turn, take, span.flags, checkpoint.tail)


def _is_noted(checkpoint: Checkpoint) -> bool:
    return checkpoint.span.stored is not None


def _prompt_of(checkpoint: Checkpoint) -> MessageNode:
    """Return the last message before a turn."""
    above = checkpoint.node.parent
    assert above is not None
    return above


def _noted_before(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Return the turns on whose notes the note on a turn builds."""
    before = (replay.sampled_above(_prompt_of(checkpoint), _is_noted)[0], checkpoint.parent)
    return [one for one in before if one is not None and _is_noted(one)]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ChatNote)


def _decode(data: bytes) -> ChatNote:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(f"a note on a chat is whole, but is none that this router knows: {error}") from error


def _path_to(node: MessageNode) -> bytes:
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
        path = _longer(path, passed.key)
    return path


def _names_of_turn(checkpoint: Checkpoint) -> list[str]:
    """Return all names of the note on a turn."""
    above = checkpoint.node.parent
    assert above is not None
    return [checkpoint.id, *_names_on(_path_to(checkpoint.node), checkpoint.reasoning), _name_before(_path_to(above))]


def _reasoning_in(message: Message) -> str:
    """Return the reasoning that a client sent with a message; empty without any."""
    found = message.get("reasoning_content")
    return found if isinstance(found, str) else ""


def _longer(path: bytes, key: MessageKey) -> bytes:
    """Return the path of one more message."""
    said = key if isinstance(key, bytes) else repr(key).encode("utf-8", "surrogatepass")
    return blake2b(path + said, digest_size=_DIGEST).digest()


def _names_on(path: bytes, reasoning: str) -> tuple[str, ...]:
    """Return the names of turns whose messages have this path, and whose reply this reasoning, or this one stripped."""
    texts = [text.encode("utf-8", "surrogatepass") for text in dict.fromkeys((reasoning, reasoning.strip())) if text]
    return path.hex(), *(_longer(path, text).hex() for text in texts)


def _name_before(path: bytes) -> str:
    """Return the name of turns whose prompt has this path."""
    return f"before {path.hex()}"
