"""Deeply nested JSON is an error of its sender at any depth, and never one of the router.

The limit depends on the depth of the interpreter's own calls, so a depth that is readable in one place is not in another. Hence
the many depths around the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys

import pytest

from router.config import ServerConfig
from router.engines.events import event_index
from router.engines.form.outcome import (
    aborted_replies,
    lacks_adapter,
    refusal_status,
    renamed,
    was_aborted,
    was_refused,
)
from router.engines.form.reply import UnreadableReplyError, edit_meta, read_reply, split_list
from router.engines.form.request import GenerateRequest, new_weight_version
from router.engines.form.stream import StreamedReply
from router.engines.form.worker_request import WorkerRequest
from router.errors import BadRequestError, BodyTooLargeError
from tests.router.conftest import running
from tests.support.depths import LIMITED

FATHOMLESS = 200_000
DEPTHS = (*range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 20, 4), FATHOMLESS)
KINDS = ((b"[", b"]"), (b'{"a":', b"}"))
NESTS = [begin * depth + b"1" + end * depth for depth in DEPTHS for begin, end in KINDS]

DEEPER = () if LIMITED else (BadRequestError, BodyTooLargeError)
"""What is said of a body that this Python reads, and that has too many values in it."""

REQUESTS = [
    b"%b",
    b'{"text": %b}',
    b'{"text": "a", "unknown": %b}',
    b'{"text": "a", "rid": %b}',
    b'{"text": "a", "stream": %b}',
    b'{"text": "a", "lora_path": %b}',
    b'{"text": "a", "logprob_start_len": %b}',
    b'{"text": "a", "return_logprob": %b}',
    b'{"text": "a", "return_logprob": true, "top_logprobs_num": %b}',
    b'{"text": "a", "sampling_params": %b}',
    b'{"text": "a", "sampling_params": {"n": %b}}',
    b'{"text": "a", "sampling_params": {"top_k": %b}}',
    b'{"text": "a", "sampling_params": {"custom_params": %b}}',
    b'{"text": ["a", "b"], "sampling_params": [{}, %b]}',
    b'{"input_ids": %b}',
    b'{"input_embeds": %b}',
]


@pytest.mark.parametrize("request_body", REQUESTS)
def test_a_request(request_body: bytes) -> None:
    """A request is read or refused, and so is the worker request made of it."""
    for nest in NESTS:
        body = request_body.replace(b"%b", nest)
        readable = False
        with contextlib.suppress(BadRequestError, *DEEPER):
            request = GenerateRequest.parse(body, vocabulary=100)
            assert {request.rid(0), request.lora_path(0), request.skips_special(0)}
            readable = True
        attempt = None
        with contextlib.suppress(*DEEPER):
            attempt = WorkerRequest.parse(body)
        if len(nest) > FATHOMLESS and LIMITED:
            assert not readable
            assert attempt is None


REPLIES = [
    b"%b",
    b'{"text": %b, "output_ids": [1], "meta_info": {"id": "x"}}',
    b'{"text": "a", "output_ids": %b, "meta_info": {"id": "x"}}',
    b'{"text": "a", "output_ids": [1], "meta_info": %b}',
    b'{"text": "a", "output_ids": [1], "meta_info": {"id": "x", "finish_reason": {"type": "abort", "unknown": %b}}}',
    b'{"text": "a", "output_ids": [1], "meta_info": {"id": "x", "output_token_logprobs": %b}}',
    b'{"text": "a", "output_ids": [1], "meta_info": {"id": "x"}, "unknown": %b}',
    b'{"error": %b, "a": "abort"}',
    b'{"error": {"message": %b, "param": "LoRA adapter"}}',
]


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply(reply: bytes) -> None:
    """A reply is read or unreadable; no client loses a reply because of it."""
    for nest in NESTS:
        body = reply.replace(b"%b", nest)
        for read in (read_reply, lambda raw: split_list(raw, 1), lambda raw: edit_meta(raw, drop=frozenset({"x"}))):
            with contextlib.suppress(UnreadableReplyError):
                read(body)
        streamed = StreamedReply()
        streamed.feed(body)
        for look in (was_aborted, was_refused, refusal_status, lacks_adapter, event_index, new_weight_version):
            look(body)
        renamed(body, "x")
        attempt = WorkerRequest.parse(b'{"text": "a"}')
        assert attempt is not None
        aborted_replies(body, attempt)


CALLS = [
    ("/add_worker", b"%b"),
    ("/add_worker", b'{"url": %b}'),
    ("/remove_worker", b'{"url": %b}'),
    ("/workers", b'{"url": "http://127.0.0.1:1", "worker_type": %b}'),
    ("/abort_request", b"%b"),
    ("/abort_request", b'{"rid": %b}'),
    ("/abort_request", b'{"rid": "x", "unknown": %b}'),
    ("/abort_request", b'{"abort_all": %b}'),
    ("/pause_generation", b'{"mode": "in_place", "unknown": %b}'),
    ("/update_weight_version", b'{"new_version": "7", "unknown": %b}'),
    ("/update_weights_from_disk", b'{"model_path": %b}'),
    ("/flush_cache", b"%b"),
]


@pytest.mark.parametrize(("path", "call"), CALLS)
def test_a_call(path: str, call: bytes) -> None:
    """A call that is nested too deeply is answered with 400. (Otherwise there is no worker to call.)"""

    async def main() -> None:
        async with running(server=ServerConfig(api_keys=("k",))) as router:
            headers = {"authorization": "Bearer k"}
            for nest in NESTS:
                body = call.replace(b"%b", nest)
                async with router.client.post(path, data=io.BytesIO(body), headers=headers) as reply:
                    error = (await reply.json())["error"]
                    assert error["code"] == reply.status
                    assert reply.status in ((400, 413) if len(nest) > FATHOMLESS else (400, 404, 503)), error

    asyncio.run(main())
