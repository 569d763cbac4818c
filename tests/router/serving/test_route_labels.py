"""The `route` labels of metrics: a dashboard counts generations by two of them."""

from __future__ import annotations

import pytest

from router.serving.entrance import route_class


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/generate", "generate"),
        ("/v1/completions", "generate"),
        ("/v1/chat/completions", "turn"),  # of an agent that names no session
        ("/v1/messages", "turn"),
        ("/sessions/s/v1/chat/completions", "turn"),
        ("/sessions/s/v1/messages", "turn"),
        ("/sessions/s/v1/responses", "turn"),
        ("/v1/messages/count_tokens", "other"),
        ("/sessions/s/finalize", "sessions"),
        ("/workers/abc", "workers"),
        ("/made/up", "other"),
    ],
)
def test_generations_are_told_from_the_rest(path: str, route: str) -> None:
    assert route_class(path) == route
