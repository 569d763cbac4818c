"""Who gets in, to what, and as whom."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from router.auth.key_check import ACT_AS, KeyCheck
from router.auth.keys import ApiKeys
from router.config import RouterConfig, ServerConfig
from router.http.request_state import RequestRecord, RequestState, first_state, request_state
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving

TENANTS = ServerConfig(api_keys=("a:one", "a:two", "b:three"), admin_keys=("all",))
ONLY_ADMIN = ServerConfig(admin_keys=("all",))
ONLY_TENANTS = ServerConfig(api_keys=("a:one", "b:three"))

USE = ("POST", "/generate")
READ = ("GET", "/workers")
ADMIN = ("POST", "/flush_cache")
PROXIED = ("GET", "/server_info")
FREE = ("GET", "/health")


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("server", "key", "call", "status"),
    [
        (TENANTS, None, FREE, 200),
        (TENANTS, "wrong", FREE, 200),
        (TENANTS, None, USE, 401),
        (TENANTS, "wrong", USE, 401),
        (TENANTS, None, READ, 401),
        (TENANTS, None, ADMIN, 401),
        (TENANTS, None, PROXIED, 401),
        (TENANTS, "one", USE, 200),
        (TENANTS, "two", READ, 200),
        (TENANTS, "one", ADMIN, 403),
        (TENANTS, "three", PROXIED, 403),
        (TENANTS, "all", USE, 200),
        (TENANTS, "all", READ, 200),
        (TENANTS, "all", ADMIN, 200),
        (TENANTS, "all", PROXIED, 200),
        (ONLY_ADMIN, None, USE, 200),
        (ONLY_ADMIN, "EMPTY", USE, 200),  # some clients always send something
        (ONLY_ADMIN, None, READ, 401),
        (ONLY_ADMIN, "EMPTY", ADMIN, 401),
        (ONLY_ADMIN, None, PROXIED, 401),
        (ONLY_ADMIN, "all", ADMIN, 200),
        (ONLY_TENANTS, None, USE, 401),
        (ONLY_TENANTS, "one", ADMIN, 200),
        (ONLY_TENANTS, "three", PROXIED, 200),
    ],
)
def test_who_may(server: ServerConfig, key: str | None, call: tuple[str, str], status: int) -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url], server=server) as router:
            method, path = call
            data = b"{}" if method == "POST" else None
            async with router.client.request(method, path, data=data, headers=bearer(key)) as reply:
                assert reply.status == status, await reply.text()
                if status in (401, 403):
                    error = (await reply.json())["error"]
                    assert error["type"] == {401: "unauthorized", 403: "forbidden"}[status]
                    assert ("--admin-key" in error["message"]) is (status == 403)
                    assert ("www-authenticate" in reply.headers) is (status == 401)
                    assert ("does not know the key" in error["message"]) is (status == 401 and key is not None)
                    assert ("Authorization: Bearer KEY" in error["message"]) is (status == 401 and key is None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("server", "key", "status"), [(TENANTS, "one", 403), (TENANTS, None, 401), (ONLY_ADMIN, None, 401)]
)
def test_a_misspelt_path_is_told_with_the_one_that_is_meant(server: ServerConfig, key: str | None, status: int) -> None:
    """Its own path may need no key, or only a tenant's."""

    async def main() -> None:
        async with running(server=server) as router:
            for path, told in [
                ("/retrieve_from_texts", True),
                ("/retrieve_from_text", False),
                ("/start_profile", False),
            ]:
                async with router.client.post(path, data=b"{}", headers=bearer(key)) as reply:
                    text = await reply.text()
                    assert ("Did you mean /retrieve_from_text?" in text) is told
                    assert reply.status == status or not told

    asyncio.run(main())


def test_a_key_that_is_sent_with_its_tenant_is_told() -> None:
    async def main() -> None:
        async with running(server=TENANTS) as router:
            for key, told in [("a:one", True), ("wrong", False)]:
                async with router.client.get("/workers", headers=bearer(key)) as reply:
                    assert reply.status == 401
                    assert ("of TENANT:KEY, a client sends the KEY" in await reply.text()) is told

    asyncio.run(main())


@pytest.mark.parametrize("header", ["one", "Basic one", "Bearer", "Bearer one two", "Bearer: one", "bearer\tone"])
def test_keys_come_in_one_form(header: str) -> None:
    async def main() -> None:
        async with running(server=TENANTS) as router:
            async with router.client.get("/workers", headers={"authorization": header}) as reply:
                assert reply.status == 401
            for scheme in ("bearer", "BEARER"):
                async with router.client.get("/workers", headers={"authorization": f"{scheme}  one "}) as reply:
                    assert reply.status == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("server", "key"), [(TENANTS, "all"), (TENANTS, "one"), (ONLY_ADMIN, "all"), (ONLY_ADMIN, "w")]
)
def test_workers_are_told_no_key(server: ServerConfig, key: str) -> None:
    """Nor whom an admin stands in for."""

    async def main() -> None:
        worker = EchoWorker()
        async with serving(worker) as url, running([url], server=server) as router:
            headers = {**bearer(key), **({"x-tenant": "b"} if (server, key) == (TENANTS, "all") else {})}
            async with router.client.get("/v1/models", headers=headers) as reply:
                assert reply.status == 200
        names = {name for name, _ in worker.seen[-1]["headers"]}
        assert not names & {"authorization", "x-tenant"}

    asyncio.run(main())


def state_of(server: ServerConfig, headers: dict[str, str], path: str = "/generate") -> tuple[RequestState, str]:
    """The state of a request that was let in, and the record's tenant."""
    record = RequestRecord("id", "POST", path)
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {},
    }
    scope["state"] = first_state(scope, record)
    KeyCheck(ApiKeys(server.api_keys, server.admin_keys))(scope)
    assert ACT_AS not in dict(scope["headers"])
    return request_state(scope), record.tenant


@pytest.mark.parametrize(
    ("server", "headers", "tenant"),
    [
        (TENANTS, bearer("one"), "a"),
        (TENANTS, bearer("two"), "a"),
        (TENANTS, bearer("three"), "b"),
        (TENANTS, bearer("all"), ""),
        (TENANTS, {**bearer("all"), "x-tenant": "b"}, "b"),
        (ONLY_ADMIN, {}, ""),
        (ONLY_ADMIN, bearer("all"), ""),
    ],
)
def test_whose_request_it_is(server: ServerConfig, headers: dict[str, str], tenant: str) -> None:
    """It is told to the middlewares, and stands on the record of the request."""
    state, on_record = state_of(server, headers)
    assert state.caller.tenant == on_record == tenant


@pytest.mark.parametrize(
    ("server", "headers", "status"),
    [
        (TENANTS, {**bearer("one"), "x-tenant": "a"}, 403),
        (TENANTS, {**bearer("one"), "x-tenant": "b"}, 403),
        (ONLY_TENANTS, {**bearer("one"), "x-tenant": "b"}, 403),  # it may change the fleet, but is no admin
        (ONLY_ADMIN, {"x-tenant": "b"}, 403),
        (TENANTS, {"x-tenant": "a"}, 401),
        (TENANTS, {**bearer("all"), "x-tenant": "c"}, 400),
        (TENANTS, {**bearer("all"), "x-tenant": ""}, 400),
        (ONLY_ADMIN, {**bearer("all"), "x-tenant": "a"}, 400),
    ],
)
def test_who_may_not_act_as_a_tenant(server: ServerConfig, headers: dict[str, str], status: int) -> None:
    async def main() -> None:
        async with running(server=server) as router, router.client.post("/generate", headers=headers) as reply:
            assert reply.status == status
            assert (await reply.json())["error"]["code"] == status

    asyncio.run(main())


def test_without_keys_the_header_means_nothing() -> None:
    """It may be another service's, and goes on to the worker."""

    async def main() -> None:
        worker = EchoWorker()
        async with (
            serving(worker) as url,
            running([url]) as router,
            router.client.get("/x", headers={"x-tenant": "b", "authorization": "Bearer the-workers-own"}) as reply,
        ):
            assert reply.status == 200
        assert {("x-tenant", "b"), ("authorization", "Bearer the-workers-own")} <= set(worker.seen[-1]["headers"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("server", "warned"), [(TENANTS, False), (ONLY_ADMIN, False), (ONLY_TENANTS, True), (ServerConfig(), False)]
)
def test_tenants_without_an_admin_are_warned_of(
    server: ServerConfig, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(server=server):
            pass

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert ("no --admin-key" in caplog.text) is warned
    assert not any(key in caplog.text for key in ("one", "three")), "a key stands in the log"


def test_a_configuration_does_not_show_its_keys() -> None:
    server = ServerConfig(api_keys=("a:secret",), admin_keys=("secret too",))
    assert "secret" not in repr(RouterConfig(server=server))
