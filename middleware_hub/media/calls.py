"""`GET /media/{digest}`: the file of an image, for the tenant that sent it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from middleware_hub import routes
from middleware_hub.media.picture import is_digest
from middleware_hub.media.stock import Stock
from middleware_hub.store.errors import StoreUnreachableError
from router.errors import NotFoundError
from router.http.handlers import ByMethod
from router.http.request_state import request_state
from router.plugins import MiddlewareContext

PREFIX: Final = "/media/"
_HEADERS: Final = (
    # A browser must take foreign bytes for nothing but a picture, and no other site may have it.
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"private, max-age=31536000, immutable"),
    (b"vary", b"authorization, x-api-key"),  # another tenant may sit at the same browser
)


class MediaCalls:
    """The calls about images, as an ASGI application for all paths below `PREFIX`."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        (calls,) = routes.bound(routes.MEDIA, {"show": self._show}).values()
        self.serve = ByMethod(calls)

    @classmethod
    def of(cls, context: MiddlewareContext, stock: Stock) -> MediaCalls:
        """Return the calls of this application. The first call makes them, and registers the metrics of the shelf."""
        found = context.shared.get(cls)
        if not isinstance(found, MediaCalls):
            found = context.shared[cls] = cls(stock)
            context.registry.register(MediaCollector(stock))
        return found

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = request_state(scope).caller.tenant
        digest = scope["path"].removeprefix(PREFIX)
        brought, unasked = await self._stock.bring(tenant, [digest] if is_digest(digest) else ())
        if unasked:
            raise StoreUnreachableError("the store does not answer, and may have this image: try again")
        if not brought:  # nobody learns whether another tenant has it
            raise NotFoundError("no image of this digest is held", code="media_unknown")
        (picture,) = brought
        headers = [
            (b"content-type", picture.mime.encode()),
            (b"content-length", b"%d" % len(picture.data)),
            *_HEADERS,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else picture.data})


class MediaCollector(Collector):
    """The content of the shelf."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    def collect(self) -> Iterable[Metric]:
        shelf = self._stock.shelf
        yield GaugeMetricFamily("tito_media_bytes", "Bytes of images held, their base64 included", value=shelf.bytes)
        yield GaugeMetricFamily("tito_media_pictures", "Images held, each once", value=shelf.count)
        evicted = CounterMetricFamily(
            "tito_media_evictions",
            "Images that went because of --media-max-bytes, by whether a request or a conversation still needed them",
            labels=["needed"],
        )
        evicted.add_metric(["false"], shelf.evicted - shelf.evicted_named)
        evicted.add_metric(["true"], shelf.evicted_named)
        yield evicted
        brought, unsaved = self._stock.brought, self._stock.unsaved
        yield CounterMetricFamily("tito_media_brought", "Images that were read from the store again", value=brought)
        yield CounterMetricFamily(
            "tito_media_unsaved",
            "Images that the store may lack: their bytes were gone before what names them was saved",
            value=unsaved,
        )
