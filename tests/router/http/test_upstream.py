"""The client towards the workers: what its sockets are told."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.http.upstream import KEEPALIVE_SECONDS, AiohttpUpstream
from tests.router.conftest import GatedWorker
from tests.support.serving import serving


@pytest.mark.parametrize("fresh", [False, True])
def test_a_machine_that_is_gone_is_noticed(fresh: bool) -> None:
    """Its system does not answer to keep-alives, after which the connection is reset: read off the sockets themselves."""

    async def main() -> None:
        async with serving(GatedWorker(first=b"begun")) as url, AiohttpUpstream(connect_timeout=5) as upstream:
            response = await upstream.send("GET", url + "/x", [], fresh=fresh)
            connection = response._response.connection  # type: ignore[attr-defined]
            one = connection.transport.get_extra_info("socket")
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_KEEPIDLE"):
                idle, every, count = (
                    one.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + every * count == 2 * KEEPALIVE_SECONDS
            response.close()

    asyncio.run(main())
