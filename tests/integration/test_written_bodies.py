"""Bodies as clients write them: compressed, and with half a character in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard

from tests.support.stack import Stack, stack
from tests.support.templates import folder

LIMIT = 64 * 1024


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    template = {"chat_template": str(folder() / "qwen3.jinja")}
    with stack("qwen", styles=("cumulative",), sessions=template, server={"max_body_bytes": LIMIT}) as made:
        yield made
        assert made.idle()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
DOORS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hi.", "sampling_params": {"max_new_tokens": 3}},
    "/retrieve_from_text": {"text": "Hi."},
    "/radix_tree/explain": {"text": "Hi."},
    "/v1/completions": {"prompt": "Hi.", "max_tokens": 3},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/sessions": {"metadata": {"a": "Hi."}},
    "/sessions/NAME/v1/chat/completions": CHAT,
    "/sessions/NAME/v1/messages": CHAT,
    "/sessions/NAME/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/sessions/NAME/v1/responses": {"input": "Hi.", "max_output_tokens": 3},
    "/sessions/NAME/reward_info": {"reward_info": {"a": "Hi."}},
    "/sessions/NAME/finalize": {"metadata": "Hi."},
    "/abort_request": {"rid": "Hi."},
    "/flush_cache": {"a": "Hi."},
}


def place(served: Stack, path: str) -> str:
    if "NAME" not in path:
        return path
    return path.replace("NAME", served.post("/sessions", {}).json()["session_id"])


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_compressed_body_is_the_same_request(served: Stack, path: str, encoding: str) -> None:
    written = json.dumps(DOORS[path]).encode()
    plain = served.post(place(served, path), None, raw=written)
    packed = gzip.compress(written) if encoding == "gzip" else zstandard.compress(written)
    answer = served.post(place(served, path), None, raw=packed, headers={"content-encoding": encoding})
    assert plain.status < 300, plain.content
    assert answer.status == plain.status, answer.content
    assert answer.json().keys() == plain.json().keys()


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip"])
def test_other_encodings_are_refused_by_name(served: Stack, path: str, encoding: str) -> None:
    answer = served.post(place(served, path), None, raw=b"x", headers={"content-encoding": encoding})
    assert answer.status == 415, answer.content
    message = answer.json()["error"]["message"]
    assert encoding in message
    assert "gzip, zstd" in message
    assert answer.headers["accept-encoding"] == "gzip, zstd"


@pytest.mark.parametrize("path", DOORS)
def test_the_size_counts_when_a_body_is_unpacked(served: Stack, path: str) -> None:
    written = json.dumps({**DOORS[path], "user": "x" * LIMIT}).encode()
    for encoding, packed in {"gzip": gzip.compress(written), "zstd": zstandard.compress(written)}.items():
        assert len(packed) < LIMIT / 10
        answer = served.post(place(served, path), None, raw=packed, headers={"content-encoding": encoding})
        assert answer.status == 413, answer.content
        assert "--max-body-bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [path for path in DOORS if path not in ("/abort_request", "/flush_cache")])
@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\uD83D\\u0041"])
def test_half_a_surrogate_pair_is_named_with_its_place(served: Stack, path: str, half: str) -> None:
    written = json.dumps(DOORS[path]).replace("Hi.", f"Hi.{half}").encode()
    answer = served.post(place(served, path), None, raw=written)
    assert answer.status == 400, answer.content
    message = answer.json()["error"]["message"]
    assert "half a surrogate pair" in message
    assert f"{half[:6]}, at byte {written.index(half.encode())}" in message
    assert "Hi." in message
