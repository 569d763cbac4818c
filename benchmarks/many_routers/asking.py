"""One request of a client: posted on a connection of its own, and its answer, in one piece or streamed."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
GONE = (OSError, http.client.HTTPException, json.JSONDecodeError)
"""The errors of a connection that broke."""
SECONDS = 60.0
_UNSAVED = b": x-radix-saved: no"


@dataclass
class Answer:
    """Status, headers in lower case, and the body; of a stream its last event, and whether its end reported a loss."""

    status: int
    headers: dict[str, str]
    body: Any
    told_unsaved: bool = False


def ask(url: str, body: Json, headers: Mapping[str, str], leaves: float | None = None) -> Answer:
    """Post JSON. Raises one of `GONE`: TimeoutError for a client that left, after `leaves` seconds."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request("POST", parts.path, json.dumps(body).encode(), dict(headers))
        if leaves is not None and connection.sock is not None:
            connection.sock.settimeout(max(leaves, 0.001))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        if body.get("stream") and response.status == 200:
            told: list[bytes] = []
            return Answer(200, found, _put_together(_events(response, told)), _UNSAVED in told)
        content = response.read()
        with contextlib.suppress(ValueError):
            return Answer(response.status, found, json.loads(content))
        if response.status == 200:
            raise ConnectionError(f"half of an answer: {content[-80:]!r}")
        return Answer(response.status, found, content.decode(errors="replace"))
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse, comments: list[bytes]) -> Iterator[Json]:
    for line in response:
        if line.startswith(b":"):
            comments.append(line.strip())
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise ConnectionError("the stream ended without [DONE]")


def _put_together(events: Iterator[Json]) -> Json:
    """Return the reply of a stream, cumulative or incremental."""
    last: Json = {}
    for event in events:
        if "error" in event:
            raise ConnectionError(f"the stream failed: {str(event)[:200]}")
        count = event["meta_info"]["completion_tokens"]
        if last and len(event["output_ids"]) < count:
            told = event["meta_info"]["output_token_logprobs"]
            event["meta_info"]["output_token_logprobs"] = last["meta_info"]["output_token_logprobs"] + told
            event["output_ids"], event["text"] = last["output_ids"] + event["output_ids"], last["text"] + event["text"]
        event.setdefault("prompt_token_ids", last.get("prompt_token_ids"))
        last = event
    if not last:
        raise ConnectionError("the stream was empty")
    return last
