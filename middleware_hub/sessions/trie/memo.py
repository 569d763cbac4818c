"""What bodies were read as: a client sends its whole conversation at every turn, nearly all of it old, letter for letter.

    known   {"model":"m","messages":[{"role":"user",...},{"role":"assistant",...}
    body    {"model":"m","messages":[{"role":"user",...},{"role":"assistant",...},{"role":"tool",...}],"tools":[...]}
    read    {"model":"m","messages":["MARK"                                      ,{"role":"tool",...}],"tools":[...]}

Where a body begins with what an earlier one began with, up to the end of a message, a mark takes the place of the messages that
are known, and only the rest is read. Nothing is guessed by that: a JSON reader is in the same state behind the mark as behind
those messages. Should the client have written `messages` twice, or the same list in another field as well, the mark is not
where it is expected, and the body is read as it came. The mark is random: no client can write it.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from middleware_hub.chat.dialect import Recalled
from middleware_hub.chat.keys import KeyedMessage, KeyFunction
from middleware_hub.chat.messages import Message
from middleware_hub.sessions.trie.nodes import Conversation, Landmark

MOST_BODIES = 8
"""Of a session: an agent and its sub-agents take turns in it."""
ROOM = 64 * 1024 * 1024
"""Bytes of bodies, for all sessions together; what was read from them takes three to five times as much."""


class KnownBody(msgspec.Struct, eq=False):
    """The beginning of a body, up to the end of its last message.

    Attributes:
        text: as it came.
        begin: where its first message begins.
        ends: where each of its messages ends.
        counts: as many of `messages` the client's first 1, 2, ... messages were read as: some dialects fold several into one.
        messages: all of them.
        landmark: where the session's trie has them.
    """

    text: bytes
    begin: int
    ends: list[int]
    counts: list[int]
    messages: list[Message]
    landmark: Landmark

    def common(self, body: bytes) -> int:
        """How many of its messages a body begins with, all that is in front of them included."""
        if body.startswith(self.text):
            return len(self.ends)
        if not body.startswith(self.text[: self.ends[0]]):
            return 0
        # So many characters are common, and fewer than `high`. Halved by characters, not by messages: what is compared gets
        # shorter each time, however long a single message is.
        low, high = self.ends[0], len(self.text)
        while high - low > 1:
            middle = (low + high) // 2
            if body.startswith(self.text[low:middle], low):
                low = middle
            else:
                high = middle
        return bisect_right(self.ends, low)


class MemoRoom:
    """Keeps the bodies of all memos within a limit: the least recently used go first."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._used: OrderedDict[int, tuple[MessageMemo, KnownBody]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._used)

    def use(self, memo: MessageMemo, known: KnownBody, text: bytes) -> None:
        """It was used just now, and its text is this one from now on."""
        self.gone(known)
        known.text = text
        self._used[id(known)] = memo, known
        self.size += len(text)
        while self.size > self._room:
            other, oldest = next(iter(self._used.values()))
            other.drop(oldest)

    def gone(self, known: KnownBody) -> None:
        """It is not kept any more."""
        if self._used.pop(id(known), None) is not None:
            self.size -= len(known.text)


class MessageMemo:
    """One dialect's, of one session.

    Args:
        key: of messages.
        room: what it shares with other memos.
        most: how many bodies it keeps.
    """

    def __init__(self, key: KeyFunction, room: MemoRoom, *, most: int = MOST_BODIES) -> None:
        self._key = key
        self._room = room
        self._most = most
        self._bodies: list[KnownBody] = []
        self._mark = b'"mark%b"' % secrets.token_hex(12).encode()

    def __len__(self) -> int:
        return len(self._bodies)

    def recall(self, body: bytes) -> Recalled | None:
        """What is known of the messages that a body begins with; at least one is left to be read."""
        best, most = None, 0
        for known in self._bodies:
            items = known.common(body)
            if items and (best is None or known.ends[items - 1] > best.ends[most - 1]):
                best, most = known, items
        if best is not None and _LAST.match(body, best.ends[most - 1]):
            most -= 1
        if best is None or not most:
            return None
        short = b"%b%b%b" % (best.text[: best.begin], self._mark, body[best.ends[most - 1] :])
        return Recalled(short, self._mark, most, best.messages[: best.counts[most - 1]], best)

    def keep(
        self,
        body: bytes,
        front: Sequence[Message],
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> Conversation:
        """See `Memo`."""
        head = [KeyedMessage(message, self._key(message)) for message in front]
        known = None if recalled is None else recalled.source
        if recalled is not None and isinstance(known, KnownBody):
            items = recalled.items
            if len(known.ends) == items + len(listed) and body.startswith(known.text):
                return Conversation(head, known.messages, known.landmark)  # the same once more
            if items < len(known.ends):  # it goes on in another way
                ends, counts = known.ends[:items], known.counts[:items]
                known = KnownBody(known.text, known.begin, ends, counts, list(recalled.messages), Landmark())
        else:
            known = KnownBody(b"", _place(body, listed), [], [], [], Landmark())
        self.drop(known)
        whole = True  # where `messages` is there twice, its place may be the other one's
        for raw, messages in zip(listed, read, strict=True):
            text = bytes(raw)
            begin = known.begin if not known.ends else _next(body, known.ends[-1])
            whole = whole and body.startswith(text, begin)
            known.messages += [KeyedMessage(message, self._key(message)) for message in messages]
            known.ends.append(begin + len(text))
            known.counts.append(len(known.messages))
        if whole:
            self._bodies.append(known)
            self._room.use(self, known, body[: known.ends[-1]])
        if len(self._bodies) > self._most:
            self.drop(self._bodies[0])
        return Conversation(head, known.messages, known.landmark)

    def drop(self, known: KnownBody) -> None:
        """Forget one."""
        if known in self._bodies:
            self._bodies.remove(known)
        self._room.gone(known)

    def clear(self) -> None:
        """Forget all of them."""
        for known in list(self._bodies):
            self.drop(known)


def _next(body: bytes, end: int) -> int:
    """Where the message behind the one that ends there begins; -1 if there is none."""
    found = _BETWEEN.match(body, end)
    return found.end() if found is not None else -1


def _place(body: bytes, listed: Sequence[Raw]) -> int:
    """Where the first message begins. If its text stands elsewhere, too, this may be wrong: then the mark will be missed."""
    return body.find(bytes(listed[0]), max(0, body.find(b'"messages"')))


_BETWEEN = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_LAST = re.compile(rb"[ \t\r\n]*\]")
