"""The starts of replies of `POST /generate`, read on their way to a client without checking or changing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.engines.events import event_index
from router.engines.form.reply import UnreadableReplyError
from router.engines.form.stream import StreamedReply
from router.engines.json import JSON_ERRORS

Listener = Callable[[str | Sequence[int]], None]


class _ReplyText(msgspec.Struct):
    text: str


class _ReplyIds(msgspec.Struct):
    output_ids: list[int]


_texts = msgspec.json.Decoder(_ReplyText | list[_ReplyText])
_ids = msgspec.json.Decoder(_ReplyIds | list[_ReplyIds])


class ReplyBeginnings:
    """Watches a reply and reports the start of each of its generations once.

    It reports as soon as enough of a generation has come or the generation is over, before the client has all of it. It ignores
    what it cannot read.

    Args:
        report: called with each start.
        ids: report ids instead of texts.
        enough: the number of ids that are enough; the text of as many tokens is enough, too.
    """

    def __init__(self, report: Listener, *, ids: bool, enough: int) -> None:
        self._report = report
        self._ids = ids
        self._enough = enough
        self._replies: dict[int, StreamedReply | None] = {}  # None once reported

    def event(self, data: bytes) -> None:
        """Take the payload of an event."""
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

    def whole(self, body: bytes) -> None:
        """Take a reply in one piece, or a list of replies."""
        try:
            found = (_ids if self._ids else _texts).decode(body)
        except JSON_ERRORS:
            return
        for one in found if isinstance(found, list) else (found,):
            self._report(one.output_ids if isinstance(one, _ReplyIds) else one.text)
