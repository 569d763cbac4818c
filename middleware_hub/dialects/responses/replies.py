"""Replies of OpenAI's `POST /v1/responses`: a response, and the events of a streamed one.

Besides OpenAI's fields a response has `generation_id` and `weight_version`, and `meta_info` with everything else a worker
reported. In a stream its last event has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.messages import ChatRequest, Piece, Reasoning, Text, ToolCall
from middleware_hub.dialects.messages import ANY, AUTO, NONE
from middleware_hub.dialects.openai.replies import error_body
from router.errors import RouterError

_INCOMPLETE: Final = {"length": "max_output_tokens", "abort": "abort"}
"""`abort` is SGLang's word. OpenAI has no such word, and any of its own words would make half a reply look complete."""

_encode = msgspec.json.encode


def whole(request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
    """Return a response. This dialect has one sample only."""
    answer = answers[0]
    status = _status(answer)
    said = answer.said or [Text("")]
    output = [_item(head, index, piece) for index, piece in enumerate(said)]
    if status == "incomplete" and not isinstance(said[-1], ToolCall):  # calls are whole
        output[-1]["status"] = status
    return _encode(_response(request, head, output, answer))


class ResponsesStream:
    """A stream of events, numbered from 0. Each item is opened, filled and closed before the next one."""

    def __init__(self, request: ChatRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = head
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._open: type[Text | Reasoning] | None = None
        self._texts: list[str] = []

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
        more: dict[str, Any] = {"logprobs": []} if isinstance(piece, Text) else {}
        return opened + self._event(f"response.{_WORDS[type(piece)]}.delta", **self._place, delta=piece.text, **more)

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
        shown = {key: found.get(key) for key in ("code", "message", "param")}
        return self._event("error", **shown, error=found)

    def ping(self) -> bytes:
        """Return a comment, which every reader of server-sent events skips."""
        return b": ping\n\n"

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **data}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event))

    @property
    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    @property
    def _place(self) -> dict[str, Any]:
        """The place of the open item's only part."""
        assert self._open is not None
        return {**self._at, "item_id": _item_id(self._head, len(self._output), self._open), "content_index": 0}

    def _opened(self, kind: type[Text | Reasoning]) -> bytes:
        if self._open is kind:
            return b""
        closed = self._closed()
        self._open, self._texts = kind, []
        item = _item(self._head, len(self._output), kind(""))
        (part,) = item["content"]
        item = {**item, "content": [], "status": "in_progress"}
        added = self._event("response.output_item.added", **self._at, item=item)
        return closed + added + self._event("response.content_part.added", **self._place, part=part)

    def _closed(self, status: str = "completed") -> bytes:
        """Close the open item, if there is one."""
        kind = self._open
        if kind is None:
            return b""
        item = {**_item(self._head, len(self._output), kind("".join(self._texts))), "status": status}
        (part,) = item["content"]
        more: dict[str, Any] = {"logprobs": []} if kind is Text else {}
        done = self._event(f"response.{_WORDS[kind]}.done", **self._place, text=part["text"], **more)
        done += self._event("response.content_part.done", **self._place, part=part)
        self._open = None
        return done + self._done(item)

    def _called(self, call: ToolCall) -> bytes:
        item = _item(self._head, len(self._output), call)
        empty = {**item, "arguments": "", "status": "in_progress"}
        place = {**self._at, "item_id": item["id"]}
        return (
            self._event("response.output_item.added", **self._at, item=empty)
            + self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
            + self._done(item)
        )

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self._event("response.output_item.done", **self._at, item=item)
        self._output.append(item)
        return done


_WORDS: Final[dict[type[Piece], str]] = {Text: "output_text", Reasoning: "reasoning_text"}
"""The word for each kind of text in the types of events."""

_IDS: Final[dict[type[Piece], str]] = {Text: "msg", Reasoning: "rs", ToolCall: "fc"}


def _item_id(head: ReplyHead, index: int, kind: type[Piece]) -> str:
    return f"{_IDS[kind]}_{head.id}_{index}"


def _item(head: ReplyHead, index: int, piece: Piece) -> dict[str, Any]:
    """Return a complete item of the output."""
    named = {"id": _item_id(head, index, type(piece)), "status": "completed"}
    if isinstance(piece, ToolCall):
        call = {"call_id": piece.id, "name": piece.name, "arguments": piece.arguments}
        return {"type": "function_call", **named, **call}
    if isinstance(piece, Reasoning):
        return {
            **{"type": "reasoning", **named, "summary": [], "encrypted_content": None},
            "content": [{"type": "reasoning_text", "text": piece.text}],
        }
    text = {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}
    return {"type": "message", **named, "role": "assistant", "content": [text]}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish in _INCOMPLETE else "completed"


def _response(
    request: ChatRequest, head: ReplyHead, output: list[dict[str, Any]], answer: Answer | None
) -> dict[str, Any]:
    """Return a response; `answer` is None while it is made. Its request is shown as it was understood."""
    why = None if answer is None else _INCOMPLETE.get(answer.finish)
    response: dict[str, Any] = {
        "id": head.id if head.id.startswith("resp_") else f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": "in_progress" if answer is None else _status(answer),
        "background": False,
        "error": None,
        "incomplete_details": why and {"reason": why},
        "model": head.model,
        "output": output,
        "previous_response_id": None,
        "store": False,
        "parallel_tool_calls": request.parallel_calls,
        "tool_choice": _choice(request),
        "tools": [{**tool["function"], "type": "function", "strict": False} for tool in request.tools or ()],
        "max_output_tokens": request.sampling.get("max_new_tokens"),
        "temperature": request.sampling.get("temperature"),
        "top_p": request.sampling.get("top_p"),
        "usage": answer and _usage(answer),
    }
    if answer is not None:
        response |= {"generation_id": answer.generation_id, "weight_version": answer.weight_version}
        if answer.extra:
            response["meta_info"] = answer.extra
    return response


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
