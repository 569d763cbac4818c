"""One request, as bytes: as a server would hand it to the application, and as a developer would paste it to send it again."""

from __future__ import annotations

import base64
import shlex
import zlib
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import Message, Scope

Headers = tuple[tuple[bytes, bytes], ...]

_PRINTED = 2000  # bytes of a body that are printed as they are
_PIECES = 3  # in which a chunked body comes


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        method: in capitals.
        target: path and query, as they stand in the first line.
        headers: but for the framing of the body, which is always true to it.
        body: whatever it is.
        chunked: the body comes in pieces, and without a length.
        leaves: the client is gone as soon as it has sent all of it.
    """

    method: str
    target: bytes
    headers: Headers = ()
    body: bytes = b""
    chunked: bool = False
    leaves: bool = False

    @property
    def framed(self) -> Headers:
        """All headers."""
        if self.chunked:
            return (*self.headers, (b"transfer-encoding", b"chunked"))
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            return (*self.headers, (b"content-length", b"%d" % len(self.body)))
        return self.headers

    def scope(self) -> Scope:
        """As uvicorn makes it."""
        path, _, query = self.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": ("127.0.0.1", 30000),
            "client": ("127.0.0.1", 40000),
            "scheme": "http",
            "root_path": "",
            "method": self.method,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query.partition(b"#")[0],
            "headers": list(self.framed),
            "state": {},
        }

    def messages(self) -> list[Message]:
        """What `receive` gives."""
        size = max(1, -(-len(self.body) // (_PIECES if self.chunked else 1)))
        pieces = [self.body[begin : begin + size] for begin in range(0, len(self.body), size)] or [b""]
        return [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, 1)
        ]

    def wire(self) -> bytes:
        """As it goes over a socket."""
        body = self.body
        if self.chunked:
            pieces = [message["body"] for message in self.messages()]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*filter(None, pieces), b""))
        head = [b"%b %b HTTP/1.1" % (self.method.encode(), self.target), b"host: fuzz"]
        head += [name + b": " + value for name, value in self.framed]
        return b"\r\n".join((*head, b"", b"")) + body

    def __str__(self) -> str:
        """A case of a test, and a command."""
        return f"{self._expression()}\n\n{self._curl()}"

    def _expression(self) -> str:
        parts = [repr(self.method), repr(self.target), repr(self.headers), literal(self.body)]
        parts += [f"{name}=True" for name in ("chunked", "leaves") if getattr(self, name)]
        return f"Case({', '.join(parts)})"

    def _curl(self) -> str:
        words = ["curl", "-i", "-X", self.method, "http://127.0.0.1:30000" + self.target.decode()]
        for name, value in self.headers:
            words += ["-H", f"{name.decode('latin-1')}: {value.decode('latin-1')}"]
        if self.chunked:
            words += ["-H", "transfer-encoding: chunked"]
        command = " ".join(map(shlex.quote, words))
        if not self.body:
            return command
        # `printf %b` of octal escapes goes through every shell.
        escaped = "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b"\\'%" else f"\\0{byte:03o}" for byte in self.body
        )
        if len(escaped) > _PRINTED:
            return f"(write the body above to a file)\n{command} --data-binary @file"
        return f"printf %b '{escaped}' | {command} --data-binary @-"


def literal(data: bytes) -> str:
    """A Python expression of bytes, packed if they are many."""
    if len(data) <= _PRINTED:
        return repr(data)
    return f"zlib.decompress(base64.b64decode({base64.b64encode(zlib.compress(data, 9))!r}))"
