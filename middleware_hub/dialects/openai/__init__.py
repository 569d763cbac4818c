"""The dialect of OpenAI's chat completions, which SGLang speaks too."""

from __future__ import annotations

import msgspec

from middleware_hub.dialects.openai import replies, requests
from router.errors import RouterError


class OpenAI:
    """`POST /v1/chat/completions`. Implements `Dialect`."""

    name = "OpenAI"
    parse = staticmethod(requests.parse)
    whole = staticmethod(replies.whole)
    stream = staticmethod(replies.OpenAIStream)

    def error(self, error: RouterError) -> bytes:
        return msgspec.json.encode(replies.error_body(error))
