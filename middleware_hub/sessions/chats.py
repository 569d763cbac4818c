"""A client's turn: its request understood, answered in its own dialect, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from middleware_hub.chat.answer import ReplyHead
from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.keys import setting_of
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.radix.tree import NO_PARENT
from middleware_hub.sessions.prompt.composing import Composer
from middleware_hub.sessions.session import Act, Session
from middleware_hub.sessions.trie.memo import MemoRoom
from middleware_hub.sessions.turn.exchange import Exchange, RequestKey
from middleware_hub.sessions.turn.generation import Generation
from middleware_hub.sessions.turn.turns import Turns
from router.engines.sglang.worker_request import new_rid
from router.http.asgi import HeaderList, header, send_json
from router.http.disconnect import ClientConnection

PING_SECONDS = 15.0
"""How long a stream may be silent: proxies and clients take a longer silence for an end."""


class Chats:
    """Serves the turns of sessions."""

    def __init__(self, turns: Turns, composer: Composer) -> None:
        self._turns = turns
        self._composer = composer
        self._room = MemoRoom()

    async def talk(
        self, dialect: Dialect, session: Session, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One turn, whose body has been read. Raises RouterError only as long as nothing was sent."""
        session.require(Act.GENERATE)
        request = dialect.parse(body, session.memo(dialect, self._room))
        key = RequestKey(header(scope, b"idempotency-key"), body, type(dialect).__name__, _parent(scope))
        # No await from here to the exchange: of two requests that are the same one, the second finds the first.
        exchange = self._turns.adopt(session, key) if _sent_again(scope) else None
        if exchange is None:
            exchange = self._turns.begin(session, request, scope, key)
        delivered = False
        try:
            async with ClientConnection(receive) as client:
                reply = _Reply(dialect, session, request, exchange, client, send)
                await (reply.stream() if request.stream else reply.whole())
                delivered = True
        finally:
            exchange.detach(delivered=delivered)
            session.settle(exchange)

    async def count(self, session: Session, request: ChatRequest) -> int:
        """How many tokens the prompt of a turn would have. Changes nothing."""
        session.require(Act.GENERATE)
        turn = session.trie.prepare(setting_of(request), request.messages)
        handle = session.trie.open(turn, new_rid())
        try:
            return (await self._composer.compose(turn, request)).tokens
        finally:
            session.trie.abandon(handle)


def _parent(scope: Scope) -> str | None:
    """The generation that a client names as the one it goes on from, by either of the two headers."""
    named = header(scope, b"x-parent-generation") or header(scope, b"x-radix-parent")
    return None if named == NO_PARENT else named


def _sent_again(scope: Scope) -> bool:
    """Whether a client's library says that it sends this request another time."""
    if header(scope, b"idempotency-key"):
        return True
    count = header(scope, b"x-stainless-retry-count") or ""
    return count.isdecimal() and int(count) > 0


class _Reply:
    """One way back to a client."""

    def __init__(
        self,
        dialect: Dialect,
        session: Session,
        request: ChatRequest,
        exchange: Exchange,
        client: ClientConnection,
        send: Send,
    ) -> None:
        self._dialect = dialect
        self._session = session
        self._request = request
        self._exchange = exchange
        self._client = client
        self._send = send
        self._began = int(time.time())

    def _head(self) -> ReplyHead:
        return ReplyHead(self._exchange.generations[0].id, self._began, self._request.model or "default")

    async def whole(self) -> None:
        """All answers in one piece."""
        await self._exchange.all_over()
        self._raise_if_nothing_came()
        body = self._dialect.whole(self._request, self._head(), self._exchange.answers)
        self._client.stop_watching()
        await send_json(self._send, 200, body, self._headers(recorded=True))

    async def stream(self) -> None:
        """Events as the pieces come."""
        await self._exchange.begun()
        self._raise_if_nothing_came()
        headers: HeaderList = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += self._headers(recorded=False)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = self._dialect.stream(self._request, self._head())
        generations = self._exchange.generations
        told, open_ones = [0] * len(generations), set(range(len(generations)))
        out = [stream.begin(generations[0].prompt_tokens)]
        while open_ones:
            for index in sorted(open_ones):
                generation = generations[index]
                pieces = generation.building.pieces
                while told[index] < len(pieces):
                    piece, logprobs = pieces[told[index]]
                    told[index] += 1
                    out.append(stream.piece(index, piece, logprobs))
                if generation.answer is not None:
                    out.append(stream.finish(index, generation.answer))
                if generation.over or self._exchange.over:
                    open_ones.discard(index)
            if open_ones:
                await self._send_on(out)
                await self._news_or_ping(stream)
        await self._exchange.all_over()
        # Of several samples those that there are will do, as where they come in one piece.
        answers = self._exchange.answers
        out.append(stream.end(answers) if answers else stream.failed(self._exchange.failure))
        self._client.stop_watching()
        await self._send({"type": "http.response.body", "body": b"".join(out), "more_body": False})

    async def _news_or_ping(self, stream: Any) -> None:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._exchange.news()
        except TimeoutError:
            await self._send_on([stream.ping()])

    async def _send_on(self, out: list[bytes]) -> None:
        body = b"".join(out)
        out.clear()
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _raise_if_nothing_came(self) -> None:
        """Of several samples those that there are will do; where there are none, the first one's error is the answer."""
        if self._exchange.over and not self._exchange.answered:
            raise self._exchange.failure

    def _headers(self, *, recorded: bool) -> HeaderList:
        generations = self._exchange.generations
        first = generations[0]
        # In a reply in one piece, choices are numbered without those that failed.
        told = [one for one in generations if one.answer is not None or not recorded] or generations
        headers: HeaderList = [
            (b"x-generation-id", ", ".join(generation.id for generation in told).encode("latin-1")),
            (b"x-radix-reused-tokens", b"%d" % first.reused_tokens),
            (b"x-radix-prompt-tokens", b"%d" % first.prompt_tokens),
            (b"x-radix-recorded", (_recorded(generations) if recorded else "pending").encode("latin-1", "replace")),
        ]
        if self._session.lasting:
            headers.append((b"x-session-id", self._session.id.encode("latin-1")))
        if first.spliced_turns:
            headers.append((b"x-radix-spliced-turns", b"%d" % first.spliced_turns))
        if self._exchange.notes:
            headers.append((b"x-radix-reasons", ", ".join(self._exchange.notes).encode("latin-1")))
        if first.worker:
            headers.append((b"x-router-worker", first.worker.encode("latin-1")))
        if first.routed:
            headers.append((b"x-router-reason", first.routed.encode("latin-1")))
        return headers


def _recorded(generations: list[Generation]) -> str:
    said = {generation.verdict.header if generation.verdict else "no; no reply" for generation in generations}
    if len(said) == 1:
        return said.pop().replace("\n", " ")
    exact = sum(generation.verdict is not None and generation.verdict.outcome == "exact" for generation in generations)
    return f"inexact; {exact} of {len(generations)} replies are exact"
