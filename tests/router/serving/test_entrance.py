"""The outermost layer: ids of requests, what is counted, and what is known while a request lasts."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from router.errors import ClientDisconnectedError, RouterError
from router.http.request_state import request_state
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import RouterMetrics
from router.observability.requests import REQUEST_ID, RequestPhase, RequestRecord, Requests
from router.serving.entrance import ErrorBoundary
from tests.router.conftest import EchoWorker, GatedWorker, Running, answer, running
from tests.support.serving import dead_url, serving

LONGEST = "x" * 128


async def echoed(router: Running, headers: Any) -> tuple[list[str], list[str]]:
    """The request ids that the worker saw, and those of the reply."""
    async with router.client.post("/generate", data=b"{}", headers=headers) as reply:
        assert reply.status == 200
        seen = [value for name, value in (await reply.json(content_type=None))["headers"] if name == "x-request-id"]
        return seen, reply.headers.getall("x-request-id")


async def samples(router: Running) -> dict[tuple[str, ...], float]:
    """All of /metrics, by name and values of the labels."""
    async with router.client.get("/metrics") as reply:
        families = text_string_to_metric_families(await reply.text())
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }


@pytest.mark.parametrize("given", ["a", "0f8c-77/{3}", LONGEST])
def test_a_clients_request_id_goes_to_the_worker_and_comes_back(given: str) -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router:
            assert await echoed(router, {"X-Request-Id": given}) == ([given], [given])

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-Request-Id", "")],
        [("X-Request-Id", "two words")],
        [("X-Request-Id", "schön")],
        [("X-Request-Id", LONGEST + "x")],
        [("X-Request-Id", "one"), ("X-Request-Id", "other")],
    ],
)
def test_without_a_sane_id_the_router_makes_one(headers: list[tuple[str, str]]) -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router:
            found = set()
            for _ in range(2):
                seen, (given_back,) = await echoed(router, headers)
                assert seen == [given_back]
                assert len(bytes.fromhex(given_back)) == 16
                found.add(given_back)
            assert len(found) == 2

    asyncio.run(main())


def test_a_workers_own_request_id_is_replaced() -> None:
    async def main() -> None:
        worker = EchoWorker()
        worker.reply_headers = [(b"X-Request-Id", b"the worker's")]
        async with serving(worker) as url, running([url]) as router:
            assert await echoed(router, {"X-Request-Id": "mine"}) == (["mine"], ["mine"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/list_workers", 200),
        ("GET", "/add_worker", 405),
        ("GET", "/workers/x", 404),
        ("POST", "/generate", 503),
    ],
)
def test_every_reply_has_the_id(method: str, path: str, status: int) -> None:
    async def main() -> None:
        async with (
            running() as router,
            router.client.request(method, path, headers={"X-Request-Id": "me"}) as reply,
        ):
            assert reply.status == status
            assert reply.headers.getall("x-request-id") == ["me"]

    asyncio.run(main())


def test_durations_are_counted_by_route() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router:
            for path in ("/generate", "/v1/a", "/v1/b"):
                async with router.client.post(path, data=b"{}") as reply:
                    await reply.read()
            found = await samples(router)
            for name in ("tito_router_request_duration_seconds", "tito_router_time_to_first_byte_seconds"):
                assert found[name + "_count", "generate"] == 1
                assert found[name + "_count", "other"] == 2
                assert 0 < found[name + "_sum", "generate"] < 10
                assert found[name + "_bucket", "60.0", "generate"] == 1
            assert found["tito_router_requests_total", "generate", "200"] == 1

    asyncio.run(main())


def test_a_reply_that_never_began_has_no_time_to_first_byte() -> None:
    async def main() -> None:
        worker = GatedWorker()
        async with serving(worker) as url, running([url]) as router:
            async with asyncio.TaskGroup() as group:
                leaving = group.create_task(router.client.post("/generate", data=b"{}"))
                await worker.wait_for_arrivals(1)
                leaving.cancel()
            await worker.wait_for_disconnects(1)
            await router.idle()
            found = await samples(router)
            assert found["tito_router_requests_total", "generate", "client_left"] == 1
            assert found["tito_router_request_duration_seconds_count", "generate"] == 1
            assert ("tito_router_time_to_first_byte_seconds_count", "generate") not in found

    asyncio.run(main())


def test_a_broken_reply_counts_as_broken() -> None:
    async def main() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with running() as router:
            async with serving(worker) as url:
                async with router.client.post("/add_worker", params={"url": url}) as added:
                    assert added.status == 200
                stream = await router.client.post("/generate", data=b"{}")
                assert await stream.content.readany() == b"data: 1\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            assert (await samples(router))["tito_router_requests_total", "generate", "broken"] == 1

    asyncio.run(main())


def test_a_request_without_a_worker_is_over_as_well() -> None:
    async def main() -> None:
        async with running([dead_url()]) as router:
            async with router.client.post("/generate", data=b"{}") as reply:
                assert reply.status in (502, 503)
            async with router.client.get("/debug/requests") as reply:
                assert await reply.json() == {"requests": [], "total": 0}

    asyncio.run(main())


class Served:
    """A boundary around an application, called as a server does."""

    def __init__(self, inside: Any) -> None:
        self.registry = CollectorRegistry()
        self.requests = Requests()
        self.boundary = ErrorBoundary(inside, RouterMetrics(self.registry), self.requests)
        self.sent: list[Message] = []

    async def get(self, state: dict[str, Any] | None = None) -> None:
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": [(b"x-request-id", b"me")], "state": state}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.boundary(scope, receive, send)

    def counted(self, status: str) -> float | None:
        return self.registry.get_sample_value("tito_router_requests_total", {"route": "other", "status": status})


def test_the_application_finds_the_record_and_the_servers_own_state() -> None:
    seen: list[RequestRecord] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["state"]["of_the_lifespan"] == 1
        (record,) = served.requests
        assert request_state(scope).record is record
        assert REQUEST_ID.get() == record.id == "me"
        assert (record.method, record.path, record.phase) == ("GET", "/x", RequestPhase.RECEIVING)
        seen.append(record)
        await answer(send, 200, b"")
        assert record.phase is RequestPhase.ANSWERING

    served, state = Served(inside), {"of_the_lifespan": 1}
    asyncio.run(served.get(state))
    assert len(seen) == 1
    assert len(served.requests) == 0
    assert state == {"of_the_lifespan": 1}


@pytest.mark.parametrize("error", [RouterError("x"), UpstreamBrokenError("x"), ZeroDivisionError()])
def test_an_error_behind_the_head_is_raised_on_and_the_request_is_over(error: BaseException) -> None:
    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    served = Served(inside)
    with pytest.raises(type(error)):
        asyncio.run(served.get())
    assert served.counted("broken") == 1
    assert len(served.requests) == 0


def test_a_request_that_is_cancelled_behind_its_head_breaks_off() -> None:
    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    served = Served(inside)
    with pytest.raises(UpstreamBrokenError, match="the router was stopped"):
        asyncio.run(served.get())
    assert served.counted("broken") == 1
    assert len(served.requests) == 0


def test_a_request_that_is_cancelled_before_its_reply_is_told_that_the_router_stops() -> None:
    """Only a server whose time to finish is over cancels requests."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    served = Served(inside)
    asyncio.run(served.get())
    assert served.sent[0]["status"] == 503
    assert (b"retry-after", b"1") in served.sent[0]["headers"]
    assert b'"type":"stopped"' in served.sent[1]["body"]
    assert served.counted("503") == 1
    assert len(served.requests) == 0


def test_nothing_is_sent_to_a_client_that_left() -> None:
    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnectedError("gone")

    served = Served(inside)
    asyncio.run(served.get())
    assert served.sent == []
    assert served.counted("client_left") == 1
