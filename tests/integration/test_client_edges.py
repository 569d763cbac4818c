"""The client where it ends, and where a trainer gives it what trainers have: arrays, rewards that are no numbers."""

from __future__ import annotations

import asyncio
import base64
import gc
import math
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import Receive, Scope, Send

from middleware_hub.client import (
    AsyncClient,
    AsyncSession,
    Client,
    Conversation,
    InconsistentAnswerError,
    OverloadedError,
    RefusedError,
    Retries,
    Session,
    UnreachableError,
    WorkerFailedError,
    operations,
)
from middleware_hub.client.trajectory import Turn, joined_top_p
from middleware_hub.client.transport import StreamReader
from middleware_hub.client.wire import ClientAnswer, ClientCall, may_go_again, read_replies
from middleware_hub.integrations.rollout import as_number
from router.http.responses import send_json
from tests.support.engine_server import free_port
from tests.support.serving import read_request, serve, serving, serving_socket
from tests.support.stack import Stack, stack

ROOT = Path(__file__).parents[2]
FEW = {"max_new_tokens": 4}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as made:
        yield made


@pytest.fixture
def client(served: Stack, space: str) -> Iterator[Client]:
    with Client(f" {served.url}/ ", namespace=space) as made:
        yield made


class Silent:
    """A router that takes connections, and answers nothing."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(30)
        self._taken: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def take(self) -> socket.socket:
        """Wait for a request, and return its connection."""
        taken, _ = self._listening.accept()
        taken.settimeout(30)
        self._taken.append(taken)
        assert taken.recv(1)
        return taken

    def close(self) -> None:
        for one in (*self._taken, self._listening):
            one.close()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_what_other_threads_wait_for_ends_with_the_client() -> None:
    """Also what would be sent again after its connection broke: the thread that sends it ends."""
    router = Silent()
    client = Client(router.url, retries=Retries(attempts=1000))
    works: list[Callable[[], Any]] = [
        lambda: client.generate("Hi", FEW),
        lambda: client.claim(wait_seconds=60),
        lambda: list(client.stream("Hi", FEW)),
    ]
    said: list[str] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:
            said.append(str(error))

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
        router.take()
    client.close()
    for thread in threads:
        thread.join(30)
    router.close()
    assert not any(thread.is_alive() for thread in threads)
    assert len(said) == len(works)
    assert all("closed" in one for one in said), said


def test_a_loop_that_was_closed_is_not_kept(served: Stack) -> None:
    """A trainer may call `asyncio.run` for each step, with one client: sockets would become more and more."""
    client = AsyncClient(served.url)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def step() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await client.generate("Hi", FEW)

    for _ in range(3):
        asyncio.run(step())
    gc.collect()
    assert [one() for one in loops] == [None] * 3


CLOSED = """
import asyncio, sys
from middleware_hub.client import AsyncClient

client = AsyncClient(sys.argv[1])

async def step():
    await client.generate("Hi", {"max_new_tokens": 4})
    return len(client._sessions)

for _ in range(3):
    loop = asyncio.new_event_loop()
    print(loop.run_until_complete(step()))
    loop.close()
print(asyncio.run(step()), len(client._sessions))
"""


def test_a_loop_that_was_closed_without_an_end_is_not_kept_either(served: Stack) -> None:
    """What it had open is let go with the next step, in its own process, because Python warns of its sockets."""
    run = [sys.executable, "-c", CLOSED, served.url]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "1", "1", "1", "0"]


def test_a_closed_client_says_so(served: Stack) -> None:
    client = Client(served.url)
    pieces = client.stream("Hi", FEW)
    next(pieces)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="make another client"):
        client.generate("Hi", FEW)
    with pytest.raises(RuntimeError, match="make another client"):
        next(pieces)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # they say that nobody closed it
def test_a_client_that_was_dropped_leaves_no_thread(served: Stack) -> None:
    def threads() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == "tito-client"}

    before = threads()
    assert Client(served.url).generate("Hi", FEW).output_ids
    gc.collect()
    for thread in threads() - before:
        thread.join(30)
        assert not thread.is_alive()
    gc.collect()


FORKS = """
import os, signal, sys
from middleware_hub.client import Client

client = Client(sys.argv[1])
print(len(client.generate("Hi", {"max_new_tokens": 4}).output_ids), flush=True)
child = os.fork()
if not child:
    signal.alarm(30)
    try:
        client.generate("Hi")
    except RuntimeError as error:
        print(error, flush=True)
    client.close()
    with Client(sys.argv[1]) as own:
        print(len(own.generate("Hi", {"max_new_tokens": 4}).output_ids), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, len(client.generate("Hi", {"max_new_tokens": 4}).output_ids), flush=True)
"""


def test_a_fork_of_a_client_says_so_instead_of_waiting_for_ever(served: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, served.url],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    first, said, own, last = done.stdout.splitlines()
    assert (first, own, last) == ("4", "4", "0 4")
    assert "before a fork" in said


DROPS = """
import gc, os, signal, sys
from middleware_hub.client import Client

signal.alarm(60)
client = Client(sys.argv[1])
client.generate("Hi", {"max_new_tokens": 4})
child = os.fork()
if not child:
    if sys.argv[2] == "exit":
        sys.exit()
    client = Client(sys.argv[1]) if sys.argv[2] == "another" else None
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
print(len(client.generate("Hi", {"max_new_tokens": 4}).output_ids), flush=True)
"""


@pytest.mark.parametrize("how", ["none", "another", "exit"])
def test_a_fork_that_lets_go_of_a_client_takes_no_connection_from_its_parent(served: Stack, how: str) -> None:
    """An epoll would be that of both: what a child closes there, the parent waits for in vain."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DROPS, served.url, how],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == "4\n"


# -- what is given -----------------------------------------------------------------------------------------------------


def test_arrays_of_ids_are_prompts(served: Stack, client: Client) -> None:
    ids = np.array([9707, 1052])
    client.generate(ids, FEW)  # type: ignore[arg-type] # no Sequence, and what trainers have
    client.generate_batch([ids, list(ids)], FEW)  # type: ignore[list-item]
    assert [record.input_ids for record in served.workers[0].log[-3:]] == [[9707, 1052]] * 3
    with pytest.raises(TypeError):
        client.generate([9707.5], FEW)  # type: ignore[list-item]


@pytest.mark.parametrize("reward", [math.nan, math.inf, np.float32("nan")])
def test_a_reward_that_is_not_finite_is_not_sent_as_none(client: Client, reward: Any) -> None:
    """JSON has no such numbers: the trainer would get a sample without a reward."""
    with pytest.raises(ValueError, match="finite"):
        client.reward("reply", reward)
    with pytest.raises(ValueError, match="finite"):
        client.reward("reply", 1.0, {"part": float(reward)})
    with Session(client) as session, pytest.raises(ValueError, match="finite"):
        session.reward({"reward": float(reward)})
    assert as_number(reward) is None


@pytest.mark.parametrize("reward", [1, True, 0.5, np.float32(0.5), np.int64(3)])
def test_a_reward_of_any_number_arrives(client: Client, reward: Any) -> None:
    reply = client.generate("Hi", FEW, group_id="g", group_size=1)
    client.reward(reply.id, reward)
    (sample,) = client.claim()
    assert sample.reward == as_number(reward) == reward


@pytest.mark.parametrize(("headers", "saved"), [({}, True), ({"x-radix-saved": "no"}, False)])
def test_a_reward_says_whether_the_store_has_it(headers: dict[str, str], saved: bool) -> None:
    given = operations.reward("n", 1.0, None)
    assert given.read(ClientAnswer(200, headers, b'{"rewarded": 1}')) is saved


@pytest.mark.parametrize("saved", [True, False])
def test_the_reward_of_a_session_says_whether_the_store_has_it(saved: bool) -> None:
    async def router(scope: Scope, receive: Receive, send: Send) -> None:
        made = scope["path"] == "/sessions"
        headers = [] if saved or made else [(b"x-radix-saved", b"no")]
        body = b'{"session_id": "s", "base_url": "", "anthropic_base_url": "", "reward_info": {}}'
        await send_json(send, 201 if made else 200, body, headers)

    async def asynchronous(url: str) -> bool:
        async with AsyncClient(url) as client:
            session = await AsyncSession.create(client)
            return await session.reward({"reward": 1})

    with serve(router) as url, Client(url) as client:
        assert Session(client).reward({"reward": 1}) is saved
        assert Session(client).reward({"reward": 1}, branch="b") is saved
        assert Session(client).complete({"reward": 1}) is saved
        assert Session(client).complete() is saved
        assert asyncio.run(asynchronous(url)) is saved


def test_an_async_client_claims_too(served: Stack, space: str) -> None:
    async def main() -> None:
        async with AsyncClient(served.url, namespace=space) as client:
            replies = {}
            for group in ("g", "h"):
                replies[group] = await client.generate(
                    "Hi", FEW, group_id=group, group_size=1, rollout_end=True, parent="none"
                )
            claim = await client.claim(groups=2)
            found = {group.group_id: group.samples for group in claim.groups}
            assert set(found) == {"g", "h"}
            for name, (sample,) in found.items():
                assert sample.group_id == name
                assert [turn.request_id for turn in sample.trajectories[0].turns] == [replies[name].id]
            await client.renew(claim)
            assert await client.release(claim) == 2
            again = await client.claim(groups=2)
            assert {one.id for one in again} == {one.id for one in claim}
            assert await client.acknowledge(again) == 2
            assert len(await client.claim()) == 0

    asyncio.run(main())


REPLY: dict[str, Any] = {
    "text": "ab",
    "output_ids": [1, 2],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop"},
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 1, None], [-0.25, 2, None]],
    },
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_ids": [1]},
        {"output_ids": [1, 3]},
        {"meta_info": {**REPLY["meta_info"], "completion_tokens": 3}},
        {"meta_info": {**REPLY["meta_info"], "output_token_logprobs": []}},
        {"meta_info": {}},
        {"meta_info": None},
    ],
)
def test_a_reply_that_contradicts_itself_is_an_error(wrong: dict[str, Any]) -> None:
    assert read_replies([REPLY, REPLY], 1, 2, {})[0][1].logprobs == [-0.5, -0.25]
    with pytest.raises(InconsistentAnswerError):
        read_replies([REPLY, {**REPLY, **wrong}], 2, 1, {})
    with pytest.raises(InconsistentAnswerError, match="2 prompts with n=2 got 1 replies"):
        read_replies(REPLY, 2, 2, {})


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (b'{"message": "it is ill", "type": "worker_error"}', "worker_error", "it is ill"),
        (b'"out of memory"', "error", "out of memory"),
        (b"[1]", "error", r"\[1\]"),
    ],
)
def test_an_error_in_a_stream_is_raised(error: bytes, kind: str, words: str) -> None:
    with pytest.raises(WorkerFailedError, match=words) as caught:
        StreamReader({}).feed(b'data: {"error": %b}' % error)
    assert caught.value.kind == kind


def test_a_stream_without_an_event_is_no_reply() -> None:
    reader = StreamReader({})
    assert reader.feed(b"data: [DONE]") == ""
    assert reader.done
    with pytest.raises(InconsistentAnswerError, match="without an event"):
        reader.reply()


@pytest.mark.parametrize(
    "operation",
    [
        operations.retrieve("a", None, None, {}),
        operations.cover("a", [], None, {}),
        operations.finalize("s", {}),
        operations.claim({}),
    ],
)
def test_an_answer_of_another_shape_names_the_versions(operation: operations.Operation[Any]) -> None:
    with pytest.raises(InconsistentAnswerError, match="the router's version does not fit"):
        operation.read(ClientAnswer(200, {}, b'{"trajectories": 5, "tokens": 5}'))


def sets_of(**turns: tuple[list[int], list[int]]) -> dict[str, Any]:
    def field(place: int) -> list[dict[str, Any]]:
        return [
            {"generation_id": name, "value": base64.b64encode(np.array(told[place], "<i4").tobytes()).decode()}
            for name, told in turns.items()
        ]

    return {"ids": field(0), "offsets": field(1)}


@pytest.mark.parametrize("kept", ["", "kept_"])
def test_the_sets_of_a_sessions_turns_are_those_of_its_tokens(kept: str) -> None:
    """A branch may leave out the last token of a turn, which has sets for all of its tokens."""
    turns = [Turn("a", 2, 4, "1", "stop"), Turn("b", 5, 6, "1", "stop")]

    def joined(turns: Sequence[Turn], **told: tuple[list[int], list[int]]) -> list[list[int]] | None:
        sets = sets_of(**told)
        fields = {f"top_p_{kept}token_{name}": sets[name] for name in ("ids", "offsets")}
        found = joined_top_p(fields, turns, 7)
        return None if found is None else [one.tolist() for one in found.arrays()]

    a, b = ([1, 2, 3], [0, 2, 3]), ([4, 5, 6], [0, 2, 3])
    assert joined(turns, a=a, b=b) == [[1, 2, 3, 4, 5], [0, 0, 0, 2, 3, 3, 5, 5]]
    assert joined(turns, a=a) is None, "a turn has none"
    assert joined([], a=a) is None
    sets = sets_of(a=a, b=b)
    assert joined_top_p({f"top_p_{kept}token_ids": sets["ids"]}, turns, 7) is None
    assert joined(turns, a=([1, 2, 3], [0, 3]), b=b) is None, "of one token of two"
    assert joined(turns, a=([1, 2, 3], [0, 2, 4]), b=b) is None, "of more ids than there are"


def test_what_may_be_sent_again_makes_no_second_one() -> None:
    """A session of a given name would exist already; a chat is known by its key; a reply is sampled once."""
    assert not operations.create_session({"session_id": "mine"}).call.again
    assert operations.create_session({}).call.again
    one, other = (operations.chat("s", {"messages": []}, {}).call for _ in range(2))
    assert one.again
    assert one.headers["idempotency-key"] != other.headers["idempotency-key"]
    sampling, asking = operations.generate("Hi", None, {}).call, operations.explain("Hi").call
    for status in (502, 504):
        assert (may_go_again(sampling, status), may_go_again(asking, status)) == (False, True)
    for status in (408, 429, 503):
        assert may_go_again(sampling, status)


def test_a_sessions_export_misses_a_reply_that_the_client_got(client: Client) -> None:
    session = Session(client)
    session.chat([{"role": "user", "content": "Hi"}], max_tokens=4)
    session.replies.append("lost")
    assert session.finalize().missing == ("lost",)


def test_a_client_that_waits_for_hours_goes_on_waiting() -> None:
    retries = Retries(attempts=10**6)
    assert retries.wait(1) == retries.first
    assert retries.wait(retries.attempts) == retries.longest


@pytest.mark.parametrize(("asked", "least"), [(b"", 0.2), (b"2", 2.0), (b"3600", 10.0), (b"Fri, 27 Nov 2026", 0.2)])
def test_a_client_waits_as_long_as_the_router_asks_plus_a_random_time(asked: bytes, least: float) -> None:
    waits: list[float] = []

    class Waiting(AsyncClient):
        def go_on(self, *args: Any) -> float | None:
            wait = super().go_on(*args)
            waits.append(wait or 0.0)
            return None if wait is None else 0.0

    async def router(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 503, b'{"error": {"message": "full"}}', [(b"retry-after", asked)] if asked else [])

    async def ask(url: str) -> None:
        async with Waiting(url, retries=Retries(attempts=2)) as client:
            with pytest.raises(OverloadedError):
                await client.explain("Hi")

    with serve(router) as url:
        for _ in range(4):
            asyncio.run(ask(url))
    first = waits[::2]
    assert all(least <= wait <= 1.5 * least for wait in first), waits
    assert len(set(first)) == 4, "clients that were refused together come back together"


@pytest.mark.parametrize("answers", [False, True], ids=["refuses the connection", "asks for less"])
def test_what_one_router_asks_for_counts_until_the_client_waits(answers: bool) -> None:
    """The client comes back to the first address as late as that asked, whatever the next one does."""
    waits: list[float] = []

    class Waiting(AsyncClient):
        def go_on(self, *args: Any) -> float | None:
            wait = super().go_on(*args)
            waits.append(wait or 0.0)
            return None if wait is None else wait / 1000

    async def router(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 503, b'{"error": {"message": "full"}}', [(b"retry-after", b"5")])

    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 503, b'{"error": {"message": "full"}}', [(b"retry-after", b"1")])

    async def ask(*urls: str) -> None:
        async with Waiting(urls, retries=Retries(attempts=3)) as client:
            with pytest.raises(OverloadedError):
                await client.explain("Hi")

    with serve(router) as url, serve(other) as second_url:
        asyncio.run(ask(url, second_url if answers else f"http://127.0.0.1:{free_port()}"))
    first, second, *_ = waits
    assert first == 0, "the other address is asked at once"
    assert 5 <= second <= 7.5


def test_what_a_router_has_asked_for_counts_for_one_wait() -> None:
    waits: list[float] = []

    class Waiting(AsyncClient):
        def go_on(self, *args: Any) -> float | None:
            wait = super().go_on(*args)
            waits.append(wait or 0.0)
            return None if wait is None else wait / 1000

    async def router(scope: Scope, receive: Receive, send: Send) -> None:
        asked = [] if waits else [(b"retry-after", b"5")]
        await send_json(send, 503, b'{"error": {"message": "full"}}', asked)

    async def ask(url: str) -> None:
        async with Waiting(url, retries=Retries(attempts=3)) as client:
            with pytest.raises(OverloadedError):
                await client.explain("Hi")

    with serve(router) as url:
        asyncio.run(ask(url))
    first, second, _ = waits
    assert 5 <= first <= 7.5
    assert 0.4 <= second <= 0.6


def test_cookies_are_not_kept_and_redirections_not_followed() -> None:
    """A load balancer's cookie would keep a client at a router that is gone. A router redirects nobody."""
    seen: list[tuple[str, bytes | None]] = []

    async def balancer(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["path"], dict(scope["headers"]).get(b"cookie")))
        headers = [(b"set-cookie", b"router=1"), (b"location", b"/elsewhere")]
        await send_json(send, 200 if len(seen) < 3 else 307, b"{}", headers)

    with serve(balancer) as url, Client(url.replace("127.0.0.1", "localhost")) as client:
        for _ in range(2):
            client.explain("Hi")
        with pytest.raises(RefusedError) as caught:
            client.explain("Hi")
    assert caught.value.status == 307
    assert seen == [("/radix_tree/explain", None)] * 3


def test_more_than_a_hundred_requests_are_under_way_at_once() -> None:
    """The library has a limit of 100 connections."""
    count = 120

    async def main() -> None:
        arrived, everybody = 0, asyncio.Event()

        async def router(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal arrived
            assert scope["type"] == "http"
            arrived += 1
            if arrived == count:
                everybody.set()
            await everybody.wait()
            await send_json(send, 200, b"{}")

        async with asyncio.timeout(60), serving(router) as url, AsyncClient(url) as client:
            await asyncio.gather(*[client.explain("Hi") for _ in range(count)])

    asyncio.run(main())


INTERRUPTED = """
import sys
from middleware_hub.client import Client

with Client(sys.argv[1]) as client:
    try:
        client.generate("Hi")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.read()
"""


def test_what_is_interrupted_ends_at_the_router() -> None:
    """Ctrl-C in a notebook: the program and its client go on."""
    router = Silent()
    run = [sys.executable, "-c", INTERRUPTED, router.url]
    with subprocess.Popen(run, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            taken = router.take()
            program.send_signal(signal.SIGINT)
            assert program.stdout.readline() == "interrupted\n"
            while taken.recv(4096):
                pass
            assert program.poll() is None
        finally:
            program.stdin.close()
            router.close()


def test_what_is_interrupted_while_it_is_handed_over_ends_at_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's thread may have sent the request before the interrupted thread knows of it."""
    router, taken = Silent(), list[socket.socket]()
    hand_over = asyncio.run_coroutine_threadsafe

    def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        hand_over(work, loop)
        taken.append(router.take())
        raise KeyboardInterrupt

    with Client(router.url) as client:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.generate("Hi")
        while taken[0].recv(4096):
            pass
    router.close()


def _one_option_more(client: Client, option: str) -> list[Callable[[], object]]:
    """Return calls of all functions that take options by name, each with this option."""
    more: Any = {option: 1}
    talk = Conversation(client, "Hi")
    return [
        lambda: Client(client.url, **more),
        lambda: client.generate("Hi", **more),
        lambda: client.generate_batch(["Hi"], **more),
        lambda: list(client.stream("Hi", **more)),
        lambda: client.retrieve("Hi", **more),
        lambda: client.cover("Hi", [], **more),
        lambda: client.claim(**more),
        lambda: Conversation(client, "Hi", **more),
        lambda: talk.say(**more),
        lambda: talk.retrieve(**more),
        lambda: Session(client, **more),
        lambda: Session(client).finalize(**more),
    ]


def test_a_misspelt_path_is_not_explained_as_a_lost_reply(served: Stack) -> None:
    with Client(f"{served.url}/v1") as client, pytest.raises(RefusedError, match=r"did you mean /generate\?$"):
        client.generate("Hi")


def test_a_misspelt_option_is_refused(served: Stack) -> None:
    with Client(served.url) as client:
        for work in _one_option_more(client, "lora_pth"):
            with pytest.raises(TypeError, match="there is no option 'lora_pth'"):
                work()
        with pytest.raises(TypeError, match="did you mean 'group_size'"):
            client.generate("Hi", group_sise=8)  # type: ignore[call-arg]


@pytest.mark.parametrize("status", [b"408 Request Timeout", b"200 OK"])
def test_what_comes_on_an_idle_connection_answers_no_later_request(status: bytes) -> None:
    """A load balancer says 408 on a connection that was not used for a while; the next answer is the router's own."""
    right = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nright"
    late = b"HTTP/1.1 %b\r\ncontent-length: 4\r\n\r\nlate" % status
    asking = operations.Operation(ClientCall("GET", "/hello"), lambda answer: (answer.status, answer.content))

    async def main() -> None:
        over = asyncio.Event()

        async def balancer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(right)
            await over.wait()
            writer.write(late)
            await reader.read()

        async with asyncio.timeout(30), serving_socket(balancer) as url, AsyncClient(url) as client:
            assert await client.run(asking) == (200, b"right")
            connector = (await client._session()).connector
            assert connector is not None
            (((kept, _),),) = connector._conns.values()
            over.set()
            while not kept.should_close:  # noqa: ASYNC110 - until the late bytes have come
                await asyncio.sleep(0)
            over.clear()
            assert await client.run(asking) == (200, b"right")

    asyncio.run(main())


@pytest.mark.parametrize("within", [True, False], ids=["within the body", "before the head"])
@pytest.mark.parametrize("cuts", [2, 3])
def test_an_answer_that_breaks_off_is_asked_for_again_where_that_is_harmless(within: bool, cuts: int) -> None:
    """Large answers are mostly body. A generation is not asked for again: its reply may have been sampled."""
    asked: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        asked.append(head.split()[1])
        whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n" + b'{"known":1}'
        writer.write(whole if len(asked) > cuts else whole[:-5] if within else b"")
        await writer.drain()

    async def work() -> None:
        async with serving_socket(handle) as url:
            retries = Retries(attempts=3, first=0.0)
            async with AsyncClient(url, retries=retries) as client:
                if cuts < 3:
                    assert await client.explain("Hello") == {"known": 1}
                else:
                    with pytest.raises(UnreachableError, match=r"explain was answered .*; attempts: 3"):
                        await client.explain("Hello")
            assert asked == ["/radix_tree/explain"] * 3
            asked.clear()
            async with AsyncClient(url, retries=retries) as client:
                with pytest.raises(UnreachableError, match="the client did not repeat the request"):
                    await client.generate("Hello")
            assert asked == ["/generate"]

    asyncio.run(work())
