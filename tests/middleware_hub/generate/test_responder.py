"""What a client is told of replies: why nothing is recorded of a stream, and whether the store has all of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from middleware_hub.generate.prompting import Prompt
from middleware_hub.generate.responder import Recorder, Responder, _ExpectedReply
from middleware_hub.radix.judge import Expectation, Judge
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import pack_ids
from middleware_hub.spans.versions import VersionClock
from router.engines.form.request import GenerateRequest
from router.http.request_state import RouteHint
from router.http.upstream import Take
from router.proxy.worker_reply import WorkerReply
from tests.middleware_hub.radix.talk import NS
from tests.middleware_hub.toy import A, B, toy_vocabulary


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "no; no reply: a stream without events"),
        ([b"[DONE]"], "no; no reply: a stream without events"),
        ([b'{"text": "half a rep', b"[DONE]"], "no; unreadable reply: an event that cannot be read"),
        ([b'{"detail": "hm"}', b"[DONE]"], "no; unreadable reply: an event that cannot be read"),
        ([b'{"error": {"message": "busy"}}', b"[DONE]"], 'no; worker error: {"message": "busy"}'),
    ],
)
def test_the_verdict_on_a_stream_without_a_reply_says_why(events: list[bytes], said: str) -> None:
    nothing: Any = None
    recorder = Recorder(nothing, Judge(toy_vocabulary(), VersionClock()))
    prompt = Prompt(nothing, None, pack_ids([A]), reused=0, encoded=1, reasons=())
    asked = Expectation(1, skips_special=True, logprobs=True, rid=None, sent_at=0, steps=0)
    expected = _ExpectedReply(recorder, prompt, asked, None, frozenset(), trajectory=False)
    for event in events:
        assert expected.event(event) == event
    expected.close()
    assert expected.verdict is not None
    assert expected.verdict.header.startswith(said)


class Memory:
    """A store that acknowledges some replies."""

    away = False

    def __init__(self, tree: RadixTree, saved: list[bool]) -> None:
        self._tree = tree
        self._saved = iter(saved)

    def record(
        self, match: PrefixMatch, context: Context | None, reply: SampledReply, _: object = None
    ) -> tuple[Generation, asyncio.Future[bool]]:
        saving = asyncio.get_running_loop().create_future()
        saving.set_result(next(self._saved))
        return self._tree.record(match, context, reply), saving


class Tally:
    def count(self, verdicts: object) -> None:
        pass


class Rest:
    """The rest of a reply."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def flow(self, take: Take) -> None:
        while self.pieces and take(self.pieces.pop(0)):
            pass

    def close(self) -> None: ...


def two_replies(
    saved: list[bool], pieces: list[bytes], *, stream: bool, flowed: list[bytes] | None = None
) -> tuple[dict[bytes, bytes], bytes]:
    """Return the headers and the body that the client of two samples gets if the worker sends these pieces.

    `flowed` gets the pieces for which no task has to wake.
    """

    def taken(piece: bytes) -> bool:
        assert flowed is not None
        flowed.append(piece)
        found.append(piece)
        return True

    found: list[bytes] = []

    async def main() -> tuple[dict[bytes, bytes], bytes]:
        tree = RadixTree(toy_vocabulary())
        memory: Any = Memory(tree, saved)
        recorder = Recorder(tree, Judge(toy_vocabulary(), tree.clock), memory=memory)
        request = GenerateRequest.parse(b'{"text": "a", "sampling_params": {"n": 2}}')
        prompt = Prompt(tree.match(NS, "a"), Context(pack_ids([A])), pack_ids([A]), 0, 1, ())
        responder = Responder(recorder, Tally(), request, [prompt], RouteHint(), b"word", force_logprobs=False)
        reply = WorkerReply(200, [], pieces[0], stream=stream, rest=Rest(pieces[1:]) if stream else None)
        await responder.follow(reply)
        while piece := await reply.read():
            found.append(piece)
            if flowed is not None:
                await reply.flow(taken)
        await reply.aclose()
        return dict(reply.headers()), b"".join(found)

    return asyncio.run(main())


def sample(number: int) -> dict[str, Any]:
    finish, counts = {"type": "length", "length": 1}, {"prompt_tokens": 1, "completion_tokens": 1}
    meta = {"id": f"r{number}", "finish_reason": finish, "weight_version": "1", **counts}
    return {"text": "b", "output_ids": [B], "index": number, "meta_info": meta}


@pytest.mark.parametrize("saved", [[True, True], [True, False], [False, True], [False, False]])
def test_two_replies_are_saved_if_both_are(saved: list[bool]) -> None:
    headers, _ = two_replies(saved, [json.dumps([sample(0), sample(1)]).encode()], stream=False)
    assert headers[b"x-radix-recorded"] == b"exact"
    assert headers.get(b"x-radix-saved") == (None if all(saved) else b"no")


@pytest.mark.parametrize("saved", [[True, True], [True, False], [False, True], [False, False]])
def test_a_stream_tells_once_that_not_all_is_saved(saved: list[bool]) -> None:
    events = [b"data: %b\n\n" % json.dumps(sample(number)).encode() for number in range(2)]
    _, body = two_replies(saved, [*events, b"data: [DONE]\n\n"], stream=True)
    assert body.count(b": x-radix-saved: no\n\n") == (not all(saved))
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("saved", [True, False])
def test_a_sample_that_has_ended_holds_the_others_back_no_longer_than_its_record(saved: bool) -> None:
    """Of what it has been told that it is not saved, a client is told once, and then all flows again."""
    first, last = sample(0), sample(1)
    going = {**last, "meta_info": {**last["meta_info"], "finish_reason": None}}
    events = [b"data: %b\n\n" % json.dumps(event).encode() for event in (going, first, going, going, last)]
    flowed: list[bytes] = []
    _, body = two_replies([saved, saved], [*events, b"data: [DONE]\n\n"], stream=True, flowed=flowed)
    assert body.count(b"data: ") == 6
    assert body.count(b": x-radix-saved: no\n\n") == (not saved)
    assert flowed == [events[2], events[3], b"data: [DONE]\n\n"], "only the ends wait"
