"""The interface of a dialect, and of the memory that it may have of earlier bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.messages import ChatRequest, Message, Piece
from router.errors import RouterError


class Recalled(msgspec.Struct, frozen=True):
    """The part of a body that is known already.

    Attributes:
        body: the bytes to read instead: the list of the unknown messages if `request` is known, else the body with a mark
            in place of all known messages.
        mark: the mark as it is written in `body`.
        items: how many of the client's messages are known.
        messages: the messages that they were parsed into.
        request: the parsed request of all other fields, if they are the same, byte for byte; else None.
        source: where the memo found them; only the memo reads it.
    """

    body: bytes
    mark: bytes
    items: int
    messages: Sequence[Message]
    request: ChatRequest | None = None
    source: object = None


class AnsweredTurns(Protocol):
    """The turns that were answered here. Each is found by the id of its reply; None if it was answered elsewhere, or never."""

    def answered(self, reply: str) -> Message | None:
        """Return a turn, with its reasoning."""

    def conversation(self, reply: str) -> Sequence[Message] | None:
        """Return all messages of the conversation that a turn ends, the turn itself included. Takes time for each of them."""


class Memo(Protocol):
    """Remembers the messages and requests of earlier bodies."""

    turns: AnsweredTurns | None
    """The turns of the same session; None if there are none."""

    def recall(self, body: bytes) -> Recalled | None:
        """Return the known part of the body's messages. At least one message is left to parse."""

    def keep(
        self,
        body: bytes,
        request: ChatRequest,
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> list[Message]:
        """Remember the result of parsing a body, and return all of its messages, which the caller uses from then on.

        Args:
            body: the body as it came.
            request: the parsed request of all other fields: `recalled.request`, or a new one that does not depend on
                `messages`. Its messages are the ones elsewhere in the body (a system prompt); they come
                first.
            listed: its other messages, without the recalled ones.
            read: the result for each of `listed`: one message, or several that a dialect folds into one.
            recalled: the result of `recall`, if the dialect used it.
        """


class DialectStream(Protocol):
    """Server-sent events of one streamed reply. Every method returns the bytes to send now; they may be empty."""

    def begin(self, prompt_tokens: int) -> bytes: ...

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Write the next piece of generation `index`, and the logprobs of the tokens since the last piece, if wanted."""

    def finish(self, index: int, answer: Answer) -> bytes:
        """End generation `index`, all of whose pieces have been sent."""

    def end(self, answers: Sequence[Answer]) -> bytes: ...

    def failed(self, error: RouterError) -> bytes: ...

    def ping(self) -> bytes:
        """Return bytes that keep a silent connection alive in this dialect."""


class Dialect(Protocol):
    """One kind of client. Pure: bytes in, bytes out."""

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
