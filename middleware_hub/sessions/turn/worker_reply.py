"""A worker's reply to one generation, whole or as its stream comes, and the error that it may stand for."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from msgspec import Raw
from starlette.types import Message

from middleware_hub.chat.errors import feed_event, refusal
from middleware_hub.tokenizer.repeated_prompt import RepeatedPrompt
from router.engines.events import DONE
from router.engines.form.reply import Reply, read_fields, read_reply
from router.engines.form.stream import StreamedReply
from router.errors import RouterError, UpstreamError


class ReplyReader(Protocol):
    """Follows a reply as it comes."""

    def head(self, start: Message) -> None: ...

    def event(self, streamed: StreamedReply) -> None:
        """Take an event of a stream that adds to the reply."""


class WorkerReply:
    """The watcher (see `router.http.reply`) of one generation's reply; `prompt_tokens` is the length of what was sent."""

    def __init__(self, reader: ReplyReader, prompt_tokens: int) -> None:
        self._reader = reader
        self._prompt_tokens = prompt_tokens
        self.repeated: RepeatedPrompt | None = None
        self._status = 0
        self._body = b""
        self.error: RouterError | None = None
        """The error that came as an event, in a stream whose own status is 200."""

    @cached_property
    def streamed(self) -> StreamedReply:
        return StreamedReply(added=[])

    def head(self, start: Message) -> None:
        self._status = start["status"]
        self._reader.head(start)

    def event(self, data: bytes) -> None:
        """Take the payload of an event. Events after an error, or after `[DONE]`, are ignored: no client reads them."""
        if self.error is None and not self.streamed.done and (data.startswith(b"{") or data == DONE):
            try:
                if self.repeated is not None:
                    data = bytes(self.repeated.taken_out(data, self.streamed.ids))
                feed_event(self.streamed, data)
            except RouterError as error:
                self.error = error
            else:
                if data != DONE:
                    self._reader.event(self.streamed)

    def end(self, body: bytes) -> None:
        self._body = body if self.repeated is None else bytes(self.repeated.taken_out(body))

    def result(self, *, stream: bool) -> tuple[Reply, dict[str, Raw], dict[str, Raw]]:
        """Return the whole reply, its top level and its `meta_info`, when all of it has come.

        Raises RouterError for what came instead of a reply, and UnreadableReplyError.
        """
        if self._status != 200:
            raise refusal(self._status, self._body, self._prompt_tokens)
        if not stream:
            reply, short = read_reply(self._body)
            return reply, *read_fields(short.body)
        if self.error is not None:
            raise self.error
        streamed = self.streamed.reply()
        if streamed is None or not self.streamed.done:
            raise UpstreamError("the worker's stream ended before its end")
        return streamed, self.streamed.last_fields, self.streamed.last_meta

    def alternatives(self) -> dict[str, Raw]:
        """Return the `meta_info` of a reply in one piece with all of its logprobs."""
        return read_fields(self._body)[1]
