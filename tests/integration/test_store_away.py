"""A real store goes away under load, in every way it can: requests are answered, and nothing is missing afterwards."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from middleware_hub.store.spool.file import SpoolFile
from middleware_hub.store.sqlite.file import connect
from router.peers.presence import LEASE_SECONDS
from tests.support.client import call
from tests.support.fleet import until
from tests.support.programs import ROOT, Program
from tests.support.redis_server import RedisServer, redis_server
from tests.support.small_disk import enlarge, small_disk
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.slow

ANSWER_SECONDS = 2.0
"""How long a store may take before it counts as away."""
STILL_SECONDS = 0.2
"""A router that has not answered for so long stands still: the machine does other things."""


@dataclass
class Said:
    """An answered request: its whole text, its name, what was sampled for it, and in the conversation by then.

    `asked`: whether the store was asked for each turn of the conversation. `saved`: whether the last one was, as is said.
    """

    text: str
    name: str
    ids: list[int]
    sampled: list[int]
    asked: bool
    saved: bool
    seconds: float
    at: float
    url: str


class Clients:
    """Some clients, each of which has conversations at one router until it is told to stop."""

    def __init__(self, *routers: Program, count: int = 4) -> None:
        self.said: list[Said] = []
        self.refused: list[float] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._beats: dict[str, list[float]] = {router.url: [] for router in routers}
        """When each router, which is asked again and again, had answered what needs no store."""
        self._threads = [threading.Thread(target=self._beat, args=(router.url,), daemon=True) for router in routers]
        self._threads += [
            threading.Thread(target=self._run, args=(routers[number % len(routers)].url, f"c{number}"), daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, url: str, seed: str) -> None:
        text, count, asked = "", 0, True
        sampled: list[int] = []
        while not self._stop.is_set():  # a router that was killed is not asked again
            count += 1
            if not text or len(text) > 2_000:
                text, sampled, asked = "You help. " * 30 + f"{seed} says {time.time_ns()}: ", [], True
            name = f"{seed}-{time.time_ns()}"
            begun = time.monotonic()
            try:
                answer = call(
                    f"{url}/generate",
                    {"text": text, "rid": name, "sampling_params": {"max_new_tokens": 1 + count % 12}},
                )
            except (OSError, http.client.HTTPException) as error:
                if not self._stop.is_set():
                    self.failed.append(str(error))
                time.sleep(0.05)
                continue
            if answer.status == 503:
                assert "retry-after" in answer.headers
                self.refused.append(time.monotonic())
                time.sleep(0.05)
                continue
            assert answer.status == 200, answer.content
            reply, now = answer.json(), time.monotonic()
            text += reply["text"]
            saved = answer.headers.get("x-radix-saved") != "no"
            asked = asked and "store_unreachable" not in answer.headers.get("x-radix-reasons", "")
            sampled = sampled + reply["output_ids"]
            self.said.append(Said(text, name, reply["output_ids"], sampled, asked, saved, now - begun, now, url))
            text += "\nAnd then? "

    def _beat(self, url: str) -> None:
        while not self._stop.wait(0.02):
            with contextlib.suppress(OSError, http.client.HTTPException):
                call(f"{url}/liveness")
            self._beats[url].append(time.monotonic())

    def unsaved(self) -> int:
        return sum(not one.saved for one in self.said)

    def outlast(self, begun: float) -> None:
        """Go on until what routers had announced has run out, and everybody was answered since."""
        until(lambda: time.monotonic() > begun + LEASE_SECONDS + 1, "it has run out")
        count = len(self.said)
        until(lambda: len(self.said) > count + 8, "it goes on")

    def nobody_waits(self, begun: float) -> None:
        """After the first moments nobody waits for a store that went away, and before that only as long as it has to answer."""
        said, counts = list(self.said), {url: len(beats) for url, beats in self._beats.items()}
        until(lambda: all(len(self._beats[url]) > count + 1 for url, count in counts.items()), "they answer")
        still = {
            url: [(start, end) for start, end in pairwise(beats) if end - start > STILL_SECONDS]
            for url, beats in self._beats.items()
        }
        waits = [(one.at - one.seconds, _waited(one, still[one.url])) for one in said]
        later = [seconds for asked, seconds in waits if asked > begun + ANSWER_SECONDS + 1]
        assert [seconds for seconds in later if seconds > ANSWER_SECONDS / 2] == []
        assert max(seconds for _, seconds in waits) < 2 * ANSWER_SECONDS + 1, "for a look-up, and for the append"


def _waited(one: Said, still: list[tuple[float, float]]) -> float:
    """Return how many seconds it waited, without those in which its router, or this process, stood still."""
    begun = one.at - one.seconds
    return one.seconds - sum(max(0.0, min(end, one.at) - max(start, begun)) for start, end in still)


@dataclass
class Place:
    """Where routers and their store are."""

    worker: EmbeddedWorker
    folder: Path
    address: str
    flags: list[str] = field(default_factory=list)

    def router(self, name: str = "router", *flags: str) -> Program:
        return Program(
            name,
            *("--tokenizer-path", str(shipped_tokenizer()), "--worker-urls", self.worker.url),
            *("--store", self.address, "--store-spool", str(self.folder / "spool"), *self.flags, *flags),
            folder=self.folder,
        )

    def spools(self) -> list[Path]:
        return list((self.folder / "spool").rglob("*.spool.sqlite3"))

    def check(self, said: list[Said], *routers: Program) -> None:
        """Everything is whole, at each of these routers, and in the store once."""
        for router in routers:
            for one in said:
                answer = call(f"{router.url}/retrieve_from_text", {"text": one.text, "expect_request_ids": [one.name]})
                found = answer.json()
                # What was asked for while nobody could say whether another router knew more of its text says so for ever.
                assert found["exact"] or (found["reasons"] == ["store_unreachable"] and not one.asked), (one, found)
                sampled = [token for token, mask in zip(found["tokens"], found["loss_mask"], strict=True) if mask]
                assert sampled == one.sampled
                assert found["tokens"][-len(one.ids) :] == one.ids
                assert found["turns"][-1]["request_id"] == one.name
                assert found["variants"] == 1, "it was recorded once"

    def metric(self, router: Program, name: str) -> float:
        lines = call(f"{router.url}/metrics").content.decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def handed_over(self, *routers: Program) -> None:
        for router in routers:
            told = f"all that waits at {router!r} is handed over; it logged:\n"
            until(
                lambda one=router: self.metric(one, "tito_store_waiting") == 0,  # type: ignore[misc]
                lambda one=router, told=told: told + one.log[-6_000:],  # type: ignore[misc]
            )


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(token_delay=0.0005) as made:
        yield made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as made:
        yield made


@pytest.fixture
def remote(worker: EmbeddedWorker, redis: RedisServer, tmp_path: Path) -> Place:
    return Place(worker, tmp_path, redis.address)


@pytest.fixture
def local(worker: EmbeddedWorker, tmp_path: Path) -> Place:
    return Place(worker, tmp_path, f"sqlite:{tmp_path / 'store.sqlite3'}")


@pytest.mark.parametrize("how", ["killed", "frozen", "full"])
def test_a_redis_that_goes_away_under_load(how: str, remote: Place, redis: RedisServer) -> None:
    with remote.router("one") as one, remote.router("two") as two:
        one.wait_until_up()
        two.wait_until_up()
        with Clients(one, two) as clients:
            until(lambda: len(clients.said) > 40, "it runs")
            begun = time.monotonic()
            if how == "killed":
                redis.kill()
            elif how == "frozen":
                redis.freeze()
            else:
                redis.say("CONFIG SET maxmemory 1")
            until(lambda: clients.unsaved() > 40, "it goes on without the store")
            clients.outlast(begun)
            clients.nobody_waits(begun)
            if how == "killed":
                redis.start()
            elif how == "frozen":
                redis.thaw()
            else:
                redis.say("CONFIG SET maxmemory 0")
            remote.handed_over(one, two)
            count = len(clients.said)
            until(lambda: len(clients.said) > count + 40, "it runs")
            assert any(said.saved for said in clients.said[count + 8 :])
        assert clients.failed == clients.refused == []
        remote.check(clients.said, one, two)
        for router in (one, two):
            assert remote.metric(router, 'tito_store_away_seconds_total{what="writes"}') > 1
            assert router.log.count("are answered without being saved") == 1
            assert router.log.count("takes writes again") >= 1


def test_a_router_that_dies_while_its_store_is_away(remote: Place, redis: RedisServer) -> None:
    """What it left behind is taken over by another one that is running; the rest is there at its next start."""
    with remote.router("one") as one, remote.router("two") as two:
        one.wait_until_up()
        two.wait_until_up()
        with Clients(one) as clients:
            until(lambda: len(clients.said) > 20, "it runs")
            redis.kill()
            until(lambda: clients.unsaved() > 20, "it goes on without the store")
            one.kill()
        before = list(clients.said)
        assert len(remote.spools()) == 2
        redis.start()
        until(lambda: "of a router that died are in the store" in two.log, "it is adopted")
        remote.check(before, two)
        one.start()
        one.wait_until_up()
        remote.check(before, one)
        assert not any(SpoolFile.look_into(path)[1] for path in remote.spools())


def test_a_lock_that_is_held(local: Place) -> None:
    with local.router() as one:
        one.wait_until_up()
        with Clients(one) as clients:
            until(lambda: len(clients.said) > 20, "it runs")
            with contextlib.closing(connect(local.folder / "store.sqlite3")) as holder:
                holder.execute("BEGIN IMMEDIATE")
                begun = time.monotonic()
                until(lambda: clients.unsaved() > 40, "it goes on without the store")
                clients.outlast(begun)
                clients.nobody_waits(begun)
                one.kill()  # and nobody had time to hand anything over
                holder.execute("COMMIT")
        assert clients.said
        one.start()
        one.wait_until_up()
        local.check(clients.said, one)


def test_refused_before_a_worker_is_asked(remote: Place, redis: RedisServer, worker: EmbeddedWorker) -> None:
    with remote.router("one", "--store-failure", "refuse") as one:
        one.wait_until_up()
        session = call(f"{one.url}/sessions", {}).json()["session_id"]
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        path = f"{one.url}/sessions/{session}/v1/chat/completions"
        with Clients(one) as clients:
            until(lambda: len(clients.said) > 20, "it runs")
            redis.kill()
            until(lambda: len(clients.refused) > 20, "it is refused")
            time.sleep(0.2)
            count = len(worker.log)
            asked = len(clients.refused)
            until(lambda: len(clients.refused) > asked + 20, "it is refused")
            assert len(worker.log) == count, "no worker is asked"
            answer = call(path, chat)
            assert (answer.status, answer.json()["error"]["type"]) == (503, "store_unreachable")
            assert "--store-failure refuse" in answer.content.decode() or "does not answer" in answer.content.decode()
            redis.start()
            before = len(clients.said)
            until(lambda: len(clients.said) > before + 20, "it goes on")
        assert clients.failed == []
        remote.handed_over(one)
        remote.check(clients.said, one)


def test_the_file_is_full(remote: Place, redis: RedisServer) -> None:
    """Rather than lose what it cannot keep, a router refuses to record more."""
    with remote.router("one", "--store-spool-max-bytes", "30000") as one:
        one.wait_until_up()
        with Clients(one) as clients:
            until(lambda: len(clients.said) > 20, "it runs")
            redis.kill()
            until(lambda: len(clients.refused) > 20, "it is refused")
            assert "--store-spool-max-bytes" in call(f"{one.url}/generate", {"text": "a"}).content.decode()
            redis.start()
            before = len(clients.said)
            until(lambda: len(clients.said) > before + 20, "it goes on")
        remote.handed_over(one)
        remote.check(clients.said, one)


@pytest.mark.parametrize("room", ["the store's", "the disk's"])
def test_a_reply_that_is_larger_than_the_disk(remote: Place, redis: RedisServer, room: str) -> None:
    """It stays in memory, and nothing else is begun until there is room for it, in the store or in the file."""
    folder = remote.folder / "disk"
    asked = {"text": "the " * 25_000, "sampling_params": {"max_new_tokens": 4}}
    with small_disk(folder, 128), remote.router("one", "--store-spool", str(folder / "spool")) as one:
        one.wait_until_up()
        first = call(f"{one.url}/generate", {**asked, "text": "Before."}).json()
        redis.kill()
        answer = call(f"{one.url}/generate", asked)
        assert (answer.status, answer.headers.get("x-radix-saved")) == (200, "no"), answer.content[:200]
        large = answer.json()
        refused = call(f"{one.url}/generate", {"text": "More."})
        assert refused.status == 503
        assert "in memory only" in refused.json()["error"]["message"]
        assert remote.metric(one, "tito_store_held_bytes") > 128 << 10
        assert "kept in memory only" in one.log
        if room == "the disk's":
            enlarge(folder, 4096)
            until(lambda: "there is room again" in one.log, "it is written to the file")
            one.kill()
            redis.start()
            one.start()
            one.wait_until_up()
        else:
            redis.start()
        remote.handed_over(one)
        assert remote.metric(one, "tito_store_held_bytes") == 0
        for said, text in ((first, "Before."), (large, asked["text"])):
            found = call(f"{one.url}/retrieve_from_text", {"text": f"{text}{said['text']}"}).json()
            assert (found["exact"], found["tokens"][-len(said["output_ids"]) :]) == (True, said["output_ids"])
        one.kill()
        one.start()
        one.wait_until_up()
        found = call(f"{one.url}/retrieve_from_text", {"text": f"{asked['text']}{large['text']}"}).json()
        assert (found["exact"], found["tokens"][-len(large["output_ids"]) :]) == (True, large["output_ids"])


def test_a_start_without_the_store(remote: Place, redis: RedisServer) -> None:
    """A router waits for a store that may be starting, too, and does not listen before it is there."""
    redis.kill()
    with remote.router("one") as one:
        until(lambda: "waiting for the store" in one.log, "it says so")
        assert "listening on" not in one.log
        redis.start()
        one.wait_until_up()
        assert call(f"{one.url}/generate", {"text": "a"}).status == 200


def test_handed_over_by_hand(remote: Place, redis: RedisServer) -> None:
    redis.say("CONFIG SET appendfsync always")  # else a busy disk lets it lose what the replies that wait build on
    with remote.router("one") as one:
        one.wait_until_up()
        with Clients(one) as clients:
            until(lambda: len(clients.said) > 20, "it runs")
            redis.kill()
            until(lambda: clients.unsaved() > 20, "it goes on without the store")
            one.kill()
        redis.start()
        command = ["handover", "--store", remote.address, "--spool", str(remote.folder / "spool")]
        shown = run(*command, "--dry-run")
        waiting = sum(map(int, re.findall(r"(\d+) replies", shown)))
        assert waiting >= clients.unsaved(), "the last ones may not have reached their clients"
        assert "0 refused, 0 left" in run(*command)
        assert remote.spools() == []
        one.start()
        one.wait_until_up()
        remote.check(clients.said, one)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [str(ROOT / ".venv/bin/python"), "-m", "router", "store", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
