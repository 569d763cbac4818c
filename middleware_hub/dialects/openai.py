"""The dialect of OpenAI's chat completions, which SGLang speaks, too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead
from middleware_hub.chat.dialect import Memo
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects import openai_replies, openai_requests
from router.errors import RouterError


class OpenAI:
    """See `chat.Dialect`."""

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        """A body of `POST /v1/chat/completions`."""
        return openai_requests.parse(body, memo)

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        """A `chat.completion`."""
        return openai_replies.whole(head, answers)

    def stream(self, request: ChatRequest, head: ReplyHead) -> openai_replies.OpenAIStream:
        """`chat.completion.chunk`s."""
        return openai_replies.OpenAIStream(request, head)

    def error(self, error: RouterError) -> bytes:
        """`{"error": {...}}`."""
        return msgspec.json.encode(openai_replies.error_body(error))
