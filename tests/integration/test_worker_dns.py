"""A router whose workers are the addresses of a name, from outside: they come, drain with what they have, and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from router.app import create_app
from router.config import RouterConfig, WorkersConfig
from router.workers import dns
from tests.support.asking import Asking, until
from tests.support.serving import serve
from tests.support.stack import Stack
from worker.worker import EmbeddedWorker

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Addresses(list[str]):
    """What the name server answers with; none is an error. `asked` counts the questions."""

    asked = 0


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    addresses = Addresses()

    def resolve(name: str, _: int) -> list[str]:
        assert name == "workers.train.svc"
        addresses.asked += 1
        if not addresses:
            raise OSError("the name server is away")
        return list(addresses)

    monkeypatch.setattr(dns.WorkerDns.__init__, "__defaults__", (resolve,))
    return addresses


@contextlib.contextmanager
def fleet(*interfaces: str) -> Iterator[list[EmbeddedWorker]]:
    """Workers at several addresses of this machine, all at one port."""
    with contextlib.ExitStack() as entered:
        first = entered.enter_context(EmbeddedWorker(interface=interfaces[0]))
        made = [first]
        for address, interface in zip(ADDRESSES[1:], interfaces[1:], strict=False):
            worker = EmbeddedWorker(interface=interface, host=address, port=first.port)
            made.append(entered.enter_context(worker))
        yield made


@contextlib.contextmanager
def routed(workers: list[EmbeddedWorker], **more: Any) -> Iterator[Stack]:
    name = f"workers.train.svc:{workers[0].port}"
    config = RouterConfig(workers=WorkersConfig(dns=(name,), dns_interval=0.02, **more), middlewares=())
    with serve(create_app(config)) as url:
        yield Stack("qwen", url, workers, None)  # type: ignore[arg-type]  # nothing here spells


def states(router: Stack) -> dict[str, str]:
    return {one["url"]: one["state"] for one in router.get("/workers").json()["workers"]}


def say(router: Stack) -> int:
    return router.post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}}).status


def test_workers_come_and_go_with_their_addresses(found: Addresses) -> None:
    with fleet("sglang", "sglang", "sglang") as workers:
        one, two, three = (worker.url for worker in workers)
        with routed(workers) as router:
            answer = router.post("/generate", {"text": "hi"})
            assert answer.status == 503
            assert "no worker" in answer.content.decode()
            found += ADDRESSES[:2]
            until(lambda: states(router) == {one: "healthy", two: "healthy"})
            assert say(router) == 200
            workers[0].hold(1)
            workers[1].hold(1)
            asking = [Asking(router.url, {"text": "hi", "sampling_params": {"max_new_tokens": 3}}) for _ in range(2)]
            until(lambda: all(worker.in_flight for worker in workers[:2]))
            found[0] = ADDRESSES[2]
            until(lambda: states(router) == {one: "draining", two: "healthy", three: "healthy"})
            for worker in workers:
                worker.release(None)
            assert [ask.answer().status for ask in asking] == [200, 200], "it finished what it had"
            until(lambda: states(router) == {two: "healthy", three: "healthy"})
            found.clear()
            assert say(router) == 200, "nobody answers, so the last addresses stay"
            found += ADDRESSES
            until(lambda: states(router) == {one: "healthy", two: "healthy", three: "healthy"}, "it came back")


def test_those_of_other_engines_are_left_out_and_those_of_the_command_line_stay(found: Addresses) -> None:
    found += ADDRESSES
    with fleet("sglang", "vllm", "sglang") as workers:
        one, two, three = (worker.url for worker in workers)
        with routed(workers, urls=(one,)) as router:
            until(lambda: states(router) == {one: "healthy", three: "healthy"})
            found[:] = [ADDRESSES[1]]
            until(lambda: states(router) == {one: "healthy"})
            assert two not in states(router)
            found[:] = [ADDRESSES[1], ADDRESSES[2]]
            until(lambda: states(router) == {one: "healthy", three: "healthy"})
            removed = router.post(f"/remove_worker?url={three}", {})
            assert removed.status == 200
            until(lambda: three not in states(router))
            asked = found.asked
            until(lambda: found.asked > asked + 2)
            assert three not in states(router), "a call has removed it"


def test_what_a_call_has_added_stays_though_it_was_found_first(found: Addresses) -> None:
    """A trainer registers its engines, whose address leaves the name while they load weights, for example."""
    found += ADDRESSES[:2]
    with fleet("sglang", "sglang") as workers, routed(workers) as router:
        one, two = (worker.url for worker in workers)
        until(lambda: states(router) == {one: "healthy", two: "healthy"})
        assert router.post("/add_worker", {"url": one}).status == 200
        found[:] = [ADDRESSES[2]]
        until(lambda: two not in states(router))
        asked = found.asked
        until(lambda: found.asked > asked + 2)
        assert states(router)[one] == "healthy"
        found[:] = ADDRESSES[:2]
        until(lambda: two in states(router))
        for call in ("add", "remove"):
            assert router.post(f"/{call}_worker", {"url": two}).status == 200
        until(lambda: two not in states(router), "a call has removed it")


def test_only_allowed_addresses_are_workers(found: Addresses) -> None:
    found += ADDRESSES[:2]
    with fleet("sglang", "sglang") as workers, routed(workers, allow=("127.0.0.1/32",)) as router:
        until(lambda: states(router) == {workers[0].url: "healthy"})


def test_a_name_is_one_of_several_of_a_worker(found: Addresses) -> None:
    """`localhost` is on the command line, and its address is found."""
    found.append(ADDRESSES[0])
    with fleet("sglang") as workers:
        named = f"http://localhost:{workers[0].port}"
        with routed(workers, urls=(named,)) as router:
            until(lambda: states(router) == {named: "healthy"})
            assert say(router) == 200
            assert list(states(router)) == [named]
