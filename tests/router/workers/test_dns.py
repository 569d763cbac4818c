"""The addresses of a name are the workers: those that come are registered, those that vanish drain, nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from router.errors import BadRequestError
from router.workers import dns
from router.workers.dns import WorkerDns
from router.workers.worker import dns_name

FAST = 0.005


class Membership:
    """What the router knows of its workers, by their URLs: whether they are there, and why others are refused."""

    def __init__(self, *there: str) -> None:
        self.there = list(there)
        self.lost_ones: list[str] = []
        self.refused: dict[str, str] = {}
        self.asked: list[str] = []
        self.removed: set[str] = set()
        self.added: set[str] = set()

    async def here(self, url: str) -> str | None:
        return url if url in self.there else None

    async def found(self, url: str) -> str | None:
        self.asked.append(url)
        if url not in self.refused:
            self.there.append(url)
        return self.refused.get(url)

    def lost(self, url: str) -> None:
        self.there.remove(url)
        self.lost_ones.append(url)

    def was_added(self, url: str) -> bool:
        return url in self.added

    def was_removed(self, url: str) -> bool:
        return url in self.removed


class Names:
    """A name server: the addresses of each name, or the error that is its answer."""

    def __init__(self, **answers: Sequence[str] | Exception) -> None:
        self.answers: dict[str, Sequence[str] | Exception] = dict(answers)
        self.asked = 0

    def __call__(self, name: str, port: int) -> Sequence[str]:
        self.asked += 1
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def again(self) -> None:
        """Wait until it was asked twice more, so that what it said before was taken over."""
        count = self.asked + 2 * len(self.answers)
        while self.asked < count:  # noqa: ASYNC110 - it is asked in threads
            await asyncio.sleep(FAST)
        await asyncio.sleep(FAST)


@contextlib.asynccontextmanager
async def watching(membership: Membership, names: Names, *given: str) -> AsyncIterator[WorkerDns]:
    made: Any = membership
    found = WorkerDns(made, given or ("a:1",), FAST, names)
    await found.begin()
    try:
        yield found
    finally:
        found.close()


def url(*numbers: int) -> list[str]:
    return [f"http://10.0.0.{number}:1" for number in numbers]


def run(course: Any) -> None:
    asyncio.run(asyncio.wait_for(course, 30))


def test_those_that_come_are_registered_and_those_that_vanish_drain() -> None:
    async def course() -> None:
        membership, names = Membership(), Names(a=["10.0.0.1", "10.0.0.2"])
        async with watching(membership, names):
            assert membership.there == url(1, 2), "before the router serves"
            names.answers["a"] = ["10.0.0.3", "10.0.0.2", "10.0.0.2"]
            await names.again()
            assert (membership.there, membership.lost_ones) == (url(2, 3), url(1))
            names.answers["a"] = ["10.0.0.1", "10.0.0.2"]
            await names.again()
            assert sorted(membership.there) == url(1, 2), "it came back"
            assert membership.asked == url(1, 2, 3, 1), "nothing is asked twice"

    run(course())


@pytest.mark.parametrize("answer", [[], OSError("no such name"), UnicodeError("label too long"), ["fe80::1%eth0"]])
def test_no_answer_and_no_address_keep_the_last_ones(
    answer: Sequence[str] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def course() -> None:
        membership, names = Membership(), Names(a=["10.0.0.1"])
        async with watching(membership, names):
            names.answers["a"] = answer
            await names.again()
            await names.again()
            assert (membership.there, membership.lost_ones) == (url(1), [])
            names.answers["a"] = ["10.0.0.2"]
            await names.again()
            assert (membership.there, membership.lost_ones) == (url(2), url(1))

    with caplog.at_level(logging.INFO, logger=dns.__name__):
        run(course())
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1, "it is told once, not at each look-up"
    assert "a:1" in said[0]
    assert "stay" in said[0]
    assert any("can be looked up again" in record.message for record in caplog.records)


def test_a_start_without_an_address_waits_for_none() -> None:
    async def course() -> None:
        membership, names = Membership(), Names(a=OSError("not yet"))
        async with watching(membership, names):
            assert not membership.there
            names.answers["a"] = ["10.0.0.1"]
            await names.again()
            assert membership.there == url(1)

    run(course())


def test_a_name_server_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "BEGIN_SECONDS", 0.05)
    answered = threading.Event()

    async def course() -> None:
        membership, asked = Membership(), list[str]()

        def names(name: str, _: int) -> Sequence[str]:
            asked.append(name)
            if name == "slow":
                answered.wait(20)
            return ["10.0.0.1"] if name == "slow" else ["10.0.0.2"]

        made: Any = membership
        found = WorkerDns(made, ("slow:1", "quick:1"), FAST, names)
        await found.begin()
        while asked.count("quick") < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(FAST)
        assert membership.there == url(2)
        assert asked.count("slow") == 1, "no second look-up while one is on its way"
        answered.set()
        while len(membership.there) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(FAST)
        found.close()

    run(course())


def test_an_address_of_several_names_stays_until_none_has_it() -> None:
    async def course() -> None:
        membership, names = Membership(), Names(a=["10.0.0.1"], b=["10.0.0.1", "10.0.0.2"])
        async with watching(membership, names, "a:1", "b:1"):
            await names.again()
            assert sorted(membership.there) == url(1, 2)
            names.answers["a"] = ["10.0.0.3"]
            await names.again()
            assert sorted(membership.there) == url(1, 2, 3)
            names.answers["b"] = OSError("away")
            await names.again()
            assert sorted(membership.there) == url(1, 2, 3), "what the other name had stays"
            names.answers["b"] = ["10.0.0.2"]
            await names.again()
            assert (sorted(membership.there), membership.lost_ones) == (url(2, 3), url(1))

    run(course())


def test_workers_that_others_named_never_drain() -> None:
    async def course() -> None:
        membership, names = Membership(*url(1)), Names(a=["10.0.0.1", "10.0.0.2"])
        async with watching(membership, names):
            names.answers["a"] = ["10.0.0.2"]
            await names.again()
            assert (membership.there, membership.lost_ones) == (url(1, 2), [])

    run(course())


def test_a_worker_that_a_call_removed_does_not_come_back_with_the_next_look_up() -> None:
    async def course() -> None:
        membership, names = Membership(), Names(a=["10.0.0.1", "10.0.0.2"])
        membership.removed.update(url(2))
        async with watching(membership, names):
            assert membership.there == url(1), "not at the start of a router, either"
            membership.there.remove(url(1)[0])
            await names.again()
            assert membership.there == []

    run(course())


def test_one_that_is_refused_is_asked_again_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Another engine than the fleet's, which may be replaced at the same address."""

    async def course() -> None:
        membership, names = Membership(), Names(a=["10.0.0.1"])
        membership.refused[url(1)[0]] = "it runs another engine"
        async with watching(membership, names):
            await names.again()
            assert membership.there == []
            del membership.refused[url(1)[0]]
            await names.again()
            assert membership.there == url(1)

    run(course())
    assert [record.message for record in caplog.records].count(
        f"{url(1)[0]}, an address of a:1, is not routed to: it runs another engine"
    ) == 1


def test_addresses_of_ipv6_and_those_that_mean_ipv4() -> None:
    async def course() -> None:
        membership, names = Membership(), Names(a=["fd00::5", "::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.1"])
        async with watching(membership, names):
            assert membership.there == ["http://[fd00::5]:1", *url(1)]

    run(course())


@pytest.mark.parametrize("given", ["Workers.Train.svc:30001", "10.0.0.1:1", "[fd00::5]:65535", "worker_1:80"])
def test_a_name_with_a_port_is_taken(given: str) -> None:
    assert dns_name(given) == given.lower()


@pytest.mark.parametrize(
    "given",
    [
        "",
        "workers",
        ":1",
        "workers:",
        "workers:0",
        "workers:99999",
        "a b:1",
        "http://a:1",
        "a:1/x",
        "u@a:1",
        "a:b:1",
        "a:x",
    ],
)
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(BadRequestError, match="--worker-dns"):
        dns_name(given)


def test_the_system_is_asked() -> None:
    assert set(dns.resolve("127.0.0.1", 1)) == {"127.0.0.1"}
    with pytest.raises(OSError, match=r".+"):
        dns.resolve("no-such-name.invalid", 1)
