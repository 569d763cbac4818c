"""Replies of OpenAI's `POST /v1/responses`: a response, and the events of a streamed one.

Besides OpenAI's fields a response has `generation_id` and `weight_version`, and `meta_info` with everything else a worker
reported. In a stream its last event has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.messages import FUNCTION, ChatRequest, Piece, Reasoning, Text, Tool, ToolCall
from middleware_hub.dialects.events import TEXT, ServerSentEvents, around_text
from middleware_hub.dialects.openai.replies import error_body
from middleware_hub.dialects.responses.tools import PREFIXES, call_item
from middleware_hub.dialects.tools import ANY, AUTO, NONE
from router.errors import RouterError

_INCOMPLETE: Final = {"length": "max_output_tokens", "abort": "abort"}
"""`abort` is SGLang's word. OpenAI has no such word, and any of its own words would make half a reply look complete."""

_ENCRYPTED: Final = "dGl0by1yb3V0ZXI="
"""The `encrypted_content` of reasoning, for clients that ask for it: they drop reasoning without. It is not read when it comes
back; the id of its item says which reasoning it is."""

_UNSET: Final[dict[str, Any]] = {
    "instructions": None,
    "max_tool_calls": None,
    "metadata": {},
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}
"""A response's values of fields that its request left out. A session keeps its responses for `previous_response_id`."""

_SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""OpenAI's defaults of fields that have the same names in `sampling_params`."""

_encode = msgspec.json.encode


def whole(request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
    answer = answers[0]
    status = _status(answer)
    said = answer.said or [Text("")]
    items = _Items(request, head)
    output = [items.next(piece) for piece in said]
    if status == "incomplete" and not isinstance(said[-1], ToolCall):  # calls are whole
        output[-1]["status"] = status
    return _encode(_response(request, head, output, answer))


class _Items:
    """Makes the items of one response. Their ids name the reply, and number its items of each kind."""

    def __init__(self, request: ChatRequest, head: ReplyHead) -> None:
        self._request = request
        self._reply = head.id
        self._counts: dict[str, int] = {}

    def next(self, piece: Piece) -> dict[str, Any]:
        """Return the complete item of a piece, which is the next one of its kind."""
        item = self.of(piece)
        prefix = item["id"].partition("_")[0]
        self._counts[prefix] = self._counts.get(prefix, 0) + 1
        return item

    def of(self, piece: Piece) -> dict[str, Any]:
        """Return the same, without counting it."""
        if isinstance(piece, ToolCall):
            form = self._request.forms.get(piece.name)
            return self._named(PREFIXES[FUNCTION if form is None else form.kind], call_item(piece, form))
        if isinstance(piece, Reasoning):
            content = [{"type": "reasoning_text", "text": piece.text}]
            asked = "reasoning.encrypted_content" in self._request.echoed.get("include", ())
            sealed: dict[str, Any] = {"summary": [], "encrypted_content": _ENCRYPTED if asked else None}
            return self._named("rs", {"type": "reasoning", **sealed, "content": content})
        text = {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}
        return self._named("msg", {"type": "message", "role": "assistant", "content": [text]})

    def _named(self, prefix: str, item: dict[str, Any]) -> dict[str, Any]:
        # The calls of a turn are numbered together, whatever their types.
        number = self._counts.get(prefix, 0) if prefix in ("rs", "msg") else self._calls
        return {"id": f"{prefix}_{self._reply}_{number}", "status": "completed", **item}

    @property
    def _calls(self) -> int:
        return sum(count for prefix, count in self._counts.items() if prefix not in ("rs", "msg"))


class ResponsesStream(ServerSentEvents):
    """A stream of events, numbered from 0. Each item is opened, filled and closed before the next one."""

    def __init__(self, request: ChatRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = head
        self._items = _Items(request, head)
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._open: type[Text | Reasoning] | None = None
        self._item_id = ""
        self._texts: list[str] = []
        self._around: tuple[bytes, bytes, bytes] = b"", b"", b""
        """What stands around the number and the text of each delta of the open item."""

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the two events that announce a response. The length of the prompt is reported at the end."""
        begun = _response(self._request, self._head, [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Return a delta of the open item if the piece is of its type, else of a new item. This dialect has no logprobs."""
        if isinstance(piece, ToolCall):
            return self._closed() + self._called(piece)
        if not piece.text:
            return b""
        opened = self._opened(type(piece))
        self._texts.append(piece.text)
        before, between, behind = self._around
        number, self._events = self._events, self._events + 1
        return b"%b%b%d%b%b%b" % (opened, before, number, between, _encode(piece.text), behind)

    def _around_delta(self, kind: type[Text | Reasoning]) -> tuple[bytes, bytes, bytes]:
        """Return what deltas of the open item have in common: they are alike but for their number and their text."""
        more: dict[str, Any] = {"logprobs": []} if kind is Text else {}
        number = self._events
        event, behind = around_text(self._event(f"response.{_WORDS[kind]}.delta", **self._place, delta=TEXT, **more))
        self._events = number
        before, _, between = event.partition(_NUMBER + b"%d" % number)
        return before + _NUMBER, between, behind

    def finish(self, index: int, answer: Answer) -> bytes:
        """Close the last item. A reply that says nothing has one empty message."""
        opened = b"" if self._output or self._open else self._opened(Text)
        return opened + self._closed("incomplete" if _status(answer) == "incomplete" else "completed")

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the whole response, in an event that says how it ended."""
        answer = answers[0]
        done = _response(self._request, self._head, self._output, answer)
        return self._event(f"response.{_status(answer)}", response=done)

    def failed(self, error: RouterError) -> bytes:
        """Return an error as the last event: OpenAI's own fields, and an object `error`, for which its library looks."""
        found = error_body(error)["error"]
        # In a body the code may be the HTTP status. An event has no status, and its code is a word.
        if not isinstance(found.get("code"), str):
            found["code"] = found["type"]
        shown = {key: found.get(key) for key in ("code", "message", "param")}
        return self._event("error", **shown, error=found)

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **data}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event))

    @property
    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._at, "item_id": self._item_id, "content_index": 0}

    def _opened(self, kind: type[Text | Reasoning]) -> bytes:
        if self._open is kind:
            return b""
        closed = self._closed()
        self._open, self._texts = kind, []
        item = self._items.of(kind(""))
        self._item_id = item["id"]
        (part,) = item["content"]
        item = {**item, "content": [], "status": "in_progress"}
        added = self._event("response.output_item.added", **self._at, item=item)
        added += self._event("response.content_part.added", **self._place, part=part)
        self._around = self._around_delta(kind)
        return closed + added

    def _closed(self, status: str = "completed") -> bytes:
        kind = self._open
        if kind is None:
            return b""
        item = {**self._items.of(kind("".join(self._texts))), "status": status}
        (part,) = item["content"]
        more: dict[str, Any] = {"logprobs": []} if kind is Text else {}
        done = self._event(f"response.{_WORDS[kind]}.done", **self._place, text=part["text"], **more)
        done += self._event("response.content_part.done", **self._place, part=part)
        self._items.next(kind(""))
        self._open = None
        return done + self._done(item)

    def _called(self, call: ToolCall) -> bytes:
        item = self._items.next(call)
        place = {**self._at, "item_id": item["id"]}
        if item["type"] == "function_call":
            field, kind, more = "arguments", "function_call_arguments", {"name": item["name"]}
        elif item["type"] == "custom_tool_call":
            field, kind, more = "input", "custom_tool_call_input", {}
        else:  # OpenAI has no events for what such a call has in it, or clients do not wait for them
            added = self._event("response.output_item.added", **self._at, item={**item, "status": "in_progress"})
            return added + self._done(item)
        whole = item[field]
        return (
            self._event("response.output_item.added", **self._at, item={**item, field: "", "status": "in_progress"})
            + self._event(f"response.{kind}.delta", **place, delta=whole)
            + self._event(f"response.{kind}.done", **place, **more, **{field: whole})
            + self._done(item)
        )

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self._event("response.output_item.done", **self._at, item=item)
        self._output.append(item)
        return done


_NUMBER: Final = b'"sequence_number":'
_WORDS: Final[dict[type[Piece], str]] = {Text: "output_text", Reasoning: "reasoning_text"}
"""The word for each kind of text in the types of events."""


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish in _INCOMPLETE else "completed"


def _response(
    request: ChatRequest, head: ReplyHead, output: list[dict[str, Any]], answer: Answer | None
) -> dict[str, Any]:
    """Return a response; `answer` is None while it is made. Its request is shown as it was understood."""
    why = None if answer is None else _INCOMPLETE.get(answer.finish)
    status = "in_progress" if answer is None else _status(answer)
    echoed = {**_UNSET, **request.echoed}
    echoed["reasoning"] = {**_UNSET["reasoning"], **echoed["reasoning"]}
    echoed.pop("include", None)
    response: dict[str, Any] = {
        "id": head.id if head.id.startswith("resp_") else f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "completed_at": answer.ended if answer is not None and status == "completed" else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": why and {"reason": why},
        "model": head.model,
        "output": output,
        "parallel_tool_calls": request.parallel_calls,
        "tool_choice": _choice(request),
        "tools": [_tool(tool) for tool in request.tools or ()],
        "max_output_tokens": request.sampling.get("max_new_tokens"),
        **{name: request.sampling.get(name, default) for name, default in _SAMPLING.items()},
        "top_logprobs": 0,
        **echoed,
        "usage": answer and _usage(answer),
    }
    if answer is not None:
        response |= {"generation_id": answer.generation_id, "weight_version": answer.weight_version}
        if answer.extra:
            response["meta_info"] = answer.extra
    return response


def _tool(tool: Tool) -> dict[str, Any]:
    unset = {"description": None, "parameters": None, "strict": False}
    return {"type": FUNCTION, **unset, **tool["function"]}


def _choice(request: ChatRequest) -> str | dict[str, str]:
    if not request.tools:
        return AUTO
    choice = request.call_choice
    return choice if choice in (ANY, AUTO, NONE) else {"type": "function", "name": choice}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
