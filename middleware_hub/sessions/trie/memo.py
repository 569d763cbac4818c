"""Remembers parsed messages: a client sends its whole conversation at every turn, and most of it is old.

    known   {"model":"m","messages":[{"role":"user",...},{"role":"assistant",...}                    ],"tools":[...]}
    body    {"model":"m","messages":[{"role":"user",...},{"role":"assistant",...},{"role":"tool",...}],"tools":[...]}
    read                                                                         [{"role":"tool",...}]

    known   {"model":"m","messages":[{"role":"user",...},{"role":"assistant",...}                    ],"tools":[...]}
    body    {"model":"m","messages":[{"role":"user",...},{"role":"assistant",...},{"role":"tool",...}],"tools":[other]}
    read    {"model":"m","messages":["MARK"                                      ,{"role":"tool",...}],"tools":[other]}

If a body begins with the same bytes as an earlier one, up to the end of a message, only the rest is parsed. If it also ends
with the same bytes after its messages, that rest is the list of the new messages: all other fields are unchanged. Otherwise a
mark replaces the messages that are known. Nothing is guessed: a JSON parser is in the same state after the mark as after those
messages. If the client wrote `messages` twice, or the same list in another field as well, the mark is not where it is expected,
and the body is parsed as it came. So the same end counts only if a mark in the place of all messages was found there. The mark
is random: no client can write it.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from middleware_hub.chat.keys import KeyFunction, answered_by, setting_of
from middleware_hub.chat.memo import AnsweredTurns, Recalled
from middleware_hub.chat.messages import ChatRequest, KeyedMessage, Message, MessageKey
from middleware_hub.sessions.trie.nodes import MessageNode
from router.engines.json import JSON_ERRORS

MOST_BODIES = 8
"""How many bodies a session remembers: an agent and its sub-agents take turns in it."""
ROOM = 64 * 1024 * 1024
"""Bytes of bodies, for all sessions together. What was parsed from them takes three to five times as much."""


class Landmark(msgspec.Struct, gc=False, eq=False):
    """The node at which the last walk along a conversation ended: the next turn repeats nearly all of that walk."""

    setting: bytes = b""
    front: tuple[MessageKey, ...] = ()
    node: MessageNode | None = None


class WalkedMessages(list[Message]):
    """The messages of a request; an earlier request may have walked along the first of them.

    Args:
        known: the body they were read from. A body that begins with another body shares that body's landmark.
        around: the fields around them, and the messages before them (a system prompt that a dialect keeps elsewhere).
    """

    __slots__ = ("_front", "_landmark", "setting")

    def __init__(self, known: KnownBody, around: Around) -> None:
        super().__init__((*around.front, *known.messages) if around.front else known.messages)
        self.setting = around.setting
        self._front = around.keys
        self._landmark = known.landmark

    def walked(self, setting: bytes) -> MessageNode | None:
        """Return a node on the path of these messages, if one is known."""
        mark = self._landmark
        if mark.node is None or mark.setting != setting or mark.front != self._front:
            return None
        # A node that was removed from its trie has no parent. A node further down belongs to a longer conversation.
        return mark.node if mark.node.parent is not None and mark.node.depth <= len(self) else None

    def ends_at(self, setting: bytes, node: MessageNode) -> None:
        mark = self._landmark
        mark.setting, mark.front, mark.node = setting, self._front, node


def setting_in(request: ChatRequest) -> bytes:
    """Return `setting_of(request)`, which may be known: its tools are the same at every turn, and may be long."""
    messages = request.messages
    return messages.setting if isinstance(messages, WalkedMessages) else setting_of(request)


class Around(msgspec.Struct, frozen=True, eq=False):
    """The parsed request of all fields except `messages`.

    Attributes:
        request: as of `Memo.keep`.
        front: its messages, which precede all others, and in `keys` their keys.
        setting: `setting_of(request)`.
    """

    request: ChatRequest
    front: Sequence[KeyedMessage]
    keys: tuple[MessageKey, ...]
    setting: bytes


class KnownBody(msgspec.Struct, eq=False):
    """A body.

    Attributes:
        text: as it came, up to the end of its last message.
        begin: the offset of its first message.
        ends: the end of each of its messages.
        counts: how many of `messages` the client's first 1, 2, ... messages became: some dialects fold several into one.
        messages: all parsed messages.
        landmark: the place of these messages in the session's trie.
        rest: the text after the last message.
        around: the other fields, if their place is certain: before `begin` and in `rest`.
        size: the bytes that count for `MemoRoom`, which alone sets it.
    """

    text: bytes
    begin: int
    ends: list[int]
    counts: list[int]
    messages: list[Message]
    landmark: Landmark
    rest: bytes = b""
    around: Around | None = None
    size: int = 0

    def common(self, body: bytes) -> int:
        """Return with how many of this body's messages `body` begins, together with everything before them."""
        if body.startswith(self.text):
            return len(self.ends)
        if not body.startswith(self.text[: self.ends[0]]):
            return 0
        # At least `low` and fewer than `high` bytes are common. Halving by bytes, not by messages, makes each comparison
        # shorter than the one before, however long a single message is.
        low, high = self.ends[0], len(self.text)
        while high - low > 1:
            middle = (low + high) // 2
            if body.startswith(self.text[low:middle], low):
                low = middle
            else:
                high = middle
        return bisect_right(self.ends, low)


class MemoRoom:
    """Keeps the bodies of all memos within a limit and drops the least recently used first."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._used: OrderedDict[int, tuple[MessageMemo, KnownBody]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._used)

    def use(self, memo: MessageMemo, known: KnownBody, text: bytes) -> None:
        """Keep a body that is not kept (any more), with its present text."""
        known.text, known.size = text, len(text) + len(known.rest)
        self._used[id(known)] = memo, known
        self.size += known.size
        while self.size > self._room:
            other, oldest = next(iter(self._used.values()))
            other.drop(oldest)

    def gone(self, known: KnownBody) -> None:
        if self._used.pop(id(known), None) is not None:
            self.size -= known.size


class MessageMemo:
    """The memo of one dialect in one session; implements `Memo`."""

    def __init__(
        self, key: KeyFunction, room: MemoRoom, turns: AnsweredTurns | None = None, *, most: int = MOST_BODIES
    ) -> None:
        self.turns = turns
        self._key = key
        self._room = room
        self._most = most
        self._bodies: list[KnownBody] = []
        self._mark = b'"mark%b"' % secrets.token_hex(12).encode()

    def __len__(self) -> int:
        return len(self._bodies)

    def recall(self, body: bytes) -> Recalled | None:
        best, most = None, 0
        for known in self._bodies:
            items = known.common(body)
            if items and (best is None or known.ends[items - 1] > best.ends[most - 1]):
                best, most = known, items
        if best is not None and _LAST.match(body, best.ends[most - 1]):
            most -= 1
        if best is None or not most:
            return None
        end, messages = best.ends[most - 1], best.messages[: best.counts[most - 1]]
        if best.around is not None and body.endswith(best.rest):
            new = _BETWEEN.match(body, end)
            if new is not None:
                listed = b"[%b]" % body[new.end() : len(body) - len(best.rest)]
                return Recalled(listed, b"", most, messages, best.around.request, best)
        short = b"%b%b%b" % (best.text[: best.begin], self._mark, body[end:])
        return Recalled(short, self._mark, most, messages, None, best)

    def keep(
        self,
        body: bytes,
        request: ChatRequest,
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> WalkedMessages:
        known = None if recalled is None else recalled.source
        around = known.around if isinstance(known, KnownBody) else None
        if around is None or around.request is not request:
            front = [KeyedMessage(message, self._key(message, ())) for message in request.messages]
            around = Around(request, front, tuple([message.key for message in front]), setting_of(request))
        if recalled is not None and isinstance(known, KnownBody):
            items = recalled.items
            if len(known.ends) == items + len(listed) and body.startswith(known.text):
                return WalkedMessages(known, around)  # the same messages again
            if items < len(known.ends):  # this body continues differently
                text, begin, ends, counts = known.text, known.begin, known.ends[:items], known.counts[:items]
                old = list(recalled.messages)
                known = KnownBody(text, begin, ends, counts, old, Landmark(), known.rest, known.around)
        else:
            known = KnownBody(b"", _place(body, listed), [], [], [], Landmark())
        self.drop(known)
        whole = True  # if the body has `messages` twice, this may be the place of the other list
        for raw, messages in zip(listed, read, strict=True):
            text, begin = bytes(raw), known.begin
            if known.ends:
                between = _BETWEEN.match(body, known.ends[-1])
                begin = -1 if between is None else between.end()
            whole = whole and body.startswith(text, begin)
            if known.ends and not messages:  # it is part of the entry before: both are recalled, or neither
                known.ends[-1] = begin + len(text)
                continue
            for message in messages:
                known.messages.append(message)
                answers = answered_by(known.messages, len(known.messages) - 1) if message["role"] == "tool" else ()
                known.messages[-1] = KeyedMessage(message, self._key(message, answers))
            known.ends.append(begin + len(text))
            known.counts.append(len(known.messages))
        if whole:
            if known.around is not around:
                known.rest = body[known.ends[-1] :]
                known.around = around if self._all_of_them(body[: known.begin], known.rest) else None
            self._bodies.append(known)
            self._room.use(self, known, body[: known.ends[-1]])
        if len(self._bodies) > self._most:
            self.drop(self._bodies[0])
        return WalkedMessages(known, around)

    def _all_of_them(self, front: bytes, rest: bytes) -> bool:
        """Return whether the text between these two is the whole `messages` of a body."""
        try:
            return _decode_marked(b"%b%b%b" % (front, self._mark, rest)).messages == [Raw(self._mark)]
        except JSON_ERRORS:
            return False

    def drop(self, known: KnownBody) -> None:
        if known in self._bodies:
            self._bodies.remove(known)
        self._room.gone(known)

    def clear(self) -> None:
        for known in list(self._bodies):
            self.drop(known)


def _place(body: bytes, listed: Sequence[Raw]) -> int:
    """Return where the first message begins. If its text is also elsewhere, this may be wrong; then the mark is not found."""
    return body.find(bytes(listed[0]), max(0, body.find(b'"messages"')))


class _Marked(msgspec.Struct):
    messages: list[Raw] = []


_decode_marked = msgspec.json.Decoder(_Marked).decode
_BETWEEN = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_LAST = re.compile(rb"[ \t\r\n]*\]")
