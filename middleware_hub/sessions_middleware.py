"""`SessionsMiddleware`: agent sessions over HTTP, as pure ASGI around the application that serves `/generate`.

`middleware_hub/routes.py` has its paths: those below `/sessions`, and those of chats and completions without a session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from xxhash import xxh3_64_hexdigest

from middleware_hub import affinity, parsers, routes
from middleware_hub.chat import keys
from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.errors import UnknownSessionError
from middleware_hub.completions_middleware import Completions
from middleware_hub.dialects.places import OPENAI, PLACES, Place, place_at
from middleware_hub.hub import Hub, unrecorded
from middleware_hub.media.calls import PREFIX as MEDIA
from middleware_hub.media.calls import MediaCalls
from middleware_hub.media.reading import NO_PICTURES, BodyReader
from middleware_hub.metrics import SessionMetrics
from middleware_hub.radix.judge import RECORDED
from middleware_hub.served_models import ServedModels
from middleware_hub.sessions.anonymous import OpenChats
from middleware_hub.sessions.chats import Chats
from middleware_hub.sessions.controls import Controls
from middleware_hub.sessions.exports import SessionSamples
from middleware_hub.sessions.log.archive import Archive
from middleware_hub.sessions.log.chat_notes import ChatNotes
from middleware_hub.sessions.prompt.composer import Composer
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.scoring import Scoring
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.turn.generation import Generator
from middleware_hub.sessions.turn.kept_replies import KeptReplies
from middleware_hub.sessions.turn.remembered_text import RememberedText
from middleware_hub.sessions.turn.reply_parsers import ReplyParsers
from middleware_hub.sessions.turn.turns import Turns
from middleware_hub.templates.chat_template import ChatTemplate
from router.auth.session_keys import UNKNOWN, opens
from router.config import RouterConfig
from router.engines.form.limits import PromptLimits, TextTooLongError
from router.errors import BadRequestError, NotFoundError, RouterError, UnauthorizedError
from router.http.bodies import Replay, read_json, with_body
from router.http.handlers import ByMethod, Handler, for_method
from router.http.headers import first_values, header
from router.http.request_state import Caller, SessionKey, request_state, with_state
from router.http.responses import send_json
from router.plugins import MiddlewareContext

logger = logging.getLogger(__name__)

PREFIX = "/sessions"
OPEN_MODELS = ("/v1beta/", "/v1alpha/", "/v1/models")
"""How paths without a session begin that may have the name of a model in them."""
NO_TEMPLATE = "the tokenizer has no chat template, so messages cannot be rendered: give the router --chat-template FILE"
UNSERVED = frozenset({"unsupported_content", "unsupported_tool_choice"})
"""Codes of requests that cannot become tokens here, but may suit a worker's own chat. Without a session they are passed on."""


class SessionsMiddleware:
    """See the top of this file. The constructor raises BadRequestError for a template or a parser that cannot be used."""

    innermost = True

    def __init__(self, app: ASGIApp, context: MiddlewareContext) -> None:
        config = context.config
        self.app = app
        self._hub = Hub.of(context)
        self._bodies = BodyReader.of(context, None if self._hub.media is None else self._hub.shelf)
        self._metrics = SessionMetrics(context.registry)
        key = keys.load(config.sessions.match)
        hub = self._hub
        notes, room = None if hub.store is None else partial(ChatNotes, hub), config.sessions.token_budget
        self.open_chats = OpenChats(key, notes, max_tokens=room)
        self.registry = SessionRegistry(self._metrics, self.open_chats, max_tokens=room, key=key)
        context.shared[SessionRegistry] = self.registry
        if hub.saving is not None and hub.versions is not None:
            archive = self.registry.archive = Archive(
                hub.saving, hub.serials, hub.clock, hub.versions, key, self._metrics, self.registry
            )
            hub.saving.store.on_loss(archive.refill)
        self._max_body_bytes = config.server.max_body_bytes
        self._models = ServedModels(hub)
        context.worker_checks.append(self._models.check)
        self._implicit = config.sessions.implicit
        self._keys = context.session_keys
        self._keys.served = True
        self._sweeper: asyncio.Task[None] | None = None
        self._controls = Controls(
            self.registry,
            config.sessions,
            key,
            self._metrics,
            hub.groups,
            context.stopping,
            self._models,
            hub.tokenizer.vocabulary,
            hub.media,
            context.scorers,
            max_body_bytes=self._max_body_bytes,
        )
        hub.sessions = samples = SessionSamples(self.registry, hub.media)
        self._chats = self._make_chats(context, config)
        self._media = MediaCalls.of(context, hub.stock).serve
        self._limits = PromptLimits(config.server.max_batch, config.radix.max_text_tokens)
        self._completions = Completions(
            hub.generate, self._hub.tokenizer, self._models, max_body_bytes=self._max_body_bytes, limits=self._limits
        )
        self._open_calls: dict[str, dict[str, Handler]] = routes.bound(
            routes.CHATS,
            {
                "talk": self._talk_open,
                "respond": self._respond_open,
                "complete": self._completions,
                "load": partial(self._models.loading, app),
            },
        )
        open_models = {"talk": self._talk_open, "models": self._list_models}
        self._open_models = routes.bound(routes.MODELS, open_models, "/")
        most, limit = config.server.max_batch, self._max_body_bytes
        vocabulary = hub.tokenizer.vocabulary
        scoring = Scoring(context.scorers, samples, vocabulary, hub.media, most=most, max_body_bytes=limit)
        self._open_calls |= routes.bound(routes.SCORES, {"score": scoring})
        all_sessions: dict[str, Handler] = {"create": self._create, "list": self._list}
        self._all_sessions = ByMethod(routes.bound(routes.SESSIONS, all_sessions)[PREFIX])
        chats = {"talk": self._talk, "models": self._show_models}
        self._chat_calls = routes.bound(routes.SESSION_CHATS, chats, f"{PREFIX}/{{id}}/")

    def _make_chats(self, context: MiddlewareContext, config: RouterConfig) -> Chats | None:
        """Return what serves turns; None without a chat template."""
        hub, sessions = self._hub, config.sessions
        source = hub.chat_template(sessions.chat_template)
        if source is None:
            logger.info("the tokenizer has no chat template: sessions answer no turns without --chat-template FILE")
            return None
        placeholder = "" if hub.media is None else hub.media.family.placeholder
        template = ChatTemplate(
            source, hub.tokenizer.special_tokens_map, late_system=sessions.late_system, placeholder=placeholder
        )
        calls = parsers.detect_calls(source) if sessions.tool_call_parser == "auto" else sessions.tool_call_parser
        reasoning = (
            parsers.detect_reasoning(source) if sessions.reasoning_parser == "auto" else sessions.reasoning_parser
        )
        replies = ReplyParsers(hub.tokenizer.vocabulary, call_parser=calls, reasoning_parser=reasoning)
        composer = Composer(
            hub.tokenizer,
            template,
            replies.of_turn,
            history=sessions.history,
            media=hub.media,
            verify_rate=sessions.verify_rate,
            shares=sessions.match in keys.NAMED,
        )
        logger.info("sessions: tool calls are read as %s, reasoning as %s", calls, reasoning)
        if context.peers is not None:
            context.peers.presence.settings |= {
                "--chat-template": xxh3_64_hexdigest(source.encode("utf-8", "surrogatepass")),
                "--tool-call-parser": calls,
                "--reasoning-parser": reasoning,
                "--history": sessions.history,
                "--late-system": sessions.late_system,
                "--session-match": sessions.match,
            }
        generator = Generator(
            hub.backend,
            lambda call, verdicts, unheard: hub.generate(call, verdicts=verdicts, unheard=unheard),
            hub.media,
            hub.judge,
            context.tracer,
            config.radix.force_logprobs,
            lambda: template.wants_short_ids,
        )
        remembered = partial(RememberedText.of, hub, context.tracer)
        turns = Turns(generator, remembered, composer, replies, self.registry, self._metrics, sessions)
        return Chats(turns, composer, self._models, KeptReplies(self._metrics), hub.media)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == PREFIX or path.startswith(PREFIX + "/"):
                return self._serve(scope, receive, send)
            if path.startswith(MEDIA):
                return self._media(scope, receive, send)
            call = self._open_calls.get(path, {}).get(scope["method"])
            if call is not None:
                return call(scope, receive, send)
            if path.startswith(OPEN_MODELS) and (place := place_at(path[1:], scope)) is not None:
                about = self._open_models.get(place.row, {}).get(scope["method"])
                if about is not None:
                    return about(scope, receive, send, place)
        elif scope["type"] == "lifespan":
            return self._hub.live(self.app, scope, self._closing(receive), self._beginning(send))
        return self.app(scope, receive, send)

    def _beginning(self, send: Send) -> Send:
        """Return a `send` of the lifespan that begins the sessions' own work after the layers inside have started.

        Earlier, the thread that warms the template would hold up their start.
        """

        async def beginning(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                if self._hub.saving is not None:
                    # After the layers inside: a note is on a reply that is in the store.
                    self._hub.saving.store.on_loss(self.open_chats.refill)
                self._sweeper = asyncio.create_task(self.registry.keep_sweeping())
                if self._chats is not None:
                    self._chats.warm()
            await send(message)

        return beginning

    def _closing(self, receive: Receive) -> Receive:
        """Return a `receive` of the lifespan that ends the sessions before the layers inside shut down."""

        async def closing() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                if self._sweeper is not None:
                    self._sweeper.cancel()
                await self.registry.close()
            return message

        return closing

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id, *rest = [*filter(None, scope["path"][len(PREFIX) :].split("/"))] or [""]
        if not session_id:
            await self._all_sessions(scope, receive, send)
            return
        path = "/".join(rest)
        place = PLACES.get(path) or place_at(path, scope)
        try:
            caller = request_state(scope).caller
            if caller.session is None:
                session = await self.registry.reach(caller.tenant, session_id)
            else:
                session, scope = await self._opened(caller.session, scope)
            if self._hub.saving is not None and scope["method"] != "GET" and (place is None or place.counter is None):
                self._hub.saving.admit()
            if session is None:
                raise UnknownSessionError(f"there is no session {session_id!r}: POST /sessions makes one")
            chats = None if place is None else self._chat_calls.get(place.row)
            if place is None or chats is None or place.counter is not None or place.about_models:
                send = _answering(send, affinity.given(first_values(scope["headers"])) or session.id.encode("latin-1"))
            if place is not None and chats is not None:
                call = chats.get(scope["method"]) or for_method(chats, scope)
                serving: Awaitable[None] = call(place, session, scope, receive, send)
            elif (calls := self._controls.places.get(path)) is not None:
                serving = for_method(calls, scope)(session, scope, receive, send)
            else:
                there = ", ".join([*self._chat_calls, *filter(None, self._controls.places)])
                raise NotFoundError(f"there is nothing at {scope['path']}: a session has {there}")
            session.visitors += 1  # the session is not dropped meanwhile
            try:
                await serving
            finally:
                session.visitors -= 1
        except RouterError as error:
            await send_dialect_error(error, OPENAI if place is None else place.dialect, send)

    async def _opened(self, key: SessionKey, scope: Scope) -> tuple[Session, Scope]:
        """Return the session that a key opens, and the scope of its tenant's caller. Raises UnauthorizedError."""
        name = key.session_id
        for tenant in sorted(self._keys.tenants, key=lambda one: self.registry.find(one, name) is None):
            session = await self.registry.reach(tenant, name)
            if session is not None and opens(key, session.key_digest):
                request_state(scope).record.tenant = tenant
                return session, with_state(scope, caller=Caller(tenant, admin=False, confined=True))
        raise UnauthorizedError(UNKNOWN, headers=(("www-authenticate", "Bearer"),))

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._controls.create(request_state(scope).caller.tenant, scope, receive, send)

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._controls.list(request_state(scope).caller.tenant, send)

    async def _talk_open(self, scope: Scope, receive: Receive, send: Send, place: Place | None = None) -> None:
        """Serve a turn without a session in its path. What cannot be served here is passed on to the worker's own chat."""
        chats, place = self._chats, place or PLACES[scope["path"][1:]]
        if chats is None and place.native:
            await self.app(scope, receive, send)
            return
        try:
            if chats is None:
                raise BadRequestError(NO_TEMPLATE)
            pictures = NO_PICTURES
            if self._bodies is None:
                original = body = await read_json(scope, receive, self._max_body_bytes)
            else:
                body, original, pictures = await self._bodies.read(scope, receive)
            session = await self._session_of(scope)
            try:
                self._limits.check_chat(body)
                if place.counter is not None:
                    counted = await chats.count(session, place.counter.parse_count(body), pictures)
                    await send_json(send, 200, place.counter.count(counted.tokens), counted.headers)
                else:
                    if self._hub.saving is not None:
                        self._hub.saving.admit()
                    session.visitors += 1
                    try:
                        await chats.talk(place.dialect, session, body, scope, receive, send, pictures)
                    finally:
                        session.visitors -= 1
            except BadRequestError as error:
                if session.lasting or not place.native or error.details.get("code") not in UNSERVED:
                    raise
                await self._pass_on(str(error.details["code"]), original, scope, receive, send, error)
            except TextTooLongError as error:
                if session.lasting or not place.native or len(body) <= self._limits.characters:
                    raise
                await self._pass_on(error.type, original, scope, receive, send, error)
        except RouterError as error:
            await send_dialect_error(error, place.dialect, send)

    async def _respond_open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a response in the session that `x-session-id` names. Without one it goes to a worker, which keeps its own."""
        named = self._chats is not None and await self._named(scope) is not None
        await (self._talk_open if named else self.app)(scope, receive, send)

    async def _session_of(self, scope: Scope) -> Session:
        """Return the session that `x-session-id` names, else the memory of chats without a session."""
        session = await self._named(scope)
        if session is not None:
            return session
        return self.open_chats.of(request_state(scope).caller.tenant, header(scope, b"x-radix-namespace") or "")

    async def _named(self, scope: Scope) -> Session | None:
        """Return the session that `x-session-id` names, if it names one.

        Without implicit sessions, a name of no session is used for routing only.
        """
        name = header(scope, b"x-session-id")
        if not name:
            return None
        tenant = request_state(scope).caller.tenant
        session = await self.registry.reach(tenant, name)
        if session is None and self._implicit:
            session = await self._controls.make(tenant, name, scope)
        return session

    async def _pass_on(
        self, why: str, body: bytes, scope: Scope, receive: Receive, send: Send, instead: RouterError
    ) -> None:
        """Have a worker answer. `instead` is raised if it has no such path, and says why the router does not answer."""
        scope, receive = with_body(scope, body), Replay(body, receive)
        if self._bodies is not None and self._hub.recorded is None:  # else the layer inside does
            scope, receive = await self._bodies.passed_on(scope, receive)
        reply = _WorkersReply(unrecorded(send, why))
        await self.app(scope, receive, reply.send)
        if await reply.missing():
            instead.headers = (*instead.headers, (RECORDED.decode(), f"no; {why}"))
            raise instead

    async def _show_models(self, place: Place, _: Session, scope: Scope, receive: Receive, send: Send) -> None:
        await self._list_models(scope, receive, send, place)

    async def _list_models(self, scope: Scope, receive: Receive, send: Send, place: Place) -> None:
        if place.listed is None:
            if ".." in place.model.split("/"):  # what is in front of a worker could read another path in it
                raise NotFoundError(f"there is no model {place.model!r}")
            path = f"/v1/models/{place.model}" if place.model else "/v1/models"
            await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
            return
        try:
            await send_json(send, 200, place.listed(await self._models.listing(scope), place.model))
        except RouterError as error:
            await send_dialect_error(error, place.dialect, send)

    async def _talk(self, place: Place, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        pictures = NO_PICTURES
        if self._bodies is None:
            body = await read_json(scope, receive, self._max_body_bytes)
        else:
            body, _, pictures = await self._bodies.read(scope, receive)
        self._limits.check_chat(body)
        chats = self._chats
        if chats is None:
            raise BadRequestError(NO_TEMPLATE)
        if place.counter is not None:
            counted = await chats.count(session, place.counter.parse_count(body), pictures)
            await send_json(send, 200, place.counter.count(counted.tokens), counted.headers)
        else:
            await chats.talk(place.dialect, session, body, scope, receive, send, pictures)


class _WorkersReply:
    """A worker's reply, passed on as it comes. One that may say that there is no such path (404) waits until it is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []

    async def send(self, message: Message) -> None:
        if message.get("status") == 404 or self._held:
            self._held.append(message)
        else:
            await self._send(message)

    async def missing(self) -> bool:
        """Return whether the worker has no such path, in the words of both engines; send any other reply that was held."""
        body = b"".join([message.get("body", b"") for message in self._held])
        if self._held and b"".join(body.split()) == b'{"detail":"NotFound"}':
            return True
        for message in self._held:
            await self._send(message)
        return False


def _answering(send: Send, word: bytes) -> Send:
    """Return a `send` for a call of a session that is no turn: a load balancer keeps it where the turns are."""

    async def answering(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (affinity.HEADER, word)]}
        await send(message)

    return answering


async def send_dialect_error(error: RouterError, dialect: Dialect, send: Send) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
    await send_json(send, error.status, dialect.error(error), headers)
