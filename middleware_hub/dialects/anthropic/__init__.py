"""The dialect of Anthropic's messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead
from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.anthropic import replies, requests
from router.errors import RouterError


class Anthropic:
    """`POST /v1/messages` and `/v1/messages/count_tokens`. Implements `Dialect`."""

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        return requests.parse(body, memo)

    def parse_count(self, body: bytes) -> ChatRequest:
        return requests.parse_count(body)

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        return replies.whole(request, head, answers)

    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def stream(self, request: ChatRequest, head: ReplyHead) -> replies.AnthropicStream:
        return replies.AnthropicStream(request, head)

    def error(self, error: RouterError) -> bytes:
        return msgspec.json.encode(replies.error_body(error))
