"""Prompts of a batch that were aborted while no worker had it: no worker gets them, and the client gets aborted replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import Message

from router.engines.json import JSON_ERRORS, decode_any, decode_object, split_items
from router.engines.sglang.worker_request import WorkerRequest
from router.errors import UpstreamError
from router.http.upstream import UpstreamBrokenError


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
        """Return an event with the index that the client knows; before the first one come those of the prompts left out.

        Raises UpstreamBrokenError for an index that no prompt has.
        """
        before, self._before = self._before, b""
        try:
            fields: dict[str, Any] = decode_object(data)
        except JSON_ERRORS:
            try:
                fields = json.loads(data)  # Python's own parser takes NaN, which a worker may write
            except ValueError:
                return before + data  # the end
        if "index" not in fields:
            return before + data  # an error
        shown = {**fields, "index": self._client_index(fields["index"])}
        return before + (json.dumps(shown).encode() if isinstance(fields["index"], int) else msgspec.json.encode(shown))

    def _client_index(self, index: object) -> int:
        """Return the place of a prompt in the whole batch, given that in the part that was sent."""
        with suppress(*JSON_ERRORS):
            at = decode_any(index) if isinstance(index, Raw) else index
            if type(at) is int and 0 <= at < len(self._sent):
                return self._sent[at]
        raise UpstreamBrokenError("a worker's stream has an event of a prompt that it was not sent")

    async def whole(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        """Return the reply with all prompts. Raises UpstreamError if it has not as many replies as prompts were sent."""
        if start["status"] == 200:
            try:
                found = split_items(body)
            except JSON_ERRORS:
                return start, body
            if len(found) != len(self._sent):
                raise UpstreamError(f"a worker answered {len(self._sent)} prompts with {len(found)} replies")
            for prompt, reply in zip(self._sent, found, strict=True):
                self._replies[prompt] = bytes(reply)
            body = b"[%b]" % b",".join(self._replies)
        return start, body
