"""What `python -m benchmarks.scale` rests on: an engine double leaves out nothing, and a client notices what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from benchmarks.scale.agents import Agent, Run
from benchmarks.scale.clients import StreamClient, events_of, request
from benchmarks.scale.engine import Engine, Group, Tokens
from benchmarks.scale.groups import Member, Router
from benchmarks.scale.streams import Load
from benchmarks.serving.conversations import Corpus
from benchmarks.serving.floors import KINDS, Plan, done, prepared, replayed, statements
from middleware_hub.store.sqlite.file import connect
from router.engines.events import EventSplitter, event_data

IDS, PIECES = [5, 7, 11], ["He", '"llo"', "\n"]


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def streamed(request: dict[str, Any]) -> bytes:
    """Return what an engine writes for a request, step by step to its end."""
    group, written = Group([Tokens(IDS, PIECES)], 1.0), Written()
    engine = Engine(group)
    engine.open(cast(asyncio.Transport, written), msgspec.json.encode(request))
    (stream,) = engine.streams
    while stream.step():
        pass
    return written.data


def unchunked(data: bytes) -> bytes:
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if size == b"0":
            return body


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_each_token_in_an_event_of_its_own(most: int, logprobs: bool) -> None:
    request = {
        "rid": "r1",
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": most},
        "return_logprob": logprobs,
    }
    *events, done = (event_data(one) for one in EventSplitter().feed(unchunked(streamed(request))))
    assert done == b"[DONE]"
    read = [msgspec.json.decode(one or b"") for one in events]
    assert [one["output_ids"] for one in read] == [[IDS[n % 3]] for n in range(most)]
    assert [one["text"] for one in read] == [PIECES[n % 3] for n in range(most)]
    metas = [one["meta_info"] for one in read]
    assert [meta["completion_tokens"] for meta in metas] == list(range(1, most + 1))
    assert {(meta["id"], meta["prompt_tokens"]) for meta in metas} == {("r1", 2)}
    assert [meta["finish_reason"] for meta in metas] == [None] * (most - 1) + [{"type": "length", "length": most}]
    found = [[one[1] for one in meta.get("output_token_logprobs", ())] for meta in metas]
    assert found == ([[IDS[n % 3]] for n in range(most)] if logprobs else [[]] * most)


WHOLE = streamed({"sampling_params": {"max_new_tokens": 4}})
ERROR = WHOLE.replace(b'"text":"\\n"', b'"error":{}')


@pytest.mark.parametrize(
    ("answer", "closed", "broken"),
    [
        (WHOLE, False, None),
        (WHOLE, True, None),
        (WHOLE[:-5], True, "closed after 5 events"),
        (WHOLE.replace(b"[DONE]", b"[NONE]"), False, "it ends with"),
        (ERROR, False, "error"),
        (WHOLE.replace(b"200 OK", b"503 No"), False, "503"),
        (b"", True, "closed after 0 events"),
    ],
)
@pytest.mark.parametrize("piece", [*range(13, 20), 101, 1 << 20])
def test_a_client_says_whether_its_stream_is_whole(answer: bytes, closed: bool, broken: str | None, piece: int) -> None:
    async def main() -> tuple[str, int]:
        client = StreamClient(b"")
        client.connection_made(cast(asyncio.BaseTransport, Written()))
        for start in range(0, len(answer), piece):
            client.data_received(answer[start : start + piece])
        if closed:
            client.connection_lost(None)
        return client.ended.result(), client.events

    wrong, events = asyncio.run(main())
    assert (wrong == "") if broken is None else (broken in wrong)
    if broken is None:
        assert events == 5


def trajectory(turns: int = 3, sampled: int = 12, *, exact: bool = True) -> dict[str, Any]:
    spans = [{"version": "1", "start": 0, "end": sampled}]
    mask = [0, *[1] * sampled]
    return {"num_turns": turns, "response_mask": mask, "exact": exact, "reasons": [], "weight_versions": spans}


@pytest.mark.parametrize(
    ("trajectories", "exact"),
    [
        ([trajectory()], 1),
        ([trajectory(2, 8), trajectory()], 1),  # a stream broke, and was asked for again
        ([trajectory(exact=False)], 0),
        ([trajectory(sampled=11)], 0),
        ([trajectory(2)], 0),
        ([], 0),
    ],
)
def test_a_session_that_lost_something_is_told(trajectories: list[dict[str, Any]], exact: int) -> None:
    run = Run()
    agent = Agent(Router("router", [Member("http://x", psutil.Process())]), cast(Corpus, None), run, tokens=4)
    agent.check({"trajectories": trajectories}, turns=3)
    assert (run.exact, len(run.wrong)) == (exact, 1 - exact)


def test_clients_are_spread_over_routers_and_tenants() -> None:
    members = [Member(f"http://127.0.0.1:{port}", psutil.Process()) for port in (1, 2)]
    target = Router("redis", members, ["a", "b", "c"])
    assert [target.member(number).address[1] for number in range(4)] == [1, 2, 1, 2]
    assert [target.key(number) for number in range(4)] == ["a", "b", "c", "a"]
    assert b"\r\nauthorization: Bearer b\r\n" in request("/generate", b"{}", target.key(1))
    assert b"authorization" not in request("/generate", b"{}", Router("router", members).key(1))


@pytest.mark.parametrize(("workers", "stayed"), [("aaaa", 3), ("aabb", 2), ("abab", 0), ("a", 0)])
def test_turns_at_another_worker_than_the_turn_before_are_told(workers: str, stayed: int) -> None:
    run = Run()
    agent = Agent(Router("router", [Member("http://x", psutil.Process())]), cast(Corpus, None), run, tokens=4)
    for name in workers:
        agent.served(b"HTTP/1.1 200 OK\r\nx-router-worker: http://%b\r\nx: y\r\n\r\n" % name.encode())
    assert (run.stayed, run.further) == (stayed, len(workers) - 1)


TABLES = ("records", "places", "news")


def test_the_floor_of_a_store_is_of_the_same_work(tmp_path: Path) -> None:
    """SQLite's calls alone leave the same rows as the store that made them."""
    noted, copy = tmp_path / "noted", tmp_path / "copy"
    plan = Plan(1, 2, 1)
    asyncio.run(prepared(f"sqlite:{noted}/", plan))
    shutil.copytree(noted, copy)
    with statements() as calls:
        _, pieces = asyncio.run(done(f"sqlite:{noted}/", plan, lambda: len(calls), alone=True))
    before = dumped(copy)
    floor = replayed(copy / "store.sqlite3", calls, pieces)
    assert before != dumped(copy) == dumped(noted)
    assert {kind: len(each) for kind, each in floor.cpu.items()} == dict(zip(KINDS, (1, 2, 1), strict=True))


def dumped(folder: Path) -> list[list[Any]]:
    with contextlib.closing(connect(folder / "store.sqlite3")) as connection:
        return [connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in TABLES]


def test_the_engines_update_their_weights_together() -> None:
    group = Group([Tokens(IDS, PIECES)], 1.0)
    assert json.loads(group.answer(b"get /model_info", b""))["weight_version"] == "1"
    assert json.loads(group.answer(b"post /update_weights_from_disk", b'{"weight_version":"7"}'))["success"] is True
    assert json.loads(group.answer(b"get /model_info", b""))["weight_version"] == "7"
    written = Written()
    engine = Engine(group)
    engine.open(cast(asyncio.Transport, written), b'{"sampling_params":{"max_new_tokens":1}}')
    engine.streams[0].step()
    (event,) = events_of(written.data)
    assert event["meta_info"]["weight_version"] == "7"


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_a_stream_is_open_until_the_window_ends(count: int) -> None:
    load = Load(count, count / 4000, 8)
    assert load.tokens * load.pause > load.opening + load.pause + load.seconds
