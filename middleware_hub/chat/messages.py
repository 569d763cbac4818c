"""The types of a conversation, in whatever dialect it is held.

Each dialect translates its requests into a `ChatRequest`. All later code uses OpenAI's form of messages, because chat templates
are written for that form.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

Message = dict[str, Any]
"""One message as chat templates read it: `role`, `content` (a string, a list of parts, or None), and optionally `name`,
`tool_call_id`, `reasoning_content`, and `tool_calls`: `[{"id", "type": "function", "function": {"name", "arguments"}}]`.
`arguments` is an object; it is a string only if it is not a JSON object."""


def argument_texts(message: Message) -> list[str]:
    """Return the arguments of a message's calls that are no JSON objects, as the client wrote them."""
    found = (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return [one for one in found if isinstance(one, str)]


Tool = dict[str, Any]
"""One tool as chat templates read it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""The `sampling_params` that are a grammar. A reply can have one."""
REPLY_FORMS = (*GRAMMARS, "structured_outputs")
"""Those that set the form of a reply: vLLM's own field as well."""

MessageKey = Hashable
"""The key of a message: equal for two messages that count as the same; see `keys`."""


class KeyedMessage(dict[str, Any]):
    """A message whose key is known. `looked_at` caches a verdict for code that reads all messages at every turn."""

    __slots__ = ("key", "looked_at")

    def __init__(self, message: Message, key: MessageKey) -> None:
        super().__init__(message)
        self.key = key
        self.looked_at: tuple[object, bool] | None = None


class Text(msgspec.Struct, frozen=True):
    """A piece of the model's text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


class SampledCall(msgspec.Struct, frozen=True):
    """A whole tool call as it was sampled. `arguments` is the JSON text of an object; `id` is empty if the format has none."""

    name: str
    arguments: str
    id: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A whole tool call as the client sees it."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Piece = Text | Reasoning | ToolCall
"""The pieces of a stream to a client."""


FUNCTION = "function"
CUSTOM = "custom"
"""The types of tools that have names: the second is called with a text."""


class ToolForm(msgspec.Struct, frozen=True):
    """How a client writes a tool that the prompt shows as a function of another name or form.

    Attributes:
        kind: the dialect's type of the tool (`function`, `custom`, `local_shell`, ...).
        name: the client's name of it.
        namespace: the namespace in which the client has it; empty for none.
    """

    kind: str
    name: str
    namespace: str = ""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, parsed and checked.

    Attributes:
        messages: the conversation; a system prompt, if there is one, comes first.
        tools: the tools that the template shows; None if there are none.
        deferred: tools that the template does not show, and whose calls are read all the same.
        forms: by their names in the prompt, the tools that the client writes in another form.
        ignored_tools: the types of tools that were left out, because nobody runs them here.
        ignored_fields: fields that have no effect here, and might have had one on the reply elsewhere.
        template: further variables for the template (`chat_template_kwargs`, `documents`, `reasoning_effort`).
        sampling: `sampling_params` for SGLang's `/generate`. `max_new_tokens` is missing if the client set no limit.
        samples: `n`.
        continue_final: continue the last message, the assistant's, instead of starting a new one.
        parallel_calls: whether one turn may contain more than one tool call.
        old_calls: whether the client reads calls as OpenAI's old `function_call`, of which a turn has one.
        separate_reasoning: whether reasoning is told apart from the text. Otherwise it stays there, with its tags.
        include_reasoning: whether the client is shown the reasoning.
        call_choice: `auto`, `none` (what looks like a call is text), `required`, or the name of the only tool to call.
        allowed: the names of the tools that may be called; empty for all of them.
        reply: the id of the reply that the last turn of the assistant is, where the request says so; else empty.
        echoed: fields of the request that its response repeats, in the dialect's own words.
        logprobs: whether the client wants logprobs; `top_logprobs` is the number of alternatives for each token.
        stream_usage: whether a stream ends with the token counts.
        token_ids: whether the client wants the ids of prompt and reply.
        tokens_as_ids: whether logprobs name each token by its id, not by its text.
        pictures: the files of its images, which are held as long as the request is.
        lengths: by digest, how many tokens an engine makes of an image, as far as its tenant knows.
        extra: further top-level fields for the worker, raw (`lora_path`, `priority`, `return_routed_experts`, ...).
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None
    deferred: Sequence[Tool] = ()
    forms: dict[str, ToolForm] = {}
    ignored_tools: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    template: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    samples: int = 1
    stream: bool = False
    stream_usage: bool = False
    continue_final: bool = False
    parallel_calls: bool = True
    old_calls: bool = False
    separate_reasoning: bool = True
    include_reasoning: bool = True
    call_choice: str = "auto"
    allowed: tuple[str, ...] = ()
    reply: str = ""
    echoed: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    tokens_as_ids: bool = False
    model: str = ""
    pictures: tuple[Any, ...] = ()
    lengths: Mapping[str, int] = {}
    extra: dict[str, Raw] = {}

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """Return all tools whose calls are read."""
        return [*(self.tools or ()), *self.deferred]

    @property
    def lora(self) -> str | None:
        """Return the name of the adapter that samples: empty without one, None if it is no string."""
        given = self.extra.get("lora_path")
        name = None if given is None else msgspec.json.decode(given)
        return name if isinstance(name, str) else None if name else ""
