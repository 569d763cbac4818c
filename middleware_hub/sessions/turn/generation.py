"""One generation of a session: asked of a worker, given to the client piece by piece, and committed.

Nothing of the session is held while the worker generates. However it ends (answered, refused, cut off, cancelled), exactly one
of two things happens: what was sampled becomes a checkpoint, or the trie is as if there had been no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Message, Scope

from middleware_hub.chat.answer import Answer, Finish
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.chat.refusals import SessionOverError, refusal
from middleware_hub.parsers.reply import ReplyParser
from middleware_hub.radix.recording import Asked, Judge, Verdict
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.prompt.composing import spoken
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, PreparedTurn
from middleware_hub.sessions.trie.trie import MessageTrie, TrieClosedError
from middleware_hub.sessions.turn.answer import AnswerBuilder
from middleware_hub.sessions.turn.reasoning import thought_before
from middleware_hub.sessions.turn.worker_request import never, worker_request
from middleware_hub.sessions.turn.worker_stream import WorkerStream
from middleware_hub.spans.chain import SpanFlag, TokenSpan
from router.engines.sglang import Reply, StreamedReply, UnreadableReplyError, read_reply
from router.engines.sglang.reply import further_fields, read_fields
from router.errors import RouterError, UpstreamError
from router.http.asgi import collected, replay, with_body
from router.http.request_state import request_state
from router.http.upstream import UpstreamBrokenError
from router.observability.tracing import OFF, Tracer

logger = logging.getLogger(__name__)

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
        lasting: whether the session is to be exported (see `Session`). If not, the layers inside record the reply.
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
        lasting: bool,
        routing_key: str | None,
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
        self._bell = bell
        self._tracer = tracer
        self._on_commit = on_commit
        self._spent = sampling.get("max_new_tokens") == 0
        self._skips_special = sampling.get("skip_special_tokens") is not False
        self._lasting = lasting
        self._logprobs = (logprobs and lasting) or request.logprobs
        self._inner, self._body = worker_request(
            scope,
            request,
            sampling,
            prompt.ids,
            self.id,
            routing_key=routing_key,
            logprobs=self._logprobs,
            kept=lasting,
            parent=turn.named if turn.unknown_parent else prompt.parent,
        )
        self._aborting = False
        self.building = AnswerBuilder(handle.generation_id, request, turn.node, parser, judge.tokenizer.vocabulary)
        self.answer: Answer | None = None
        self.error: RouterError | None = None
        self.verdict: Verdict | None = None
        self.worker = ""
        self.routed = ""
        """Why that worker was chosen."""
        self.seconds = 0.0
        """What it took, from the request to the last byte."""
        self.commit_seconds: float | None = None
        """What its commit took; None where there was none."""
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
    def spliced_turns(self) -> int:
        """So many earlier turns kept their ids in a new rendering."""
        return self._prompt.spliced

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
            self.seconds = time.perf_counter() - begun - (self.commit_seconds or 0.0)
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
        self._aborting = True
        body = msgspec.json.encode({"rid": self.id})
        scope = with_body({**self._inner, "path": "/abort_request", "raw_path": b"/abort_request"}, body)

        async def unheard(_: Message) -> None: ...

        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._app(scope, replay(body, never), unheard)
        except (RouterError, UpstreamBrokenError, TimeoutError) as error:
            logger.info("generation %s could not be aborted: %s", self.id, error)

    # To the worker and back -------------------------------------------------------------------------------------------

    async def _whole(self) -> None:
        asked = self._asked()
        start, body = await collected(self._app, with_body(self._inner, self._body), replay(self._body, never))
        self._began(start)
        if start["status"] != 200:
            raise refusal(start["status"], body)
        self.begun = True
        reply, short = read_reply(body)
        self.building.whole(reply, read_fields(body)[1] if self._request.top_logprobs else {})
        self._finish(asked, reply, *read_fields(short))

    async def _stream(self) -> None:
        """Of a worker that fails nothing is kept. What is ended on purpose keeps what has come: it was sampled."""
        asked, stream = self._asked(), WorkerStream(self._began, self._event)
        try:
            await self._app(with_body(self._inner, self._body), replay(self._body, never), stream.take)
            reply = stream.reply()
        except asyncio.CancelledError:
            self._keep(asked, stream.streamed)
            raise
        except (RouterError, UpstreamBrokenError, UnreadableReplyError):
            if self._aborting:
                self._keep(asked, stream.streamed)
            raise
        self._finish(asked, reply, stream.streamed.last_fields, stream.streamed.last_meta)

    def _began(self, start: Message) -> None:
        headers = dict(start["headers"])
        self.worker = headers.get(b"x-router-worker", b"").decode("latin-1")
        self.routed = headers.get(b"x-router-reason", b"").decode("latin-1")

    def _event(self, streamed: StreamedReply) -> None:
        self.begun = True
        if self.building.event(streamed):
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

    def _finish(self, asked: Asked, reply: Reply, fields: dict[str, Raw], meta: dict[str, Raw]) -> None:
        """It is over: commit it, and answer."""
        self.building.end()
        # Copies, for a slice would keep all of the reply in memory for as long as there is the session.
        extra = {name: value.copy() for name, value in further_fields(fields, meta).items()}
        self._commit(asked, reply, self.building.finish(reply), extra)
        self.answer = self.building.answer(reply, meta, extra, prompt_tokens=self.prompt_tokens)

    def _keep(self, asked: Asked, streamed: StreamedReply) -> None:
        """It was ended on purpose: what was sampled was sampled."""
        reply = streamed.reply()
        if reply is not None and reply.ids and not self._trie.closed:
            self.building.end()
            self._commit(asked, reply, "abort", {})

    def _commit(self, asked: Asked, reply: Reply, finish: Finish, extra: dict[str, Raw]) -> None:
        begun = time.perf_counter()
        with self._tracer.span("commit", tokens=len(reply.ids)):
            self._attach(asked, reply, finish, extra)
        self.commit_seconds = time.perf_counter() - begun

    def _attach(self, asked: Asked, reply: Reply, finish: Finish, extra: dict[str, Raw]) -> None:
        hint = request_state(self._inner).hint
        if hint is not None and hint.replied is not None:
            hint.replied(reply.ids)
        if self._trie.closed:
            raise TrieClosedError
        judgement = self._judge.judge(asked, reply, self.worker)
        self.verdict = judgement.verdict
        sampled = judgement.reply
        if sampled is None:
            return
        if self._lasting:  # else it was counted by whoever recorded it
            self._judge.clock.observe_reply(sampled.versions, late=sampled.late)
        span = TokenSpan(
            self._prompt.span,
            self._prompt.take,
            0,
            sampled.ids,
            0,
            logprobs=sampled.logprobs if self._lasting else None,
            versions=sampled.versions,
            flags=sampled.flags | SpanFlag.WHOLE | self._lost(),
            visible=-1 if sampled.visible is None else sampled.visible,
            request_ids=sampled.request_ids,
            finish=sampled.finish,
        )
        message, in_place = spoken(self._request, self._turn, self.building.content)
        self.building.add_calls(message)
        reasoning = self.building.reasoning
        if in_place:
            reasoning = thought_before(self._request, self._turn, self._prompt) + reasoning
        shown = sampled.tail[0].shown if sampled.tail else 0
        checkpoint = (self._trie.commit_in_place if in_place else self._trie.commit)(
            self._handle,
            message,
            span,
            finish=finish,
            tail=sampled.tail,
            shown=sampled.text[-shown:] if shown else "",
            reasoning=reasoning,
            scaffold=self._prompt.scaffold,
            reasons=self._prompt.reasons,
            edited=bool(self._prompt.edited),
            extra=extra if self._lasting else {},
        )
        self._on_commit(self._prompt, checkpoint)

    def _lost(self) -> int:
        """What is known to be missing from the prompt: a turn that the request named, and that nobody here remembers."""
        named = self._turn.named
        lost = self._turn.unknown_parent and named is not None and self._trie.checkpoint(named) is None
        return SpanFlag.PARENT_LOST if lost else SpanFlag.NONE
