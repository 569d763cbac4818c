"""The dialect of Google's Gemini API: `generateContent`, `streamGenerateContent` and `countTokens` of a model."""

from __future__ import annotations

import re
from functools import partial

import msgspec

from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.gemini import replies, requests
from router.errors import RouterError

GENERATE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
_CALL = re.compile(r"(?:.*?/)??(?:models|tunedModels)/(.+):([A-Za-z]+)")
"""The place of a call: a model, which may have slashes and colons in its name, and what is asked of it. Google's cloud has
`publishers/google/`, and more, in front of it.
"""
_SSE = re.compile(rb"(?:^|&)alt=sse(?:&|$)")


class Gemini:
    """One call of a model. Implements `Dialect` and `Counter`.

    Args:
        model: its name, which no body has.
        call: what is asked of it.
        events: whether a stream consists of server-sent events (`?alt=sse`); otherwise it is one JSON list, piece by piece.
    """

    whole = staticmethod(replies.whole)

    def __init__(self, model: str, call: str, *, events: bool) -> None:
        self.name = f"Gemini {call}{'?alt=sse' if events else ''} {model}"
        self.stream = partial(replies.GeminiStream, events=events)
        self._model = model
        self._stream = call == STREAM

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        return requests.parse(body, model=self._model, stream=self._stream)

    def parse_count(self, body: bytes) -> ChatRequest:
        return requests.parse_count(body, model=self._model)

    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"totalTokens": tokens})

    def error(self, error: RouterError) -> bytes:
        return msgspec.json.encode(replies.error_body(error))


def called(place: str, query: bytes) -> tuple[Gemini, str] | None:
    """Return the dialect of a call, and what is asked; None for a path that is no call of a model.

    Args:
        place: the path, without the version of the API in front.
        query: the query behind it.
    """
    found = _CALL.fullmatch(place)
    if found is None:
        return None
    return Gemini(found[1], found[2], events=bool(_SSE.search(query))), found[2]
