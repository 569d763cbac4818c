"""Replies that went out whole and may have been lost on the way: the same request, sent again, gets the same reply.

A proxy, or a client's own time limit, may cut a connection behind the last byte that this router sent. The client's library
then sends its request again. It would get a second sample, and both would be trained on. So a reply is kept for a while, byte
for byte. It has arrived as soon as a later request continues it: after that the same request means another sample. A request
that failed is sent again, too. It still has no sample, so it does not get the reply of an equal request.

Replies that did not reach their client at all are kept by their sessions, see `exchange`; those of other routers are written
anew, see `written_again`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec
from starlette.types import Send
from xxhash import xxh3_128_digest

from middleware_hub.metrics import SessionMetrics
from middleware_hub.sessions.exchange import KEPT_SECONDS, RequestKey
from middleware_hub.sessions.session import Session
from router.http.headers import HeaderList
from router.http.responses import send_json

ROOM = 64 * 1024 * 1024
"""Bytes of replies that are kept, for all sessions together; the oldest are dropped first."""
MOST_BYTES = ROOM // 2
"""A longer reply is not kept."""
MOST_FAILURES = 1024
_OVERHEAD = 1024
"""Bytes that a reply takes besides its body."""

Place = tuple[str, str, float, str]
"""Tenant and id of a session, when it was made, and the namespace of a chat without one."""
_Key = tuple[Place, RequestKey]


class KeptReply(msgspec.Struct, eq=False, gc=False):
    """A reply as it was sent.

    Attributes:
        body: of a stream, all of its events.
        stream: whether it is a stream; a whole reply's `headers` lack those of its body.
        names: the ids of its generations.
        time: when it was sent, `time.monotonic()`.
        repeated: how often it was sent again.
    """

    headers: HeaderList
    body: bytes
    stream: bool
    names: tuple[str, ...]
    time: float
    repeated: int = 0

    async def send(self, send: Send) -> None:
        if self.stream:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": False})
        else:
            await send_json(send, 200, self.body, self.headers)


class KeptReplies:
    """See the top of this file. `room` is in bytes, and `clock` returns seconds."""

    def __init__(
        self, metrics: SessionMetrics, *, room: int = ROOM, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._room = room
        self._clock = clock
        self._kept: OrderedDict[_Key, list[KeptReply]] = OrderedDict()
        """In the order of the newest replies."""
        self._keys: dict[str, _Key] = {}
        self._failed: OrderedDict[_Key, list[float]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def keep(self, place: Place, key: RequestKey, reply: KeptReply) -> None:
        """Keep a reply that was sent."""
        name = _named(place, key)
        self._kept.setdefault(name, []).append(reply)
        self._kept.move_to_end(name)
        self.size += len(reply.body) + _OVERHEAD
        self._keys.update(dict.fromkeys(reply.names, name))
        while self._kept:
            oldest = next(iter(self._kept))
            if self.size <= self._room and reply.time - self._kept[oldest][-1].time <= KEPT_SECONDS:
                break
            self._drop(oldest, tuple(self._kept[oldest]))

    def failed(self, place: Place, key: RequestKey) -> None:
        """Note that a request got an error: its repetition asks for the sample that it did not get."""
        name = _named(place, key)
        self._failed.setdefault(name, []).append(self._clock())
        self._failed.move_to_end(name)
        if len(self._failed) > MOST_FAILURES:
            self._failed.popitem(last=False)

    def find(
        self, session: Session, place: Place, key: RequestKey, written: Callable[[], KeptReply | None] = lambda: None
    ) -> KeptReply | None:
        """Return the reply that an equal request got, to be sent again; of several, the one that was repeated least.

        `written` writes one anew, if none is kept here.
        """
        name, now = _named(place, key), self._clock()
        failures = [moment for moment in self._failed.pop(name, ()) if now - moment <= KEPT_SECONDS]
        if failures:
            if failures[1:]:
                self._failed[name] = failures[1:]
            return None
        kept = self._kept.get(name, ())
        self._drop(name, [one for one in kept if now - one.time > KEPT_SECONDS or _is_continued(session, one.names)])
        found = min(self._kept.get(name, ()), key=lambda one: one.repeated, default=None)
        if found is None and (found := written()) is not None and len(found.body) <= MOST_BYTES:
            self.keep(place, key, found)
        if found is not None:
            found.repeated += 1
            self._metrics.resent.labels("replayed").inc()
        return found

    def continued(self, name: str) -> None:
        """Note that a request continues a generation: its reply has arrived."""
        kept = self._keys.get(name)
        if kept is not None:
            self._drop(kept, [one for one in self._kept[kept] if name in one.names])

    def _drop(self, name: _Key, replies: Sequence[KeptReply]) -> None:
        for reply in replies:
            self._kept[name].remove(reply)
            self.size -= len(reply.body) + _OVERHEAD
            for one in reply.names:
                del self._keys[one]
        if replies and not self._kept[name]:
            del self._kept[name]


def _named(place: Place, key: RequestKey) -> _Key:
    """Return the key without its body, which may be long."""
    return place, key._replace(body=xxh3_128_digest(key.body))


def _is_continued(session: Session, names: Iterable[str]) -> bool:
    """Whether a generation is continued, here or at another router."""
    return any((found := session.trie.checkpoint(name)) is not None and found.users for name in names)
