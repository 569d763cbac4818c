"""Prompts of a batch that were aborted while no worker had it: no worker gets them, and the client gets aborted replies."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from starlette.types import Message

from router.engines.json import JSON_ERRORS, decode_object, split_items
from router.engines.sglang.worker_request import WorkerRequest


class LeftOut:
    """A batch without some of its prompts: an editor of the reply, which puts theirs into their places.

    Attributes:
        request: the batch as it is sent.
    """

    def __init__(self, whole: WorkerRequest, sent: Sequence[int]) -> None:
        """`sent`: the prompts of the whole batch that are sent, rising."""
        self.request = whole.only(sent)
        self._sent = sent
        self._replies: list[bytes] = whole.ended_replies(whole.rids)
        left_out = [reply for prompt, reply in enumerate(self._replies) if prompt not in set(sent)]
        self._before = b"\n\ndata: ".join((*left_out, b""))

    def head(self, start: Message, *, stream: bool) -> Message | None:
        return start if stream else None

    def event(self, data: bytes) -> bytes:
        """Return an event with the index that the client knows; before the first one come those of the prompts left out."""
        before, self._before = self._before, b""
        try:
            fields = decode_object(data)
            return before + msgspec.json.encode({**fields, "index": self._sent[int(bytes(fields["index"]))]})
        except (*JSON_ERRORS, KeyError):
            pass
        try:  # Python's own parser takes NaN, which a worker may write
            read = json.loads(data)
            return before + json.dumps({**read, "index": self._sent[read["index"]]}).encode()
        except (ValueError, TypeError, KeyError):  # the end, or an error
            return before + data

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        if start["status"] == 200:
            try:
                found = split_items(body)
            except JSON_ERRORS:
                return start, body
            for prompt, reply in zip(self._sent, found, strict=False):
                self._replies[prompt] = bytes(reply)
            body = b"[%b]" % b",".join(self._replies)
        return start, body
