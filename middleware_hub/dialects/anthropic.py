"""The dialect of Anthropic's messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead
from middleware_hub.chat.dialect import Memo
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects import anthropic_replies, anthropic_requests
from router.errors import RouterError


class Anthropic:
    """See `chat.Dialect`."""

    def parse(self, body: bytes, memo: Memo | None = None) -> ChatRequest:
        """A body of `POST /v1/messages`."""
        return anthropic_requests.parse(body, memo)

    def parse_count(self, body: bytes) -> ChatRequest:
        """A body of `POST /v1/messages/count_tokens`."""
        return anthropic_requests.parse_count(body)

    def whole(self, request: ChatRequest, head: ReplyHead, answers: Sequence[Answer]) -> bytes:
        """A message."""
        return anthropic_replies.whole(request, head, answers)

    def count(self, tokens: int) -> bytes:
        """The reply to `count_tokens`."""
        return msgspec.json.encode({"input_tokens": tokens})

    def stream(self, request: ChatRequest, head: ReplyHead) -> anthropic_replies.AnthropicStream:
        """The events of a message."""
        return anthropic_replies.AnthropicStream(request, head)

    def error(self, error: RouterError) -> bytes:
        """`{"type": "error", "error": {...}}`."""
        return msgspec.json.encode(anthropic_replies.error_body(error))
