"""`Inspector`: the page at /inspect and the API behind it, as pure ASGI.

The router serves its paths with it, behind the middlewares whose memory it shows. It only reads, and no answer to a trainer
depends on it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from middleware_hub import routes
from middleware_hub.hub import Hub
from middleware_hub.inspector.api import GUARDS, PREFIX, Api, Sources
from middleware_hub.media.reading import BodyReader
from middleware_hub.sessions.registry import SessionRegistry
from router.engines.form.limits import PromptLimits
from router.errors import NotFoundError, RouterError
from router.http.handlers import by_method
from router.http.headers import header
from router.plugins import MiddlewareContext

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".woff2": b"font/woff2",
    ".json": b"application/json",
    ".txt": b"text/plain; charset=utf-8",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    b"form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_MOST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


class Pages:
    """Serves the page's own files, which hold no data and need no key. A file is read again when it has changed."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[tuple[int, int], bytes, bytes]] = {}

    async def serve(self, name: str, scope: Scope, send: Send) -> None:
        """Answer with a file. Raises NotFoundError."""
        etag, content = self._file(name)
        headers = [(b"etag", etag), (b"cache-control", b"no-cache"), (b"content-security-policy", POLICY), *GUARDS]
        if etag.decode() in (header(scope, b"if-none-match") or ""):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        headers += [(b"content-type", TYPES[Path(name).suffix]), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})

    def _file(self, name: str) -> tuple[bytes, bytes]:
        path = self._folder / name
        allowed = len(name) <= _MOST_NAME and _NAME.fullmatch(name) and path.suffix in TYPES
        if not allowed or not path.is_file():
            raise NotFoundError(f"the inspector has no file {name[:_MOST_NAME]!r}")
        state = path.stat()
        stamp = state.st_mtime_ns, state.st_size
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            content = path.read_bytes()
            etag = b'"%b"' % hashlib.blake2b(content, digest_size=12).hexdigest().encode()
            known = self._read[path] = stamp, etag, content
        return known[1], known[2]


PAGE = "/inspect"
ASSETS = "/inspect/assets/"


class Inspector:
    """See the top of this file. It is made after the middlewares inside it, and finds the hub that they share."""

    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        hub, registry = Hub.of(context), context.shared.get(SessionRegistry)
        sessions = registry if isinstance(registry, SessionRegistry) else None
        self.app = app
        sources = Sources(
            hub.tokenizer, hub.tree, hub.memory, sessions, hub.clock.distance, hub.groups, hub.media, hub.stock
        )
        server, limits = context.config.server, PromptLimits(tokens=context.config.radix.max_text_tokens)
        bodies = BodyReader.of(context, None if hub.media is None else hub.shelf)
        self.api = Api(sources, bodies, max_body_bytes=server.max_body_bytes, limits=limits, processes=server.processes)
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
