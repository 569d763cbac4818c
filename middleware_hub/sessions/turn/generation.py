"""One generation of a session: sent to a worker, passed on to the client piece by piece, and committed.

Nothing of the session is held while the worker generates. However it ends (answered, refused, cut off, cancelled), exactly one
of two things happens: the sampled tokens become a checkpoint, or the trie is as if there had been no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from middleware_hub.chat.answer import Answer
from middleware_hub.chat.errors import SessionOverError, feed_event, refusal, unreadable
from middleware_hub.chat.messages import Message as ChatMessage
from middleware_hub.media.media import ABOUT_PROMPT, MEDIA_MISMATCH, Media
from middleware_hub.parsers.base import SampledParser
from middleware_hub.radix.judge import ENGINE_MISMATCH, Expectation, Judge, Verdict
from middleware_hub.sessions.events import BranchEnded, Touched
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt, PromptIds
from middleware_hub.sessions.prompt.echoes import content_of
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint
from middleware_hub.sessions.trie.trie import TrieClosedError
from middleware_hub.sessions.turn.answer import AnswerBuilder, begins
from middleware_hub.sessions.turn.plan import TurnPlan
from middleware_hub.spans.media import UNKNOWN, UnlikePromptError, chain_media, learned, settle
from middleware_hub.tokenizer.repeated_prompt import RepeatedPrompt
from router.engines.events import DONE, EventSplitter, event_data
from router.engines.form.reply import Reply, UnreadableReplyError, read_fields, read_reply
from router.engines.form.stream import StreamedReply
from router.engines.json import NotNumbersError, read_list
from router.errors import RouterError, UpstreamError
from router.http.offload import offload
from router.http.upstream import UpstreamBrokenError
from router.observability.tracing import Tracer, untraced
from router.proxy.generate_call import Backend, GenerateCall
from router.proxy.worker_reply import WorkerReply

logger = logging.getLogger(__name__)

MANY_LOGPROBS = 5000
"""Logprobs, alternatives included, of one reply: more of them are spelled in a thread."""
CONTRADICTORY = ("no", ENGINE_MISMATCH), ("no", MEDIA_MISMATCH)
"""The verdicts on a reply whose tokens are not kept because it contradicted itself."""
_ABORT_SECONDS = 10.0
"""How long a worker may take to return what it has sampled once its generation is told to end."""


class Generator(msgspec.Struct, frozen=True):
    """The parts that all generations share.

    Attributes:
        backend: generates past the memory of texts.
        recorded: generates by way of that memory, for a chat without a session. It takes a list, which gets the verdict, and
            whether nobody knows if replies in the prompt were sampled.
        media: what is known of pictures; None if the model reads none.
        judge: checks replies against what was asked.
        tracer: gets a span for each step, if there is one.
        force_logprobs: whether sessions keep the logprobs of all sampled tokens.
        short_ids: whether the template takes only ids of nine letters and digits for calls; asked when it is warm.
    """

    backend: Backend
    recorded: Callable[[GenerateCall, list[Verdict], bool], Awaitable[WorkerReply]]
    media: Media | None
    judge: Judge
    tracer: Tracer | None
    force_logprobs: bool
    short_ids: Callable[[], bool]


class TurnGeneration:
    """See the top of this file.

    Args:
        parser: parses the sampled text; made for this generation.
        on_news: called when more of a stream is there for the client; not at the end.
        on_commit: called with the prompt and the checkpoint.

    Attributes:
        answer, error: how it ended; None before.
        verdict: what became of the reply; None if there was none.
        worker: the worker that was chosen, and in `routed` why.
        seconds: the time from the request to the last byte.
        commit_seconds: the time of its commit; None if there was none.
        begun: whether a reply other than an error has begun to arrive.
        over: whether it has ended, with `answer` or `error`.
        saved: whether it is in the store, if there is one.
    """

    def __init__(
        self,
        generator: Generator,
        plan: TurnPlan,
        handle: BranchHandle,
        parser: SampledParser,
        *,
        on_news: Callable[[], None],
        on_commit: Callable[[ComposedPrompt, Checkpoint], None],
    ) -> None:
        self._generator = generator
        self._plan = plan
        self._handle = handle
        self._on_news = on_news
        self._on_commit = on_commit
        self._logprobs = (generator.force_logprobs and plan.lasting) or plan.request.logprobs
        self._aborting = False
        self.id = handle.generation_id
        self.prompt = plan.prompt
        short_ids = bool(plan.request.tools or plan.request.deferred) and generator.short_ids()
        vocabulary = generator.judge.vocabulary
        self.building = AnswerBuilder(self.id, plan.request, parser, vocabulary, short_ids=short_ids)
        self._call = plan.generate(self.id, logprobs=self._logprobs)
        self._verdicts: list[Verdict] = []
        """Of the middleware that remembers texts, for a chat without a session."""
        self.answer: Answer | None = None
        self.error: RouterError | None = None
        self.verdict: Verdict | None = None
        self.worker = self.routed = ""
        self.seconds = 0.0
        self.commit_seconds: float | None = None
        self.begun = self.over = False
        self.saved = True

    @property
    def sampling(self) -> dict[str, Any]:
        """The `sampling_params` that the worker gets."""
        return self._plan.sampling

    def __repr__(self) -> str:
        state = "answered" if self.answer else f"failed: {self.error}" if self.error else "in flight"
        return f"<TurnGeneration {self.id}: {state}>"

    async def run(self) -> None:
        """Generate and commit. Raises nothing: `error` says what went wrong."""
        begun = time.perf_counter()
        try:
            if self._plan.sampling.get("max_new_tokens") == 0:
                await self._end_branch()
            else:
                await self._generate()
        except RouterError as error:
            self.error = error
        except TrieClosedError:
            self.error = SessionOverError("the session ended before this generation did: what was sampled is not kept")
        except UpstreamBrokenError as error:
            self.error = UpstreamError(str(error))
        except UnreadableReplyError as error:
            self.error = unreadable(error)
        except Exception as error:
            logger.exception("generation %s failed", self.id)
            self.error = RouterError(f"internal error ({type(error).__name__}): the router's log has the details")
        finally:
            self.seconds = time.perf_counter() - begun - (self.commit_seconds or 0.0)
            if self._handle.open:
                self._plan.trie.abandon(self._handle)
            if self.answer is None and self.error is None:
                self.error = SessionOverError("this generation was cancelled")
            self.over = True

    async def abort(self) -> None:
        """Tell the worker to end it; the tokens sampled so far become its answer."""
        if self.over:
            return
        self._aborting = True
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._generator.backend.abort(self.id, self._call)
        except (RouterError, UpstreamBrokenError, TimeoutError) as error:
            logger.info("generation %s could not be aborted: %s", self.id, error)

    def was_read(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether a conversation goes on from the beginning of its reply, which a client must have read."""
        if not self._handle.open:
            return False  # it is committed, and its prompt may no longer be in the trie
        node, before = self._plan.turn.node, ""
        # The reply goes on in the last message, so the echo has that message's text in front of it.
        if self._plan.request.continue_final:
            before = content_of(self._plan.request.messages[-1]) or ""
            assert node.parent is not None
            node = node.parent
        return (
            len(messages) > node.depth
            and self.building.begins_with(messages[node.depth], before)
            and self._plan.trie.leads_to(node, messages)
            and not any(  # a client may go on from one that it has whole
                begins(msgspec.json.decode(child.message), messages[node.depth], sample.reasoning)
                for child in (node.children or {}).values()
                for sample in child.samples or ()
            )
        )

    async def _end_branch(self) -> None:
        """End the branch as if by its length: the session's `response_budget` is used up, so no worker is asked."""
        checkpoint, log = self.prompt.checkpoint, self._plan.log
        if checkpoint is not None and checkpoint.finish != "length":
            if log is None:
                checkpoint.finish = "length"
            else:
                self.saved = await log.append(BranchEnded(checkpoint.id, time=time.time()))
        self.verdict = Verdict("no", "response_budget")
        answer = Answer(generation_id=self.id, finish="length", prompt_tokens=self.prompt.tokens)
        if self._plan.request.token_ids:
            answer = msgspec.structs.replace(answer, ids=(), prompt_ids=Raw(self.prompt.ids.written))
        self.answer = answer

    async def _generate(self) -> None:
        """Send it to a worker. A failed reply is not kept; a stream that was ended on purpose is: it was sampled."""
        judge = self._generator.judge
        skips_special = self._plan.sampling.get("skip_special_tokens") is not False
        asked = Expectation(
            self.prompt.tokens, skips_special, self._logprobs, self.id, judge.workers.moment(), judge.clock.steps
        )
        received = _ReceivedReply(asked.prompt_tokens)
        packed = self.prompt.ids.packed
        if memoryview(packed).cast("i")[-1] in judge.vocabulary.open_ends:
            received.repeated = RepeatedPrompt(judge.vocabulary, packed, skips_special=skips_special)
        try:
            status, body = await self._receive(received)
            reply, fields, meta = received.result(status, body, stream=self._plan.request.stream)
        except asyncio.CancelledError:
            await self._keep(asked, received)
            raise
        except (RouterError, UpstreamBrokenError, UnreadableReplyError):
            if self._aborting:
                await self._keep(asked, received)
            if received.error is not None:
                raise received.error from None  # a stream that breaks off after it says less
            raise
        self.begun = self.begun or not self._plan.trie.closed
        if self.prompt.media:
            for name in ABOUT_PROMPT:  # which only the router asked for
                fields.pop(name, None)
            asked = self._as_computed(asked, reply)
        sent = self.prompt.ids.written
        answer = self.building.answer(reply, fields, meta, prompt_tokens=asked.prompt_tokens, prompt_ids=sent)
        request = self._plan.request
        if request.logprobs:  # before the commit: what fails leaves nothing
            heavy = len(reply.ids) * (1 + request.top_logprobs) > MANY_LOGPROBS
            tops = received.alternatives() if request.top_logprobs and not request.stream else {}
            logprobs = await offload(heavy, self.building.spelled, reply, tops)
            answer = msgspec.structs.replace(answer, logprobs=logprobs)
        await self._commit(asked, reply, answer)
        found = self.verdict
        if self._plan.log is not None and found is not None and (found.outcome, found.reason) in CONTRADICTORY:
            # The client will send its text again, which looks like context: every router has to know.
            self.saved = await self._plan.log.append(Touched(time=time.time(), lost=self.id))
        self.answer = answer

    def _as_computed(self, asked: Expectation, reply: Reply) -> Expectation:
        """Compare a prompt that has pictures with the ids that the engine computed with, and learn from them their lengths.

        If the engine computed with other ids, `verdict` says so, and the turn is not kept.
        """
        prompt, media = self.prompt, self._generator.media
        shown = prompt.media
        if media is None or not shown:
            return asked
        tenant = self._plan.state.caller.tenant
        unknown = {one.digest for one in shown if one.length == UNKNOWN}
        if not reply.prompt_ids:
            if unknown:
                self._mismatch("the worker does not say what ids it computed with")
            return asked
        try:
            returned = read_list(reply.prompt_ids, "i").astype(np.int32).tobytes()
            lengths = learned(prompt.ids.packed, shown, unknown, returned, media.family.least, reply.places)
        except (UnlikePromptError, NotNumbersError) as error:
            media.forget(tenant, (one.digest for one in shown))
            self._mismatch(str(error))
            return asked
        if not lengths:
            return asked
        media.learn(tenant, lengths)
        settle(prompt.span, lengths)
        take = prompt.span.count  # lengths are unknown only in the context at the end of a prompt, which is whole
        ids = PromptIds.of(returned)
        self.prompt = msgspec.structs.replace(
            prompt,
            take=take,
            ids=ids,
            tokens=prompt.span.offset + take,
            media=tuple(chain_media(prompt.span, take)),
        )
        return msgspec.structs.replace(asked, prompt_tokens=self.prompt.tokens)

    def _mismatch(self, detail: str) -> None:
        self.verdict = Verdict("no", MEDIA_MISMATCH, detail)
        logger.warning("a turn is not kept: %s: %s", MEDIA_MISMATCH, detail)

    async def _receive(self, received: _ReceivedReply) -> tuple[int, bytes]:
        """Have it generated, and take what comes. Return the status, and the body of a reply in one piece."""
        generator, plan = self._generator, self._plan
        if plan.lasting:
            reply = await generator.backend.generate(self._call)
        else:
            reply = await generator.recorded(self._call, self._verdicts, plan.unheard)
        self.worker, self.routed = reply.worker, reply.routed
        try:
            if reply.stream:
                events, streamed = EventSplitter(), received.streamed
                # Where the prompt is repeated, it has to be taken out of each event.
                alike = _is_never if received.repeated is not None else streamed.alike

                def added(event: bytes) -> bool:
                    """Take an event, and return whether it adds text."""
                    if not alike(event):
                        if not received.event(event_data(event)):
                            return False
                        # What comes of a session that is over reaches no client.
                        self.begun = self.begun or not plan.trie.closed
                    return self.building.event(streamed)

                def taken(piece: bytes) -> bool:
                    if not events.rest and alike(piece):
                        news = self.building.event(streamed)
                    else:
                        news = False
                        for event in events.feed(piece):
                            news = added(event) or news
                    if news:
                        self._on_news()
                    return True

                while piece := await reply.read():
                    taken(piece)
                    await reply.flow(taken)
            elif not reply.complete:
                await reply.gather()
        finally:
            await reply.aclose()
        return reply.status, b"" if reply.stream else reply.body

    async def _keep(self, asked: Expectation, received: _ReceivedReply) -> None:
        """Commit what a stream brought before it was ended on purpose."""
        reply = received.streamed.reply()
        if reply is not None and reply.ids and not self._plan.trie.closed:
            asked = self._as_computed(asked, reply)
            answer = self.building.answer(reply, {}, {}, prompt_tokens=asked.prompt_tokens, cut_off=True)
            await self._commit(asked, reply, answer)

    async def _commit(self, asked: Expectation, reply: Reply, answer: Answer) -> None:
        begun = time.perf_counter()
        tracer = self._generator.tracer
        with untraced if tracer is None else tracer.span("commit", tokens=len(reply.ids)):
            await self._attach(asked, reply, answer)
        self.commit_seconds = time.perf_counter() - begun

    async def _attach(self, asked: Expectation, reply: Reply, answer: Answer) -> None:
        plan, prompt, judge, lasting = self._plan, self.prompt, self._generator.judge, self._plan.lasting
        hint = self._call.hint
        if hint is not None and hint.replied is not None:
            hint.replied(reply.ids)
        if plan.trie.closed:
            raise TrieClosedError
        if self.verdict is not None:
            return  # `media_mismatch`
        judgement = judge.judge(asked, reply, self.worker)
        inside = self._verdicts
        self.verdict = inside[0] if inside else judgement.verdict
        sampled = judgement.reply
        kept = inside[0].generation if inside else None
        if sampled is None or (inside and kept is None):
            return  # the layer inside may ask for more, such as logprobs, and its record is what can be retrieved
        if lasting:  # otherwise that layer has counted its versions
            judge.clock.observe_reply(sampled.versions, late=sampled.late)
        kv_version = None if self._call.salts is None else self._call.salts.version(0, sampled.versions)
        turn = plan.sampled(prompt, sampled, answer, kv_version=kv_version)
        noting: Awaitable[bool] | None = None

        def commit() -> None:
            nonlocal noting
            checkpoint = plan.trie.commit(self._handle, turn)
            if plan.notes is not None and kept is not None:
                noting = plan.notes.save(checkpoint, plan.request.lora or "", kept)
            self._on_commit(prompt, checkpoint)

        if plan.log is None:
            commit()
            if noting is not None:
                self.saved = await noting
        else:
            self.saved = await plan.log.append_turn(self._handle, turn, plan.request.lora or "", commit)


def _is_never(_: bytes) -> bool:
    return False


class _ReceivedReply:
    """A worker's reply to one generation, whole or as its stream comes, and the error that it may stand for."""

    def __init__(self, prompt_tokens: int) -> None:
        """`prompt_tokens`: the length of what was sent."""
        self._prompt_tokens = prompt_tokens
        self.repeated: RepeatedPrompt | None = None
        self._body = b""
        self.error: RouterError | None = None
        """The error that came as an event, in a stream whose own status is 200."""

    @cached_property
    def streamed(self) -> StreamedReply:
        return StreamedReply(added=[])

    def event(self, data: bytes | None) -> bool:
        """Take the payload of an event; return whether it adds to the reply.

        Events after an error, or after `[DONE]`, are ignored: no client reads them.
        """
        if data is None or self.error is not None or self.streamed.done or not (data.startswith(b"{") or data == DONE):
            return False
        try:
            if self.repeated is not None:
                data = bytes(self.repeated.taken_out(data, self.streamed.ids))
            feed_event(self.streamed, data)
        except RouterError as error:
            self.error = error
            return False
        return data != DONE

    def result(self, status: int, body: bytes, *, stream: bool) -> tuple[Reply, dict[str, Raw], dict[str, Raw]]:
        """Return the whole reply, its top level and its `meta_info`, when all of it has come. `body`: empty for a stream.

        Raises RouterError for what came instead of a reply, and UnreadableReplyError.
        """
        self._body = body if self.repeated is None else bytes(self.repeated.taken_out(body))
        if status != 200:
            raise refusal(status, self._body, self._prompt_tokens)
        if not stream:
            reply, short = read_reply(self._body)
            return reply, *read_fields(short.body)
        if self.error is not None:
            raise self.error
        streamed = self.streamed.reply()
        if streamed is None or not self.streamed.done:
            raise UpstreamError("the worker's stream ended before its end")
        return streamed, self.streamed.last_fields, self.streamed.last_meta

    def alternatives(self) -> dict[str, Raw]:
        """Return the `meta_info` of a reply in one piece with all of its logprobs."""
        return read_fields(self._body)[1]
