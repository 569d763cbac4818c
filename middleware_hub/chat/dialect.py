"""The interface of a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import ChatRequest, Piece
from router.errors import RouterError


class DialectStream(Protocol):
    """Writes one streamed reply. Every method returns the bytes to send now; they may be empty."""

    content_type: bytes

    def begin(self, prompt_tokens: int) -> bytes: ...

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Write the next piece of generation `index`, and the logprobs of the tokens since the last piece, if wanted."""

    def finish(self, index: int, answer: Answer) -> bytes:
        """End generation `index`, all of whose pieces have been sent."""

    def end(self, answers: Sequence[Answer]) -> bytes: ...

    def failed(self, error: RouterError) -> bytes: ...

    def ping(self) -> bytes:
        """Return bytes that keep a silent connection alive in this dialect."""

    def comment(self, name: str, value: str) -> bytes:
        """Tell what would be a header of the reply, were it known when the reply began."""


class Dialect(Protocol):
    """One kind of client. Pure: bytes in, bytes out.

    Attributes:
        name: what its requests are besides their bodies: two of them with one body are equal if they have one name.
    """

    name: str

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        """Parse a body, except the messages that `memo` knows.

        Raises BadRequestError for malformed or unsupported fields, with what to do about it.
        """

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        """Return the body of a reply in one piece, with one answer for each sample."""

    def stream(self, request: ChatRequest, head: ReplyHead) -> DialectStream:
        """Return the writer of a streamed reply."""

    def error(self, error: RouterError) -> bytes:
        """Return the body of an error."""


class Counter(Protocol):
    """A call of a dialect that counts the tokens of a prompt."""

    def parse_count(self, body: bytes) -> ChatRequest:
        """Parse a body for which nothing is sampled. Raises BadRequestError."""

    def count(self, tokens: int) -> bytes:
        """Return the body of the reply."""
