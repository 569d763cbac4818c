"""How the replies of `POST /generate` begin: read on their way to a client, neither checked nor changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from router.engines.events import event_index
from router.engines.json import JSON_ERRORS
from router.engines.sglang.reply import UnreadableReplyError
from router.engines.sglang.stream import StreamedReply

Listener = Callable[[str | Sequence[int]], None]


class _Text(msgspec.Struct):
    text: str


class _Ids(msgspec.Struct):
    output_ids: list[int]


_texts = msgspec.json.Decoder(_Text | list[_Text])
_ids = msgspec.json.Decoder(_Ids | list[_Ids])


class ReplyBeginnings:
    """Watches a reply, and reports how each generation in it begins, once.

    That happens as soon as enough of it has come or it is over, and before the client has all of it. What cannot be read is
    nobody's reply.

    Args:
        report: called with each beginning.
        ids: report ids instead of texts.
        enough: how many ids are enough; a text of so many tokens is long enough, too.
    """

    def __init__(self, report: Listener, *, ids: bool, enough: int) -> None:
        self._report = report
        self._ids = ids
        self._enough = enough
        self._streaming = False
        self._replies: dict[int, StreamedReply | None] = {}  # None: it was reported

    def head(self, start: Mapping[str, Any]) -> None:
        """Do nothing: a head says nothing of replies."""

    def event(self, data: bytes) -> None:
        """Take the payload of an event."""
        self._streaming = True
        if not data.startswith(b"{"):
            return
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
            self._report(reply.ids if self._ids else reply.text)

    def end(self, body: bytes) -> None:
        """Take a reply in one piece, or a list of replies. Of a stream there is nothing left to report."""
        if self._streaming:
            return
        try:
            found = (_ids if self._ids else _texts).decode(body)
        except JSON_ERRORS:
            return
        for one in found if isinstance(found, list) else (found,):
            self._report(one.output_ids if isinstance(one, _Ids) else one.text)
