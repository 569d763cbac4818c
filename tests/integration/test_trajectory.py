"""`return_trajectory`: the retrieval comes with the reply, and the reply is otherwise what it would have been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.asking import assert_kept
from tests.support.stack import STYLES, Stack, stack
from worker.options import StreamStyle

PROMPTS = {"single": "A:", "list": ["A:", "B: b"]}
PIECES = ("Hel", "lo", " sum", "mary", " x")


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as started:
        yield started


def replies(body: Any, style: StreamStyle | None) -> list[dict[str, Any]]:
    """Each generation as its client has it at the end, put together as its kind of stream wants it."""
    if style is None:
        return body if isinstance(body, list) else [body]
    found: dict[int, dict[str, Any]] = {}
    for event in body:
        last = found.get(event.get("index", 0))
        if last is not None and style != "cumulative":
            event["output_ids"] = last["output_ids"] + event["output_ids"]
        if last is not None and style == "incremental":
            event["text"] = last["text"] + event["text"]
            if "output_token_logprobs" in event["meta_info"]:
                before = last["meta_info"]["output_token_logprobs"]
                event["meta_info"]["output_token_logprobs"] = before + event["meta_info"]["output_token_logprobs"]
        found[event.get("index", 0)] = event
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "none"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("style", [None, *STYLES])
def test_the_reply_is_the_same_and_the_trajectory_is_what_was_sampled(
    served: Stack, space: str, style: StreamStyle | None, prompts: str, samples: int, logprobs: bool
) -> None:
    (worker,) = served.workers
    worker.wire.stream_style = style or "cumulative"
    texts = PROMPTS[prompts]
    count = len(texts) * samples if isinstance(texts, list) else samples
    ids = [number for piece in PIECES for number in served.spelling.encode_tail(piece)]
    body = {"text": texts, "stream": style is not None, "return_logprob": logprobs, "sampling_params": {"n": samples}}
    seen = []
    for wanted in (False, True):
        worker.script(ids, times=count)
        sent = {**body, "return_trajectory": wanted}
        seen.append(served.generate(sent, headers={"x-radix-namespace": space + str(wanted)}))
    plain, told = (replies(reply.body, style) for reply in seen)
    assert len(plain) == len(told) == count
    for without, reply, record in zip(plain, told, seen[1].records, strict=True):
        trajectory = reply["meta_info"].pop("trajectory")
        assert "trajectory" not in without["meta_info"]
        assert (reply["text"], reply["output_ids"]) == (without["text"], without["output_ids"])
        assert reply["meta_info"].keys() == without["meta_info"].keys()
        if logprobs:
            said = [tuple(entry[:2]) for entry in reply["meta_info"]["output_token_logprobs"]]
            assert said == list(zip(record.logprobs, record.output_ids, strict=True))
        assert reply["output_ids"] == record.output_ids
        assert_kept(trajectory, record)
