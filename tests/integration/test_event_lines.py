"""Workers whose events have other line ends, or other fields beside their data, as some servers and proxies write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.asking import Asking, assert_kept, settle
from tests.support.stack import STYLES, Stack, stack
from worker.http.exchange import HttpExchange
from worker.options import StreamStyle

FORMS: dict[str, Callable[[bytes], bytes]] = {
    "carriage_returns": lambda events: events.replace(b"\n", b"\r\n"),
    "fields": lambda events: events.replace(b"data: ", b"event: message\nid: 7\ndata: "),
    "no_space": lambda events: events.replace(b"data: ", b"data:"),
}
WORDS = ("one ", "two ", "three ", "four ")


@pytest.fixture(scope="module")
def started() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as made:
        yield made


@pytest.fixture
def served(started: Stack) -> Iterator[Stack]:
    yield started
    for worker in started.workers:
        worker.release()
    settle(started)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", STYLES)
def test_they_pass_as_they_come_and_are_recorded(
    served: Stack,
    asks: list[Asking],
    space: str,
    monkeypatch: pytest.MonkeyPatch,
    style: StreamStyle,
    form: str,
    logprobs: bool,
) -> None:
    sent = HttpExchange.part

    async def part(exchange: HttpExchange, content: bytes, *, last: bool = False) -> None:
        await sent(exchange, FORMS[form](content), last=last)

    monkeypatch.setattr(HttpExchange, "part", part)
    (worker,) = served.workers
    worker.wire.stream_style = style
    logged = len(worker.log)
    worker.script([number for word in WORDS for number in served.spelling.encode_tail(word)])
    worker.hold(after=2)
    body = {"text": "Count:", "stream": True, "return_logprob": logprobs}
    asks.append(Asking(served.url, body, headers={"x-radix-namespace": space}))
    first = asks[-1].response.read1()
    assert b"one" in first, "the worker has not ended yet"
    worker.release()
    rest = asks[-1].response.read()
    assert (b"output_token_logprobs" in first + rest) is logprobs
    record = worker.log[logged]
    assert_kept(served.retrieve("Count:" + record.text, namespace=space), record)
