"""`SessionsMiddleware`: agent sessions over HTTP, as pure ASGI around whatever serves `/generate`.

    POST GET    /sessions
    GET DELETE  /sessions/{id}
    POST        /sessions/{id}/v1/chat/completions          OpenAI
    POST        /sessions/{id}/v1/messages                  Anthropic
    POST        /sessions/{id}/v1/messages/count_tokens
    GET         /sessions/{id}/v1/models
    POST        /sessions/{id}/reward_info
    POST GET    /sessions/{id}/complete
    POST        /sessions/{id}/finalize
    GET         /sessions/{id}/trajectories
    POST        /v1/chat/completions                        without a session in the path: `X-Session-Id` may name one
    POST        /v1/messages
    POST        /v1/messages/count_tokens
    POST        /v1/completions                             texts, without a chat template

A client's library is told the `base_url` and adds the rest. Some add `/v1` to what has it already, some do not where it is
missing: both are understood.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware_hub import parsers
from middleware_hub.chat import keys
from middleware_hub.chat.dialect import Dialect
from middleware_hub.completions_middleware import Completions
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.hub import Hub
from middleware_hub.sessions.chats import Chats
from middleware_hub.sessions.controls import Controls
from middleware_hub.sessions.metrics import SessionMetrics
from middleware_hub.sessions.prompt.composing import Composer
from middleware_hub.sessions.registry import SessionStore
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.turn.reasoning import Thoughts
from middleware_hub.sessions.turn.turns import Turns
from middleware_hub.templates.rendering import ChatTemplate
from router.config import SessionsConfig
from router.engines.sglang.limits import PromptLimits, TextTooLongError
from router.errors import BadRequestError, NotFoundError, RouterError
from router.http.asgi import ByMethod, Handler, header, read_json, replay, send_json, with_body
from router.http.request_state import request_state
from router.plugins import MiddlewareContext

logger = logging.getLogger(__name__)

PREFIX = "/sessions"
OPENAI, ANTHROPIC = OpenAI(), Anthropic()
TURNS: Mapping[str, Dialect] = {"chat/completions": OPENAI, "messages": ANTHROPIC}
"""Where a turn is taken, below a session's `/v1` or at the root's, and in which dialect."""
COUNT = "messages/count_tokens"
CHATS = frozenset(f"/v1/{place}" for place in (*TURNS, COUNT))
COMPLETIONS = "/v1/completions"
"""What is served at the root."""
UNSERVED = frozenset({"unsupported_content", "unsupported_tool_choice"})
"""Codes of what cannot be said in tokens here, and may well be in a worker's own chat: without a session it is passed on."""


class SessionsMiddleware:
    """See the top of this file. Raises BadRequestError when made with a template or a parser that cannot be used."""

    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        config = context.config.sessions
        self.app = app
        self._metrics = SessionMetrics(context.registry)
        key = keys.load(config.match)
        self.store = SessionStore(self._metrics, max_tokens=config.token_budget, key=key)
        self._max_body_bytes = context.config.server.max_body_bytes
        self._implicit = config.implicit
        self._sweeper: asyncio.Task[None] | None = None
        self._controls = Controls(self.store, config, key, self._metrics, max_body_bytes=self._max_body_bytes)
        self._chats = self._talking(context, config)
        self._limits = PromptLimits(context.config.server.max_batch, context.config.radix.max_text_tokens)
        self._completions = Completions(
            app, Hub.of(context).tokenizer, max_body_bytes=self._max_body_bytes, limits=self._limits
        )

    def _talking(self, context: MiddlewareContext, config: SessionsConfig) -> Chats | None:
        """What answers turns; None without a chat template."""
        hub = Hub.of(context)
        source = hub.chat_template(config.chat_template)
        if source is None:
            logger.info("the tokenizer has no chat template: sessions answer no turns without --chat-template FILE")
            return None
        template = ChatTemplate(source, hub.tokenizer.special_tokens_map)
        composer = Composer(hub.tokenizer, template, history=config.history, verify_rate=config.verify_rate)
        calls = parsers.detect_calls(source) if config.tool_call_parser == "auto" else config.tool_call_parser
        thinks = parsers.detect_reasoning(source) if config.reasoning_parser == "auto" else config.reasoning_parser
        parsers.create(calls, thinks, (), starts_inside=False)  # what is no name is told now
        logger.info("sessions: tool calls are read as %s, reasoning as %s", calls, thinks)
        turns = Turns(
            self.app,
            hub,
            composer,
            Thoughts(hub.tokenizer.vocabulary, call_parser=calls, reasoning_parser=thinks),
            self.store,
            self._metrics,
            context.tracer,
            call_parser=calls,
            orphan_grace=config.orphan_grace,
            max_context=config.max_context,
            force_logprobs=context.config.radix.force_logprobs,
        )
        return Chats(turns, composer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the lifespan."""
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == PREFIX or path.startswith(PREFIX + "/"):
                await self._serve(scope, receive, send)
                return
            if scope["method"] == "POST":
                if path in CHATS and self._chats is not None:
                    await self._serve_open(self._chats, path.removeprefix("/v1/"), scope, receive, send)
                    return
                if path == COMPLETIONS:
                    await self._completions(scope, receive, send)
                    return
        elif scope["type"] == "lifespan":
            receive = self._closing(receive)
        await self.app(scope, receive, send)

    def _closing(self, receive: Receive) -> Receive:
        """Sessions end before what they stand on does."""

        async def closing() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._sweeper = asyncio.create_task(self.store.keep_sweeping())
            elif message["type"] == "lifespan.shutdown":
                if self._sweeper is not None:
                    self._sweeper.cancel()
                await self.store.close()
            return message

        return closing

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = request_state(scope).caller.tenant
        session_id, *rest = [part for part in scope["path"][len(PREFIX) :].split("/") if part] or [""]
        if not session_id:
            by_method: dict[str, Handler] = {
                "POST": lambda scope, receive, send: self._controls.create(tenant, scope, receive, send),
                "GET": lambda scope, receive, send: self._controls.list(tenant, send),
            }
            await ByMethod(by_method)(scope, receive, send)
            return
        place = "/".join(rest)
        while place.startswith("v1/"):
            place = place.removeprefix("v1/")
        dialect: Dialect = ANTHROPIC if place.startswith("messages") else OPENAI
        try:
            session = self.store.get(tenant, session_id)
            handlers = self._talks(session, place) or self._controls.handlers(session, "/".join(rest))
            if not handlers:
                raise NotFoundError(f"there is nothing at {scope['path']}")
            await ByMethod(handlers)(scope, receive, send)
        except RouterError as error:
            await _tell(error, dialect, send)

    async def _serve_open(self, chats: Chats, place: str, scope: Scope, receive: Receive, send: Send) -> None:
        """A turn of a client that has no session in its path. What cannot be served here is for the worker's own chat."""
        dialect = TURNS.get(place, ANTHROPIC)
        try:
            body = await read_json(scope, receive, self._max_body_bytes)
            session = self._meant(scope)
            try:
                self._limits.check_chat(body)
                if place == COUNT:
                    await send_json(send, 200, ANTHROPIC.count(await chats.count(session, ANTHROPIC.parse_count(body))))
                else:
                    await chats.talk(dialect, session, body, scope, receive, send)
            except BadRequestError as error:
                if session.lasting or error.details.get("code") not in UNSERVED:
                    raise
                await self._pass_on(str(error.details["code"]), body, scope, receive, send)
            except TextTooLongError as error:
                if session.lasting or len(body) <= self._limits.characters:
                    raise
                await self._pass_on(error.type, body, scope, receive, send)
        except RouterError as error:
            await _tell(error, dialect, send)

    def _meant(self, scope: Scope) -> Session:
        """The session that a request is for, or where those talk that have none. A name that is none only routes."""
        tenant, name = request_state(scope).caller.tenant, header(scope, b"x-session-id")
        if name:
            session = self.store.find(tenant, name)
            if session is None and self._implicit:
                session = self._controls.make(tenant, name)
            if session is not None:
                return session
        return self.store.anonymous(tenant, header(scope, b"x-radix-namespace") or "")

    async def _pass_on(self, why: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_reason(message: Message) -> None:
            if message["type"] == "http.response.start":
                reason = (b"x-radix-recorded", f"no; {why}".encode("latin-1", "replace"))
                message = {**message, "headers": [*message["headers"], reason]}
            await send(message)

        await self.app(with_body(scope, body), replay(body, receive), send_with_reason)

    def _talks(self, session: Session, place: str) -> dict[str, Handler]:
        """What speaks a dialect at this place of a session, by method."""
        dialect = TURNS.get(place)

        async def talk(scope: Scope, receive: Receive, send: Send) -> None:
            assert dialect is not None
            body = await read_json(scope, receive, self._max_body_bytes)
            self._limits.check_chat(body)
            await self._required().talk(dialect, session, body, scope, receive, send)

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            body = await read_json(scope, receive, self._max_body_bytes)
            self._limits.check_chat(body)
            request = ANTHROPIC.parse_count(body)
            await send_json(send, 200, ANTHROPIC.count(await self._required().count(session, request)))

        async def models(scope: Scope, receive: Receive, send: Send) -> None:
            path = f"/v1/{place}"
            await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

        if dialect is not None:
            return {"POST": talk}
        if place == COUNT:
            return {"POST": count}
        return {"GET": models} if place == "models" or place.startswith("models/") else {}

    def _required(self) -> Chats:
        if self._chats is None:
            raise BadRequestError(
                "the tokenizer has no chat template, so messages cannot be rendered: give the router --chat-template FILE"
            )
        return self._chats


async def _tell(error: RouterError, dialect: Dialect, send: Send) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
    await send_json(send, error.status, dialect.error(error), headers)
