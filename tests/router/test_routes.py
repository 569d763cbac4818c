"""The router's own calls."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.config import ServerConfig
from tests.router.conftest import DONE, EchoWorker, GatedWorker, json_app, running
from tests.support.serving import dead_url, serving


def test_add_list_remove() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running() as router:
            client = router.client
            for _ in range(2):  # again is no error
                async with client.post("/add_worker", params={"url": url + "/"}) as reply:
                    assert reply.status == 200
            async with client.get("/list_workers") as reply:
                assert await reply.json() == {"urls": [url]}
            async with client.get("/health") as reply:
                assert reply.status == 200
            async with client.post("/remove_worker", params={"url": url}) as reply:
                assert reply.status == 200
                assert (await reply.json())["worker"]["state"] == "gone"
            async with client.get("/list_workers") as reply:
                assert await reply.json() == {"urls": []}
            async with client.post("/remove_worker", params={"url": url}) as reply:
                assert reply.status == 404
                assert url in (await reply.json())["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "call",
    [
        {"params": {"url": "URL"}},
        {"params": {"worker_url": "URL"}},
        {"json": {"url": "URL"}},
        {"json": {"worker_url": "URL"}},
        {"json": {"url": "URL", "worker_type": "regular", "unknown": 1}},
    ],
)
@pytest.mark.parametrize("path", ["/add_worker", "/workers"])
def test_a_url_may_be_given_in_several_ways(call: dict[str, dict[str, object]], path: str) -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running() as router:
            real: dict[str, Any] = {
                kind: {key: url if value == "URL" else value for key, value in fields.items()}
                for kind, fields in call.items()
            }
            async with router.client.post(path, **real) as reply:
                assert reply.status in (200, 202)
            assert [worker.url for worker in router.app.pool.list()] == [url]

    asyncio.run(main())


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"params": {"url": ""}},
        {"params": {"url": "not a url"}},
        {"params": {"url": "ftp://host"}},
        {"params": {"url": "http://host/path"}},
        {"data": b"{"},
        {"data": b"[]"},
        {"data": b'"http://host"'},
        {"data": b"\xff\xfe"},
        {"json": {}},
        {"json": {"url": None}},
        {"json": {"url": 5}},
        {"json": {"url": "http://host", "worker_type": "encode"}},
        {"json": {"url": "http://host", "worker_type": "prefill", "bootstrap_port": 0}},
    ],
)
def test_bad_calls_are_400(call: dict[str, Any]) -> None:
    async def main() -> None:
        async with running() as router:
            for path in ("/add_worker", "/remove_worker", "/workers"):
                async with router.client.post(path, **call) as reply:
                    assert reply.status == 400, path
                    error = (await reply.json())["error"]
                    assert error["code"] == 400
                    assert error["message"]
            assert router.app.pool.list() == ()

    asyncio.run(main())


def test_workers_in_the_gateways_shape() -> None:
    """The calls as slime makes them: register, look for the URL in GET /workers, delete by the id found there."""

    async def main() -> None:
        async with serving(EchoWorker()) as url, running() as router:
            client = router.client
            async with client.post("/workers", json={"url": url, "worker_type": "regular"}) as reply:
                assert reply.status == 202
                location = reply.headers["location"]
            async with client.get("/workers") as reply:
                body = await reply.json()
                assert body["total"] == 1
                (worker,) = body["workers"]
                assert worker["url"] == url
                assert worker["is_healthy"] is True
                assert worker["state"] == "healthy"
                assert worker["load"] == 0
            async with client.get(location) as reply:
                assert await reply.json() == worker
            async with client.delete(f"/workers/{worker['id']}") as reply:
                assert reply.status == 202
            for method in ("GET", "DELETE"):
                async with client.request(method, f"/workers/{worker['id']}") as reply:
                    assert reply.status == 404
            async with client.get("/workers") as reply:
                assert await reply.json() == {"workers": [], "total": 0}

    asyncio.run(main())


def test_wrong_method_is_405() -> None:
    async def main() -> None:
        async with running() as router, router.client.get("/add_worker") as reply:
            assert reply.status == 405
            assert reply.headers["allow"] == "POST"
            assert (await reply.json())["error"]["type"] == "method_not_allowed"

    asyncio.run(main())


def test_health_endpoints_without_workers() -> None:
    async def main() -> None:
        async with running() as router:
            async with router.client.get("/health") as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["type"] == "no_worker"
            for path in ("/liveness", "/readiness"):
                async with router.client.get(path) as reply:
                    assert reply.status == 200
            router.app.start_draining()
            async with router.client.get("/readiness") as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["type"] == "draining"
            async with router.client.get("/liveness") as reply:
                assert reply.status == 200

    asyncio.run(main())


def test_metrics() -> None:
    async def main() -> None:
        dead = dead_url()
        async with serving(EchoWorker()) as url, running([dead, url], policy="round_robin") as router:
            async with router.client.post("/generate", data=b"{}") as reply:
                assert reply.status == 200
            async with router.client.get("/no/such/path") as reply:
                assert reply.status == 200
            async with router.client.get("/metrics") as reply:
                assert reply.headers["content-type"].startswith("text/plain")
                text = await reply.text()
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["tito_router_requests_total", (("route", "generate"), ("status", "200"))] == 1
        assert samples["tito_router_requests_total", (("route", "other"), ("status", "200"))] == 1
        assert samples["tito_router_worker_failures_total", (("reason", "connect"),)] == 0, "it was not asked"
        assert samples["tito_router_worker_inflight", (("worker", url),)] == 0
        assert samples["tito_router_worker_routable", (("state", "healthy"), ("worker", url))] == 1
        assert samples["tito_router_worker_routable", (("state", "starting"), ("worker", dead))] == 0
        assert samples["tito_router_worker_breaker_open", (("worker", url),)] == 0
        assert samples["tito_router_generations_total", (("outcome", "answered"),)] == 1
        assert samples["tito_router_queue_length", ()] == 0

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
@pytest.mark.parametrize(
    ("info", "flag"),
    [
        ({"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
        ({"is_embedding": True}, "--is-embedding"),
        ({"encoder_only": True}, "--encoder-only"),
    ],
)
def test_a_worker_that_is_not_regular_is_refused(path: str, info: dict[str, Any], flag: str) -> None:
    async def main() -> None:
        worker = json_app({path: {**info, "other": 1}})
        async with serving(worker) as url, running([url]) as router:
            assert router.app.pool.list() == ()  # nor is one of the command line routed to
            async with router.client.post("/add_worker", params={"url": url}) as reply:
                assert reply.status == 400
                assert flag in (await reply.json())["error"]["message"]
            assert router.app.pool.list() == ()

    asyncio.run(main())


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"skip_tokenizer_init": False, "disaggregation_mode": "null", "is_embedding": False},
        {"skip_tokenizer_init": "odd"},
        {"disaggregation_mode": 1},
        [1],
        "text",
        None,
    ],
)
def test_any_other_answer_is_accepted(info: object) -> None:
    async def main() -> None:
        async with (
            serving(json_app({"/server_info": info})) as url,
            running() as router,
            router.client.post("/add_worker", params={"url": url}) as reply,
        ):
            assert reply.status == 200

    asyncio.run(main())


def test_unreachable_worker_is_registered() -> None:
    """Workers are often registered before they have loaded their model."""

    async def main() -> None:
        async with running() as router, router.client.post("/add_worker", params={"url": dead_url()}) as reply:
            assert reply.status == 200

    asyncio.run(main())


def test_hanging_worker_does_not_hold_up_registration() -> None:
    async def hanging(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive())["type"] != "http.disconnect":
                pass

    async def main() -> None:
        async with (
            asyncio.timeout(30),
            serving(hanging) as url,
            running(probe_timeout=0.05) as router,
            router.client.post("/add_worker", params={"url": url}) as reply,
        ):
            assert reply.status == 200

    asyncio.run(main())


def test_api_key() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url], server=ServerConfig(api_keys=("one", "two"))) as router:
            for header in (
                {},
                {"authorization": "Bearer three"},
                {"authorization": "Basic one"},
                {"authorization": "one"},
            ):
                for method, path in (
                    ("POST", "/generate"),
                    ("GET", "/workers"),
                    ("GET", "/metrics"),
                    ("GET", "/x"),
                ):
                    async with router.client.request(method, path, headers=header) as reply:
                        assert reply.status == 401
                        assert (await reply.json())["error"]["type"] == "unauthorized"
                        assert reply.headers["www-authenticate"] == "Bearer"
            for key in ("one", "two"):
                async with router.client.get("/x", headers={"authorization": f"Bearer {key}"}) as reply:
                    assert reply.status == 200
            for path in ("/liveness", "/readiness", "/health"):
                async with router.client.get(path) as reply:
                    assert reply.status == 200

    asyncio.run(main())


STREAM = b'{"text": "t", "stream": true}'


def test_what_is_in_flight_is_listed_oldest_first() -> None:
    async def main() -> None:
        worker = GatedWorker(first=b"data: 1\n\n")
        async with serving(worker) as url, running([url]) as router:
            streams = []
            for name in ("first", "second"):
                headers = {"x-request-id": name, "authorization": "Bearer my-key"}
                streams.append(await router.client.post("/generate?key=my-key", data=STREAM, headers=headers))
            async with router.client.get("/debug/requests") as reply:
                assert reply.status == 200
                text = await reply.text()
            body = msgspec.json.decode(text)
            assert body["total"] == 2
            assert [request["id"] for request in body["requests"]] == ["first", "second"]
            first = body["requests"][0]
            assert first.keys() == {
                *("id", "method", "path", "tenant", "phase", "worker", "attempts"),
                *("seconds", "phase_seconds", "begun_at"),
            }
            assert (first["method"], first["path"], first["phase"]) == ("POST", "/generate", "answering")
            assert (first["worker"], first["attempts"], first["tenant"]) == (url, 1, "")
            assert 0 <= first["phase_seconds"] <= first["seconds"] < 30
            age = datetime.now(UTC) - datetime.fromisoformat(first["begun_at"])
            assert timedelta(0) <= age < timedelta(seconds=30)
            assert "my-key" not in text
            worker.release()
            for stream in streams:
                assert (await stream.read()).endswith(DONE)
            async with router.client.get("/debug/requests") as reply:
                assert await reply.json() == {"requests": [], "total": 0}

    asyncio.run(main())


def test_a_request_at_a_worker_that_has_not_begun_to_answer() -> None:
    async def main() -> None:
        worker = GatedWorker()
        async with serving(worker) as url, running([url]) as router:
            asking = asyncio.ensure_future(router.client.post("/generate", data=b"{}"))
            await worker.wait_for_arrivals(1)
            async with router.client.get("/debug/requests") as reply:
                (request,) = (await reply.json())["requests"]
            assert (request["phase"], request["worker"]) == ("at_worker", url)
            worker.release()
            assert (await asking).status == 200

    asyncio.run(main())
