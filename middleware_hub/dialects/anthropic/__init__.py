"""The dialect of Anthropic's messages."""

from __future__ import annotations

import msgspec

from middleware_hub.dialects.anthropic import replies, requests
from router.errors import RouterError


class Anthropic:
    """`POST /v1/messages` and `/v1/messages/count_tokens`. Implements `Dialect`."""

    name = "Anthropic"
    parse = staticmethod(requests.parse)
    parse_count = staticmethod(requests.parse_count)
    whole = staticmethod(replies.whole)
    stream = staticmethod(replies.AnthropicStream)

    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def error(self, error: RouterError) -> bytes:
        return msgspec.json.encode(replies.error_body(error))
