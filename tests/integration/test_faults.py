"""Faults of a fleet whose workers and router are processes of their own: killed, frozen, slow, failing, full, paused, stopped.

Each test counts what its clients got, and `Ledger.settle` compares that with the router's own books: every generation has one
outcome, every reply can be retrieved as its client saw it, once, and nothing is left in flight.

`TITO_EXAMPLES=1` makes the loads several times as large; `TITO_PAUSE_SECONDS` is how long the fleet is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MORE
from tests.support.client import call
from tests.support.fleet import PATIENCE, Fleet, until
from tests.support.ledger import Ledger, Reply, assert_trains, tell
from tests.support.programs import Program
from tests.support.serving import read_request, serve_socket
from worker.models.ngram import shipped_tokenizer

CONVERSATIONS = 96 if MORE else 16
PAUSE_SECONDS = float(os.environ.get("TITO_PAUSE_SECONDS", "3"))
PROBES = ("--health-check-interval-secs", "0.2")
SHORT = {"max_new_tokens": 8, "ignore_eos": True}
MIDDLING = {"max_new_tokens": 100, "ignore_eos": True, "stream_interval": 20}
LONG = {"max_new_tokens": 600, "ignore_eos": True, "stream_interval": 20}  # three seconds

Start = Callable[..., AbstractContextManager[Fleet]]


def demo_worker(number: int, folder: Path, pace: int = 200) -> Program:
    flags = ["--seed", str(number), "--tokens-per-second", str(pace)]
    if number % 2:
        flags.append("--incremental-streaming-output")
    return Program(f"worker-{number}", "demo-worker", *flags, folder=folder)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    """Four, of which every second one streams in deltas."""
    folder = tmp_path_factory.mktemp("workers")
    with contextlib.ExitStack() as running:
        started = [running.enter_context(demo_worker(number, folder)) for number in range(4)]
        for worker in started:
            worker.wait_until_up()
        yield started


@contextlib.contextmanager
def router(folder: Path, workers: list[Program], *flags: str, urls: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """In front of workers, and of further URLs."""
    urls = (*urls, *(worker.url for worker in workers))
    tokenizer = ("--tokenizer-path", str(shipped_tokenizer()))
    try:
        with Program("router", *tokenizer, *flags, "--worker-urls", *urls, folder=folder) as program:
            program.wait_until_up()
            yield Fleet(program, workers)
    finally:
        for worker in workers:
            revive(worker)


@pytest.fixture
def fleet(workers: list[Program], tmp_path: Path) -> Start:
    """`fleet(3, "--flag")`: a router in front of three workers."""
    return lambda count, *flags, urls=(): router(tmp_path, workers[:count], *flags, urls=urls)


@pytest.fixture(scope="module")
def pair(workers: list[Program], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router in front of two workers, for others to join them."""
    flags = ("--policy", "round_robin", "--cb-failure-threshold", "3")
    with router(tmp_path_factory.mktemp("pair"), workers[:2], *flags) as served:
        yield served


def revive(worker: Program) -> None:
    """Whatever a test that failed has left behind, the next one has a worker that works."""
    if worker.alive:
        worker.thaw()
    else:
        worker.start()
        worker.wait_until_up()
    go_on(worker)


def stand_still(worker: Program) -> None:
    tell(worker.url, "/pause_generation", {"mode": "in_place"})


def go_on(worker: Program) -> None:
    tell(worker.url, "/continue_generation", {})


def is_idle(worker: Program) -> bool:
    return call(worker.url + "/flush_cache", {}).status == 200


def ask_all(clients: ThreadPoolExecutor, ledger: Ledger, prompts: list[str], **how: Any) -> list[Future[Reply | None]]:
    """All at once, every second one streamed."""
    return [clients.submit(ledger.ask, prompt, stream=number % 2 == 0, **how) for number, prompt in enumerate(prompts)]


def done(jobs: list[Future[Reply | None]]) -> list[Reply | None]:
    return [job.result(PATIENCE * 2) for job in jobs]


# -- workers that die, hang, are slow ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_killed_under_load_lose_only_the_streams_that_they_had_begun(fleet: Start) -> None:
    """One of three in a moment in which it has begun streams and holds others, then a second one in full flight."""
    flags = ["--policy", "round_robin", "--cb-timeout-duration-secs", "1"]
    with fleet(3, *PROBES, *flags) as served:
        ledger, (first, second, _) = Ledger(served), served.workers
        with ledger.load(CONVERSATIONS):
            held = hold(served, ledger, first)
            first.kill()
            second.kill()
            served.until_state(first.url, "quarantined")
            served.until_state(second.url, "quarantined")
            for worker in (first, second):
                worker.start()
            for worker in (first, second):
                worker.wait_until_up()
                until_used(served, ledger, worker)
        ledger.settle()
        assert not ledger.refusals
        assert {reply.worker for reply in ledger.broken} <= {first.url, second.url}
        assert sum(reply.worker == first.url for reply in ledger.broken) >= 2
        assert all(reply.ids for reply in ledger.broken), "what had not begun was answered"
        assert served.count("tito_router_retries_total", reason="lost") >= held


def until_used(served: Fleet, ledger: Ledger, worker: Program) -> None:
    """A worker has been taken back: by its probes, by its breaker if that was open, and by the policy."""
    served.until_state(worker.url, "healthy")
    until(lambda: served.seen()[worker.url]["circuit_breaker"] == "closed", "its breaker lets all requests pass")
    before = ledger.answered_by(worker.url)
    until(lambda: ledger.answered_by(worker.url) > before, "it is used again")


def hold(served: Fleet, ledger: Ledger, worker: Program) -> int:
    """Have a worker stand still with two streams begun and four requests without a word; how many of those."""

    def begun() -> int:
        return len(ledger.begun(worker.url))

    while True:
        until(lambda: begun() >= 2, "streams have begun")
        stand_still(worker)
        until(lambda: served.load(worker) >= begun() + 4, "others wait for it")
        if begun() >= 2:  # they may have ended in the moment in which it was told
            return served.load(worker) - begun()
        go_on(worker)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--request-timeout-secs", "1"]], ids=["by its probes", "by the time limit"])
def test_a_worker_that_hangs_is_found_out_and_loses_nothing(fleet: Start, flags: list[str]) -> None:
    """What it has not begun is answered elsewhere and ends there; what it has begun goes on when it does."""
    flags = [*PROBES, *flags, "--health-check-timeout-secs", "0.5", "--policy", "round_robin"]
    with ThreadPoolExecutor(24) as clients, fleet(3, *flags) as served:
        ledger, hung = Ledger(served), served.workers[0]
        streams = [clients.submit(ledger.ask, f"Long {number}: ", stream=True, sampling=LONG) for number in range(6)]
        until(lambda: len(ledger.begun()) == 6, "all have begun")
        stand_still(hung)
        sent = served.count("tito_router_decisions_total")
        jobs = ask_all(clients, ledger, [f"Short {number}: " for number in range(12)], sampling=SHORT)
        until(lambda: served.count("tito_router_decisions_total") >= sent + 12, "all are sent")
        hung.freeze()
        try:
            assert all(done(jobs))
            served.until_state(hung.url, "quarantined")
            later = ask_all(clients, ledger, [f"Later {number}: " for number in range(6)], sampling=SHORT)
            assert all(done(later))
            assert ledger.answered_by(hung.url) == 0
        finally:
            hung.thaw()
        go_on(hung)
        assert all(done(streams))
        served.until_state(hung.url, "healthy")
        until(lambda: is_idle(hung), "what was given to others is over there")
        ledger.settle()
        assert (len(ledger.replies), ledger.failed) == (24, 0)
        assert ledger.answered_by(hung.url) == 2, "the streams that it had begun"
        assert served.count("tito_router_retries_total", reason="timeout") >= 4


@pytest.mark.slow
def test_a_slow_worker_is_sent_less(fleet: Start) -> None:
    """However fast the machine is: the slow one answers nothing before the others have answered most of all."""
    with fleet(3) as served:
        ledger, slow = Ledger(served), served.workers[2]
        stand_still(slow)
        with ThreadPoolExecutor(12) as clients:
            jobs = ask_all(clients, ledger, [f"Question {number}: " for number in range(120)], sampling=SHORT)
            until(lambda: len(ledger.replies) >= 100, "the others answer")
            go_on(slow)
            assert all(done(jobs))
        ledger.settle()
        shares = Counter(reply.worker for reply in ledger.replies)
        print(shares[slow.url], "at the slow one of", shares)
        assert 0 < 2 * shares[slow.url] < min(shares[worker.url] for worker in served.workers[:2])


# -- workers that talk nonsense ------------------------------------------------------------------------------------------

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
UNMISTAKABLE = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "no body": _OK + b"content-length: 100\r\n\r\n",
    "less than it says": _OK + b'content-length: 100\r\n\r\n{"text": "half a rep',
    "more than it says": _OK + b'content-length: 10\r\n\r\n{"text": "half a reply"}',
    "a chunk cut short": _OK + b'transfer-encoding: chunked\r\n\r\n64\r\n{"text": "half a rep',
}
"""What no worker means to answer: its connection breaks, or it is not HTTP."""
PASSED_ON = {"no JSON": b"<ok>", "half of it": b'{"text": "half a rep', "no reply": b'{"detail": "hm"}'}
"""What is HTTP and looks whole: a router passes it on, and remembers nothing of it."""


@contextlib.contextmanager
def nonsense(answer: bytes | Callable[[bytes], bytes]) -> Iterator[str]:
    """A worker that is well when it is probed, and answers everything else so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await read_request(reader)
        if " /generate " in head:
            said = answer if isinstance(answer, bytes) else answer(body)
            writer.write(said.replace(b"application/json", b"text/event-stream") if asks_for_stream(body) else said)
        else:
            writer.write(_OK + b"content-length: 18\r\n\r\n" + b'{"model_path":"m"}')
        await writer.drain()

    with serve_socket(handle) as url:
        yield url


def asks_for_stream(body: bytes) -> bool:
    return bool(json.loads(body)["stream"])


@pytest.mark.parametrize("answer", UNMISTAKABLE.values(), ids=UNMISTAKABLE)
def test_a_worker_that_breaks_off_is_replaced_and_its_breaker_opens(pair: Fleet, answer: bytes) -> None:
    with nonsense(answer) as url, pair.joined_by(url), ThreadPoolExecutor(4) as clients:
        ledger = Ledger(pair)
        assert all(done(ask_all(clients, ledger, [f"Prompt {number}: " for number in range(24)], sampling=SHORT)))
        pair.until_open(url)
        ledger.settle()
        assert {reply.worker for reply in ledger.replies} == {worker.url for worker in pair.workers}
        assert {pair.seen()[worker.url]["circuit_breaker"] for worker in pair.workers} == {"closed"}
        assert pair.states() == {"healthy": 3}


@pytest.mark.parametrize("answer", PASSED_ON.values(), ids=PASSED_ON)
def test_nonsense_that_looks_whole_is_passed_on_and_not_recorded(pair: Fleet, answer: bytes) -> None:
    with nonsense(_OK + b"content-length: %d\r\n\r\n" % len(answer) + answer) as url, pair.joined_by(url):
        ledger = Ledger(pair)
        for number in range(9):
            ledger.ask(f"Prompt {number}: ", sampling=SHORT)
        ledger.settle()
        assert ledger.garbage == [answer] * 3


# -- weights ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_comes_back_with_older_weights_is_kept_out_until_it_has_the_fleets(fleet: Start) -> None:
    with fleet(3, *PROBES, "--version-gate") as served:
        ledger, back = Ledger(served), served.workers[1]
        version = {"new_version": "7", "abort_all_requests": False}
        with ledger.load(CONVERSATIONS):
            served.post("/update_weight_version", version)
            updated = time.monotonic()
            back.kill()
            served.until_state(back.url, "quarantined")
            back.start()
            back.wait_until_up()
            served.until_state(back.url, "healthy")
            is_back = time.monotonic()
            until(lambda: len(ledger.asked_since(is_back)) > 2 * CONVERSATIONS, "the load goes on")
            seen = served.seen()[back.url]
            assert (seen["weight_version"], seen["is_healthy"], seen["load"]) == ("default", False, 0)
        assert {version for reply in ledger.asked_since(updated) for version in reply.versions} == {"7"}
        assert not [reply for reply in ledger.asked_since(is_back) if reply.worker == back.url]
        ledger.settle()
        served.post("/update_weight_version", {**version, "new_version": "8"})
        updated, answered = time.monotonic(), ledger.answered_by(back.url)
        with ledger.load(CONVERSATIONS, name="Again "):
            until(lambda: ledger.answered_by(back.url) > answered, "it is used again")
        assert {version for reply in ledger.asked_since(updated) for version in reply.versions} == {"8"}
        ledger.settle()


# -- requests that are the fault themselves, and fleets that are full ------------------------------------------------------


@pytest.mark.slow
def test_a_request_that_no_worker_answers_opens_no_breaker_and_costs_nobody_else(fleet: Start) -> None:
    """It breaks the connection, or fails, at whichever worker gets it."""
    with ThreadPoolExecutor(20) as clients, fleet(4, *PROBES, "--cb-failure-threshold", "3") as served:
        ledger = Ledger(served)

        def fail(name: str) -> int:
            jobs = []
            for fault in ("dies", "http_500"):
                sampling = {**SHORT, "custom_params": {"script": {"fault": fault}}}
                prompts = [f"Fails {name}{number} {fault}: " for number in range(40)]
                jobs += ask_all(clients, ledger, prompts, sampling=sampling)
            assert not any(done(jobs))
            return len(jobs)

        sent = fail("alone ")
        with ledger.load(8):
            sent += fail("among others ")
        ledger.settle()
        assert ledger.failed == sent
        assert len(ledger.broken) == sent // 4, "streams that were begun"
        assert Counter(refusal.status for refusal in ledger.refusals) == {502: sent // 4, 500: sent // 2}
        assert served.numbers("tito_router_breaker_changes_total") == {}
        assert set(served.numbers("tito_router_worker_breaker_open").values()) == {0}
        assert {worker["circuit_breaker"] for worker in served.seen().values()} == {"closed"}
        assert served.states() == {"healthy": 4}
        assert len(ledger.replies) >= 16


@pytest.mark.slow
def test_a_full_queue_turns_away_and_one_that_stands_still_lets_go(fleet: Start) -> None:
    """Four at the workers, six wait and are told in the end, five are told at once."""
    flags = ["--max-inflight-per-worker", "2", "--queue-size", "6", "--queue-timeout-secs", "4"]
    with ThreadPoolExecutor(15) as clients, fleet(2, *flags) as served:
        ledger = Ledger(served)
        served.post("/pause_generation", {"mode": "in_place"})
        held = ask_all(clients, ledger, [f"Held {number}: " for number in range(4)])
        until(lambda: served.phases()["at_worker"] == 4, "the workers are full")
        waiting = ask_all(clients, ledger, [f"Waiting {number}: " for number in range(6)])
        until(lambda: served.phases()["queued"] == 6, "the queue is full")
        assert not any(done(ask_all(clients, ledger, [f"Too many {number}: " for number in range(5)])))
        assert [(told.status, told.type, told.retry_after) for told in ledger.refusals] == [
            (429, "queue_full", "1")
        ] * 5
        assert not any(done(waiting))
        assert [told.status for told in ledger.refusals[5:]] == [408] * 6
        served.post("/continue_generation", {})
        assert all(done(held))
        assert all(done(ask_all(clients, ledger, [f"Later {number}: " for number in range(6)])))
        ledger.settle()
        assert (len(ledger.replies), ledger.failed) == (10, 11)
        waits = {word: served.count("tito_router_queue_seconds_count", outcome=word) for word in ("full", "timeout")}
        assert waits == {"full": 5, "timeout": 6}


def test_one_with_many_requests_does_not_keep_another_one_waiting_for_all_of_them(fleet: Start) -> None:
    with ThreadPoolExecutor(12) as clients, fleet(1, "--max-inflight", "1") as served:
        ledger = Ledger(served)
        served.post("/pause_generation", {"mode": "in_place"})
        for number, key in enumerate("-" + "A" * 6 + "B" * 3):
            clients.submit(ledger.ask, f"{key}{number}: ", sampling=SHORT, headers={"x-smg-routing-key": key})
            until(lambda: served.phases().total() == number + 1, "it stands in line")  # noqa: B023 - it is called here
        served.post("/continue_generation", {})
        until(lambda: len(ledger.replies) == 10, "all are answered")
        order = sorted(ledger.replies, key=lambda reply: reply.sent_at)
        assert "".join(reply.prompt[0] for reply in order) == "-ABABABAAA"
        ledger.settle()


def test_a_worker_that_says_it_is_full_is_asked_less_and_less_often_under_ids_it_has_not_seen(fleet: Start) -> None:
    asked: list[tuple[float, Any]] = []

    def full(body: bytes) -> bytes:
        asked.append((time.monotonic(), json.loads(body)["rid"]))
        return b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"

    with nonsense(full) as url, fleet(0, "--retry-jitter-factor", "0", urls=(url,)) as served:
        ledger = Ledger(served)
        assert ledger.ask("Nobody has room: ") is None
        ledger.settle()
        assert [told.status for told in ledger.refusals] == [503]
        assert len({name for _, name in asked}) == len(asked) == 5
        waits = [after - before for (before, _), (after, _) in pairwise(asked)]
        assert all(wait >= least for wait, least in zip(waits, (0.05, 0.075, 0.1125, 0.16875), strict=True)), waits


def test_while_one_is_full_the_others_answer_and_nobody_is_blamed(pair: Fleet) -> None:
    full = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 3600\r\ncontent-length: 2\r\n\r\n{}"
    with nonsense(full) as url, pair.joined_by(url), ThreadPoolExecutor(8) as clients:
        ledger, before = Ledger(pair), pair.count("tito_router_retries_total", reason="busy")
        assert all(done(ask_all(clients, ledger, [f"Prompt {number}: " for number in range(24)], sampling=SHORT)))
        ledger.settle()
        assert pair.count("tito_router_retries_total", reason="busy") >= before + 4
        assert {worker["circuit_breaker"] for worker in pair.seen().values()} == {"closed"}


# -- pauses and the end ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pause_in_the_middle_of_two_hundred_generations(fleet: Start) -> None:
    """Probes go on, no worker is given up, and then all go on.

    Each client asks again and again until it has a generation that the pause holds up, however fast the machine is.
    """
    count = 800 if MORE else 200
    paused = threading.Event()
    with ThreadPoolExecutor(count) as clients, fleet(4, *PROBES) as served:
        ledger = Ledger(served)

        def ask(number: int) -> int:
            asked = 0
            while not paused.is_set():
                asked += 1
                assert ledger.ask(f"{number} asks {asked}: ", stream=number % 2 == 0, sampling=MIDDLING)
            return asked

        jobs = [clients.submit(ask, number) for number in range(count)]
        until(lambda: len(ledger.begun()) + len(ledger.replies) >= count // 4, "they are on their way")
        served.post("/pause_generation", {"mode": "in_place"})
        try:
            begun, probes = time.monotonic(), served.count("tito_router_probes_total", outcome="good")
            until(lambda: served.phases().total() == count, "each has one at a worker")
        finally:
            paused.set()
        before = ended(served)
        until(
            lambda: (
                time.monotonic() > begun + PAUSE_SECONDS
                and served.count("tito_router_probes_total", outcome="good") > probes + 8
            ),
            "the pause is over, and probes went on in it",
            PATIENCE + PAUSE_SECONDS,
        )
        assert (ended(served), served.phases().total()) == (before, count)
        assert served.states() == {"healthy": 4}
        served.post("/continue_generation", {})
        asked = sum(job.result(PATIENCE * 2) for job in jobs)
        ledger.settle()
        assert (len(ledger.replies), ledger.failed) == (asked, 0)
        assert served.count("tito_router_probes_total", outcome="bad") == 0
        assert served.count("tito_router_retries_total") == 0


def ended(served: Fleet) -> int:
    return served.count("tito_router_generations_total")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_router_that_is_told_to_stop_finishes_what_it_has_and_takes_nothing_new(
    fleet: Start, number: signal.Signals
) -> None:
    """Also if its terminal is closed, which shells and supervisors say once more behind another signal."""
    with ThreadPoolExecutor(25) as clients, fleet(2, *PROBES) as served:
        ledger = Ledger(served)
        prompts = [f"Prompt {number}: " for number in range(24)]
        jobs = ask_all(clients, ledger, prompts, sampling=LONG, trajectory=True)
        until(lambda: len(ledger.begun()) >= 8, "they are on their way")
        for worker in served.workers:
            stand_still(worker)
        with socket.create_connection(("127.0.0.1", served.router.port)) as kept:
            # One connection that asks for something long, and behind it whether it may ask for more.
            body = b'{"text": "Kept: ", "sampling_params": {"max_new_tokens": 8}}'
            head = b"host: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            kept.sendall(b"POST /generate HTTP/1.1\r\n" + head + body + b"GET /readiness HTTP/1.1\r\nhost: x\r\n\r\n")
            until(lambda: served.phases().total() + ended(served) == 25, "all are at a worker, or answered")
            assert served.phases().total() >= 8
            os.kill(served.router.pid, number)
            until(lambda: not takes_connections(served.router), "it takes nothing new")
            os.kill(served.router.pid, signal.SIGHUP)
            assert served.router.alive
            for worker in served.workers:
                go_on(worker)
            answers = kept.makefile("rb").read()
        assert all(done(jobs))
        assert served.router.exit_code() == 0
        assert (len(ledger.replies), ledger.failed) == (24, 0)
        for reply in ledger.replies:
            assert len(reply.ids) == LONG["max_new_tokens"]
            assert_trains(reply.trajectory, reply)
        generated, _, ready = answers.partition(b"HTTP/1.1 503")
        assert generated.startswith(b"HTTP/1.1 200")
        assert b"draining" in ready
        assert "Traceback" not in served.router.log


def takes_connections(program: Program) -> bool:
    with contextlib.suppress(ConnectionError):
        socket.create_connection(("127.0.0.1", program.port)).close()
        return True
    return False
