"""Replies of OpenAI's `POST /v1/chat/completions`: `chat.completion`, and streams of `chat.completion.chunk`.

Fields that OpenAI lacks are in `meta_info` of a choice: `generation_id`, `weight_version`, and everything else a worker
reported (`routed_experts`, ...). SDKs keep fields that they do not know, and raise for fields that are not there: so
`reasoning_content` is null where there is none, as from SGLang. The ids of `return_token_ids` are where SGLang and vLLM have
them, under the names of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.messages import CUSTOM, ChatRequest, Piece, Reasoning, Text, ToolCall
from middleware_hub.dialects.events import TEXT, ServerSentEvents, around_text
from middleware_hub.dialects.tools import custom_input
from router.errors import RouterError

UNLIKELY = -9999.0
"""OpenAI's logprob for an impossible token: JSON has no infinity."""

_PIECE = 200
"""Tokens whose logprobs are written at once."""

_encode = msgspec.json.encode


def whole(request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
    """Return a `chat.completion` with a choice for each answer."""
    reply = {
        "id": _named(head.id),
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_choice(index, answer, request) for index, answer in enumerate(answers)],
        "usage": usage(answers, answers[:1]),
    }
    if answers[0].ids is not None:
        reply["prompt_token_ids"] = answers[0].prompt_ids
    return _encode(reply)


def error_body(error: RouterError) -> dict[str, Any]:
    """Return `{"error": {"message", "type", "param", "code"}}` with the details of the error."""
    inner: Any = error.body()["error"]
    return {"error": {"param": None, **inner}}


class OpenAIStream(ServerSentEvents):
    """A stream of chunks. The first one of a choice has its role, the last one its `finish_reason`."""

    def __init__(self, request: ChatRequest, head: ReplyHead) -> None:
        self._request = request
        shared = {
            "id": _named(head.id),
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        self._opening = b"data: " + _encode(shared)[:-1] + b',"choices":['
        self._calls = [0] * request.samples
        self._shown = [0] * request.samples
        self._around: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        """What stands around the text of a delta, by its choice and its field."""

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the role of every choice. The length of the prompt is reported at the end."""
        return b"".join(self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self._request.samples))

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Return one delta. A call is whole, with its index among the calls of the choice."""
        delta: dict[str, Any]
        if isinstance(piece, ToolCall):
            delta = {"tool_calls": [{"index": self._calls[index], **_called(self._request, piece)}]}
            if self._request.old_calls:
                delta = {"function_call": piece.as_openai()["function"]}
            self._calls[index] += 1
        elif isinstance(piece, Reasoning) and not self._request.include_reasoning:
            return self._chunk(index, {}, logprobs) if logprobs else b""
        elif not piece.text and not logprobs:
            return b""
        else:
            field = "content" if isinstance(piece, Text) else "reasoning_content"
            if logprobs is None:  # all of a choice and field are alike, so only the text is encoded
                around = self._around.get((index, field))
                if around is None:
                    around = self._around[index, field] = around_text(self._chunk(index, {field: TEXT}))
                return around[0] + _encode(piece.text) + around[1]
            delta = {field: piece.text}
        if logprobs is not None:
            self._shown[index] += len(logprobs)
        return self._chunk(index, delta, logprobs)

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return the finish reason, and the logprobs of tokens after the last piece: a hidden tail has no text of its own."""
        behind = None if answer.logprobs is None else answer.logprobs[self._shown[index] :]
        beside = None if answer.ids is None else {"prompt_token_ids": answer.prompt_ids}
        return self._chunk(index, {}, behind or None, beside, **_ending(self._request, answer))

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the usage, if the request asks for it, and `[DONE]`."""
        done = b"data: [DONE]\n\n"
        if not self._request.stream_usage:
            return done
        return self._opening + b'],"usage":' + _encode(usage(answers, answers[:1])) + b"}\n\n" + done

    def failed(self, error: RouterError) -> bytes:
        """Return an error instead of a chunk. Nothing follows it: with `[DONE]` it would look like a success."""
        return b"data: " + _encode(error_body(error)) + b"\n\n"

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] | None = None,
        beside: dict[str, Any] | None = None,
        *,
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": None if logprobs is None else _logprobs(logprobs, as_ids=self._request.tokens_as_ids),
            "finish_reason": finish_reason,
            **more,
        }
        end = b"," + _encode(beside)[1:] if beside else b"}"
        return self._opening + _encode(choice) + b"]" + end + b"\n\n"


def _named(reply_id: str) -> str:
    return reply_id if reply_id.startswith("chatcmpl-") else f"chatcmpl-{reply_id}"


def _called(request: ChatRequest, call: ToolCall) -> dict[str, Any]:
    """Return a call in the form of its tool's type."""
    form = request.forms.get(call.name)
    if form is None or form.kind != CUSTOM:
        return call.as_openai()
    return {"id": call.id, "type": CUSTOM, CUSTOM: {"name": form.name, "input": custom_input(call.arguments)}}


def _choice(index: int, answer: Answer, request: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
    message["refusal"] = None
    message["reasoning_content"] = (answer.reasoning or None) if request.include_reasoning else None
    if answer.tool_calls and request.old_calls:
        message["function_call"] = answer.tool_calls[0].as_openai()["function"]
    elif answer.tool_calls:
        message["tool_calls"] = [_called(request, call) for call in answer.tool_calls]
    logprobs = None if answer.logprobs is None else _logprobs(answer.logprobs, as_ids=request.tokens_as_ids)
    return {"index": index, "message": message, "logprobs": logprobs, **_ending(request, answer)}


def _ending(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    end = ending(answer, chat=True)
    if request.old_calls and end["finish_reason"] == "tool_calls":
        end["finish_reason"] = "function_call"
    return end


def ending(answer: Answer, *, chat: bool = False) -> dict[str, Any]:
    """Return how a choice ends, and the fields that the dialect lacks."""
    # `abort` is SGLang's word. OpenAI has no such word, and any of its own words would make half a reply look complete.
    end: dict[str, Any] = {
        "finish_reason": answer.finish,
        "matched_stop": answer.matched,
        "meta_info": {"generation_id": answer.generation_id, "weight_version": answer.weight_version, **answer.extra},
    }
    if answer.ids is not None:
        end |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.ids}
        if chat:  # SGLang's chats have another name for `token_ids`, which is vLLM's
            end["response_token_ids"] = answer.ids
    return end


def usage(answers: Sequence[Answer], firsts: Sequence[Answer]) -> dict[str, Any]:
    """Return the token counts of a reply.

    A prompt counts once, however many samples it has, with the cached tokens that its first sample found.

    Args:
        answers: all answers.
        firsts: the first sample of each prompt.
    """
    prompt = cached = completion = reasoning = 0
    for answer in firsts:
        prompt += answer.prompt_tokens
        cached += answer.cached_tokens
    for answer in answers:
        completion += answer.completion_tokens
        reasoning += answer.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def token_name(token_id: int) -> str:
    """Return a token as vLLM writes it for a client that wants ids in place of texts."""
    return f"token_id:{token_id}"


def _logprobs(logprobs: Sequence[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    if len(logprobs) <= _PIECE:
        return {"content": [_with_alternatives(one, as_ids) for one in logprobs], "refusal": None}
    # A long reply is written piece by piece: as objects it takes ten times the memory of its JSON.
    starts = range(0, len(logprobs), _PIECE)
    pieces = [_encode([_with_alternatives(one, as_ids) for one in logprobs[at : at + _PIECE]])[1:-1] for at in starts]
    return {"content": Raw(b"[%b]" % b",".join(pieces)), "refusal": None}


def _with_alternatives(one: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    top = [_token(*other, as_ids=as_ids) for other in one.top]
    return {**_token(one.token_id, one.spelled, one.logprob, as_ids=as_ids), "top_logprobs": top}


def _token(token_id: int, spelled: bytes, logprob: float | None, *, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_name(token_id) if as_ids else spelled.decode(errors="replace"),
        "bytes": list(spelled),
        "logprob": logprob if logprob is not None and math.isfinite(logprob) else UNLIKELY,
    }
