"""The networks that workers may be in."""

from __future__ import annotations

import asyncio

import pytest

from router.app import create_app
from router.config import RouterConfig, WorkersConfig
from router.errors import BadRequestError
from router.http.upstream import AiohttpUpstream, ConnectFailedError, fetch
from router.workers.allowed import AllowedWorkers
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving


def allowed(*networks: str) -> AllowedWorkers:
    return AllowedWorkers(WorkersConfig(allow=networks).networks)


@pytest.mark.parametrize(
    ("networks", "url", "inside"),
    [
        ((), "http://203.0.113.9:1", True),
        ((), "http://no-such-host.invalid:1", True),  # no lookup
        (("10.0.0.0/8",), "http://10.1.2.3:30001", True),
        (("10.0.0.0/8",), "https://10.1.2.3", True),
        (("10.0.0.0/8",), "http://11.1.2.3:30001", False),
        (("10.0.0.0/8", "192.168.1.7"), "http://192.168.1.7:30001", True),
        (("10.0.0.0/8", "192.168.1.7"), "http://192.168.1.8:30001", False),
        (("127.0.0.0/8", "::1"), "http://localhost:30001", True),
        (("10.0.0.0/8",), "http://localhost:30001", False),
        (("fd00::/8",), "http://[fd00::1]:30001", True),
        (("fd00::/8",), "http://[fe80::1]:30001", False),
        (("10.0.0.0/8",), "http://[fd00::1]:30001", False),
        # Other ways to write an address.
        (("10.0.0.0/8",), "http://[::ffff:10.0.0.1]:30001", True),
        (("::/0",), "http://[::ffff:10.0.0.1]:30001", False),
        (("10.0.0.0/8",), "http://2130706433:30001", False),
        (("127.0.0.0/8",), "http://2130706433:30001", True),
        (("10.0.0.0/8",), "http://0x7f.1:30001", False),
        (("10.0.0.0/8",), "http://0.0.0.0:30001", False),
        (("10.0.0.0/8",), "http://no-such-host.invalid:1", False),
    ],
)
def test_all_addresses_of_a_name_must_be_inside(networks: tuple[str, ...], url: str, inside: bool) -> None:
    """With and without an event loop."""
    rule = allowed(*networks)
    if inside:
        rule.check_now(url)
        asyncio.run(rule.check(url))
        return
    for check in (lambda: rule.check_now(url), lambda: asyncio.run(rule.check(url))):
        with pytest.raises(BadRequestError, match="--worker-allow") as raised:
            check()
        assert url in str(raised.value)


@pytest.mark.parametrize("network", ["", "10.0.0.1/8", "10.0.0.0/33", "example.org", "10.*"])
def test_a_wrong_network_is_refused(network: str) -> None:
    with pytest.raises(BadRequestError, match="--worker-allow"):
        WorkersConfig(allow=(network,))


def test_a_worker_of_the_command_line_outside_ends_the_start() -> None:
    workers = WorkersConfig(urls=("http://10.0.0.1:1", "http://127.0.0.1:1"), allow=("10.0.0.0/8",))
    with pytest.raises(BadRequestError, match=r"127\.0\.0\.1"):
        create_app(RouterConfig(workers=workers, middlewares=()))


@pytest.mark.parametrize("path", ["/add_worker", "/workers"])
def test_a_worker_outside_is_not_added(path: str) -> None:
    async def main() -> None:
        async with running(allow=("10.0.0.0/8", "127.0.0.2/32")) as router:
            for url in ("http://127.0.0.1:1", "http://localhost:1", "http://no-such-host.invalid:1"):
                async with router.client.post(path, json={"url": url}) as reply:
                    assert reply.status == 400
                    assert "--worker-allow" in (await reply.json())["error"]["message"]
            assert router.app.pool.list() == ()
            async with router.client.post(path, json={"url": "http://127.0.0.2:1"}) as reply:
                assert reply.status in (200, 202)

    asyncio.run(main())


def test_addresses_are_checked_again_at_each_connection() -> None:
    """The owner of a name may change its address after the admission: then connections fail, and nothing is sent."""

    async def main() -> None:
        worker, inside = EchoWorker(), True
        async with (
            serving(worker) as url,
            AiohttpUpstream(connect_timeout=1, permits=lambda address: inside and address == "127.0.0.1") as upstream,
        ):
            for host in ("localhost", "127.0.0.1"):
                named, inside = url.replace("127.0.0.1", host), True
                assert (await fetch(upstream, "GET", f"{named}/x", [], fresh=True))[0] == 200
                inside = False
                with pytest.raises(ConnectFailedError, match="--worker-allow"):
                    await fetch(upstream, "GET", f"{named}/x", [], fresh=True)
        assert len(worker.seen) == 2

    asyncio.run(main())


def test_permits_agrees_with_check() -> None:
    within = allowed("10.0.0.0/8", "::1")
    assert within.permits("10.1.1.1")
    assert within.permits("::ffff:10.1.1.1")
    assert not within.permits("127.0.0.1")
    assert not within.permits("fe80::1%eth0")
    assert allowed().permits("203.0.113.9")
