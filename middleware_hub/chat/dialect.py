"""What a dialect of clients provides, and what it may remember between requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.messages import ChatRequest, Message, Piece
from router.errors import RouterError


class DialectStream(Protocol):
    """Server-sent events of one streamed reply. Every method returns the bytes to send now; they may be empty."""

    def begin(self, prompt_tokens: int) -> bytes: ...

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Write the next piece of generation `index`, and the logprobs of the tokens since the piece before, if wanted."""

    def finish(self, index: int, answer: Answer) -> bytes:
        """End generation `index`, all of whose pieces have been sent."""

    def end(self, answers: Sequence[Answer]) -> bytes: ...

    def failed(self, error: RouterError) -> bytes: ...

    def ping(self) -> bytes:
        """Return what keeps a silent connection alive in this dialect."""


class Recalled(msgspec.Struct, frozen=True):
    """The part of a body that is known already.

    Attributes:
        body: the body to read instead: a mark replaces all messages that are known.
        mark: the mark as it is written in `body`.
        items: how many of the client's messages the mark replaces.
        messages: the messages that they were parsed into.
        source: where the memo found them; only the memo reads it.
    """

    body: bytes
    mark: bytes
    items: int
    messages: Sequence[Message]
    source: object = None


class Memo(Protocol):
    """Remembers what the first messages of earlier bodies were parsed into."""

    def recall(self, body: bytes) -> Recalled | None:
        """Return what is known of the body's messages. At least one message is left to parse."""

    def keep(
        self,
        body: bytes,
        front: Sequence[Message],
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> list[Message]:
        """Remember what a body was parsed into, and return all of its messages, which the caller uses from then on.

        Args:
            body: the body as it came.
            front: messages that the dialect keeps elsewhere in the body (a system prompt), in front of all others.
            listed: its other messages, without the recalled ones.
            read: what each of `listed` was parsed into: one message, or several that a dialect folds into one.
            recalled: what `recall` returned, if the dialect used it.
        """


class Dialect(Protocol):
    """One kind of client. Pure: bytes in, bytes out."""

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        """Parse a body, but for the messages that `memo` knows.

        Raises BadRequestError for what is malformed, and for what is not supported, with what to do about it.
        """

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        """Return the body of a reply in one piece, with one answer for each sample."""

    def stream(self, request: ChatRequest, head: ReplyHead) -> DialectStream:
        """Return the writer of a streamed reply."""

    def error(self, error: RouterError) -> bytes:
        """Return the body of an error."""
