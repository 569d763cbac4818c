"""`GET /media/{digest}` through the whole router."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from prometheus_client import generate_latest

from middleware_hub.hub import Hub
from middleware_hub.media.picture import Picture, read_picture
from router.app import RouterApp, create_app
from router.config import (
    RADIX_TREE_MIDDLEWARE,
    SESSIONS_MIDDLEWARE,
    MediaConfig,
    RadixConfig,
    RouterConfig,
    ServerConfig,
    StoreConfig,
)
from router.processes.shares import config_of
from tests.middleware_hub.sessions.in_process import tokenizer

GIF = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")
PICTURE = read_picture(base64.b64encode(GIF).decode(), 1_000)
EITHER = pytest.mark.parametrize(
    "middlewares",
    [(SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE), (RADIX_TREE_MIDDLEWARE,), (SESSIONS_MIDDLEWARE,)],
)


def made(*middlewares: str) -> tuple[RouterApp, Hub]:
    hub = Hub(tokenizer())
    config = RouterConfig(
        server=ServerConfig(api_keys=("a:A", "b:B")),
        radix=RadixConfig(tokenizer_path="toy"),
        middlewares=middlewares or (SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE),
    )
    return create_app(config, shared={Hub: hub}), hub


def ask(app: RouterApp, path: str, key: str = "A", method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "headers": [(b"host", b"r"), (b"authorization", f"Bearer {key}".encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(part.get("body", b"") for part in sent[1:])


@EITHER
def test_a_tenant_gets_the_bytes_that_it_sent(middlewares: tuple[str, ...]) -> None:
    app, hub = made(*middlewares)
    hub.shelf.put("a", PICTURE)
    status, headers, body = ask(app, f"/media/{PICTURE.digest}")
    assert (status, body) == (200, GIF)
    assert headers[b"content-type"] == b"image/gif"
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"content-security-policy"] == b"default-src 'none'"
    assert headers[b"cache-control"] == b"private, max-age=31536000, immutable"


def test_head_has_the_headers_only() -> None:
    app, hub = made()
    hub.shelf.put("a", PICTURE)
    status, headers, body = ask(app, f"/media/{PICTURE.digest}", method="HEAD")
    assert (status, headers[b"content-length"], body) == (200, b"%d" % len(GIF), b"")


@EITHER
def test_another_tenants_picture_is_answered_like_an_unknown_one(middlewares: tuple[str, ...]) -> None:
    app, hub = made(*middlewares)
    unknown = ask(app, f"/media/{PICTURE.digest}", "B")
    hub.shelf.put("a", PICTURE)
    status, headers, body = ask(app, f"/media/{PICTURE.digest}", "B")
    assert (status, body) == (404, unknown[2])
    assert b'"code":"media_unknown"' in body
    assert headers.keys() == unknown[1].keys()
    assert ask(app, "/media/x/../y", "B")[0] in (403, 404)
    assert ask(app, "/media/", "B")[2] == body


def test_other_methods_and_unknown_keys_are_refused() -> None:
    app, hub = made()
    hub.shelf.put("a", PICTURE)
    assert ask(app, f"/media/{PICTURE.digest}", method="DELETE")[0] == 405
    assert ask(app, f"/media/{PICTURE.digest}", "C")[0] == 401


def test_metrics_tell_what_is_held() -> None:
    app, hub = made()
    hub.shelf.max_bytes = 1
    hub.shelf.put("a", PICTURE)
    hub.shelf.put("a", Picture(f"sha256:{1:064x}", "image/gif", 1, 1, GIF, True))
    text = generate_latest(app.registry).decode()
    assert "tito_media_pictures 1.0" in text
    assert f"tito_media_bytes {float(PICTURE.held_bytes)}" in text
    assert 'tito_media_evictions_total{needed="false"} 1.0' in text


def test_the_budget_is_that_of_the_flag_and_is_divided() -> None:
    assert Hub(tokenizer(), None, MediaConfig(max_bytes=1_000)).shelf.max_bytes == 1_000
    config = RouterConfig(
        server=ServerConfig(processes=2), store=StoreConfig(url="sqlite:none"), media=MediaConfig(max_bytes=1_001)
    )
    assert [config_of(config, number).media.max_bytes for number in (1, 2)] == [501, 500]
