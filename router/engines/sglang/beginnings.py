"""How the replies of `POST /generate` begin, read from the bytes on their way to a client: nothing is checked or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.engines.sglang.json import JSON_ERRORS
from router.engines.sglang.reply import UnreadableReplyError
from router.engines.sglang.stream import EventSplitter, StreamedReply, event_data, event_index

Told = Callable[[str | Sequence[int]], None]


class _Text(msgspec.Struct):
    text: str


class _Ids(msgspec.Struct):
    output_ids: list[int]


_texts = msgspec.json.Decoder(_Text | list[_Text])
_ids = msgspec.json.Decoder(_Ids | list[_Ids])


def tell_whole(body: bytes, told: Told, *, ids: bool) -> None:
    """Tell of a reply in one piece, or of each in a list. What cannot be read is nobody's reply. `ids`: instead of texts."""
    try:
        found = (_ids if ids else _texts).decode(body)
    except JSON_ERRORS:
        return
    for one in found if isinstance(found, list) else (found,):
        told(one.output_ids if isinstance(one, _Ids) else one.text)


class StreamBeginnings:
    """Tells how the replies of a stream begin, as soon as enough of each has come, or its stream is over.

    Args:
        told: is told of each once.
        ids: of ids instead of texts.
        enough: how many ids that is; a text of so many tokens is long enough.
    """

    def __init__(self, told: Told, *, ids: bool, enough: int) -> None:
        self._told = told
        self._ids = ids
        self._enough = enough
        self._events = EventSplitter()
        self._replies: dict[int, StreamedReply | None] = {}  # None: it was told

    def feed(self, chunk: bytes) -> None:
        """Take in what comes, before it goes on to the client."""
        for event in self._events.feed(chunk):
            data = event_data(event)
            if data is not None and data.startswith(b"{"):
                self._take(data)

    def _take(self, data: bytes) -> None:
        number = event_index(data)
        streamed = self._replies.setdefault(number, StreamedReply())
        if streamed is None:
            return
        streamed.feed(data)
        if not (streamed.finished or streamed.error or len(streamed.ids) >= self._enough):
            return
        self._replies[number] = None
        try:
            reply = streamed.reply()
        except UnreadableReplyError:
            return
        if reply is not None:
            self._told(reply.ids if self._ids else reply.text)
