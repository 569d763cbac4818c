"""Probes of engines and of other servers, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.http.upstream import AiohttpUpstream
from router.workers.probe import Prober
from tests.router.conftest import MODEL
from tests.router.workers.watched import NO_ENGINES, AnsweringServer, web_server
from tests.support.serving import serving


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ({"ping": {}}, ["/ping"]),
        ({"ping": 401}, ["/ping"]),
        ({"model_info": {}}, ["/ping", "/model_info"]),
        ({"get_model_info": {}}, ["/ping", "/model_info", "/get_model_info"]),
        ({"server_info": MODEL}, ["/ping", "/model_info", "/get_model_info", "/server_info"]),
    ],
)
def test_any_path_of_an_engine_answers_a_probe(answers: dict[str, Any], asked: list[str]) -> None:
    async def main() -> None:
        server = AnsweringServer(**answers)
        async with serving(server) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            found = await Prober(upstream, seconds=5).probe(url)
            assert found.complaint is None
            assert server.asked == asked

    asyncio.run(main())


@pytest.mark.parametrize(("get", "post"), NO_ENGINES.values(), ids=NO_ENGINES)
def test_a_probe_of_another_server_is_bad(get: tuple[int, bytes], post: tuple[int, bytes]) -> None:
    """For example a page with status 200 in place of the worker's ping."""

    async def main() -> None:
        async with serving(web_server(get, post)) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            for wants_version in (False, True):
                found = await Prober(upstream, seconds=5).probe(url, wants_version=wants_version)
                assert found.refusal is None, "it was a worker once, and may be one again"
                assert found.complaint is not None
                assert f"no engine: GET /server_info is answered with {get[0]}" in found.complaint

    asyncio.run(main())
