"""Replies of Google's `generateContent`: a `GenerateContentResponse`, and a stream of them.

A stream is server-sent events with `?alt=sse`, else one JSON list, of which an entry comes at a time. Each entry has the pieces
that are new. The last one has how each candidate ended, and all numbers.

Fields that Google's API lacks are beside those of a candidate, under the names that they have in all dialects:
`generation_id`, `weight_version`, `meta_info` with everything else that a worker reported, and the ids of `return_token_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.chat.errors import ContextLengthError
from middleware_hub.chat.messages import ChatRequest, Piece, Reasoning, ToolCall
from middleware_hub.dialects.events import ServerSentEvents
from middleware_hub.dialects.openai.replies import UNLIKELY
from middleware_hub.dialects.tools import AUTO, NONE
from router.errors import RouterError
from router.http.google_errors import google_error

_FINISHES = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "abort": "OTHER"}
"""`abort` is SGLang's word. All of Google's other words would make half a reply look complete, or filtered."""
_PIECE = 200
"""Tokens whose logprobs are written at once."""

_encode = msgspec.json.encode


def whole(request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
    """Return a response with a candidate for each answer."""
    candidates = []
    for index, answer in enumerate(answers):
        parts = [part for piece in answer.said if (part := _part(request, piece)) is not None]
        candidates.append({**_candidate(index, parts), **_ending(request, answer), **_chosen(request, answer.logprobs)})
    return _encode({"candidates": candidates, "usageMetadata": _usage(answers), **_headed(head)})


def error_body(error: RouterError) -> dict[str, Any]:
    """Return Google's form of an error; of a context that is exceeded in Google's words, which agents match."""
    words = None
    if isinstance(error, ContextLengthError) and error.completion is None:
        words = (
            f"The input token count ({error.prompt}) exceeds the maximum number of tokens allowed ({error.context})."
        )
    return google_error(error, words)


class GeminiStream(ServerSentEvents):
    """A stream of responses. `events`: whether they are server-sent events; otherwise they are the entries of one list."""

    def __init__(self, request: ChatRequest, head: ReplyHead, *, events: bool) -> None:
        if not events:
            self.content_type = b"application/json"
        self._events = events
        self._request = request
        self._head = head
        self._shown = [0] * request.samples
        self._prompt_tokens = 0
        self._entries = 0
        self._ended: dict[int, Answer] = {}
        self._comments: dict[str, str] = {}

    def begin(self, prompt_tokens: int) -> bytes:
        self._prompt_tokens = prompt_tokens
        return b"" if self._events else b"["

    def piece(self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        part = _part(self._request, piece)
        if logprobs is not None:
            self._shown[index] += len(logprobs)
        if part is None and not logprobs:
            return b""
        candidate = {**_candidate(index, [] if part is None else [part]), **_chosen(self._request, logprobs)}
        return self._entry({"candidates": [candidate], "usageMetadata": self._so_far()})

    def finish(self, index: int, answer: Answer) -> bytes:
        self._ended[index] = answer  # the last entry tells it: clients read the numbers of the entry with the reason
        return b""

    def end(self, answers: Sequence[Answer]) -> bytes:
        candidates = []
        for index, answer in sorted(self._ended.items()):
            behind = None if answer.logprobs is None else answer.logprobs[self._shown[index] :]
            ended = {**_ending(self._request, answer), **_chosen(self._request, behind or None)}
            candidates.append({**_candidate(index, []), **ended})
        last = self._entry({"candidates": candidates, "usageMetadata": _usage(answers), **self._comments})
        return last if self._events else last + b"]"

    def failed(self, error: RouterError) -> bytes:
        """Return an error instead of a response. A list ends with it, and is whole JSON all the same."""
        told = self._entry(error_body(error), headed=False)
        return told if self._events else told + b"]"

    def ping(self) -> bytes:
        return super().ping() if self._events else b"\n"

    def comment(self, name: str, value: str) -> bytes:
        if self._events:
            return super().comment(name, value)
        self._comments[name] = value  # JSON has no comments: the last entry tells it
        return b""

    def _entry(self, response: dict[str, Any], *, headed: bool = True) -> bytes:
        written = _encode({**response, **_headed(self._head)} if headed else response)
        self._entries += 1
        if self._events:
            return b"data: " + written + b"\n\n"
        return b",\n" + written if self._entries > 1 else written

    def _so_far(self) -> dict[str, int]:
        return {"promptTokenCount": self._prompt_tokens, "totalTokenCount": self._prompt_tokens}


def _headed(head: ReplyHead) -> dict[str, Any]:
    return {"modelVersion": head.model, "responseId": head.id}


def _candidate(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    # Clients take a content without parts for a fault, and drop the turn.
    return {"content": {"parts": parts or [{"text": ""}], "role": "model"}, "index": index}


def _part(request: ChatRequest, piece: Piece) -> dict[str, Any] | None:
    """Return a piece as a part; None if there is nothing to show."""
    if isinstance(piece, ToolCall):
        return {"functionCall": {"id": piece.id, "name": piece.name, "args": Raw(piece.arguments.encode())}}
    if not piece.text or (isinstance(piece, Reasoning) and not request.include_reasoning):
        return None
    return {"text": piece.text, "thought": True} if isinstance(piece, Reasoning) else {"text": piece.text}


def _ending(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """Return how a candidate ends, and the fields that Google's API lacks."""
    reason = _FINISHES[answer.finish]
    if request.call_choice not in (AUTO, NONE) and answer.finish == "stop" and not answer.tool_calls:
        reason = "MALFORMED_FUNCTION_CALL"
    end: dict[str, Any] = {"finishReason": reason}
    if answer.finish == "abort":
        end["finishMessage"] = "the generation was aborted"
    end |= {"generation_id": answer.generation_id, "weight_version": answer.weight_version}
    if answer.extra:
        end["meta_info"] = answer.extra
    if answer.ids is not None:
        end |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.ids}
    return end


def _chosen(request: ChatRequest, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    """Return the logprobs of a candidate; nothing if there are none."""
    if not logprobs:
        return {}
    values = [_finite(one.logprob) for one in logprobs]
    # A long reply is written piece by piece: as objects it takes ten times the memory of its JSON.
    starts = range(0, len(logprobs), _PIECE)
    pieces = ([_token(one.token_id, one.spelled, one.logprob) for one in logprobs[at : at + _PIECE]] for at in starts)
    result = {"chosenCandidates": _joined(pieces)}
    if request.top_logprobs:
        tops = (
            [{"candidates": [_token(*other) for other in one.top]} for one in logprobs[at : at + _PIECE]]
            for at in starts
        )
        result["topCandidates"] = _joined(tops)
    return {"avgLogprobs": sum(values) / len(values), "logprobsResult": result}


def _joined(pieces: Iterable[list[dict[str, Any]]]) -> Raw:
    """Return one list of several."""
    return Raw(b"[%b]" % b",".join([_encode(piece)[1:-1] for piece in pieces]))


def _token(token_id: int, spelled: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": spelled.decode(errors="replace"), "tokenId": token_id, "logProbability": _finite(logprob)}


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else UNLIKELY


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the numbers as Google counts them: thoughts apart from the rest, and cached tokens as a part of the prompt."""
    prompt, cached = (answers[0].prompt_tokens, answers[0].cached_tokens) if answers else (0, 0)
    sampled = sum(answer.completion_tokens for answer in answers)
    thoughts = sum(answer.reasoning_tokens for answer in answers)
    usage = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled - thoughts,
        "totalTokenCount": prompt + sampled,
    }
    if cached:
        usage["cachedContentTokenCount"] = cached
    if thoughts:
        usage["thoughtsTokenCount"] = thoughts
    return usage
