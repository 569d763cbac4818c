"""What a worker's stream is for a turn."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message

from middleware_hub.sessions.turn.worker_reply import WorkerReply
from router.engines.events import DONE
from router.engines.form.stream import StreamedReply


class Reader:
    """Counts what a client is shown."""

    def __init__(self) -> None:
        self.events = 0

    def head(self, start: Message) -> None: ...

    def event(self, streamed: StreamedReply) -> None:
        self.events += 1


def event(text: str, ids: list[int], finish: dict[str, Any] | None) -> bytes:
    entries = [[-0.5, token, None] for token in ids]
    meta = {
        "id": "r",
        "prompt_tokens": 1,
        "completion_tokens": len(ids),
        "finish_reason": finish,
        "output_token_logprobs": entries,
    }
    return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()


def test_what_comes_behind_the_end_of_a_stream_is_no_part_of_the_reply() -> None:
    """The client has stopped reading: the turn is what it has seen."""
    reader = Reader()
    received = WorkerReply(reader, 3)
    received.head({"type": "http.response.start", "status": 200, "headers": []})
    received.event(event("a", [7], {"type": "stop"}))
    received.event(DONE)
    for data in (event("ab", [7, 8], None), b'{"error": {"message": "late"}}', DONE):
        received.event(data)
    reply, _, _ = received.result(stream=True)
    assert (reply.text, list(reply.ids), reader.events) == ("a", [7], 1)
