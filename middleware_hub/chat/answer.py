"""The answer of one generation, as a client sees it, in the types of all dialects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Raw

from middleware_hub.chat.messages import Piece, Reasoning, Text, ToolCall

Finish = Literal["stop", "length", "tool_calls", "abort"]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token: its id, its bytes, its logprob, and the best alternatives as `(id, bytes, logprob)`.

    A logprob is None where the worker sent null: workers have no other word for one that is infinite, or not a number.
    """

    token_id: int
    spelled: bytes
    logprob: float | None
    top: Sequence[tuple[int, bytes, float | None]] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished generation, as a client sees it.

    Attributes:
        generation_id: its name in this router.
        content: text for the reader; empty if there is none.
        ended: when it was whole, in seconds since 1970.
        pieces: reasoning, texts and calls in the order in which they were sampled, neighbours of one kind joined; none if the
            order is unknown.
        matched: the stop string (or stop token id) that ended it, if any.
        completion_tokens: the number of sampled tokens, hidden ones included.
        logprobs: those of all sampled tokens; None if the client did not ask for them.
        extra: further fields of the worker's reply, raw, under their own names (`routed_experts`, `hidden_states`, ...).
        ids: the sampled ids, and in `prompt_ids` those that were sent, as a JSON list; None if the client did not ask for them.
    """

    generation_id: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    matched: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    weight_version: str | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    extra: dict[str, Raw] = {}
    ids: Sequence[int] | None = None
    prompt_ids: Raw | None = None
    pieces: Sequence[Piece] = ()
    ended: int = 0

    @property
    def said(self) -> Sequence[Piece]:
        """Return all that was said, in its order, for dialects that have one: a whole reply is what its stream adds up to."""
        if self.pieces:
            return self.pieces
        texts: list[Piece] = [Reasoning(self.reasoning)] if self.reasoning else []
        texts += [Text(self.content)] if self.content else []
        return [*texts, *self.tool_calls]


class ReplyHead(msgspec.Struct, frozen=True):
    """The head of every reply: its id, its time (seconds since 1970), and the name of the model."""

    id: str
    created: int
    model: str
