"""`Inspector`: the page at /inspect and the API behind it, as pure ASGI.

The router serves its paths with it, behind the middlewares whose memory it shows. It only reads, and no answer to a trainer
depends on it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from middleware_hub.hub import Hub
from middleware_hub.inspector.api import PREFIX, Api, Sources
from middleware_hub.inspector.pages import GUARDS, Pages
from middleware_hub.sessions.registry import SessionRegistry
from router.engines.sglang.limits import PromptLimits
from router.errors import MethodNotAllowedError, RouterError
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
            if scope["method"] not in ("GET", "HEAD"):
                raise MethodNotAllowedError(f"{path} takes GET", headers=(("allow", "GET"),))
            name = path.removeprefix(ASSETS) if path.startswith(ASSETS) else "index.html"
            await self._pages.serve(name, scope, send)
        else:
            await self.app(scope, receive, send)
