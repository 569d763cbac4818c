"""What a dialect says to a body that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from middleware_hub.chat.messages import ChatRequest
from router.errors import BadRequestError

Parse = Callable[[bytes], ChatRequest]


def refused(parse: Parse, body: dict[str, Any] | bytes) -> BadRequestError:
    """The error; there has to be one."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(BadRequestError) as caught:
        parse(raw)
    return caught.value


def nested(levels: int) -> Any:
    """An object, and JSON inside of JSON."""
    value: Any = {}
    for level in range(levels - 1, 0, -1):
        value = {"a": value} if level % 2 else [value]
    return value
