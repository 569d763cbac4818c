"""`--processes`: several routers behind one port are, from outside, one router that is hard to kill."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import Asking
from tests.support.client import call
from tests.support.processes import Processes, alive, until
from tests.support.programs import Program
from tests.support.redis_server import empty_redis
from tests.support.usual import usual
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

SHORT = {"max_new_tokens": 8}


@pytest.fixture
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker() as found:
        yield found


@pytest.fixture
def router(worker: EmbeddedWorker, tmp_path: Path) -> Iterator[Processes]:
    with Processes("router", worker.url, folder=tmp_path) as found:
        found.wait_until_up()
        yield found


@pytest.fixture(scope="module")
def busy() -> Iterator[EmbeddedWorker]:
    """The worker of the router that stands."""
    with EmbeddedWorker() as found:
        yield found


@pytest.fixture(scope="module", params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def standing(
    busy: EmbeddedWorker, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Processes]:
    """A router for tests that leave it as it is. Both processes have answered: one may start slower than the other."""
    store = empty_redis() if request.param == "redis" else ""
    with Processes("router", busy.url, folder=tmp_path_factory.mktemp("standing"), store=store) as found:
        found.wait_until_up()
        busy.hold()
        first: list[Asking] = []
        at_both(found, busy, first, {"text": "Hello", "sampling_params": SHORT})
        busy.release()
        assert all(asking.answer().status == 200 for asking in first)
        yield found


class Kept:
    """A connection that stays open, and so at one process. `worker` is the one that answered last."""

    worker: str | None = None

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        self._connection.connect()

    def call(self, path: str, body: Any = None, **headers: str) -> Any:
        content = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        self._connection.request(method, path, content, {"content-type": "application/json", **headers})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        self.worker = response.headers.get("x-router-worker")
        assert response.status in (200, 201), answer
        return answer

    def close(self) -> None:
        self._connection.close()


def at_both(router: Processes, worker: EmbeddedWorker, asks: list[Asking], body: Any) -> None:
    """Send requests until each process has one. On a machine that is busy, the first ones may all be at one of them."""
    while True:
        asks.append(Asking(router.url, body))
        worker.wait_for_arrivals(len(asks))
        if {one["process"] for one in router.get("/debug/requests")["requests"]} == {1, 2}:
            return
        assert len(asks) < 50


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_connections_are_spread_evenly(
    count: int, busy: EmbeddedWorker, standing: Processes, asks: list[Asking]
) -> None:
    """However they come, one after the other or all at once; and what is in flight is shown, and counted, for all."""
    busy.hold()
    answered = partial(standing.metric, "tito_router_requests_total", route="generate", status="200")
    before = answered()
    body = {"text": "Hello", "sampling_params": SHORT}
    for number in range(count):
        asks.append(Asking(standing.url, body))
        if number % 2:
            busy.wait_for_arrivals(number + 1)
    busy.wait_for_arrivals(count)
    shown = standing.get("/debug/requests")
    assert shown["processes"] == [1, 2]
    assert shown["total"] == count
    by_process = Counter(one["process"] for one in shown["requests"])
    # Even to one; but on a machine where a process waits for the CPU, the others take what it leaves.
    assert min(by_process[1], by_process[2]) >= count // 8, by_process
    (one,) = standing.get("/workers")["workers"]
    assert one["load"] == count
    assert standing.get(f"/workers/{one['id']}")["load"] == count
    assert standing.metric("tito_router_worker_inflight", worker=busy.url) == count
    assert standing.metric("tito_router_worker_routable", worker=busy.url, state="healthy") == 1
    busy.release()
    assert all(asking.answer().status == 200 for asking in asks)
    assert answered() == before + count


@pytest.mark.slow
def test_all_are_one_memory(standing: Processes) -> None:
    """A conversation and a session go on at whichever process has the connection, turn by turn."""
    ends = [Kept(standing.url) for _ in range(6)]
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    chain: list[int] = []
    for turn in range(6):
        asked = {"text": text, "sampling_params": SHORT, "return_prompt_token_ids": True}
        reply = ends[turn].call("/generate", asked)
        assert reply["prompt_token_ids"][: len(chain)] == chain
        chain = reply["prompt_token_ids"] + reply["output_ids"]
        text += reply["text"]
        for end in ends:
            found = end.call("/retrieve_from_text", {"text": text})
            assert (found["tokens"], found["exact"]) == (chain, True)
        text += "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    made = ends[0].call("/sessions", {})["session_id"]
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    for turn in range(4):
        asked = {"model": "m", "messages": messages, "max_tokens": 8}
        choice = ends[turn].call(f"/sessions/{made}/v1/chat/completions", asked)["choices"][0]
        messages += [choice["message"], {"role": "user", "content": "And?"}]
    seen = [end.call(f"/sessions/{made}/trajectories") for end in ends]
    assert all(one["trajectories"] == seen[0]["trajectories"] for one in seen)
    assert len(seen[0]["trajectories"]) == 1
    assert standing.metric("tito_store_restored_records_total") > 0, "all of it happened in one process"
    for end in ends:
        end.close()


@pytest.mark.slow
def test_turns_stay_at_their_worker_whichever_process_has_the_connection(tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(EmbeddedWorker()).url for _ in range(4)]
        flags = "--policy", "cache_aware", "--worker-urls", *workers
        router = stack.enter_context(Processes("router", workers[0], *flags, folder=tmp_path))
        router.wait_until_up()
        ends = [Kept(router.url) for _ in range(6)]
        for end in ends:
            stack.callback(end.close)

        def generate(end: Kept, said: Any, number: int) -> Any:
            text = said or f"{number * 7919} begins conversation {number}."
            body = {"text": text, "sampling_params": SHORT}
            # This client has one word for all it does, so that a load balancer keeps it at one router.
            return text + end.call("/generate", body, **{"x-router-affinity": "trainer"})["text"] + " And what follows?"

        def chat(end: Kept, said: Any, number: int, path: str = "/v1/chat/completions") -> Any:
            messages = said or [{"role": "user", "content": f"{number * 7919} begins chat {number}."}]
            reply = end.call(path, {"messages": messages, "max_tokens": 8})["choices"][0]["message"]
            return [*messages, reply, {"role": "user", "content": "And what follows?"}]

        def turn(end: Kept, said: Any, number: int) -> Any:
            if said is None:
                end.call("/sessions", {"session_id": f"s{number}"})
            return chat(end, said, number, f"/sessions/s{number}/v1/chat/completions")

        generate(ends[0], None, 100)  # else both processes would choose the same workers in the same order
        for kind in (generate, chat, turn):
            said: dict[int, Any] = {}
            at: defaultdict[int, set[str | None]] = defaultdict(set)
            for end in ends:
                for number in range(4):
                    said[number] = kind(end, said.get(number), number)
                    at[number].add(end.worker)
            assert [len(workers) for workers in at.values()] == [1] * 4, (kind.__name__, at)


def test_a_killed_process_takes_nothing_with_it(worker: EmbeddedWorker, router: Processes) -> None:
    """What was answered is there, the others serve on, no sum falls, and there are two again."""
    answered: list[str] = []
    stopping, unanswered = threading.Event(), Counter[str]()

    def ask(number: int) -> None:
        turn = 0
        while not stopping.is_set():
            turn += 1
            text = f"Client {number}, text {turn}: "
            try:
                reply = router.generate(text)
            except (OSError, http.client.HTTPException):
                unanswered["broken"] += 1
                continue
            answered.append(text + reply["text"])

    sums: dict[Any, float] = {}

    def watch() -> None:
        now = router.metrics()
        for key, value in now.items():
            if key[0].endswith(("_total", "_bucket", "_count")):
                assert value >= sums.get(key, 0), key
        assert sums.keys() - now.keys() == set()
        sums.update({key: value for key, value in now.items() if key[0].endswith(("_total", "_bucket", "_count"))})

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask, number) for number in range(4)]
        try:
            for kills in range(1, 4):
                before = len(answered)
                until(lambda before=before: len(answered) > before + 20)
                watch()
                victim = router.children[kills % 2]
                os.kill(victim, signal.SIGKILL)
                until(lambda victim=victim: not alive(victim))
                before = len(answered)
                watch()
                until(lambda before=before: len(answered) > before + 20)
                watch()
                until(lambda kills=kills: router.log.count("serves again") == kills)
        finally:
            stopping.set()
        for client in clients:
            client.result()
    watch()
    assert unanswered["broken"] <= 3 * 4, "only what was in flight at a killed process, once each"
    assert router.metric("tito_router_processes") == 2
    assert router.metric("tito_router_process_restarts_total", reason="ended") == 3
    for text in answered:
        found = call(f"{router.url}/retrieve_from_text", {"text": text}).json()
        assert found["exact"] is True, text


@pytest.mark.slow
def test_processes_end_with_their_parent(worker: EmbeddedWorker, router: Processes, asks: list[Asking]) -> None:
    """Killed, it can do nothing any more; the port is free, and one that hangs is no exception."""
    children = router.children
    assert len(children) == 2
    worker.hold()
    at_both(router, worker, asks, {"text": "Hello"})
    os.kill(children[0], signal.SIGSTOP)
    router.kill()
    until(lambda: not any(map(alive, children)))
    until(lambda: _free(router.port))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGHUP, signal.SIGINT))]
)
def test_all_finish_what_they_have(
    number: signal.Signals, worker: EmbeddedWorker, router: Processes, asks: list[Asking]
) -> None:
    """Streams at every process end as they would have; nothing new is let in."""
    worker.hold(after=2)
    body = {"text": "Hello", "sampling_params": SHORT, "stream": True}
    at_both(router, worker, asks, body)
    for asking in asks:
        assert asking.event() is not None
    os.kill(router.pid, number)
    until(lambda: not _connects(router.port))
    for pid in (router.pid, *router.children):
        os.kill(pid, signal.SIGHUP)  # the terminal was closed as well: that hurries nothing
    worker.release()
    for asking in asks:
        *_, last = iter(asking.event, None)
        assert last is not None
        assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert router.exit_code() == 0


@pytest.mark.slow
def test_one_that_dies_while_it_finishes_is_told(worker: EmbeddedWorker, router: Processes, asks: list[Asking]) -> None:
    """As when memory runs out. The other one finishes, and the log says why the exit status is not 0."""
    worker.hold(after=2)
    at_both(router, worker, asks, {"text": "Hello", "sampling_params": SHORT, "stream": True})
    victim = router.children[0]
    router.terminate()
    until(lambda: not _connects(router.port))
    os.kill(victim, signal.SIGKILL)
    until(lambda: not alive(victim))
    worker.release()
    assert router.exit_code() == 1
    assert f"(pid {victim}) did not finish what it had: killed by SIGKILL" in router.log
    assert router.log.count("did not finish") == 1


@pytest.mark.slow
def test_a_signal_to_all_processes_is_one_signal(worker: EmbeddedWorker, router: Processes, asks: list[Asking]) -> None:
    """Supervisors such as Slurm send SIGTERM to every process, and the parent passes it on: that is not the second signal."""
    worker.hold(after=2)
    at_both(router, worker, asks, {"text": "Hello", "sampling_params": SHORT, "stream": True})
    everyone = (*router.children, router.pid)
    for pid in everyone:
        os.kill(pid, signal.SIGTERM)
    until(lambda: not _connects(router.port))
    for pid in everyone[:-1]:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    worker.release()
    for asking in asks:
        *_, last = iter(asking.event, None)
        assert last is not None
        assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert router.exit_code() == 0


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_a_second_signal_ends_all_at_once(
    group: bool, worker: EmbeddedWorker, router: Processes, asks: list[Asking]
) -> None:
    """One Ctrl-C in a terminal, which all processes of its group get, is one signal; the second one does not wait."""
    worker.hold(after=2)
    at_both(router, worker, asks, {"text": "Hello", "sampling_params": SHORT, "stream": True})
    children = router.children
    send = (lambda: os.killpg(os.getpgid(router.pid), signal.SIGINT)) if group else router.terminate
    if group:
        assert all(os.getpgid(child) != os.getpgid(router.pid) for child in children)
        send = router.terminate
    send()
    until(lambda: not _connects(router.port))
    until(lambda: router.log.count("requests in flight have") == 2)
    assert all(map(alive, children))
    send()
    assert router.exit_code() == 1
    assert not any(map(alive, children))


@pytest.mark.slow
def test_one_that_hangs_is_replaced(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Stopped, it is noticed by its silence; until then clients get their answers from the others."""
    with Processes("router", worker.url, "--hang-timeout-secs", "3", folder=tmp_path) as router:
        router.wait_until_up()
        first = router.generate("Hello")
        assert router.metric("tito_router_requests_total", route="generate", status="200") == 1
        victim, other = router.children
        begun = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        while alive(victim):
            assert router.generate("Hello")["text"]
            assert router.get("/health")["workers"] == 1
            assert router.metric("tito_router_requests_total", route="generate", status="200") > 1
            assert time.monotonic() - begun < 30
        assert time.monotonic() - begun > 2
        until(lambda: "serves again" in router.log)
        assert "has not answered for 3 s" in router.log
        assert router.metric("tito_router_process_restarts_total", reason="hung") == 1
        assert router.metric("tito_router_processes") == 2
        assert other in router.children
        found = call(f"{router.url}/retrieve_from_text", {"text": "Hello" + first["text"]}).json()
        assert found["exact"] is True


@pytest.mark.parametrize(
    ("flags", "says"),
    usual(
        [
            (["--tokenizer-path", "/nowhere"], "/nowhere"),
            (["--store", "sqlite:/proc/nowhere/"], "/proc/nowhere"),
            (["--middleware", "no.such:Thing"], "no.such"),
            (["--max-inflight", "1"], "--max-inflight 1 is divided among --processes 2"),
            (["--store", "nosuch:thing"], "nosuch:thing"),
        ],
        (["--tokenizer-path", "/nowhere"], "/nowhere"),
        (["--max-inflight", "1"], "--max-inflight 1 is divided among --processes 2"),
    ),
)
def test_what_cannot_start_is_said_once(flags: list[str], says: str, tmp_path: Path) -> None:
    with Processes("router", "http://127.0.0.1:9", *flags, folder=tmp_path) as router:
        assert router.exit_code() == 2
        (line,) = [line for line in router.log.splitlines() if says in line]
        assert line
        assert "Traceback" not in router.log
        assert "serves again" not in router.log


def test_a_taken_port_is_said_before_anything_is_started(worker: EmbeddedWorker, tmp_path: Path) -> None:
    router = Processes("router", worker.url, folder=tmp_path)
    with socket.create_server(("127.0.0.1", router.port)), router:
        assert router.exit_code() == 2
        assert router.log.startswith(f"tito-router: error: cannot listen on 127.0.0.1:{router.port}")


def test_processes_need_a_store(tmp_path: Path) -> None:
    flags = ("--processes", "2", "--tokenizer-path", str(shipped_tokenizer()))
    with Program("router", *flags, folder=tmp_path) as router:
        assert router.exit_code() == 2
        assert router.log.startswith("tito-router: error: --processes 2 needs --store")
    with Program("plain", "--processes", "2", "--store", "sqlite:x", "--middleware", "none", folder=tmp_path) as router:
        assert router.exit_code() == 2
        assert "--middleware none" in router.log


@pytest.mark.slow
def test_one_log_of_whole_lines(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Each line says of which process it is; as JSON each is one object."""
    with Processes("text", worker.url, "--log-level", "debug", folder=tmp_path) as router:
        router.wait_until_up()
        for number in range(20):
            router.generate(f"Hello {number}")
        router.terminate()
        assert router.exit_code() == 0
        lines = router.log.splitlines()
        assert {line.partition("|")[0] for line in lines if not line.startswith("20")} == {"1", "2"}
    with Processes("json", worker.url, "--log-format", "json", "--log-level", "debug", folder=tmp_path) as router:
        router.wait_until_up()
        long = ["a" * 100_000 + str(number) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: call(f"{router.url}/nowhere?{name[-60000:]}"), long))
        router.terminate()
        assert router.exit_code() == 0
        entries = [json.loads(line) for line in router.log.splitlines()]
        assert {entry.get("process") for entry in entries} == {None, 1, 2}


@pytest.mark.slow
def test_keys_are_for_all_processes(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Whoever may see one may see all, and nobody else; nothing but the port is open."""
    with Processes("router", worker.url, "--api-key", "a:one", "--admin-key", "boss", folder=tmp_path) as router:
        router.wait_until_up()
        for path, key, status in [
            ("/metrics", "", 401),
            ("/metrics", "one", 200),
            ("/workers", "", 401),
            ("/workers", "one", 200),
            ("/radix_tree/stats", "", 401),
            ("/debug/requests", "one", 403),
            ("/debug/requests", "boss", 200),
            ("/health", "", 200),
        ]:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for _ in range(4):
                assert call(f"{router.url}{path}", headers=headers).status == status, path


@pytest.mark.slow
def test_a_router_is_not_its_own_worker(standing: Processes) -> None:
    """A probe that comes back to another of the processes is recognized, too."""
    with ExitStack() as stack:
        for _ in range(6):
            end = Kept(standing.url)
            stack.callback(end.close)
            answer = call(f"{standing.url}/add_worker?url={standing.url}", {})
            assert answer.status == 400, answer.content
    assert standing.get("/workers")["total"] == 1


@pytest.mark.slow
def test_the_inspector_says_that_it_shows_the_memory_of_one_process(standing: Processes) -> None:
    """Else a list that another process answers next looks as if conversations had been lost."""
    remembered = call(f"{standing.url}/inspect/api/conversations").json()["remembered"]
    assert remembered["processes"] == len(standing.children)


@pytest.mark.slow
def test_what_one_is_told_holds_for_all(busy: EmbeddedWorker, standing: Processes, asks: list[Asking]) -> None:
    """Workers and aborts, at whichever process the call comes in; one that is started again knows of them, too.

    The last test of the router that stands, which has other processes behind it.
    """
    with EmbeddedWorker() as other:
        ends = [Kept(standing.url) for _ in range(6)]
        ends[0].call("/add_worker", {"url": other.url})
        for end in ends:
            assert set(end.call("/list_workers")["urls"]) == {busy.url, other.url}
        assert len(ends[0].call("/routers")["routers"]) == 2
        victim = standing.children[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: "serves again" in standing.log)
        for end in ends:
            end.close()
        ends = [Kept(standing.url) for _ in range(6)]
        for end in ends:
            assert set(end.call("/list_workers")["urls"]) == {busy.url, other.url}
        ends[1].call("/remove_worker", {"url": other.url})
        for number, end in enumerate(ends):
            busy.hold()
            asking = Asking(standing.url, {"text": "Hello", "rid": f"mine-{number}", "sampling_params": SHORT})
            asks.append(asking)
            busy.wait_for_arrivals(1)
            end.call("/abort_request", {"rid": f"mine-{number}"})
            answer = asking.answer()
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
            busy.release()
            end.close()


def _free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
