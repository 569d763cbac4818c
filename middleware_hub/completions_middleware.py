"""`Completions`: OpenAI's `POST /v1/completions`, as pure ASGI around the application that serves `/generate`.

A request becomes a `/generate` with the prompt unchanged. The layers inside match the prompt, have it answered and record the
reply; their reply is passed on in OpenAI's form, a stream event by event. They get the client's own `receive`, so that they see
when the client leaves.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub.chat.answer import ReplyHead, of_several
from middleware_hub.chat.errors import refusal, unreadable
from middleware_hub.dialects.completions import Choices, CompletionAnswer, CompletionRequest, parse
from middleware_hub.dialects.openai.replies import error_body
from middleware_hub.served_models import ServedModels
from middleware_hub.tokenizer.id_checks import check_unmatched
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.engines.events import DONE, EventSplitter, event_data, event_index
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.form.reply import UnreadableReplyError, split_list
from router.engines.form.worker_request import new_rid
from router.engines.json_cost import LIGHT
from router.errors import BadRequestError, RouterError, UpstreamError
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.headers import HeaderList, as_json, first_values
from router.http.offload import offload
from router.http.request_state import request_state
from router.http.responses import send_json
from router.http.upstream import UpstreamBrokenError
from router.proxy.generate_call import GenerateCall
from router.proxy.worker_reply import WorkerReply

_PASSED_ON = (b"x-radix-", b"x-router-")
"""The prefixes of reply headers that are passed on. The others describe a body that the client does not get."""

_PROMPT_INSIDE = re.compile("`(?:text|input_ids)`")
"""How an error of the layers inside names the prompt."""

Generate = Callable[[GenerateCall], Awaitable[WorkerReply]]


class Completions:
    """See the top of this file.

    Args:
        generate: see `Hub.generate`.
        tokenizer: spells prompts and tokens for clients that want to see them.
        models: know which adapter a `model` names.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: Tokenizer,
        models: ServedModels,
        *,
        max_body_bytes: int,
        limits: PromptLimits = PROMPT_LIMITS,
    ) -> None:
        self._limits = limits
        self._generate = generate
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
            await self._models.ask(scope, request.model)
        adapter = self._models.adapter_of(request.model)
        if adapter is not None:
            extra = {**request.extra, "lora_path": Raw(msgspec.json.encode(adapter))}
            request = msgspec.structs.replace(request, extra=extra)
        rid = of_several(new_rid(), request.replies)
        body = await offload(heavy, request.generate, rid)
        choices = self._choices(request, ReplyHead(f"cmpl-{rid}", int(time.time()), request.model or "default"))
        answers = [CompletionAnswer(request, self._tokenizer.vocabulary) for _ in range(request.replies)]
        state = request_state(scope)
        headers = _inner_headers(scope["headers"])
        call = GenerateCall(body, None, headers, state.record, state.caller, named=first_values(headers))
        async with ClientConnection(receive) as client:
            if request.stream:
                await _CompletionStream(request, choices, answers, client, send).run(self._replied, call)
                return
            try:
                reply = await self._replied(call)
                try:
                    await reply.gather()
                finally:
                    await reply.aclose()
            except UpstreamBrokenError as error:
                raise UpstreamError(str(error)) from error
        if reply.status != 200:
            raise refusal(reply.status, reply.body)
        try:
            replies = split_list(reply.body, request.replies) if request.listed else [Raw(reply.body)]
        except UnreadableReplyError as error:
            raise unreadable(error) from error
        found = []
        for answer, raw in zip(answers, replies, strict=True):
            found.append(await offload(request.logprobs is not None and len(raw) > LIGHT, answer.whole, raw))
            await asyncio.sleep(0)  # a batch may be large
        heavy = request.logprobs is not None and len(reply.body) > LIGHT
        await send_json(send, 200, await offload(heavy, choices.whole, found), _passed_on(reply.headers()))

    def _parsed(self, body: bytes) -> CompletionRequest:
        request = parse(body, self._limits)
        if request.bare and isinstance(request.prompts[0], str) and self._tokenizer.adds_bos:
            raise BadRequestError(
                "`add_special_tokens` cannot be false with a text, because this tokenizer begins each with"
                f" {self._tokenizer.vocabulary.spell(self._tokenizer.bos)}: give token ids in `prompt`",
                param="add_special_tokens",
            )
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                with _prompt_named():
                    check_unmatched(self._tokenizer.vocabulary, prompt)
        return request

    async def _replied(self, call: GenerateCall) -> WorkerReply:
        with _prompt_named():
            return await self._generate(call)

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
        self,
        request: CompletionRequest,
        choices: Choices,
        answers: list[CompletionAnswer],
        client: ClientConnection,
        send: Send,
    ) -> None:
        self._request = request
        self._choices = choices
        self._answers = answers
        self._client = client
        self._send = send
        self._headers: HeaderList = []
        self._begun = False
        self._done = False
        self._error: RouterError | None = None

    async def run(self, generate: Generate, call: GenerateCall) -> None:
        """Send the whole reply. Raises RouterError only before anything is sent."""
        try:
            reply = await generate(call)
            try:
                await self._pass_on(reply)
            finally:
                await reply.aclose()
            if self._error is None and not self._done:
                raise UpstreamError("the worker's stream ended before its end")
        except RouterError as error:
            self._error = self._error or error
        except UpstreamBrokenError as error:
            self._error = self._error or UpstreamError(str(error))
        if self._error is None:
            end = self._choices.end([one.answer for one in self._answers if one.answer is not None])
        elif self._begun:
            call.record.broken = True
            # `[DONE]` after it would make it look like a success.
            end = b"data: " + msgspec.json.encode(error_body(self._error)) + b"\n\n"
        else:
            raise self._error
        self._client.stop_watching()
        await self._send_body(end, last=True)

    async def _pass_on(self, reply: WorkerReply) -> None:
        """Send what comes of a stream. Raises RouterError for a reply that is none."""
        if not reply.stream:
            await reply.gather()
            raise refusal(reply.status, reply.body) if reply.status != 200 else UpstreamError("no stream came")
        self._headers = _passed_on(reply.headers())
        reply.add_step(partial(self._shown, EventSplitter()))
        body = await reply.read()
        while body:
            await self._send_body(body)
            await reply.flow_to(self._send)
            body = await reply.read()

    def _shown(self, events: EventSplitter, piece: bytes) -> bytes:
        """Return what the client gets of a piece of the stream; that may be nothing yet."""
        out = []
        for event in events.feed(piece):
            data = event_data(event)
            if data is not None and self._error is None and not self._done:  # what follows on either is ignored
                try:
                    out.append(self._piece(data))
                except RouterError as error:
                    self._error = error
        return b"".join(out)

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

    async def _send_body(self, body: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            headers: HeaderList = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            headers += self._headers
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


@contextmanager
def _prompt_named() -> Iterator[None]:
    """Have an error about the prompt name it as the client does."""
    try:
        yield
    except BadRequestError as error:
        named = _PROMPT_INSIDE.sub("`prompt`", error.message)
        if named != error.message:
            error.message = named
            error.details.setdefault("param", "prompt")
        raise


def _inner_headers(headers: HeaderList) -> HeaderList:
    """Return the headers of the `/generate`: the client's own, except those that describe its body."""
    return as_json([pair for pair in headers if pair[0] != b"accept"])


def _passed_on(headers: HeaderList) -> HeaderList:
    return [(name, value) for name, value in headers if name.startswith(_PASSED_ON)]
