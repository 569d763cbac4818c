"""The dialect of OpenAI's chat completions, which SGLang speaks too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead
from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.openai import replies, requests
from router.errors import RouterError


class OpenAI:
    """`POST /v1/chat/completions`. Implements `Dialect`."""

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        return requests.parse(body, memo)

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        return replies.whole(head, answers)

    def stream(self, request: ChatRequest, head: ReplyHead) -> replies.OpenAIStream:
        return replies.OpenAIStream(request, head)

    def error(self, error: RouterError) -> bytes:
        return msgspec.json.encode(replies.error_body(error))
