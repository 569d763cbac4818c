"""What a worker's stream is for a turn."""

from __future__ import annotations

import json
from typing import Any

from middleware_hub.sessions.turn.generation import _ReceivedReply
from router.engines.events import DONE


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
    received = _ReceivedReply(3)
    assert received.event(event("a", [7], {"type": "stop"}))
    assert not received.event(DONE)
    for data in (event("ab", [7, 8], None), b'{"error": {"message": "late"}}', DONE):
        assert not received.event(data), "no client is shown it"
    reply, _, _ = received.result(200, b"", stream=True)
    assert (reply.text, list(reply.ids)) == ("a", [7])
