"""The outermost layer: ids of requests, what is counted, and what is known while a request lasts."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from router.errors import BadRequestError, ClientDisconnectedError, ForbiddenError, RouterError
from router.http.disconnect import EXTENSION, ClientMessages, ServedClient
from router.http.request_state import REQUEST_ID, RequestPhase, RequestRecord, Requests, request_state
from router.http.upstream import UpstreamBrokenError
from router.observability.metrics import RouterMetrics
from router.serving.entrance import Check, Entrance
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
    """An entrance to an application, called as a server does."""

    def __init__(self, inside: Any, *checks: Check) -> None:
        self.registry = CollectorRegistry()
        self.requests = Requests()
        self.entrance = Entrance(inside, checks, RouterMetrics(self.registry), self.requests, body_timeout=5.0)
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def get(self, **known: Any) -> None:
        """Send a request; `known` is what the server has in its scope besides."""
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": [(b"x-request-id", b"me")], **known}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self.entrance(scope, receive, self.send)

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
    asyncio.run(served.get(state=state))
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


def refusing(error: RouterError) -> Check:
    def check(scope: Scope) -> None:
        raise error

    return check


async def not_reached(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no request was let in")


def test_the_first_check_that_refuses_answers() -> None:
    """Its error is JSON, and the request is counted, as that of any route is."""
    served = Served(not_reached, refusing(ForbiddenError("no")), refusing(BadRequestError("not looked at")))
    asyncio.run(served.get())
    assert served.sent[0]["status"] == 403
    assert (b"x-request-id", b"me") in served.sent[0]["headers"]
    assert b'"message":"no"' in served.sent[1]["body"]
    assert served.counted("403") == 1
    assert len(served.requests) == 0


def test_a_check_that_fails_is_an_error_of_the_router(caplog: pytest.LogCaptureFixture) -> None:
    """It lets nobody in."""

    def broken(scope: Scope) -> None:
        raise ZeroDivisionError

    served = Served(not_reached, broken)
    asyncio.run(served.get())
    assert served.sent[0]["status"] == 500
    assert "GET /x failed" in caplog.text


def test_what_a_check_notes_is_for_the_application_only() -> None:
    """The scope is the entrance's copy: the server's own stays as it was."""
    seen: list[Scope] = []

    def noting(scope: Scope) -> None:
        scope["noted"] = scope["headers"] = [(b"of", b"the check")]

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def main() -> None:
        entrance = Served(inside, noting).entrance
        for scope in given:
            await entrance(scope, nothing, nothing)

    given: list[Scope] = [
        {"type": kind, "method": "GET", "path": "/x", "headers": []} for kind in ("http", "websocket")
    ]
    nothing: Any = None
    before = [dict(scope) for scope in given]
    asyncio.run(main())
    assert [scope["noted"] for scope in seen] == [[(b"of", b"the check")]] * 2
    assert given == before


def test_websockets_are_checked_and_the_lifespan_is_not() -> None:
    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        kinds.append(scope["type"])

    async def main() -> None:
        entrance = Served(inside, refusing(ForbiddenError("no"))).entrance
        nothing: Any = None
        await entrance({"type": "lifespan"}, nothing, nothing)
        with pytest.raises(ForbiddenError):
            await entrance({"type": "websocket", "path": "/x", "headers": []}, nothing, nothing)

    kinds: list[str] = []
    asyncio.run(main())
    assert kinds == ["lifespan"]


def test_an_application_that_cannot_start_says_why() -> None:
    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async def main() -> None:
        await served.entrance({"type": "lifespan"}, never, served.send)

    error, served = RouterError("no store"), Served(inside)
    never: Any = None
    asyncio.run(main())
    assert served.sent == [{"type": "lifespan.startup.failed", "message": ""}]
    assert served.entrance.fault is error


@pytest.mark.parametrize("here", [True, False])
def test_a_request_that_is_here_as_a_whole_is_not_timed(here: bool) -> None:
    """The server itself tells when its client leaves, so that no task has to wait for that."""
    seen: list[Receive] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(receive)

    client = ServedClient()
    client.all_here = here
    asyncio.run(Served(inside).get(extensions={EXTENSION: client}))
    (receive,) = seen
    assert isinstance(receive, ClientMessages) is here
    assert getattr(receive, "client", None) is (client if here else None)
