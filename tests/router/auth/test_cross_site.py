"""What the page of another site cannot make a browser do."""

from __future__ import annotations

import asyncio

import pytest

from router.config import ServerConfig
from tests.router.auth.test_key_check import ADMIN, FREE, ONLY_ADMIN, PROXIED, READ, TENANTS, USE, bearer
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving

CROSS = {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}
OWN = {"sec-fetch-site": "same-origin"}


@pytest.mark.parametrize(
    ("server", "call", "headers", "status"),
    [
        (ServerConfig(), USE, {}, 200),
        (ServerConfig(), USE, OWN, 200),
        (ServerConfig(), USE, {**OWN, "origin": "https://router.example"}, 200),  # behind a proxy with TLS
        (ServerConfig(), USE, {"sec-fetch-site": "none"}, 200),
        (ServerConfig(), USE, {"origin": "http://HOST"}, 200),
        (ServerConfig(), USE, {"origin": "http://gpu1:8080", "x-forwarded-host": "gpu1:8080"}, 200),
        (ServerConfig(), USE, {"origin": "HTTP://GPU1:8080", "x-forwarded-host": "gpu1:8080"}, 200),
        (ServerConfig(), USE, CROSS, 403),
        (ServerConfig(), USE, {"sec-fetch-site": "same-site", "origin": "http://HOST"}, 403),
        (ServerConfig(), USE, {"origin": "http://evil.example"}, 403),
        (ServerConfig(), USE, {"origin": "http://["}, 403),
        (ServerConfig(), USE, {"origin": "null"}, 403),
        (ServerConfig(), ADMIN, CROSS, 403),
        (ServerConfig(), PROXIED, CROSS, 403),
        (ServerConfig(), READ, CROSS, 200),
        (ServerConfig(), FREE, CROSS, 200),
        (ONLY_ADMIN, USE, CROSS, 403),
        (ONLY_ADMIN, USE, {**CROSS, **bearer("wrong")}, 403),
        (ONLY_ADMIN, USE, {**CROSS, **bearer("all")}, 200),
        (TENANTS, USE, {**CROSS, **bearer("one")}, 200),
        (TENANTS, USE, CROSS, 401),  # the check of keys comes first, and says what is missing
    ],
)
def test_pages_of_other_sites_do_nothing_without_a_key(
    server: ServerConfig, call: tuple[str, str], headers: dict[str, str], status: int
) -> None:
    """A page can make a browser post JSON as text/plain, without asking the router first."""

    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url], server=server) as router:
            method, path = call
            host = router.url.removeprefix("http://")
            sent = {name: value.replace("HOST", host) for name, value in headers.items()}
            data = b"{}" if method == "POST" else None
            sent["content-type"] = "text/plain"
            async with router.client.request(method, path, data=data, headers=sent) as reply:
                assert reply.status == status, await reply.text()
                assert (status == 403) is ("another site" in await reply.text())

    asyncio.run(main())
