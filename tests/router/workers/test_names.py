"""Which worker a URL names, over real sockets; names of other hosts come from a table in place of DNS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from router.workers.names import WorkerNames
from router.workers.worker import ProbeResult
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving


@contextlib.asynccontextmanager
async def listening(*hosts: str) -> AsyncIterator[int]:
    """Listen at one port of all these addresses. Skips where the machine has no IPv6."""
    async with contextlib.AsyncExitStack() as stack:
        port = 0
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                bound = stack.enter_context(socket.socket(family))
                if family is socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind((host, port))
            except OSError as error:
                pytest.skip(f"{host}: {error}")
            bound.listen()
            port = bound.getsockname()[1]
        yield port


class Engines:
    """What the workers at some URLs say of themselves."""

    def __init__(self, **seeds: int) -> None:
        self.seeds = seeds

    async def describe(self, url: str) -> bytes | ProbeResult | None:
        host = url.removeprefix("http://").partition(":")[0].replace("-", "_")
        if host not in self.seeds:
            return ProbeResult("no answer within 5 s")
        return msgspec.json.encode({"model_path": "m", "port": 1, "random_seed": self.seeds[host]})


def resolving(monkeypatch: pytest.MonkeyPatch, table: dict[str, list[str]]) -> None:
    """Let names of this table lead to these addresses in the running loop."""
    loop = asyncio.get_running_loop()
    before = loop.getaddrinfo

    async def look_up(host: Any, port: Any, **more: Any) -> Any:
        if host not in table:
            return await before(host, port, **more)
        if not table[host]:
            await asyncio.Event().wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)


def test_names_of_this_machine_are_one_worker() -> None:
    async def main() -> None:
        names = WorkerNames(Engines().describe)
        async with listening("127.0.0.1") as port:
            one, local = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
            assert await names.known_as(local, [one]) == one
            assert await names.known_as(one, [local]) == local
            assert await names.known_as(f"http://[::ffff:127.0.0.1]:{port}", [one]) == one
            assert await names.known_as(f"http://0.0.0.0:{port}", [one]) == one
            assert await names.known_as(local, [f"http://0.0.0.0:{port}"]) == f"http://0.0.0.0:{port}"
            for other in (f"http://127.0.0.2:{port}", f"http://127.0.0.1:{port - 1}", f"https://127.0.0.1:{port}"):
                assert await names.known_as(other, [one, local]) == other
            assert await names.distinct([one, local]) == {one: one, local: one}

    asyncio.run(main())


def test_before_anybody_listens_localhost_is_this_machine() -> None:
    async def main() -> None:
        async with listening("127.0.0.1") as port:
            pass
        one, local = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        assert await WorkerNames(Engines().describe).known_as(local, [one]) == one

    asyncio.run(main())


def test_two_servers_at_one_port_are_two_workers() -> None:
    """One listens to IPv4 and one to IPv6: `localhost` leads to either."""

    async def main() -> None:
        names = WorkerNames(Engines().describe)
        async with listening("127.0.0.1", "::1") as port:
            four, six, local = (f"http://{host}:{port}" for host in ("127.0.0.1", "[::1]", "localhost"))
            assert await names.distinct([four, six]) == {four: four, six: six}
            found = await asyncio.get_running_loop().getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
            if len({address for *_, (address, *_) in found}) == 2:
                assert await names.known_as(local, [four, six]) == local

    asyncio.run(main())


@pytest.mark.parametrize(
    ("seeds", "same"),
    [({"gpu1": 5, "gpu1_lan": 5}, True), ({"gpu1": 5, "gpu1_lan": 6}, False), ({"gpu1": 5}, False), ({}, False)],
)
def test_two_names_at_one_address_are_one_worker_if_it_says_so(
    monkeypatch: pytest.MonkeyPatch, seeds: dict[str, int], same: bool
) -> None:
    """A proxy serves any number of workers at one address."""

    async def main() -> None:
        resolving(monkeypatch, {"gpu1": ["127.0.0.1"], "gpu1-lan": ["127.0.0.1"]})
        names = WorkerNames(Engines(**seeds).describe)
        async with listening("127.0.0.1") as port:
            one, two = f"http://gpu1:{port}", f"http://gpu1-lan:{port}"
            assert await names.known_as(two, [one]) == (one if same else two)
            assert await names.known_as(f"http://127.0.0.1:{port}", [one]) == one, "an address is no name"

    asyncio.run(main())


def test_a_name_of_several_workers_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a headless service of Kubernetes: it leads to another one each time."""

    async def main() -> None:
        resolving(monkeypatch, {"workers": ["127.0.0.1", "127.0.0.2"], "same": ["127.0.0.1", "127.0.0.2"]})
        names = WorkerNames(Engines(workers=5, same=5).describe)
        async with listening("127.0.0.1", "127.0.0.2") as port:
            service, same = f"http://workers:{port}", f"http://same:{port}"
            for one in (f"http://127.0.0.1:{port}", same):
                assert await names.known_as(one, [service]) == one
                assert await names.known_as(service, [one]) == service

    asyncio.run(main())


def test_a_name_that_nobody_resolves_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.names.LOOK_UP_SECONDS", 0.1)

    async def main() -> None:
        resolving(monkeypatch, {"slow": []})
        names = WorkerNames(Engines().describe)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        slow, unknown, one = "http://slow:1", "http://no-such-host.invalid:1", "http://127.0.0.1:1"
        assert await names.distinct([one, slow, unknown]) == {url: url for url in (one, slow, unknown)}
        assert ticks > 5
        ticking.cancel()

    asyncio.run(main())


def test_a_host_that_has_another_address_now_is_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of pods are used again: what was known of the old one says nothing."""

    async def main() -> None:
        table = {"old": ["127.0.0.1"], "new": ["127.0.0.2"]}
        resolving(monkeypatch, table)
        names = WorkerNames(Engines(old=5, new=5).describe)
        async with listening("127.0.0.1") as port:
            old, new = f"http://old:{port}", f"http://new:{port}"
            assert await names.known_as(new, [old]) == new
            table |= {"old": ["127.0.0.3"], "new": ["127.0.0.1"]}
            assert await names.known_as(new, [old]) == new

    asyncio.run(main())


def test_a_worker_is_registered_once_and_removed_by_either_name() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running() as router:
            other = url.replace("127.0.0.1", "localhost")
            assert other != url
            for first, second in ((url, other), (other, url)):
                for path, status in (("/add_worker", 200), ("/workers", 202)):
                    async with router.client.post(path, json={"url": first}) as reply:
                        assert (reply.status, "message" in await reply.json()) == (status, False)
                    async with router.client.post(path, json={"url": second}) as reply:
                        said = await reply.json()
                        assert reply.status == status
                        assert said["message"].startswith(f"{second} is the worker {first} under another name")
                        assert (said["worker"]["url"] if "worker" in said else said["url"]) == first
                async with router.client.get("/list_workers") as reply:
                    assert await reply.json() == {"urls": [first]}
                async with router.client.get(f"/workers/{second}") as reply:
                    assert (await reply.json())["url"] == first
                async with router.client.post("/remove_worker", json={"url": second}) as reply:
                    assert (reply.status, (await reply.json())["worker"]["url"]) == (200, first)
                async with router.client.post("/remove_worker", json={"url": second}) as reply:
                    assert reply.status == 404
            both = [router.client.post("/add_worker", json={"url": one}) for one in (url, other)]
            assert {reply.status for reply in await asyncio.gather(*both)} == {200}
            assert len(router.app.pool.list()) == 1, "also where both come at once"

    asyncio.run(main())


def test_a_command_line_may_name_a_worker_twice(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url:
            other = url.replace("127.0.0.1", "localhost")
            async with running([url, other]) as router:
                assert [worker.url for worker in router.app.pool.list()] == [url]
                assert f"worker {other} is {url} under another name" in caplog.text

    asyncio.run(main())
