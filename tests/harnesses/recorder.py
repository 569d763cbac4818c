"""A proxy between a harness and its session: it scripts the worker's next reply, and keeps what was asked and answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

SAMPLED = frozenset({"messages", "input", "contents"})
"""The fields of bodies that ask for a sample, in all dialects."""
COUNTS = ("count_tokens", ":countTokens")
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})


@dataclass(frozen=True)
class Exchange:
    """A request that could sample, who asked (see `Recorder`), and what came of it; its `headers` are in small letters."""

    path: str
    body: Any
    status: int
    headers: dict[str, str]
    reply: bytes
    who: str

    @property
    def is_side(self) -> bool:
        """Whether it is none of the task's turns."""
        return self.who != "task"


@dataclass
class Recorder:
    """Hands requests on, one at a time: whose turn it is decides which reply is scripted.

    Attributes:
        router: the router's URL.
        script: is called with the body of each request that can sample, before it goes on, and returns who asks: `task`, or
            else which conversation beside it.
    """

    router: str
    script: Callable[[Any], str]
    exchanges: list[Exchange] = field(default_factory=list)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def hand_on(
        self, method: str, path: str, headers: dict[str, str], content: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        body = None
        if method == "POST" and content and not path.partition("?")[0].endswith(COUNTS):
            with contextlib.suppress(ValueError):
                body = json.loads(content)
        with self._turn:
            samples = isinstance(body, dict) and not SAMPLED.isdisjoint(body)
            who = self.script(body) if samples else ""
            parts = urlsplit(self.router)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
            try:
                connection.request(method, path, content or None, headers)
                answer = connection.getresponse()
                reply, told = answer.read(), {key.lower(): value for key, value in answer.getheaders()}
            finally:
                connection.close()
            if samples:
                self.exchanges.append(Exchange(path, body, answer.status, told, reply, who))
            return answer.status, told, reply


@contextlib.contextmanager
def recording(router: str, script: Callable[[Any], str]) -> Iterator[tuple[str, list[Exchange]]]:
    """Serve a `Recorder` in front of a router; yields its URL, and the exchanges as they come."""
    recorder = Recorder(router, script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {key: value for key, value in self.headers.items() if key.lower() not in HOP_BY_HOP}
            headers.pop("accept-encoding", None)
            status, told, reply = recorder.hand_on(self.command, self.path, headers, content)
            self.send_response(status)
            for key, value in told.items():
                if key not in HOP_BY_HOP:
                    self.send_header(key, value)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_DELETE = do_HEAD = _serve

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", recorder.exchanges
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
