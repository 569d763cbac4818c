"""Requests to an embedded worker over HTTP."""

from __future__ import annotations

import http.client
import json
from typing import Any

from worker.worker import EmbeddedWorker


def request(
    worker: EmbeddedWorker, path: str, body: Any = None, *, raw: bytes | None = None, kind: str = "application/json"
) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
    try:
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request("GET" if content is None else "POST", path, content, {"content-type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("content-type")
    finally:
        connection.close()


def generate(worker: EmbeddedWorker, prompt: Any = "Hello", **body: Any) -> Any:
    key = "text" if isinstance(prompt, str) or isinstance(prompt[0], str) else "input_ids"
    status, content, _ = request(worker, "/generate", {key: prompt, **body})
    assert status == 200, content
    return json.loads(content)


def events(content: bytes) -> list[dict[str, Any]]:
    parts = content.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def stream(worker: EmbeddedWorker, prompt: str = "Hello", **body: Any) -> list[dict[str, Any]]:
    status, content, kind = request(worker, "/generate", {"text": prompt, "stream": True, **body})
    assert status == 200
    assert kind == "text/event-stream; charset=utf-8"
    return events(content)
