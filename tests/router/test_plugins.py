"""Middlewares: loading them, and what they see."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import plugins
from router.errors import BadRequestError, NotFoundError
from router.http.bodies import Replay, read_body, with_body
from router.http.request_state import RouteHint
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving

HERE = "tests.router.test_plugins"


class Outer:
    """Marks what passes, and counts."""

    order: ClassVar[list[str]] = []
    messages: ClassVar[list[Message]] = []

    def __init__(self, app: ASGIApp, context: plugins.MiddlewareContext) -> None:
        self._app = app
        self._seen = Counter("outer_seen", "Requests seen.", registry=context.registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            self.messages.append(message)
            await send(message)

        if scope["type"] == "http":
            self._seen.inc()
            self.order.append("outer")
            if scope["path"] == "/missing":
                raise NotFoundError("not here")
            if scope["path"] == "/bug":
                raise ZeroDivisionError
        await self._app(scope, receive, noting if scope["type"] == "http" else send)


class Rewriting:
    """Rewrites the body of /generate and leaves a hint."""

    def __init__(self, app: ASGIApp, context: plugins.MiddlewareContext) -> None:
        self._app = app
        self._limit = context.config.server.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate":
            Outer.order.append("inner")
            body = (await read_body(scope, receive, self._limit)).upper() + b"!"
            hint = RouteHint(text="t", token_ids=[1], routing_key="k")
            scope, receive = with_body(scope, body, hint=hint), Replay(body, receive)
        await self._app(scope, receive, send)


class NeedsMore:
    def __init__(self, app: ASGIApp) -> None:
        pass


def test_middlewares_wrap_the_proxy_in_the_order_given() -> None:
    async def main() -> None:
        Outer.order.clear()
        Outer.messages.clear()
        worker = EchoWorker()
        async with (
            serving(worker) as url,
            running([url], middlewares=(f"{HERE}:Outer", f"{HERE}:Rewriting")) as router,
        ):
            async with router.client.post("/generate", data=b"abc") as reply:
                assert reply.status == 200
                assert (await reply.json(content_type=None))["body"] == "ABC!"
            assert Outer.order == ["outer", "inner"]
            assert dict(worker.seen[0]["headers"])["content-length"] == "4"
            start, *bodies = Outer.messages
            assert start["type"] == "http.response.start"
            assert {message["type"] for message in bodies} == {"http.response.body"}
            assert [message.get("more_body", False) for message in bodies] == [True] * (len(bodies) - 1) + [False]
            async with router.client.get("/metrics") as metrics:
                assert "outer_seen_total 2.0" in await metrics.text()

    asyncio.run(main())


def test_errors_of_middlewares_become_json(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(middlewares=(f"{HERE}:Outer",)) as router:
            async with router.client.get("/missing") as reply:
                assert reply.status == 404
                assert (await reply.json())["error"]["message"] == "not here"
            async with router.client.get("/bug") as reply:
                assert reply.status == 500
                assert (await reply.json())["error"]["type"] == "internal_error"
        assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_colon", "pkg.mod:Class"),
        (":Class", "pkg.mod:Class"),
        ("module:", "pkg.mod:Class"),
        ("no.such.module:Class", "cannot import no.such.module"),
        (f"{HERE}:Nothing", "has no Nothing"),
        (f"{HERE}:HERE", "is not a class"),
    ],
)
def test_bad_paths_are_told_what_is_wrong(path: str, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        plugins.load(path)


def test_hint_reaches_the_policy() -> None:
    seen: list[Any] = []

    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url], middlewares=(f"{HERE}:Rewriting",)) as router:
            policy = router.app.pool._policy
            choose = policy.select

            class Recording:
                def select(self, workers: Any, query: Any) -> Any:
                    seen.append(query)
                    return choose(workers, query)

            router.app.pool._policy = Recording()
            async with router.client.post("/generate", data=b"abc") as reply:
                assert reply.status == 200

    asyncio.run(main())
    assert [(query.text, query.token_ids, query.routing_key) for query in seen] == [("t", [1], "k")]
