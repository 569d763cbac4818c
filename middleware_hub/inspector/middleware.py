"""`Inspector`: the page at /inspect and the API behind it, as pure ASGI.

The router serves its paths with it, behind the middlewares whose memory it shows. It only reads, and no answer to a trainer
depends on it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from middleware_hub import routes
from middleware_hub.hub import Hub
from middleware_hub.inspector.api import PREFIX, Api, Sources
from middleware_hub.inspector.pages import GUARDS, Pages
from middleware_hub.sessions.registry import SessionRegistry
from router.engines.form.limits import PromptLimits
from router.errors import RouterError
from router.http.handlers import by_method
from router.plugins import MiddlewareContext

PAGE = "/inspect"
ASSETS = "/inspect/assets/"


class Inspector:
    """See the top of this file. It is made after the middlewares inside it, and finds the hub that they share."""

    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        hub, registry = Hub.of(context), context.shared.get(SessionRegistry)
        sessions = registry if isinstance(registry, SessionRegistry) else None
        self.app = app
        sources = Sources(hub.tokenizer, hub.tree, hub.memory, sessions, hub.clock.distance, hub.groups)
        server, limits = context.config.server, PromptLimits(tokens=context.config.radix.max_text_tokens)
        self.api = Api(sources, max_body_bytes=server.max_body_bytes, limits=limits, processes=server.processes)
        self._pages = Pages()
        self._files = by_method(routes.bound(routes.INSPECTOR_PAGE, {"page": self._page}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except RouterError as error:
            error.headers += tuple((name.decode(), value.decode()) for name, value in GUARDS)
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path == PREFIX or path.startswith(PREFIX + "/"):
            await self.api(scope, receive, send)
        elif path == PAGE + "/":  # the page names its files relative to its own address
            await send(
                {"type": "http.response.start", "status": 308, "headers": [(b"location", b"../inspect"), *GUARDS]}
            )
            await send({"type": "http.response.body", "body": b""})
        elif path == PAGE or path.startswith(ASSETS):
            await self._files[PAGE if path == PAGE else f"{ASSETS}{{file}}"](scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        await self._pages.serve(path.removeprefix(ASSETS) if path.startswith(ASSETS) else "index.html", scope, send)
