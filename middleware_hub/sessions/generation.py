"""One generation of a session: asked of a worker, given to the client piece by piece, and committed.

Nothing of the session is held while the worker generates. However it ends (answered, refused, cut off, cancelled), exactly one
of two things happens: what was sampled becomes a checkpoint, or the trie is as if there had been no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Message, Scope

from middleware_hub.recording import Asked, Judge, Verdict
from middleware_hub.sessions.chat import (
    Answer,
    Call,
    ChatRequest,
    Finish,
    Piece,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCall,
)
from middleware_hub.sessions.composing import ComposedPrompt, spoken
from middleware_hub.sessions.message_key import call_id
from middleware_hub.sessions.message_trie import BranchHandle, Checkpoint, MessageTrie, PreparedTurn, TrieClosedError
from middleware_hub.sessions.parsers.plain import Plain
from middleware_hub.sessions.parsers.reply import ReplyParser
from middleware_hub.sessions.refusals import SessionOverError, refusal
from middleware_hub.spans import SpanFlag, TokenSpan
from router.asgi import KEPT, ROUTE_HINT, RouteHint, collected, replay, with_body
from router.errors import RouterError, UpstreamError
from router.sglang import EventSplitter, Reply, StreamedReply, UnreadableReplyError, event_data, read_reply
from router.sglang.attempt import ATTEMPT, Attempt, refusal_status
from router.sglang.reply import Usage, further_fields, read_fields
from router.sglang.stream import DONE
from router.tracing import OFF, Tracer
from router.upstream import UpstreamBrokenError

logger = logging.getLogger(__name__)

_KEPT_HEADERS = frozenset({b"authorization", b"x-request-id", b"x-abort-policy", b"traceparent", b"tracestate"})
"""Of the client's; the others are about its own dialect."""
_ABORT_SECONDS = 10.0
"""How long a worker may take to hand over what it has sampled of a generation that is to end."""


class Generation:
    """See the top of this file.

    Args:
        app: the layers inside, which bring a `/generate` to a worker.
        scope: of the client's request.
        judge: holds the reply against what was asked.
        trie, turn, handle: where it belongs.
        prompt: what is sent.
        request: what the client wants.
        sampling: `sampling_params`, complete.
        parser: takes the sampled text apart; made for this generation.
        routing_key: generations with the same one have a prefix in common.
        bell: rung whenever there is something new.
        on_commit: told of the checkpoint.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        judge: Judge,
        trie: MessageTrie,
        turn: PreparedTurn,
        handle: BranchHandle,
        prompt: ComposedPrompt,
        request: ChatRequest,
        sampling: dict[str, Any],
        parser: ReplyParser,
        *,
        routing_key: str,
        logprobs: bool,
        bell: Callable[[], None],
        on_commit: Callable[[ComposedPrompt, Checkpoint], None],
        tracer: Tracer = OFF,
    ) -> None:
        self._app = app
        self._judge = judge
        self._trie = trie
        self._turn = turn
        self._handle = handle
        self._prompt = prompt
        self._request = request
        self._parser = parser
        self._bell = bell
        self._tracer = tracer
        self._on_commit = on_commit
        self._spent = sampling.get("max_new_tokens") == 0
        self._skips_special = sampling.get("skip_special_tokens") is not False
        self._logprobs = logprobs or request.logprobs
        self._inner = self._scope(scope, routing_key)
        self._body = self._worker_body(sampling, self._inner["state"])
        self._calls: list[ToolCall] = []
        self._shown = 0
        self.pieces: list[tuple[Piece, Sequence[TokenLogprob] | None]] = []
        """What a client has been told so far, in order; of a stream, as it came."""
        self.answer: Answer | None = None
        self.error: RouterError | None = None
        self.verdict: Verdict | None = None
        self.worker = ""
        self.seconds = 0.0
        """What it took."""
        self.begun = False
        """Whether a reply has begun to come that is none of an error."""

    def __repr__(self) -> str:
        state = "answered" if self.answer else f"failed: {self.error}" if self.error else "in flight"
        return f"<Generation {self.id}: {state}>"

    @property
    def id(self) -> str:
        """Its name, here and at the worker."""
        return self._handle.generation_id

    @property
    def prompt_tokens(self) -> int:
        """What was sent."""
        return self._prompt.tokens

    @property
    def reused_tokens(self) -> int:
        """Of these, taken from memory."""
        return self._prompt.reused

    @property
    def over(self) -> bool:
        """Whether there is an answer, or an error."""
        return self.answer is not None or self.error is not None

    async def run(self) -> None:
        """From the request to the commit. Raises nothing: `error` says what went wrong."""
        begun = time.perf_counter()
        try:
            if self._spent:
                self._end_branch()
            elif self._request.stream:
                await self._stream()
            else:
                await self._whole()
        except RouterError as error:
            self.error = error
        except TrieClosedError:
            self.error = SessionOverError("the session ended before this generation did: what was sampled is not kept")
        except (UpstreamBrokenError, UnreadableReplyError) as error:
            self.error = UpstreamError(str(error))
        except Exception as error:
            logger.exception("generation %s failed", self.id)
            self.error = RouterError(f"internal error ({type(error).__name__}): the router's log has the details")
        finally:
            self.seconds = time.perf_counter() - begun
            self._trie.abandon(self._handle)
            if not self.over:
                self.error = SessionOverError("this generation was cancelled")
            self._bell()

    def _end_branch(self) -> None:
        """The session's `response_budget` is used up: no worker is asked, and the branch ends for want of length."""
        if self._prompt.checkpoint is not None:
            self._prompt.checkpoint.finish = "length"
        self.verdict = Verdict("no", "response_budget")
        self.answer = Answer(generation_id=self.id, finish="length", prompt_tokens=self.prompt_tokens)

    async def abort(self) -> None:
        """Have the worker end it; what was sampled so far is then its answer."""
        if self.over:
            return
        body = msgspec.json.encode({"rid": self.id})
        scope = with_body({**self._inner, "path": "/abort_request", "raw_path": b"/abort_request"}, body)

        async def unheard(_: Message) -> None: ...

        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._app(scope, replay(body, _never), unheard)
        except (RouterError, UpstreamBrokenError, TimeoutError) as error:
            logger.info("generation %s could not be aborted: %s", self.id, error)

    # To the worker -----------------------------------------------------------------------------------------------------

    def _scope(self, scope: Scope, routing_key: str) -> Scope:
        headers = [pair for pair in scope["headers"] if pair[0] in _KEPT_HEADERS]
        headers.append((b"content-type", b"application/json"))
        hint = RouteHint(None, memoryview(self._prompt.ids.packed).cast("i"), routing_key)
        return {
            **scope,
            "method": "POST",
            "path": "/generate",
            "raw_path": b"/generate",
            "query_string": b"",
            "headers": headers,
            "state": {**(scope.get("state") or {}), KEPT: True, ROUTE_HINT: hint},
        }

    def _worker_body(self, sampling: dict[str, Any], state: dict[str, Any]) -> bytes:
        """The body of `/generate`; `state` tells the layers inside what is in it, so that they need not read it again."""
        fields: dict[str, Raw] = {
            **self._request.extra,
            "rid": Raw(b'"%b"' % self.id.encode()),
            "input_ids": Raw(self._prompt.ids.written),
            "sampling_params": Raw(msgspec.json.encode(sampling)),
            "stream": Raw(b"true" if self._request.stream else b"false"),
        }
        if self._logprobs:
            fields["return_logprob"] = Raw(b"true")
            if self._request.top_logprobs:
                fields["top_logprobs_num"] = Raw(b"%d" % self._request.top_logprobs)
        body = msgspec.json.encode(fields)
        state[ATTEMPT] = body, Attempt.single(fields, self.id, stream=self._request.stream)
        return body

    async def _ask(self, send: Callable[[Message], Any]) -> None:
        await self._app(with_body(self._inner, self._body), replay(self._body, _never), send)

    async def _whole(self) -> None:
        asked = self._asked()
        start, body = await collected(self._app, with_body(self._inner, self._body), replay(self._body, _never))
        self._begin(start, body)
        reply, short = read_reply(body)
        tops = _top_logprobs(read_fields(body)[1]) if self._request.top_logprobs else ()
        self._take(self._parsed(reply.text), ())
        self._finish(asked, reply, *read_fields(short), tops)

    async def _stream(self) -> None:
        events, streamed = EventSplitter(), StreamedReply(added=[])
        tops: list[Any] = []
        asked = self._asked()
        start: Message = {}
        refused: list[bytes] = []
        status: list[int] = []  # of an error that came as an event

        async def take(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                if message["status"] == 200:
                    self.worker = _worker_of(message)
            elif start["status"] != 200:
                refused.append(message.get("body", b""))
            else:
                for event in events.feed(message.get("body", b"")):
                    data = event_data(event)
                    if data is not None and (data.startswith(b"{") or data == DONE):
                        self._event(streamed, data, tops)
                        if streamed.error is not None and not status:
                            status.append(refusal_status(data) or 502)

        try:
            await self._ask(take)
            if start["status"] != 200:
                raise refusal(start["status"], b"".join(refused))
            if streamed.error is not None:
                raise refusal(status[0] if status else 502, streamed.error)
            reply = streamed.reply()
            if reply is None or not streamed.done:
                raise UpstreamError("the worker's stream ended before its end")
        except BaseException:
            # Whoever breaks it off: what was sampled was sampled.
            reply = streamed.reply()
            if reply is not None and reply.ids and not self._trie.closed:
                self._take(self._parsed(None), ())
                self._commit(asked, reply, *self._said(), "abort", {})
            raise
        self._finish(asked, reply, streamed.last_fields, streamed.last_meta, tops)

    def _event(self, streamed: StreamedReply, data: bytes, tops: list[Any]) -> None:
        streamed.feed(data)
        if streamed.error is not None or data == DONE:
            return
        self.begun = True
        if self._request.top_logprobs:
            _join_tops(tops, _top_logprobs(streamed.last_meta), len(streamed.logprobs))
        added = streamed.added or []
        text = "".join([msgspec.json.decode(piece, type=str) for piece in added])
        added.clear()
        if text:
            self._take(self._parsed(text), tops, streamed)
            self._bell()

    def _asked(self) -> Asked:
        return Asked(
            self._prompt.tokens,
            self._skips_special,
            self._logprobs,
            self.id,
            self._judge.workers.moment(),
            self._judge.clock.steps,
        )

    # From the worker ---------------------------------------------------------------------------------------------------

    def _begin(self, start: Message, body: bytes) -> None:
        self.worker = _worker_of(start)
        if start["status"] != 200:
            raise refusal(start["status"], body)
        self.begun = True

    def _parsed(self, text: str | None) -> Sequence[Text | Reasoning | Call]:
        """What a parser makes of the next piece of text, or of the end (None). Where it fails, the rest is text."""
        try:
            return self._parser.finish() if text is None else self._parser.feed(text)
        except Exception:
            logger.exception("the parser of %s failed: the rest of its text is told as it is", self.id)
            self._parser = ReplyParser(Plain(()))
            return [Text(text)] if text else []

    def _take(
        self, found: Sequence[Text | Reasoning | Call], tops: Sequence[Any], streamed: StreamedReply | None = None
    ) -> None:
        """Pieces of the reply, for the client to see."""
        for number, piece in enumerate(found):
            logprobs = None
            if streamed is not None and self._request.logprobs and number == len(found) - 1:
                logprobs = self._spelled(streamed.logprobs[self._shown :], tops[self._shown :])
                self._shown = len(streamed.logprobs)
            shown: Piece
            if isinstance(piece, Call):
                if self._calls and not self._request.parallel_calls:
                    continue
                shown = self._called(piece)
            else:
                shown = piece
            self.pieces.append((shown, logprobs))

    def _called(self, call: Call) -> ToolCall:
        node, number = self._turn.node, len(self._calls)
        made = ToolCall(call_id(node.key, node.depth, number, call.name, call.arguments), call.name, call.arguments)
        self._calls.append(made)
        return made

    def _finish(
        self, asked: Asked, reply: Reply, fields: dict[str, Raw], meta: dict[str, Raw], tops: Sequence[Any]
    ) -> None:
        """It is over: commit it, and answer."""
        self._take(self._parsed(None), ())
        content, reasoning = self._said()
        finish = _finish_of(reply, bool(self._calls))
        extra = further_fields(fields, meta)
        self._commit(asked, reply, content, reasoning, finish, extra)
        usage = msgspec.json.decode(msgspec.json.encode(meta), type=Usage)
        entries = list(zip(reply.logprobs or (), reply.logprob_ids or (), strict=False))
        self.answer = Answer(
            generation_id=self.id,
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(self._calls),
            finish=finish,
            matched=reply.matched,
            prompt_tokens=self._prompt.tokens,
            completion_tokens=len(reply.ids),
            cached_tokens=usage.cached_tokens or 0,
            reasoning_tokens=usage.reasoning_tokens or 0,
            weight_version=reply.version,
            logprobs=self._spelled(entries, tops) if self._request.logprobs else None,
            extra=extra,
        )

    def _said(self) -> tuple[str, str]:
        """Content and reasoning, as far as they have come."""
        content = [piece.text for piece, _ in self.pieces if isinstance(piece, Text)]
        return "".join(content), "".join([piece.text for piece, _ in self.pieces if isinstance(piece, Reasoning)])

    def _commit(
        self, asked: Asked, reply: Reply, content: str, reasoning: str, finish: Finish, extra: dict[str, Raw]
    ) -> None:
        with self._tracer.span("commit", tokens=len(reply.ids)):
            self._attach(asked, reply, content, reasoning, finish, extra)

    def _attach(
        self, asked: Asked, reply: Reply, content: str, reasoning: str, finish: Finish, extra: dict[str, Raw]
    ) -> None:
        if self._trie.closed:
            raise TrieClosedError
        judgement = self._judge.judge(asked, reply, self.worker)
        self.verdict = judgement.verdict
        sampled = judgement.reply
        if sampled is None:
            return
        self._judge.clock.observe_reply(sampled.versions, late=sampled.late)
        span = TokenSpan(
            self._prompt.span,
            self._prompt.take,
            0,
            sampled.ids,
            0,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            flags=sampled.flags | SpanFlag.WHOLE,
            visible=-1 if sampled.visible is None else sampled.visible,
        )
        message, in_place = spoken(self._request, self._turn, content)
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._calls
            ]
        shown = sampled.tail[0].shown if sampled.tail else 0
        checkpoint = (self._trie.commit_in_place if in_place else self._trie.commit)(
            self._handle,
            message,
            span,
            finish=finish,
            tail=sampled.tail,
            shown=sampled.text[-shown:] if shown else "",
            reasoning=reasoning,
            reasons=self._prompt.reasons,
            extra=extra,
        )
        self._on_commit(self._prompt, checkpoint)

    def _spelled(self, entries: Sequence[Any], tops: Sequence[Any]) -> list[TokenLogprob]:
        piece = self._judge.tokenizer.vocabulary.piece
        found = []
        for number, entry in enumerate(entries):
            best = tops[number] if number < len(tops) else ()
            found.append(
                TokenLogprob(
                    entry[1],
                    piece(entry[1]),
                    entry[0],
                    [(one[1], piece(one[1]), one[0]) for one in best or ()],
                )
            )
        return found


def _finish_of(reply: Reply, called: bool) -> Finish:
    if reply.finish_type == "length":
        return "length"
    if reply.finish_type != "stop":
        return "abort"
    return "tool_calls" if called else "stop"


def _top_logprobs(meta: dict[str, Raw]) -> list[Any]:
    raw = meta.get("output_top_logprobs")
    found: list[Any] = [] if raw is None else msgspec.json.decode(raw) or []
    return found


def _join_tops(tops: list[Any], new: list[Any], tokens: int) -> None:
    """Alternatives of an event: of all tokens so far, or of those that are new."""
    if len(new) == tokens:
        tops[:] = new
    else:
        tops += new


def _worker_of(start: Message) -> str:
    url: bytes = dict(start["headers"]).get(b"x-router-worker", b"")
    return url.decode("latin-1")


async def _never() -> Message:
    """A client that does not leave: whoever sends this decides by itself when it is over."""
    await asyncio.Event().wait()
    raise AssertionError
