"""Sessions in this process, in front of a scripted engine: a test can stop at every moment of a turn.

After `room.engine.says("one two", hold=1)` and `client = room.ask({"messages": [...]})`, `await room.engine.arrived()` returns
when one token has been sent; the engine sends no more until the test sets `go`. The client may leave meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from middleware_hub import hub
from middleware_hub.hub import Hub
from middleware_hub.sessions.session import Session
from middleware_hub.sessions_middleware import SessionsMiddleware
from middleware_hub.spans.chain import pack_ids
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.config import RadixConfig, RouterConfig, SessionsConfig, StoreConfig
from router.errors import ClientDisconnectedError, RouterError
from router.http.disconnect import EXTENSION, DirectSend, ServedClient
from router.http.responses import send_error
from router.http.upstream import UpstreamBrokenError
from router.plugins import MiddlewareContext
from tests.support import templates
from tests.support.asgi_backend import AsgiBackend
from tests.support.vocabularies import load, vocabulary

RADIX = RadixConfig(tokenizer_path=str(vocabulary("qwen")), tokenizer_backend="huggingface")
PATH = "/sessions/s/v1/chat/completions"


@cache
def tokenizer() -> Tokenizer:
    return hub.load(RADIX)


@dataclass
class Says:
    """What one generation is to be.

    Attributes:
        hold: stop behind so many tokens, until `go` is set or the generation is aborted.
        heap: the tokens of a stream behind the hold that come in one piece; then it stops until `more` is set.
        breaks: break off behind so many tokens, or behind the error of `refuses`.
        deaf: an abort does nothing.
        status: answer with this error instead.
        refuses: a stream's only event is an error with this code.
        aborts: a stream's last event, behind `breaks` tokens, is an abort with this code.
    """

    text: str
    finish: str = "stop"
    hold: int | None = None
    heap: int = 0
    breaks: int | None = None
    deaf: bool = False
    status: int = 200
    refuses: int | None = None
    aborts: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)


class GatedTokenizer:
    """The real one, whose encoding waits for a gate."""

    def __init__(self) -> None:
        self._inner = tokenizer()
        self.gate = asyncio.Event()
        self.waiting = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def encode(self, text: str, *, start: bool) -> list[int]:
        self.waiting += 1
        await self.gate.wait()
        return list(await self._inner.encode(text, start=start))

    async def encode_packed(self, text: str, *, start: bool) -> bytes:
        return pack_ids(await self.encode(text, start=start))


class Engine:
    """`/generate` and `/abort_request`; it says what it was told, in order, and streams in deltas of one token."""

    def __init__(self) -> None:
        self.tokenizer = load("qwen")
        self.eos: int = self.tokenizer.token_to_id("<|im_end|>")
        self.log: list[tuple[dict[str, Any], list[int]]] = []
        """Of each generation its request, and what was sampled by now."""
        self._queue: list[Says] = []
        self._running: dict[str, Says] = {}
        self._aborted: set[str] = set()
        self._waiting = 0
        self._condition = asyncio.Event()

    def says(self, text: str, **how: Any) -> Says:
        self._queue.append(Says(text, **how))
        return self._queue[-1]

    async def arrived(self, count: int = 1) -> None:
        """Wait until so many generations are held."""
        while self._waiting < count:
            self._condition.clear()
            await self._condition.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await _reply(send, 404, {})
            return
        body = json.loads((await receive())["body"])
        if scope["path"] == "/abort_request":
            says = self._running.get(body["rid"])
            if says is not None and not says.deaf:
                self._aborted.add(body["rid"])
                says.go.set()
            await _reply(send, 200, {})
            return
        says = self._queue.pop(0) if self._queue else Says("Yes.")
        self._running[body["rid"]] = says
        sampled: list[int] = []
        self.log.append((body, sampled))
        if says.status != 200:
            await _reply(send, says.status, {"error": {"message": "no", "code": says.status}})
        elif body["stream"]:
            await self._stream(body, says, sampled, send)
        else:
            await self._whole(body, says, sampled, send)

    def _ids(self, body: dict[str, Any], says: Says) -> tuple[list[int], dict[str, Any]]:
        ids = list(self.tokenizer.encode(says.text, add_special_tokens=False).ids)
        limit = body["sampling_params"].get("max_new_tokens")
        if limit is not None and len(ids) >= limit:
            return ids[:limit], {"type": "length", "length": limit}
        if says.finish != "stop":
            return ids, {"type": says.finish}
        return [*ids, self.eos], {"type": "stop", "matched": self.eos}

    async def _whole(self, body: dict[str, Any], says: Says, sampled: list[int], send: Send) -> None:
        ids, finish = self._ids(body, says)
        if says.hold is not None:
            await self._held(says)
            if body["rid"] in self._aborted:
                ids, finish = ids[: says.hold], {"type": "abort"}
        sampled += ids
        await _reply(send, 200, self._event(body, ids, len(ids), finish, says.extra))

    async def _stream(self, body: dict[str, Any], says: Says, sampled: list[int], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-router-worker", b"http://engine")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if says.refuses is not None:
            await _event(send, {"error": {"message": "no", "code": says.refuses}})
            if says.breaks is not None:
                raise UpstreamBrokenError("the worker broke the stream off")
            return
        ids, finish = self._ids(body, says)
        heap, left = b"", says.heap
        for number, token in enumerate(ids):
            if number == says.hold:
                await self._held(says)
                if body["rid"] in self._aborted:
                    await _event(send, self._event(body, [], number, {"type": "abort"}, {}))
                    break
            if number == says.breaks and says.aborts is not None:
                reason = {"type": "abort", "message": "no", "status_code": says.aborts}
                await _event(send, self._event(body, [], number, reason, {}))
                break
            if number == says.breaks:
                raise UpstreamBrokenError("the worker broke the stream off")
            sampled.append(token)
            last = number == len(ids) - 1
            extra = says.extra if last else {}
            event = self._event(body, [token], number + 1, finish if last else None, extra)
            if not left or says.hold is None or number < says.hold:
                await _event(send, event)
                continue
            heap, left = heap + _printed(event), left - 1
            if not left:
                await send({"type": "http.response.body", "body": heap, "more_body": True})
                await says.more.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _held(self, says: Says) -> None:
        self._waiting += 1
        self._condition.set()
        await says.go.wait()
        self._waiting -= 1

    def _event(
        self, body: dict[str, Any], ids: list[int], count: int, finish: dict[str, Any] | None, extra: dict[str, Any]
    ) -> dict[str, Any]:
        shown = [token for token in ids if token != self.eos]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": count,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        said = self.tokenizer.decode(shown, skip_special_tokens=True)
        return {"text": said, "output_ids": ids, "meta_info": meta, **extra}


async def _reply(send: Send, status: int, body: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-router-worker", b"http://engine")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": False})


async def _event(send: Send, event: Any) -> None:
    await send({"type": "http.response.body", "body": _printed(event), "more_body": True})


def _printed(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class Client:
    """One request of a client, which may leave."""

    def __init__(self, app: Any, method: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        self._content: bytes | None = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self.out: list[AsgiMessage] = []
        self._condition = asyncio.Event()
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.served = ServedClient()
        self.served.write = self._write
        scope = {"type": "http", "method": method, "path": path, "headers": given, "query_string": b"", "state": {}}
        scope["extensions"] = {EXTENSION: self.served}
        self._task = asyncio.create_task(self._served(app, scope))

    async def _served(self, app: Any, scope: Scope) -> None:
        try:
            await app(scope, self._receive, DirectSend(self._send, self.served))
        except RouterError as error:  # as the boundary does it
            await send_error(self._send, error, scope["path"])

    async def _receive(self) -> AsgiMessage:
        content, self._content = self._content, None
        if content is not None:
            return {"type": "http.request", "body": content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        self.out.append(message)
        self._condition.set()

    def _write(self, piece: bytes) -> bool:
        """Take a piece past `_send`, as a server does as long as the client is there."""
        if self.served.gone:
            return False
        self.out.append({"type": "http.response.body", "body": piece, "more_body": True})
        self._condition.set()
        return True

    async def heard(self, words: bytes) -> None:
        """Wait until this was sent."""
        while words not in self.content:
            self._condition.clear()
            await self._condition.wait()

    async def leave(self) -> None:
        """The connection is gone, and the router has seen it."""
        self.served.leave()
        self._gone.set()
        try:
            await self._task
        except ClientDisconnectedError:
            return
        raise AssertionError("it was answered")

    async def answer(self) -> tuple[int, Any]:
        """The whole reply; of a stream the data of its events."""
        await self._task
        if (b"content-type", b"text/event-stream") in self.out[0]["headers"]:
            lines = [line[6:] for line in self.content.split(b"\n") if line.startswith(b"data: ")]
            return self.out[0]["status"], [line if line == b"[DONE]" else json.loads(line) for line in lines]
        return self.out[0]["status"], json.loads(self.content)

    @property
    def content(self) -> bytes:
        return b"".join(part.get("body", b"") for part in self.out[1:])


class Room:
    """A middleware with one session, `s`."""

    def __init__(
        self,
        *,
        encodes: Tokenizer | None = None,
        store: StoreConfig | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """`encodes`: another tokenizer than the usual one; `store`: it has to be opened; `options`: of `SessionsConfig`."""
        options = {"chat_template": str(templates.folder() / "qwen2_5.jinja"), **options}
        config = RouterConfig(radix=RADIX, sessions=SessionsConfig(**options))
        self.registry = CollectorRegistry()
        self.engine = engine or Engine()
        self.hub = Hub(encodes or tokenizer(), store)
        shared: dict[type, object] = {Hub: self.hub}
        context = MiddlewareContext(config, self.registry, shared=shared, backend=AsgiBackend(self.engine))
        self.app = SessionsMiddleware(self.engine, context)

    async def open(self, **body: Any) -> Session:
        """Make the session."""
        status, _ = await self.call("POST", "/sessions", {"session_id": "s", **body})
        assert status == 201
        return self.session

    @property
    def session(self) -> Session:
        return self.app.registry.get("", "s")

    def ask(self, body: dict[str, Any], path: str = PATH, **headers: str) -> Client:
        """A turn; `again=...` is the header by which a library says that it sends it again."""
        named = {"again": "x-stainless-retry-count", "key": "idempotency-key", "parent": "x-parent-generation"}
        return Client(self.app, "POST", path, body, {named[name]: value for name, value in headers.items()})

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await Client(self.app, method, path, {} if body is None else body, {}).answer()

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


async def until(condition: Callable[[], object]) -> None:
    """Let others go on until it holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # it is no event
            await asyncio.sleep(0)


def gated(**options: Any) -> tuple[Room, GatedTokenizer]:
    """A room that encodes nothing until it is let."""
    slow = GatedTokenizer()
    as_tokenizer: Any = slow
    return Room(encodes=as_tokenizer, **options), slow
