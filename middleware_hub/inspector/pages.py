"""The page's own files. They hold no data, so they need no key."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.types import Scope, Send

from router.errors import NotFoundError
from router.http.headers import header

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
GUARDS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of all answers of the inspector."""
_MOST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


class Pages:
    """Serves the files of a folder. A file is read again when it has changed."""

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
