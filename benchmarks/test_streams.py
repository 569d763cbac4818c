"""The cost of a streamed reply: splitting and parsing its events, and editing them for the client.

A cumulative stream repeats everything in every event, so its bytes grow with the square of its length, but what is parsed must
not. `us a token` is the time spent here, `kB a token` what a worker sends. A client that wants no logprobs has them removed.
`times a copy` compares with copying the stream's bytes twice, as any proxy does: it must not grow with the length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from router.engines.events import EventSplitter, event_data
from router.engines.form.event_shape import EventCut
from router.engines.form.reply import LOGPROB_FIELDS, edit_meta
from router.engines.form.stream import StreamedReply


def stream(tokens: int, *, incremental: bool) -> Iterator[bytes]:
    """Yield the events of a stream as SGLang writes them, one per token."""
    text, ids, logprobs = bytearray(), bytearray(), bytearray()
    for number in range(1, tokens + 1):
        if incremental:
            text, ids, logprobs = bytearray(), bytearray(), bytearray()
        text += b" word"
        ids += b"%s%d" % (b"," if ids else b"", 1_000 + number % 30_000)
        logprobs += b"%s[-0.%d,%d,null]" % (b"," if logprobs else b"", 10**15 + number, 1_000 + number % 30_000)
        finish = json.dumps({"type": "length", "length": tokens}).encode() if number == tokens else b"null"
        yield (
            b'data: {"text":"%b","output_ids":[%b],"meta_info":{"id":"0123456789abcdef","finish_reason":%b,'
            b'"prompt_tokens":100,"weight_version":"default","num_retractions":0,"input_token_logprobs":[],'
            b'"output_token_logprobs":[%b],"output_token_logprobs_length":%d,"reasoning_tokens":0,'
            b'"completion_tokens":%d,"cached_tokens":0}}\n\n' % (text, ids, finish, logprobs, number, number)
        )


@pytest.mark.parametrize("tokens", [1_000, 2_000, 4_000, 8_000])
@pytest.mark.parametrize("wanted", [True, False], ids=["logprobs", "no-logprobs"])
@pytest.mark.parametrize("form", ["cumulative", "incremental"])
def test_stream(benchmark: BenchmarkFixture, form: str, wanted: bool, tokens: int) -> None:
    spent = copied = size = 0.0

    def read() -> StreamedReply:
        nonlocal spent, copied, size
        spent = copied = size = 0.0
        splitter, reply = EventSplitter(), StreamedReply()
        cut: EventCut | None = None
        for chunk in stream(tokens, incremental=form == "incremental"):
            size += len(chunk)
            begun = time.perf_counter()
            for event in splitter.feed(chunk):
                data = event_data(event)
                assert data is not None
                reply.feed(data)
                if wanted:
                    continue
                if reply.shape is not None and reply.values is not None:
                    cut = cut or reply.shape.cut(partial(edit_meta, drop=LOGPROB_FIELDS))
                    cut.print(cut.choose(reply.values))
                elif reply.news is not None:
                    reply.whole(edit_meta(reply.news, drop=LOGPROB_FIELDS))
                else:
                    edit_meta(data, drop=LOGPROB_FIELDS)
            done = time.perf_counter()
            bytes(bytearray(chunk))
            spent += done - begun
            copied += time.perf_counter() - done
        return reply

    reply = benchmark.pedantic(read, rounds=3 if tokens < 8_000 else 1)
    assert len(reply.reply().ids) == tokens
    benchmark.extra_info["us a token"] = round(1e6 * spent / tokens, 1)
    benchmark.extra_info["kB a token"] = round(size / tokens / 1e3, 2)
    benchmark.extra_info["ns a byte"] = round(1e9 * spent / size, 3)
    benchmark.extra_info["times a copy"] = round(spent / copied, 1)
