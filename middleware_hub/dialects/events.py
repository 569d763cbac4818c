"""What streams of server-sent events have in common (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from typing import Final

TEXT: Final = "the text of a delta"
"""Stands for the text of an event of which `around_text` takes the rest."""
_WRITTEN = b'"%b"' % TEXT.encode()


def around_text(event: bytes) -> tuple[bytes, bytes]:
    """Return what stands before and behind the text of an event whose last text is `TEXT`."""
    before, _, behind = event.rpartition(_WRITTEN)
    return before, behind


class ServerSentEvents:
    """The part of `DialectStream` that the dialect does not matter for. Every reader of events skips a comment."""

    content_type = b"text/event-stream"

    def ping(self) -> bytes:
        return b": ping\n\n"

    def comment(self, name: str, value: str) -> bytes:
        return f": {name}: {value}\n\n".encode("latin-1")
