"""`Completions`: OpenAI's `POST /v1/completions`, as pure ASGI around whatever serves `/generate`.

The walk of one: the body becomes one of `/generate`, with the prompt as it is; the layers inside match it, have it answered
and remember the reply; what they say goes on in OpenAI's form, a stream event by event. A client that leaves is theirs to see:
they are given its own `receive`.
"""

from __future__ import annotations

import asyncio
import time

from msgspec import Raw
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware_hub.chat.answer import ReplyHead
from middleware_hub.chat.refusals import refusal
from middleware_hub.dialects import completions_requests
from middleware_hub.dialects.completions_answer import CompletionAnswer, unreadable
from middleware_hub.dialects.completions_replies import Choices
from middleware_hub.dialects.completions_requests import CompletionRequest
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.radix import prompting
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.engines.sglang import EventSplitter, UnreadableReplyError, event_data, event_index, split_list
from router.engines.sglang.limits import PROMPT_LIMITS, PromptLimits
from router.engines.sglang.stream import DONE
from router.engines.sglang.worker_request import new_rid
from router.errors import RouterError, UpstreamError
from router.http.asgi import HeaderList, collected, read_json, replay, send_json, with_body
from router.http.json_cost import LIGHT
from router.http.offload import beside
from router.http.upstream import UpstreamBrokenError

_ERRORS = OpenAI()
_PASSED_ON = (b"x-radix-", b"x-router-")
"""How the reply headers begin that are passed on: the others are about a body that the client does not get."""


class Completions:
    """See the top of this file.

    Args:
        app: the layers inside.
        tokenizer: spells prompts and tokens, where the client wants to see them.
        max_body_bytes: of a request.
        limits: for its prompts.
    """

    def __init__(
        self, app: ASGIApp, tokenizer: Tokenizer, *, max_body_bytes: int, limits: PromptLimits = PROMPT_LIMITS
    ) -> None:
        self._limits = limits
        self._app = app
        self._tokenizer = tokenizer
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever its path. Errors are answered in OpenAI's form."""
        try:
            await self._serve(scope, receive, send)
        except RouterError as error:
            headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers]
            await send_json(send, error.status, _ERRORS.error(error), headers)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        written = await read_json(scope, receive, self._max_body_bytes)
        heavy = len(written) > LIGHT
        request = await beside(heavy, self._parsed, written)
        rid = new_rid()
        body = await beside(heavy, request.generate, rid)
        choices = self._choices(request, ReplyHead(f"cmpl-{rid}", int(time.time()), request.model or "default"))
        told = [CompletionAnswer(request, self._tokenizer.vocabulary) for _ in range(request.replies)]
        inner = _inner(scope, body)
        if request.stream:
            stream = _Stream(request, choices, told, send)
            await stream.run(self._app, inner, replay(body, receive))
        else:
            await self._whole(request, choices, told, inner, replay(body, receive), send)

    def _parsed(self, body: bytes) -> CompletionRequest:
        request = completions_requests.parse(body, self._limits)
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                prompting.check_ids(self._tokenizer, prompt, "prompt")
        return request

    def _choices(self, request: CompletionRequest, head: ReplyHead) -> Choices:
        fronts = [""] * len(request.prompts)
        if request.echo:
            spell = self._tokenizer.spell_prompt
            fronts = [prompt if isinstance(prompt, str) else spell(prompt) for prompt in request.prompts]
        hidden = self._tokenizer.vocabulary.special_ids if request.skips_special else frozenset[int]()
        return Choices(head, request, fronts, hidden)

    async def _whole(
        self,
        request: CompletionRequest,
        choices: Choices,
        told: list[CompletionAnswer],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            start, body = await collected(self._app, scope, receive)
        except UpstreamBrokenError as error:
            raise UpstreamError(str(error)) from error
        if start["status"] != 200:
            raise refusal(start["status"], body)
        try:
            replies = split_list(body, request.replies) if request.listed else [Raw(body)]
        except UnreadableReplyError as error:
            raise unreadable(error) from error
        answers = []
        for one, reply in zip(told, replies, strict=True):
            answers.append(one.whole(reply))
            await asyncio.sleep(0)  # a batch may be large
        await send_json(send, 200, choices.whole(answers), _passed_on(start))


class _Stream:
    """One streamed reply on its way. Its head waits for the first event: that may be an error, with a status of its own."""

    def __init__(self, request: CompletionRequest, choices: Choices, told: list[CompletionAnswer], send: Send) -> None:
        self._request = request
        self._choices = choices
        self._told = told
        self._send = send
        self._events = EventSplitter()
        self._start: Message = {"status": 502}
        self._begun = False
        self._done = False
        self._refused: list[bytes] = []
        self._error: RouterError | None = None

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """From the request to the last event. Raises RouterError only as long as nothing was sent."""
        try:
            await app(scope, receive, self._take)
            if self._start["status"] != 200:
                raise refusal(self._start["status"], b"".join(self._refused))
            if self._error is None and not self._done:
                raise UpstreamError("the worker's stream ended before its end")
        except RouterError as error:
            self._error = self._error or error
        except UpstreamBrokenError as error:
            self._error = self._error or UpstreamError(str(error))
        if self._error is None:
            await self._say(self._choices.end([one.answer for one in self._told if one.answer is not None]), last=True)
        elif self._begun:
            # Nothing comes behind it: with `[DONE]` it would look like a success.
            await self._say(b"data: " + _ERRORS.error(self._error) + b"\n\n", last=True)
        else:
            raise self._error

    async def _take(self, message: Message) -> None:
        """What the application inside calls."""
        if message["type"] == "http.response.start":
            self._start = message
        elif self._start["status"] != 200:
            self._refused.append(message.get("body", b""))
        else:
            out = []
            for event in self._events.feed(message.get("body", b"")):
                data = event_data(event)
                if data is not None and self._error is None:
                    out.append(self._event(data))
            if body := b"".join(out):
                await self._say(body)

    def _event(self, data: bytes) -> bytes:
        """What the client is told of an event, which may be nothing yet."""
        if data == DONE:
            self._done = all(one.answer is not None for one in self._told)
            return b""
        number = event_index(data) if self._request.listed else 0
        try:
            if not 0 <= number < len(self._told):
                raise UpstreamError(f"the worker's stream has an event of reply {number}, of {len(self._told)}")
            one = self._told[number]
            over = one.answer is not None
            text = one.event(data)
        except RouterError as error:
            self._error = error
            return b""
        ended = None if over else one.answer
        # A token whose text is held back waits for it: what has no text is told with what comes next.
        if not text and ended is None:
            return b""
        return self._choices.piece(number, text, one.news(), ended)

    async def _say(self, body: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            headers: HeaderList = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            headers += _passed_on(self._start)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


def _inner(scope: Scope, body: bytes) -> Scope:
    """The scope of the `/generate`: the client's own headers, but for what is said of its body."""
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
