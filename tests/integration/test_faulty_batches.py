"""One faulty reply of a batch: its client is told, and the other replies of the batch are remembered exactly."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import read_request, serve_socket
from tests.support.stack import STYLES, Stack, stack
from worker.engine.script import Fault

FAULTS: list[Fault] = [
    "nan_logprob",
    "null_logprob",
    "missing_logprob",
    "wrong_logprob_ids",
    "wrong_completion_tokens",
    "wrong_prompt_tokens",
    "no_logprobs",
]
ODD_BATCH = (
    b' [ {"text": " NaN", "output_ids": [9707], "meta_info": {"id": "a", "finish_reason": {"type": "stop"},\n'
    b'"prompt_tokens": 1, "completion_tokens": 1, "output_token_logprobs": [[NaN, 9707, null]]}},\n'
    b'  {"text": "Hello", "output_ids": [9707], "meta_info": {"id": "b", "finish_reason": {"type": "stop"},\n'
    b'"prompt_tokens": 1, "completion_tokens": 1, "output_token_logprobs": [[-0.50, 9707, null]]}} ,\n'
    b'  {"meta_info": {"id": "c", "finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 1,\n'
    b'"new": -Infinity, "output_token_logprobs": [[-0.5, 9707, null]]}, "text": "Hello", "output_ids": [9707]} ] '
)
"""No worker that we know prints spaces and lines so. The second reply is good."""


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as started:
        yield started


def batch(fault: Fault, prompts: list[str]) -> dict[str, Any]:
    """Return a request whose second reply has the fault."""
    scripts: list[dict[str, Any]] = [{"ids": [9707, 1879]} for _ in prompts]
    scripts[1]["fault"] = fault
    return {
        "text": prompts,
        "return_logprob": True,
        "sampling_params": [{"custom_params": {"script": script}} for script in scripts],
    }


def exact(served: Stack, space: str, prompts: list[str], said: str = "Hello world") -> list[bool]:
    return [served.retrieve(prompt + said, namespace=space)["exact"] for prompt in prompts]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_faulty_reply_of_a_batch_takes_no_other_with_it(served: Stack, fault: Fault) -> None:
    space, prompts = uuid.uuid4().hex, ["One", "Two", "Three"]
    answer = served.post("/generate", batch(fault, prompts), headers={"x-radix-namespace": space})
    assert answer.status == 200
    assert answer.headers["x-radix-recorded"] == "inexact; 2 of 3 replies are exact"
    assert exact(served, space, prompts) == [True, False, True]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("style", STYLES)
def test_one_faulty_stream_of_a_batch_takes_no_other_with_it(style: Any, fault: Fault) -> None:
    space, prompts = uuid.uuid4().hex, ["One", "Two", "Three"]
    with stack("qwen", styles=(style,)) as served:
        body = {**batch(fault, prompts), "stream": True}
        answer = served.post("/generate", body, headers={"x-radix-namespace": space})
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert exact(served, space, prompts) == [True, False, True]


def test_a_batch_reaches_its_client_byte_for_byte_and_its_good_reply_is_exact() -> None:
    """Two replies hold literals that are not JSON, and one text spells such a literal."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        body = ODD_BATCH if head.startswith("POST /generate ") else b'{"model_path":"m"}'
        start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(start % len(body) + body)
        await writer.drain()

    with serve_socket(answer) as url, stack("qwen", styles=()) as served:
        assert served.post("/add_worker", {"url": url}).status == 200
        prompts = ["One", "Two", "Three"]
        found = served.post("/generate", {"text": prompts, "return_logprob": True})
        assert found.content == ODD_BATCH
        assert found.headers["x-radix-recorded"] == "inexact; 1 of 3 replies are exact"
        assert exact(served, "", prompts, "Hello") == [False, True, False]
