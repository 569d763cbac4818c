"""`Completions`: OpenAI's `POST /v1/completions`, as pure ASGI around the application that serves `/generate`.

A request becomes a `/generate` with the prompt unchanged. The layers inside match the prompt, have it answered and record the
reply; their reply is passed on in OpenAI's form, a stream event by event. They get the client's own `receive`, so that they see
when the client leaves.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware_hub.chat.answer import ReplyHead
from middleware_hub.chat.errors import refusal, unreadable
from middleware_hub.dialects.completions import Choices, CompletionAnswer, CompletionRequest, parse
from middleware_hub.dialects.openai.replies import error_body
from middleware_hub.served_models import ServedModels
from middleware_hub.spans.reply_names import of_several
from middleware_hub.store.errors import NOT_SAVED_COMMENT
from middleware_hub.tokenizer.tokenizer import Tokenizer
from middleware_hub.tokenizer.vocabulary import check_unmatched
from router.engines.events import DONE, event_index
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.form.reply import UnreadableReplyError, split_list
from router.engines.form.worker_request import new_rid
from router.engines.json_cost import LIGHT
from router.errors import RouterError, UpstreamError
from router.http.bodies import Replay, read_json, with_body
from router.http.headers import HeaderList
from router.http.offload import offload
from router.http.reply import CollectedReply, WatchedReply
from router.http.responses import send_json
from router.http.upstream import UpstreamBrokenError

_PASSED_ON = (b"x-radix-", b"x-router-")
"""The prefixes of reply headers that are passed on. The others describe a body that the client does not get."""


class Completions:
    """See the top of this file.

    Args:
        tokenizer: spells prompts and tokens for clients that want to see them.
        models: know which adapter a `model` names.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokenizer: Tokenizer,
        models: ServedModels,
        *,
        max_body_bytes: int,
        limits: PromptLimits = PROMPT_LIMITS,
    ) -> None:
        self._limits = limits
        self._app = app
        self._tokenizer = tokenizer
        self._models = models
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever its path. Errors are answered in OpenAI's form."""
        try:
            await self._serve(scope, receive, send)
        except RouterError as error:
            headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
            await send_json(send, error.status, msgspec.json.encode(error_body(error)), headers)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        written = await read_json(scope, receive, self._max_body_bytes)
        heavy = len(written) > LIGHT
        request = await offload(heavy, self._parsed, written)
        if self._models.must_ask(request.model):
            await self._models.ask(scope)
        adapter = self._models.adapter_of(request.model)
        if adapter is not None:
            extra = {**request.extra, "lora_path": Raw(msgspec.json.encode(adapter))}
            request = msgspec.structs.replace(request, extra=extra)
        rid = of_several(new_rid(), request.replies)
        body = await offload(heavy, request.generate, rid)
        choices = self._choices(request, ReplyHead(f"cmpl-{rid}", int(time.time()), request.model or "default"))
        answers = [CompletionAnswer(request, self._tokenizer.vocabulary) for _ in range(request.replies)]
        inner, receive = _inner(scope, body), Replay(body, receive)
        if request.stream:
            await _CompletionStream(request, choices, answers, send).run(self._app, inner, receive)
            return
        reply = CollectedReply()
        try:
            await self._app(inner, receive, reply.send)
        except UpstreamBrokenError as error:
            raise UpstreamError(str(error)) from error
        if reply.start["status"] != 200:
            raise refusal(reply.start["status"], reply.body)
        try:
            replies = split_list(reply.body, request.replies) if request.listed else [Raw(reply.body)]
        except UnreadableReplyError as error:
            raise unreadable(error) from error
        found = []
        for answer, raw in zip(answers, replies, strict=True):
            found.append(await offload(request.logprobs is not None and len(raw) > LIGHT, answer.whole, raw))
            await asyncio.sleep(0)  # a batch may be large
        heavy = request.logprobs is not None and len(reply.body) > LIGHT
        await send_json(send, 200, await offload(heavy, choices.whole, found), _passed_on(reply.start))

    def _parsed(self, body: bytes) -> CompletionRequest:
        request = parse(body, self._limits)
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                check_unmatched(self._tokenizer.vocabulary, prompt, "prompt")
        return request

    def _choices(self, request: CompletionRequest, head: ReplyHead) -> Choices:
        fronts = [""] * len(request.prompts)
        if request.echo:
            spell = self._tokenizer.spell_prompt
            fronts = [prompt if isinstance(prompt, str) else spell(prompt) for prompt in request.prompts]
        hidden = self._tokenizer.vocabulary.special_ids if request.skips_special else frozenset[int]()
        return Choices(head, request, fronts, hidden)


class _CompletionStream:
    """Watches one streamed reply and sends it on. Its head waits for the first event, which may be an error with a status."""

    def __init__(
        self, request: CompletionRequest, choices: Choices, answers: list[CompletionAnswer], send: Send
    ) -> None:
        self._request = request
        self._choices = choices
        self._answers = answers
        self._send = send
        self._start: Message = {"status": 502}
        self._begun = False
        self._done = False
        self._refused = b""
        self._error: RouterError | None = None
        self._out: list[bytes] = []

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Send the whole reply. Raises RouterError only before anything is sent."""
        try:
            await app(scope, receive, WatchedReply(self, self._send_on).send)
            if self._start["status"] != 200:
                raise refusal(self._start["status"], self._refused)
            if self._error is None and not self._done:
                raise UpstreamError("the worker's stream ended before its end")
        except RouterError as error:
            self._error = self._error or error
        except UpstreamBrokenError as error:
            self._error = self._error or UpstreamError(str(error))
        if self._error is None:
            end = self._choices.end([one.answer for one in self._answers if one.answer is not None])
        elif self._begun:
            # `[DONE]` after it would make it look like a success.
            end = b"data: " + msgspec.json.encode(error_body(self._error)) + b"\n\n"
        else:
            raise self._error
        await self._send_body(end, last=True)

    def head(self, start: Message) -> None:
        self._start = start

    def event(self, data: bytes) -> None:
        """Take the payload of an event. Events after an error, or after the `[DONE]` of all replies, are ignored."""
        if self._error is None and not self._done:
            try:
                self._out.append(self._piece(data))
            except RouterError as error:
                self._error = error

    def end(self, body: bytes) -> None:
        """Take the body of a reply that is an error."""
        self._refused = body

    def _piece(self, data: bytes) -> bytes:
        """Return what the client gets of an event; that may be nothing yet."""
        if data == DONE:
            self._done = all(one.answer is not None for one in self._answers)
            return b""
        number = event_index(data) if self._request.listed else 0
        if not 0 <= number < len(self._answers):
            raise UpstreamError(f"the worker's stream has an event of reply {number}, of {len(self._answers)}")
        one = self._answers[number]
        over = one.answer is not None
        text = one.event(data)
        ended = None if over else one.answer
        # A token whose text is held back waits for that text: a token without text is sent with the next text.
        if not text and ended is None:
            return b""
        return self._choices.piece(number, text, one.news(), ended)

    async def _send_on(self, message: Message) -> None:
        if message.get("body", b"").startswith(NOT_SAVED_COMMENT):
            self._out.insert(0, NOT_SAVED_COMMENT)
        body = b"".join(self._out)
        self._out.clear()
        if body:
            await self._send_body(body)

    async def _send_body(self, body: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            headers: HeaderList = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            headers += _passed_on(self._start)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


def _inner(scope: Scope, body: bytes) -> Scope:
    """Return the scope of the `/generate`: the client's own headers, except those that describe its body."""
    inner = with_body(scope, body)
    headers = [pair for pair in inner["headers"] if pair[0] not in (b"content-type", b"accept")]
    return {
        **inner,
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [*headers, (b"content-type", b"application/json")],
    }


def _passed_on(start: Message) -> HeaderList:
    return [(name, value) for name, value in start["headers"] if name.startswith(_PASSED_ON)]
