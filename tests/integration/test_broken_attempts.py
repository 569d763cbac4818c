"""A second attempt that breaks off: what the client has of it is the end, and what it has nothing of is tried once more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.config import AbortConfig
from tests.support.asking import Asking, assert_kept, settle
from tests.support.stack import STYLES, Stack, stack
from worker.options import StreamStyle

FIRST, SECOND, THIRD = (("Hel",), ("one ", "two ", "three ", "four "), ("sum", "mary"))


@pytest.fixture(scope="module")
def started() -> Iterator[Stack]:
    """One worker; an aborted generation goes out again at once, five times."""
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(attempts=5, wait=0)) as made:
        yield made


@pytest.fixture
def served(started: Stack) -> Iterator[Stack]:
    (worker,) = started.workers
    logged = len(worker.log)
    yield started
    worker.forget_scripts()
    settle(started)
    rids = [record.rid for record in worker.log[logged:]]
    assert len(set(rids)) == len(rids)


def words(served: Stack, pieces: tuple[str, ...]) -> list[int]:
    return [number for piece in pieces for number in served.spelling.encode_tail(piece)]


@pytest.mark.parametrize("stream", STYLES)
def test_a_stream_that_breaks_after_its_first_event_is_not_started_again(
    served: Stack, asks: list[Asking], space: str, stream: StreamStyle
) -> None:
    """Behind the tokens of one attempt there are never those of another: the client sees that its stream has failed."""
    (worker,) = served.workers
    worker.wire.stream_style = stream
    logged = len(worker.log)
    worker.script(words(served, FIRST), finish="abort")
    worker.script(words(served, SECOND), fault="dies")
    worker.script(words(served, THIRD))
    body = {"text": "A:", "stream": True, "rid": space}
    asks.append(Asking(served.url, body, headers={"x-radix-namespace": space}))
    seen = [asks[-1].event()]
    with pytest.raises(OSError, match=r"."):
        seen.extend(iter(asks[-1].event, None))
    records = worker.log[logged:]
    assert len(records) == 2, "nobody asked for a third attempt"
    assert None not in seen, "no [DONE]"
    shown = [event["output_ids"] for event in seen if event is not None]
    ids = shown[-1] if stream == "cumulative" else [number for part in shown for number in part]
    assert ids == records[1].output_ids[: len(ids)]
    assert ids
    assert {event["meta_info"]["id"] for event in seen if event is not None} == {space}
    found = served.retrieve("A:summary", namespace=space)
    assert sum(found["loss_mask"]) == 0


@pytest.mark.parametrize("stream", [None, *STYLES])
def test_one_that_breaks_before_anything_came_of_it_is_tried_again(
    served: Stack, space: str, stream: StreamStyle | None
) -> None:
    """Nobody has seen anything of the second attempt, so the third one's reply is whole."""
    (worker,) = served.workers
    worker.wire.stream_style = stream or "cumulative"
    worker.script(words(served, FIRST), finish="abort")
    worker.script(fault="http_500")
    worker.script(words(served, THIRD))
    body = {"text": "A:", "stream": stream is not None, "rid": space}
    reply = served.generate(body, headers={"x-radix-namespace": space})
    assert len(reply.records) == 3
    last = reply.body if stream is None else reply.body[-1]
    assert (last["meta_info"]["id"], last["meta_info"]["finish_reason"]["type"]) == (space, "stop")
    assert_kept(served.retrieve("A:summary", namespace=space, request_id=space), reply.records[-1])


def test_a_reply_in_one_piece_that_breaks_is_tried_again(served: Stack, space: str) -> None:
    """Half of it had come to the router, and nothing to the client."""
    (worker,) = served.workers
    worker.wire.stream_style = "cumulative"
    worker.script(words(served, FIRST), finish="abort")
    worker.script(words(served, SECOND), fault="dies")
    worker.script(words(served, THIRD))
    reply = served.generate({"text": "A:", "rid": space}, headers={"x-radix-namespace": space})
    assert reply.body["output_ids"] == reply.records[-1].output_ids
    assert reply.body["meta_info"]["id"] == space
    assert_kept(served.retrieve("A:summary", namespace=space, request_id=space), reply.records[-1])
