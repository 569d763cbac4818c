"""Streams of replies, in any of the forms that workers send them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from middleware_hub.client.errors import InconsistentAnswerError, refused
from middleware_hub.client.wire import SAVED, Reply, read_reply

_COMMENT = b": x-radix-saved:"


class StreamReader:
    """Reads one stream, in any of the forms that workers send it in."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        from router.engines.sglang.stream import StreamedReply  # it needs numpy, which only streams load

        self._headers = {
            name: value for name, value in headers.items() if name != SAVED
        }  # a comment says it at the end
        self._reply = StreamedReply(added=[])

    @property
    def done(self) -> bool:
        """Return whether the last event has come."""
        return self._reply.done

    def feed(self, line: bytes) -> str:
        """Take a line; return what it adds to the text. Raises RefusedError for an error in the place of an event."""
        if line.startswith(_COMMENT):
            self._headers[SAVED] = line[len(_COMMENT) :].strip().decode("latin-1")
        if not line.startswith(b"data:"):
            return ""
        self._reply.feed(line[5:].strip())
        if self._reply.error is not None:
            try:
                error = msgspec.json.decode(self._reply.error)
            except msgspec.DecodeError:
                error = {"message": self._reply.error}
            raise refused(502, error if isinstance(error, dict) else {"message": str(error)})
        added = self._reply.added
        assert added is not None
        pieces = [msgspec.json.decode(piece, type=str) for piece in added]
        added.clear()
        return "".join(pieces)

    def reply(self) -> Reply:
        """Return the whole reply, when the stream is over. Raises InconsistentAnswerError."""
        found = self._reply.reply()
        if found is None:
            raise InconsistentAnswerError("the stream ended without an event")
        meta = {name: msgspec.json.decode(raw) for name, raw in self._reply.last_meta.items()}
        if self._reply.logprobs:
            meta["output_token_logprobs"] = list(self._reply.logprobs)
        return read_reply({"text": found.text, "output_ids": list(self._reply.ids), "meta_info": meta}, self._headers)


class Lines:
    """Cuts bytes into lines, at line feeds only: JSON may hold any other character that Unicode calls a line's end."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> Sequence[bytes]:
        """Take bytes; return the lines that they complete."""
        *lines, self._held = (self._held + chunk).split(b"\n")
        return lines
