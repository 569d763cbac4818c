"""The dialect of OpenAI's Responses API, without what needs a server that keeps responses.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import msgspec

from middleware_hub.dialects.openai.replies import error_body
from middleware_hub.dialects.responses import replies, requests
from router.errors import RouterError


class Responses:
    """`POST /v1/responses`. Implements `Dialect`."""

    name = "Responses"
    parse = staticmethod(requests.parse)
    whole = staticmethod(replies.whole)
    stream = staticmethod(replies.ResponsesStream)

    def error(self, error: RouterError) -> bytes:
        return msgspec.json.encode(error_body(error))
