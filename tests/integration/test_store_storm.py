"""What else may happen to a store under load, with routers between which each conversation wanders from turn to turn.

Whatever was answered as saved is whole at every router afterwards, and every answer in between is exact or says that it is not.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.many_routers.wire import Wire
from tests.support.client import call
from tests.support.fleet import until
from tests.support.programs import Program
from tests.support.redis_server import RedisServer, redis_server
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker, LoopThread

pytestmark = pytest.mark.slow

Json = dict[str, Any]


@dataclass
class Said:
    """A reply: its whole text, its name and ids, and what was sampled in the conversation by then, as far as that is known."""

    text: str
    name: str
    ids: list[int]
    sampled: list[int]
    saved: bool


@dataclass
class Clients:
    """Some clients that take each turn to another router than the one before. What was not saved they do not go on with."""

    urls: list[str]
    said: list[Said] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, count: int = 4) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    def _run(self, number: int) -> None:
        before, turn = None, 0
        while not self._stop.is_set():
            turn += 1
            url = self.urls[(number + turn) % len(self.urls)]
            try:
                before = self._ask(url, f"c{number}-{time.time_ns()}", before)
            except (OSError, http.client.HTTPException) as error:
                self.failed.append(str(error))
                time.sleep(0.05)

    def _ask(self, url: str, name: str, before: Said | None) -> Said | None:
        text = f"You help. {name} says: " if before is None else f"{before.text}\nAnd then? "
        answer = call(f"{url}/generate", {"text": text, "rid": name, "sampling_params": {"max_new_tokens": 9}})
        if answer.status == 503:
            time.sleep(0.05)
            return None
        assert answer.status == 200, answer.content
        reply, known = answer.json(), "store_unreachable" not in answer.headers.get("x-radix-reasons", "")
        saved = answer.headers.get("x-radix-saved") != "no"
        said = Said(text + reply["text"], name, reply["output_ids"], reply["output_ids"], saved)
        if before is not None and known:
            said.sampled = before.sampled + said.ids
        if before is None or known:
            self.said.append(said)
        if known:
            self._retrieve(url, said)
        return said if saved and known and len(said.text) < 1_500 else None

    def _retrieve(self, url: str, said: Said) -> None:
        """What a router gives back at any moment is exact, or says why it is not."""
        found = retrieved(url, said)
        if found["exact"] and (sampled_of(found) != said.sampled or found["tokens"][-len(said.ids) :] != said.ids):
            self.wrong.append(f"{said.name}: {found}")

    def more(self, count: int = 30) -> None:
        there = len(self.said)
        until(lambda: len(self.said) > there + count, "it goes on", 60)

    def unsaved(self) -> int:
        return sum(not one.saved for one in self.said)

    def saved_again(self) -> None:
        there = len(self.said)
        until(lambda: sum(one.saved for one in self.said[there:]) > 20, "replies are saved again", 60)


def retrieved(url: str, said: Said) -> Json:
    answer = call(f"{url}/retrieve_from_text", {"text": said.text, "expect_request_ids": [said.name]})
    assert answer.status == 200, answer.content
    found: Json = answer.json()
    return found


def sampled_of(found: Json) -> list[int]:
    return [token for token, mask in zip(found["tokens"], found["loss_mask"], strict=True) if mask]


class Place:
    """Two routers on one store, each by a wire of its own if it is a Redis."""

    def __init__(self, folder: Path, worker: EmbeddedWorker, *addresses: str, flags: tuple[str, ...] = ()) -> None:
        common = ["--tokenizer-path", str(shipped_tokenizer()), "--worker-urls", worker.url]
        common += ["--store-spool", str(folder / "spool"), *flags]
        self.routers = [
            Program(f"router-{number}", *common, "--store", address, "--router-id", f"r{number}", folder=folder)
            for number, address in enumerate(addresses)
        ]

    @contextmanager
    def running(self) -> Iterator[Clients]:
        first, second = self.routers
        with first, second:
            first.wait_until_up()
            second.wait_until_up()
            yield Clients([one.url for one in self.routers])

    def handed_over(self) -> None:
        for one in self.routers:
            until(lambda one=one: metric(one, "tito_store_waiting") == 0, "all is handed over", 60)  # type: ignore[misc]

    def check(self, clients: Clients) -> None:
        """Everything is whole at each router, and once."""
        assert clients.failed == clients.wrong == []
        assert sum(one.saved for one in clients.said) > 20
        for one in self.routers:
            for said in clients.said:
                found = retrieved(one.url, said)
                assert found["exact"] or found["reasons"] == ["store_unreachable"], (one, said, found)
                assert sampled_of(found) == said.sampled, (one, said, found)
                assert (found["turns"][-1]["request_id"], found["variants"]) == (said.name, 1)


def metric(router: Program, name: str) -> float:
    lines = call(f"{router.url}/metrics").content.decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(token_delay=0.0005) as made:
        yield made


# A Redis ---------------------------------------------------------------------------------------------------------------


def emptied(server: RedisServer, clients: Clients) -> None:
    server.say("FLUSHALL")
    clients.more()


def set_back(server: RedisServer, clients: Clients) -> None:
    """It writes no append-only file, so it starts with what it had when it was told to save."""
    server.say("SAVE")
    clients.more()
    server.kill()
    server.start()
    clients.more()
    server.kill()
    server.start()


def a_replica_for_a_while(server: RedisServer, clients: Clients) -> None:
    """READONLY; then it is the master again."""
    server.say("REPLICAOF 127.0.0.1 9")
    clients.more(10)
    server.say("REPLICAOF NO ONE")


def another_password(server: RedisServer, clients: Clients) -> None:
    """Connections are cut, and the new ones are refused (NOAUTH) until the old password is back."""
    server.say("CONFIG SET requirepass another")
    server.say("CLIENT KILL TYPE normal")
    clients.more(10)
    with_password = 'AUTH another\r\nCONFIG SET requirepass ""'
    server.say(with_password)


@pytest.mark.parametrize("kind", ["redis-server", pytest.param("valkey-server", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [emptied, set_back, a_replica_for_a_while, another_password])
def test_a_server_that_loses_or_refuses(
    fault: Callable[[RedisServer, Clients], None], kind: str, worker: EmbeddedWorker, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis", ("appendonly", "no"), kind=kind) as server:
        place = Place(tmp_path, worker, *[f"{server.address}?socket_timeout=1"] * 2)
        with place.running() as clients:
            with clients.running():
                clients.more()
                fault(server, clients)
                clients.saved_again()
            place.handed_over()
            place.check(clients)


def test_a_router_that_has_just_come_is_waited_for(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """The store is emptied, and only that router knows what it had written: until that is there again, nothing is exact."""
    with redis_server(tmp_path / "redis", ("appendonly", "no")) as server:
        place = Place(tmp_path, worker, *[f"{server.address}?socket_timeout=1"] * 2)
        with place.running() as clients:
            one, two = place.routers
            first = clients._ask(two.url, "first", None)
            assert first is not None
            two.freeze()
            server.say("FLUSHALL")
            for number in range(20):
                clients._ask(one.url, f"second-{number}", first)
                time.sleep(0.05)
            assert clients.wrong == []
            two.thaw()
            until(lambda: retrieved(one.url, first)["exact"], "it is written again", 60)


def test_connections_that_break_in_the_middle_of_what_is_said(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Commands are done and their answers lost, again and again, at one router and then at the other."""
    thread = LoopThread("wires", asyncio.new_event_loop)
    with redis_server(tmp_path / "redis") as server:
        wires = [Wire(thread, server.port) for _ in range(2)]
        place = Place(tmp_path, worker, *(f"redis://127.0.0.1:{wire.port}/0?socket_timeout=1" for wire in wires))
        try:
            with place.running() as clients:
                with clients.running():
                    for number in range(6):
                        clients.more(10)
                        wires[number % 2].set("deaf")
                        clients.more(4)
                        wires[number % 2].set("cut")
                        wires[number % 2].set("whole")
                    clients.saved_again()
                place.handed_over()
                place.check(clients)
        finally:
            for wire in wires:
                wire.close()
            thread.stop()


def test_stores_with_other_prefixes_know_nothing_of_each_other(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Also if one of them is emptied, or one prefix begins with the other."""
    with redis_server(tmp_path / "redis") as server:
        place = Place(tmp_path, worker, f"{server.address}?prefix=a:", f"{server.address}?prefix=a:l:")
        with place.running():
            one, two = place.routers
            text, name = "Who are you? ", "mine"
            reply = call(f"{one.url}/generate", {"text": text, "rid": name, "sampling_params": {"max_new_tokens": 9}})
            said = Said(
                text + reply.json()["text"], name, reply.json()["output_ids"], reply.json()["output_ids"], saved=True
            )
            assert retrieved(one.url, said)["exact"]
            other = retrieved(two.url, said)
            assert (other["exact"], sampled_of(other)) == (False, [])
            assert len(call(f"{one.url}/routers").json()["routers"]) == 1


# A file ----------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_moved_away_for_a_while(worker: EmbeddedWorker, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    place = Place(tmp_path, worker, *[f"sqlite:{folder / 'store.sqlite3'}"] * 2)
    with place.running() as clients:
        with clients.running():
            clients.more()
            folder.rename(tmp_path / "moved")
            until(lambda: clients.unsaved() > 10, "it says that nothing is saved", 60)
            assert not folder.exists(), "nobody makes another one"
            (tmp_path / "moved").rename(folder)
            clients.saved_again()
        place.handed_over()
        place.check(clients)


@pytest.mark.parametrize("failure", ["spool", "refuse"])
def test_a_file_that_is_removed_under_its_routers(failure: str, worker: EmbeddedWorker, tmp_path: Path) -> None:
    """What began since waits in the spool, or is refused: the next routers hand it over to a new file."""
    file = tmp_path / "store" / "store.sqlite3"
    place = Place(tmp_path, worker, *[f"sqlite:{file}"] * 2, flags=("--store-failure", failure))
    with place.running() as clients:
        with clients.running():
            clients.more()
            for path in file.parent.iterdir():
                path.unlink()
            if failure == "spool":
                until(lambda: clients.unsaved() > 20, "it says that nothing is saved", 60)
            else:
                until(lambda: all(refused(one) for one in place.routers), "it is refused", 60)
        assert clients.failed == clients.wrong == []
        assert not file.exists(), "nobody makes an empty one"
    kept = [one for one in clients.said if not one.saved and one.sampled == one.ids]
    assert kept or failure == "refuse"
    with place.running():
        for one in kept:
            for router in place.routers:
                found = retrieved(router.url, one)
                assert sampled_of(found)[-len(one.ids) :] == one.ids, (one, found)


def refused(router: Program) -> bool:
    return call(f"{router.url}/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}).status == 503
