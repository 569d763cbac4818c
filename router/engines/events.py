"""Server-sent events: a byte stream split into events, their payloads, and the end of a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from router.engines.json import JSON_ERRORS

DONE = b"[DONE]"
FRAME = b"data: %b\n\n"
"""An event around its payload, as engines print it."""

END_BYTES = 256
"""The last bytes of a stream that `has_ended` needs."""

_END = re.compile(rb"(?:\A|\n)data:[ \t]*\[DONE\](?:\s|(?<=\n):[^\n]*(?:\n|\Z))*\Z")
_EMPTY_LINE = b"\n", b"\r\n"
"""SGLang and vLLM end their lines with the first; other servers of events, and proxies, with the second."""


@dataclass(slots=True)
class EventSplitter:
    """Splits a byte stream into server-sent events, however it is chunked.

    Attributes:
        rest: what has come of the event that is not complete yet.
    """

    rest: bytearray = field(default_factory=bytearray)
    _seen: int = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the events that are complete now, each with its empty line."""
        rest = self.rest
        if not rest and chunk.endswith(b"\n\n") and chunk.find(b"\n") == len(chunk) - 2:
            yield chunk  # one whole event, as a worker sends it: nothing to copy
            return
        rest += chunk
        begin, at = 0, max(0, self._seen - len(_EMPTY_LINE[1]))
        # Finding one line break is many times faster than finding two, and the JSON contains none.
        while (at := rest.find(b"\n", at)) >= 0:
            at += 1
            if rest.startswith(_EMPTY_LINE, at):
                at = rest.find(b"\n", at) + 1
                with memoryview(rest) as view:
                    event = bytes(view[begin:at])
                begin = self._seen = at
                yield event
        del rest[:begin]
        self._seen = len(rest)

    def only(self, chunk: bytes) -> bytes | None:
        """Return the payload of a chunk that is one whole event with nothing else in it, as engines send it; None otherwise.

        None also means that the chunk has yet to be fed.
        """
        if self.rest or not (chunk.startswith(b"data: {") and chunk.endswith(b"}\n\n")):
            return None
        return chunk[6:-2] if chunk.find(b"\n") == len(chunk) - 2 else None

    def flush(self) -> bytes:
        """Return and forget the bytes after the last empty line."""
        rest = bytes(self.rest)
        self.rest.clear()
        self._seen = 0
        return rest


def event_data(event: bytes) -> bytes | None:
    """Return the payload of an event that has one, whatever other fields the event has; None for any other event."""
    if event.startswith(b"data: {") and event.endswith(b"}\n\n"):
        return event[6:-2]
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def has_event(part: bytes) -> bool:
    """Return whether an event ends in a part of a stream."""
    return b"\n\n" in part or b"\n\r\n" in part


def has_ended(stream: bytes | bytearray) -> bool:
    """Return whether a stream, or the end of one, ends with the event `[DONE]`.

    Comments may follow, which some servers and proxies send at intervals.
    """
    return _END.search(stream, max(0, len(stream) - END_BYTES)) is not None


class _Index(msgspec.Struct):
    index: int | None = None


_index = msgspec.json.Decoder(_Index)
_LAST_INDEX = re.compile(rb'"index":\s*(\d+)\s*\}\s*\Z')


def event_index(data: bytes) -> int:
    """Return which generation of a batch an event belongs to; 0 if there is only one."""
    # SGLang writes the index last, and a key just before the last brace belongs to the top level.
    last = _LAST_INDEX.search(data, max(0, len(data) - 40))
    if last is not None:
        return int(last[1])
    try:
        return _index.decode(data).index or 0
    except JSON_ERRORS:
        return 0
