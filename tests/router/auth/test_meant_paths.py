"""The path that a misspelt one means."""

from __future__ import annotations

import pytest

from router.auth.permissions import meant_path


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/retrieve", "/retrieve_from_text"),
        ("/retreive_from_text", "/retrieve_from_text"),
        ("/retrieve_from_text/", "/retrieve_from_text"),
        ("/v1/generate", "/generate"),
        ("/", "/inspect"),
        ("/session", "/sessions"),
        ("/metric", "/metrics"),
        ("/healthz", "/health"),
        ("/explain", "/radix_tree/explain"),
        ("/claim", "/trajectories/claim"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/generate", "/generate"),
        ("////v1/generate", "/generate"),
        ("/tokenize/", "/tokenize"),
        ("/release", "/release_memory_occupation"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/session/a/v1/chat/completions", "/sessions/a/v1/chat/completions"),
        ("/sessions/a/v1/chat/completions", None),
        ("/v1/messages/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/update_weight_from_disk", "/update_weights_from_disk"),
        # What is known, or may be a worker's own.
        ("/generate", None),
        ("/update_weights_from_tensor", None),
        ("/update_weights_from_disk", None),
        ("/workers/42903d095d88", None),
        ("/v1/chat/completions/batch", None),
        ("/v1/responses/resp_1", None),
        ("/get_server_info", None),
        ("/start_profile", None),
        ("", None),
        ("/other", None),
        # What is longer than a path with the id of a session is not compared, because that takes long.
        ("/session/" + "a" * 1000 + "/v1/messages", "/sessions/" + "a" * 1000 + "/v1/messages"),
        ("/v1" * 20_000 + "/generate", None),
    ],
)
def test_what_is_meant(path: str, meant: str | None) -> None:
    assert meant_path(path) == meant
