"""What streams of server-sent events have in common (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations


class ServerSentEvents:
    """The part of `DialectStream` that the dialect does not matter for. Every reader of events skips a comment."""

    content_type = b"text/event-stream"

    def ping(self) -> bytes:
        return b": ping\n\n"

    def comment(self, name: str, value: str) -> bytes:
        return f": {name}: {value}\n\n".encode("latin-1")
