"""The words of a conversation, whatever dialect it is held in.

A client's dialect is translated into a `ChatRequest` and back from `Answer`s; in between everybody speaks OpenAI's form of
messages, because that is what chat templates are written for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Raw

from router.errors import RouterError

Message = dict[str, Any]
"""One message as chat templates want it: `role`, `content` (a string, a list of parts, or None), and where there are such
`name`, `tool_call_id`, `reasoning_content`, and `tool_calls`: `[{"id", "type": "function", "function": {"name",
"arguments"}}]` with `arguments` an object; a string only where it is no JSON object."""

Tool = dict[str, Any]
"""One tool as chat templates want it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Finish = Literal["stop", "length", "tool_calls", "abort"]


class Text(msgspec.Struct, frozen=True):
    """A piece of what the model says to the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what it thinks."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """A whole tool call, as it was sampled: nobody has given it an id yet. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A whole tool call, as the client sees it."""

    id: str
    name: str
    arguments: str


Piece = Text | Reasoning | ToolCall
"""What a stream to a client is made of."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants, understood.

    Attributes:
        messages: the conversation, a system prompt first if there is one.
        tools: what the template is shown; None if there are none.
        template: further variables for the template (`chat_template_kwargs`, `documents`, `reasoning_effort`).
        sampling: `sampling_params` for SGLang's `/generate`. `max_new_tokens` is missing where the client set no limit.
        samples: `n`.
        continue_final: go on with the last message, the assistant's, instead of starting another one.
        parallel_calls: whether more than one tool call is wanted in a turn.
        call_choice: `auto`, `none` (what looks like a call is text), `required`, or the name of the only tool to be called.
        logprobs: whether the client wants to see them; `top_logprobs` so many alternatives each.
        stream_usage: whether a stream ends with the numbers of tokens.
        extra: further top-level fields for the worker, raw (`lora_path`, `priority`, `return_routed_experts`, ...).
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None
    template: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    samples: int = 1
    stream: bool = False
    stream_usage: bool = False
    continue_final: bool = False
    parallel_calls: bool = True
    call_choice: str = "auto"
    logprobs: bool = False
    top_logprobs: int = 0
    model: str = ""
    extra: dict[str, Raw] = {}


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token: its id, its bytes, its logprob, and the best alternatives as `(id, bytes, logprob)`."""

    token_id: int
    spelled: bytes
    logprob: float
    top: Sequence[tuple[int, bytes, float]] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished generation, as a client sees it.

    Attributes:
        generation_id: its name in this router.
        content: text for the reader; empty if there is none.
        matched: the stop string (or stop token id) that ended it, if one did.
        completion_tokens: sampled ones, hidden ones counted.
        logprobs: of all sampled tokens; None if they were not asked for.
        extra: what else the worker said, raw, under its own names (`routed_experts`, `hidden_states`, ...).
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


class ReplyHead(msgspec.Struct, frozen=True):
    """What stands in front of every reply: its id, when it was made (seconds since 1970), and what to call the model."""

    id: str
    created: int
    model: str


class DialectStream(Protocol):
    """Server-sent events of one streamed reply. Every method gives the bytes to send now, which may be none."""

    def begin(self, prompt_tokens: int) -> bytes:
        """The reply begins."""
        ...

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """The next piece of generation `index`, with the logprobs of the tokens since the piece before, if asked for."""
        ...

    def finish(self, index: int, answer: Answer) -> bytes:
        """Generation `index` is over. All of its pieces have been sent."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """All of them are."""
        ...

    def failed(self, error: RouterError) -> bytes:
        """It ends here, with an error."""
        ...

    def ping(self) -> bytes:
        """Nothing has happened for a while: what keeps a connection alive in this dialect."""
        ...


class Recalled(msgspec.Struct, frozen=True):
    """What is known of a body.

    Attributes:
        body: to be read in its place: one mark stands for all of its messages that are known.
        mark: how that is written.
        items: how many of the client's messages these are.
        messages: what they were read as.
    """

    body: bytes
    mark: bytes
    items: int
    messages: Sequence[Message]


class Memo(Protocol):
    """Knows what was made of the first messages of a body before."""

    def recall(self, body: bytes) -> Recalled | None:
        """What is known of them. At least one message is left to be read."""
        ...

    def keep(
        self,
        body: bytes,
        front: Sequence[Message],
        listed: Sequence[Raw],
        read: Sequence[Sequence[Message]],
        recalled: Recalled | None,
    ) -> list[Message]:
        """Remember what was read of a body, and use what is given back: all messages.

        Args:
            body: as it came.
            front: messages that stand elsewhere in it (a system prompt), in front of all others.
            listed: its other messages; without those that were recalled.
            read: what each of these was read as: one message, or the several that a dialect folds into one.
            recalled: what the first ones were.
        """
        ...


class Dialect(Protocol):
    """One kind of client. Pure: bytes in, bytes out."""

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        """What a body asks for; messages that `memo` knows are not read again.

        Raises BadRequestError for what is malformed, and for what is not supported, with what to do about it.
        """
        ...

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        """The body of a reply in one piece, an answer for each sample."""
        ...

    def stream(self, request: ChatRequest, head: ReplyHead) -> DialectStream:
        """The events of a streamed reply."""
        ...

    def error(self, error: RouterError) -> bytes:
        """The body of an error."""
        ...
