"""A client's turn: its request is parsed, and answered in its own dialect, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from middleware_hub import affinity
from middleware_hub.chat.answer import Answer, ReplyHead, check_one, of_several
from middleware_hub.chat.dialect import Dialect, DialectStream
from middleware_hub.chat.keys import setting_of
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.fields import unsupported
from middleware_hub.dialects.messages import UnreadMediaError
from middleware_hub.media.errors import MediaMissingError, MediaUnknownError, MultimodalUnsupportedError
from middleware_hub.media.family_files import SIGHT
from middleware_hub.media.media import MEDIA_ESTIMATED, Media
from middleware_hub.media.part import image_parts
from middleware_hub.media.picture import Picture
from middleware_hub.media.reading import NO_PICTURES
from middleware_hub.media.stock import Brought
from middleware_hub.served_models import ServedModels
from middleware_hub.sessions.exchange import Exchange, RequestKey, end_what_was_read
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.prompt.composer import Composer
from middleware_hub.sessions.session import Act, Session
from middleware_hub.sessions.trie.memo import MemoRoom
from middleware_hub.sessions.turn.generation import MANY_LOGPROBS, TurnGeneration
from middleware_hub.sessions.turn.kept_replies import MOST_BYTES, KeptReplies, KeptReply
from middleware_hub.sessions.turn.turns import Turns
from middleware_hub.spans.media import UNKNOWN
from middleware_hub.store.errors import NOT_SAVED, StoreUnreachableError
from router.engines.form.worker_request import new_rid
from router.errors import BadRequestError, ClientDisconnectedError, RouterError
from router.http.disconnect import ClientConnection, DirectSend, leave, served_client
from router.http.headers import HeaderList, first_values, text_of
from router.http.offload import offload
from router.http.request_state import RequestRecord, request_state
from router.http.responses import send_json

logger = logging.getLogger(__name__)

PING_SECONDS = 15.0
"""How long a stream may be silent. Proxies and clients take a longer silence for its end."""
_CLIENTS_OWN = ("max_new_tokens", "stop")
"""What a reply repeats only as its client wrote it: the router lowers limits, and stops at the ends of calls."""
_MOST_IGNORED = 32
"""Types of tools that a header names."""
PIECES_AT_ONCE = 256
"""Pieces of a stream that are written in one step. Thousands may wait: the client was slow, or it adopts a whole reply."""
_id_of, _saved_of = attrgetter("id"), attrgetter("saved")


class Counted(NamedTuple):
    """The number of tokens of a prompt, and the reasons why an engine may count another number."""

    tokens: int
    reasons: tuple[str, ...]

    @property
    def headers(self) -> HeaderList:
        return [(b"x-radix-reasons", ", ".join(self.reasons).encode())] if self.reasons else []


class Chats:
    """Serves the turns of sessions."""

    def __init__(
        self, turns: Turns, composer: Composer, models: ServedModels, kept: KeptReplies, media: Media | None = None
    ) -> None:
        self._turns = turns
        self._media = media
        self._kept = kept
        self._composer = composer
        self._models = models
        self._room = MemoRoom()
        self._warming: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Start, in a thread, the work with which the first turn would hold up the event loop. Turns wait until it is done."""
        self._warming = asyncio.create_task(asyncio.to_thread(self._composer.warm))

    async def _warmed(self, warming: asyncio.Task[None]) -> None:
        with suppress(Exception):  # it fails again in the turn, which reports it
            await asyncio.shield(warming)
        self._warming = None

    async def talk(
        self,
        dialect: Dialect,
        session: Session,
        body: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
        pictures: Mapping[str, Picture] = NO_PICTURES,
    ) -> None:
        """Serve one turn whose body has been read. Raises RouterError only before anything is sent.

        `pictures` are those that came with the body, by digest.
        """
        waits = bool(self._warming or session.orphans or session.notes)
        if self._warming is not None:
            await self._warmed(self._warming)
        session.require(Act.GENERATE)
        memo = session.memo(dialect, self._room)
        try:
            request = dialect.parse(body, memo)
            request = await self._shelved(session, request, pictures)
        except UnreadMediaError as error:
            raise self._unread(error) from error
        except (MediaMissingError, MediaUnknownError, StoreUnreachableError):
            # Of a remembered message the bytes were not read again, and they may have gone meanwhile, from the store as well.
            memo.clear()
            request = await self._shelved(session, dialect.parse(body, memo), pictures)
        if request.pictures:  # their bytes or lengths may have come from the store
            waits = True
            session.require(Act.GENERATE)
        if self._models.must_ask(request.model, session.defaults.model):
            waits = True
            await self._models.ask(scope, request.model, session.defaults.model)
            session.require(Act.GENERATE)
        request = session.defaults.complete(request, self._models.adapter_of)
        if self._media is not None:
            self._media.check_beside(request)
        if request.ignored_tools:
            logger.info("tools are left out, because nobody runs them here: %s", ", ".join(request.ignored_tools))
        state, headers = request_state(scope), first_values(scope["headers"])
        parent = headers.get(b"x-parent-generation") or headers.get(b"x-radix-parent")
        if parent:
            check_one(text_of(parent), "the parent")
        given = headers.get(b"idempotency-key")
        idempotency = None if given is None else given.decode("latin-1")
        key = RequestKey(idempotency, body, dialect.name, text_of(parent) if parent else None)
        retries = headers.get(b"x-stainless-retry-count", b"")
        sent_again = idempotency or (retries.isdigit() and int(retries) > 0)
        if session.orphans:
            await end_what_was_read(session.orphans, request.messages)
            session.require(Act.GENERATE)
        asked = True
        if session.notes is not None:
            is_echo = self._composer.recognizer(session.trie.key, request)
            asked = await session.notes.recall(request, key.parent, is_echo, replies=bool(sent_again))
            session.require(Act.GENERATE)
        if sent_again and session.log is not None:
            with suppress(StoreUnreachableError):  # then the reply lacks further fields of the worker's
                await session.log.fill()
            session.require(Act.GENERATE)
        served = served_client(scope) if waits else None
        if served is not None and served.gone:  # the same request may be here again, and begins a turn of its own
            raise ClientDisconnectedError("the client left before its turn was begun")
        namespace = "" if session.lasting else headers.get(b"x-radix-namespace", b"").decode("latin-1")
        place = session.tenant, session.id, session.created_at, namespace
        # No await until the exchange is known, so that the second of two equal requests finds the first.
        exchange = self._turns.adopt(session, key) if sent_again else None
        if exchange is None and sent_again:
            word = _affinity(session, request, headers)
            kept = self._kept.find(
                session, place, key, lambda: self._turns.written_again(session, request, key, dialect, word)
            )
            if kept is not None:
                session.touch()
                return await kept.send(send)
        try:
            if exchange is None:
                exchange = self._turns.begin(session, request, scope["headers"], state, key, unread=not asked)
            reply = await self._answer(dialect, session, request, exchange, receive, send, headers, state.record)
        except RouterError as error:
            if not isinstance(error, ClientDisconnectedError):
                self._kept.failed(place, key)
            raise
        if reply is not None:
            self._kept.keep(place, key, reply)
        return None

    def _unread(self, error: UnreadMediaError) -> BadRequestError:
        """Return the error for media that is not read, in the words for the model: one that sees, or one of text."""
        if self._media is None:
            return error
        place = str(error.details.get("param"))
        text = f"`{place}`: only images are read here, in messages of users and in results of tools"
        return MultimodalUnsupportedError(text, param=place)

    async def _shelved(self, session: Session, request: ChatRequest, sent: Mapping[str, Picture]) -> ChatRequest:
        """Keep the pictures of a conversation, and return the request, which holds them.

        Raises BadRequestError for what is none, and if the model reads none.
        """
        media, messages = self._media, request.messages
        if media is not None:
            media.check_fields(request.extra)
            parts = [part for message in messages for part in image_parts(message)]
            named, held = [part["digest"] for part in parts], Brought([])
            if parts:
                here = {part["digest"] for part in parts if getattr(part, "picture", None) is not None}
                held = await media.bring(session.tenant, named, here.union(sent))
            pictures = media.shelve(session.tenant, messages, sent, held.unasked)
            if pictures and session.lasting:
                session.need(media.shelf, named)
            del held  # the request holds them now
            if not pictures:
                return request
            lengths = media.lengths(session.tenant, named)
            return msgspec.structs.replace(request, pictures=tuple(pictures), lengths=lengths)
        for message in messages:
            if type(message.get("content")) is list and (parts := image_parts(message)):
                place, kind = (getattr(parts[0], name, None) for name in ("place", "kind"))
                text = f'`{place}` is of the type "{kind}": this model takes text only, by the files of the router. {SIGHT}'
                raise unsupported(text, str(place))
        return request

    async def _answer(
        self,
        dialect: Dialect,
        session: Session,
        request: ChatRequest,
        exchange: Exchange[TurnGeneration],
        receive: Receive,
        send: Send,
        headers: Mapping[bytes, bytes],
        record: RequestRecord,
    ) -> KeptReply | None:
        """Send the reply of an exchange, and return it if it is to be kept. Raises RouterError only before anything is sent."""
        delivered = False
        try:
            async with ClientConnection(receive) as client:
                reply = _ChatReply(dialect, session, request, exchange, client, send, headers, record, int(time.time()))
                await (reply.stream(self._still_unknown) if request.stream else reply.whole())
                delivered = True
                return reply.kept
        except asyncio.CancelledError:
            # The router stops. The client of a stream goes on elsewhere, as soon as it sees that the stream broke off.
            if request.stream:
                await exchange.abort()
            raise
        finally:
            for generation in exchange.generations:
                if (before := generation.prompt.checkpoint) is not None:
                    self._kept.continued(before.id)
                    before.asked = b""
            exchange.detach(delivered=delivered)
            if not delivered:
                session.orphans.add(exchange)
            session.settle(exchange)

    async def count(self, session: Session, request: ChatRequest, sent: Mapping[str, Picture]) -> Counted:
        """Return how many tokens the prompt of a turn would have. Changes nothing."""
        if self._warming is not None:
            await self._warmed(self._warming)
        request = await self._shelved(session, request, sent)
        request = session.defaults.complete(request, self._models.adapter_of)
        if self._media is not None:
            self._media.check_beside(request)
        if session.notes is not None:
            await session.notes.recall(request, None, self._composer.recognizer(session.trie.key, request))
        session.require(Act.GENERATE)
        is_echo = self._composer.recognizer(session.trie.key, request)
        turn = session.trie.prepare(setting_of(request), request.messages, is_echo=is_echo)
        handle = session.trie.open(turn, new_rid())
        try:
            prompt = await self._composer.compose(turn, request)
            estimated = any(one.length == UNKNOWN for one in prompt.media)
            return Counted(
                prompt.tokens + self._still_unknown(session, prompt), (MEDIA_ESTIMATED,) if estimated else ()
            )
        finally:
            session.trie.abandon(handle)

    def _still_unknown(self, session: Session, prompt: ComposedPrompt) -> int:
        return 0 if self._media is None else self._media.still_unknown(session.tenant, prompt.media)


@dataclass(slots=True)
class _ChatReply:
    """The reply of one exchange to one client."""

    _dialect: Dialect
    _session: Session
    _request: ChatRequest
    _exchange: Exchange[TurnGeneration]
    _client: ClientConnection
    _send: Send
    _asked: Mapping[bytes, bytes]
    _record: RequestRecord
    _began: int
    kept: KeptReply | None = None
    """The whole reply, once it was sent; None if it failed, or is too long."""
    _out: list[bytes] = field(default_factory=list)
    """What was sent of a stream, as long as it may be kept."""
    _size: int = 0
    _silent: bool = False
    """Whether nothing was sent since the last tick."""
    _ping_due: bool = False
    _ticker: asyncio.TimerHandle | None = None

    def _head(self) -> ReplyHead:
        generations = self._exchange.generations
        name = of_several(generations[0].id, len(generations))
        return ReplyHead(name, self._began, self._request.model or "default")

    def _shown(self) -> ChatRequest:
        """Return the request as its reply repeats it: with the sampling that the session may have set or changed."""
        if not self._session.defaults.sampling_params:
            return self._request
        given = {name: value for name, value in self._request.sampling.items() if name in _CLIENTS_OWN}
        used = self._exchange.generations[0].sampling
        sampling = {name: value for name, value in used.items() if name not in _CLIENTS_OWN}
        return msgspec.structs.replace(self._request, sampling={**sampling, **given})

    async def whole(self) -> None:
        await self._exchange.all_over()
        # The choices of a reply in one piece are numbered without those that failed.
        answers, answered = [], []
        for one in self._exchange.generations:
            if one.answer is not None:
                answers.append(one.answer)
                answered.append(one)
        if not answers:
            raise self._exchange.failure
        request, head = self._shown(), self._head()
        if request.logprobs:
            told = (1 + request.top_logprobs) * sum(len(one.logprobs or ()) for one in answers)
            body = await offload(told > MANY_LOGPROBS, self._dialect.whole, request, head, answers)
        else:
            body = self._dialect.whole(request, head, answers)
        self._client.stop_watching()
        headers = self._headers(answered, _recorded(self._exchange.generations))
        await send_json(self._send, 200, body, headers)
        self._keep(headers, body)

    async def stream(self, still_unknown: Callable[[Session, ComposedPrompt], int]) -> None:
        """Send the reply as events. `still_unknown`: by how many tokens a prompt is longer than is known when they begin."""
        begun = await self._exchange.begun()
        if not begun and not self._exchange.answers:
            raise self._exchange.failure
        generations = self._exchange.generations
        stream = self._dialect.stream(self._shown(), self._head())
        headers: HeaderList = [(b"content-type", stream.content_type), (b"cache-control", b"no-cache")]
        headers += self._headers(generations, "pending")
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        prompt = generations[0].prompt
        out = [stream.begin(prompt.tokens + (still_unknown(self._session, prompt) if prompt.media else 0))]
        self._tick()
        try:
            await self._send_pieces(stream, out)
        finally:
            if self._ticker is not None:
                self._ticker.cancel()
        await self._exchange.all_over()
        # If some of several samples failed, the others are the reply, as in a reply in one piece.
        answers = self._exchange.answers
        for index, generation in enumerate(generations if answers else ()):
            if generation.answer is None:  # a partial reply must not look complete
                out.append(stream.finish(index, Answer(generation_id=generation.id, finish="abort")))
        if not self._saved(generations):
            out.append(stream.comment(*(part.decode() for part in NOT_SAVED)))
        self._record.broken = not answers
        out.append(stream.end(answers) if answers else stream.failed(self._exchange.failure))
        self._client.stop_watching()
        await self._send_on(out, last=True)
        if answers:
            self._keep(headers, b"".join(self._out))
        self._out.clear()

    def _keep(self, headers: HeaderList, body: bytes) -> None:
        if len(body) <= MOST_BYTES and self._size <= MOST_BYTES:
            names = tuple(map(_id_of, self._exchange.generations))
            self.kept = KeptReply(headers, body, self._request.stream, names, time.monotonic())

    async def _send_pieces(self, stream: DialectStream, out: list[bytes]) -> None:
        """Send `out` and the pieces of all generations as they come; what is left in `out` is still to be sent."""
        generations = self._exchange.generations
        sent, running = [0] * len(generations), set(range(len(generations)))
        write = self._send.write if isinstance(self._send, DirectSend) else leave

        def gather() -> bool:
            """Put the pieces that are new into `out`, as many as go at once; return whether there are more."""
            room = PIECES_AT_ONCE
            for index in sorted(running):
                generation = generations[index]
                made, begin = generation.building.pieces, sent[index]
                sent[index] = end = min(len(made), begin + room)
                for piece, logprobs in made[begin:end]:
                    out.append(stream.piece(index, piece, logprobs))
                room -= end - begin
                if end < len(made):
                    return True
                if generation.answer is not None:
                    out.append(stream.finish(index, generation.answer))
                if generation.over or self._exchange.over:
                    running.discard(index)
            return False

        def written() -> bool:
            """Write what is new to the client; return False where this task has to do it, because it may have to wait."""
            behind = gather()
            if body := b"".join(out):  # a piece that is hidden from the client is empty
                if not write(body):
                    return False
                self._note(body)
            out.clear()
            return bool(running) and not (behind or self._ping_due)

        while running:
            behind = gather()
            if running:
                if self._ping_due:
                    self._ping_due = False
                    out.append(stream.ping())
                await self._send_on(out)
                await (asyncio.sleep(0) if behind else self._exchange.news(written))

    def _tick(self) -> None:
        """Have a ping sent if nothing was sent since the last tick. A timer for each event would cost more than the event."""
        if self._silent:
            self._ping_due = True
            self._exchange.notify()
        self._silent = True
        self._ticker = asyncio.get_running_loop().call_later(PING_SECONDS / 2, self._tick)

    async def _send_on(self, out: list[bytes], *, last: bool = False) -> None:
        body = b"".join(out)
        out.clear()
        if body or last:
            self._note(body)
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    def _note(self, body: bytes) -> None:
        """Keep what is sent, as long as it may be kept."""
        self._silent = False
        self._size += len(body)
        if self._size <= MOST_BYTES:
            self._out.append(body)
        else:
            self._out.clear()

    def _saved(self, named: list[TurnGeneration]) -> bool:
        """Return whether these turns and those before them are in the store, as far as this router knows."""
        log = self._session.log
        return all(map(_saved_of, named)) and (log is None or not log.unsaved)

    def _headers(self, named: list[TurnGeneration], recorded: str) -> HeaderList:
        first = self._exchange.generations[0]
        headers: HeaderList = [
            (b"x-generation-id", ", ".join(map(_id_of, named)).encode("latin-1")),
            (b"x-radix-reused-tokens", b"%d" % first.prompt.reused),
            (b"x-radix-recorded", recorded.encode("latin-1", "replace")),
        ]
        if not first.prompt.media or all(one.length != UNKNOWN for one in first.prompt.media):
            headers.append((b"x-radix-prompt-tokens", b"%d" % first.prompt.tokens))
        if not self._saved(named):
            headers.append(NOT_SAVED)
        if self._session.lasting:
            headers.append((b"x-session-id", self._session.id.encode("latin-1")))
        headers.append((affinity.HEADER, _affinity(self._session, self._request, self._asked)))
        if first.prompt.spliced:
            headers.append((b"x-radix-spliced-turns", b"%d" % first.prompt.spliced))
        if self._request.ignored_tools:
            kinds = self._request.ignored_tools[:_MOST_IGNORED]
            more = ("...",) * (len(self._request.ignored_tools) > len(kinds))
            headers.append((b"x-radix-ignored-tools", ", ".join((*kinds, *more)).encode("latin-1", "replace")))
        if self._request.ignored_fields:
            headers.append((b"x-radix-ignored-fields", ", ".join(self._request.ignored_fields).encode("latin-1")))
        if self._exchange.notes:
            headers.append((b"x-radix-reasons", ", ".join(self._exchange.notes).encode("latin-1")))
        if first.worker:
            headers.append((b"x-router-worker", first.worker.encode("latin-1")))
        if first.routed:
            headers.append((b"x-router-reason", first.routed.encode("latin-1")))
        return headers


def _affinity(session: Session, request: ChatRequest, asked: Mapping[bytes, bytes]) -> bytes:
    word = affinity.given(asked) if affinity.HEADER in asked else None
    if word is None and session.lasting:
        return session.id.encode("latin-1")
    namespace = session.tenant, asked.get(b"x-radix-namespace", b"").decode("latin-1")
    return word or affinity.of_chat(namespace, request.messages)


def _recorded(generations: list[TurnGeneration]) -> str:
    exact, values = 0, set()
    for generation in generations:
        verdict = generation.verdict
        values.add("no; no reply" if verdict is None else verdict.header)
        exact += verdict is not None and verdict.outcome == "exact"
    if len(values) == 1:
        return values.pop().replace("\n", " ")
    return f"inexact; {exact} of {len(generations)} replies are exact"
