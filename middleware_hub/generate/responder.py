"""The reply to a `/generate` that is recorded: the same bytes go to the client and into the tree."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
from msgspec import Raw
from msgspec.structs import replace

from middleware_hub.affinity import HEADER as AFFINITY
from middleware_hub.generate.prompting import Prompt
from middleware_hub.media.errors import ReservedCharacterError
from middleware_hub.media.media import ABOUT_PROMPT, MEDIA_MISMATCH, OURS, Media
from middleware_hub.media.viewer import Viewer
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.judge import (
    INTERNAL_ERROR,
    NO_REPLY,
    RECORDED,
    UNREADABLE,
    WORKER_ERROR,
    Expectation,
    Judge,
    Verdict,
    summary,
)
from middleware_hub.radix.records import SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.retrieval import retrieval
from middleware_hub.spans.chain import ID_BYTES, Versions
from middleware_hub.spans.media import CLOSE, OPEN, UnlikePromptError, is_reserved
from middleware_hub.store.errors import NOT_SAVED, NOT_SAVED_COMMENT
from middleware_hub.tokenizer.repeated_prompt import RepeatedPrompt
from middleware_hub.trajectories.groups import Groups
from router.engines.events import event_index
from router.engines.form.event_shape import EventCut, EventShape
from router.engines.form.reply import (
    LOGPROB_FIELDS,
    Reply,
    ShortBody,
    UnreadableReplyError,
    edit_meta,
    read_reply,
    split_list,
)
from router.engines.form.request import GenerateRequest
from router.engines.form.stream import StreamedReply
from router.engines.json import NotNumbersError, read_list
from router.http.request_state import RouteHint
from router.kv_cache.salts import CallSalts
from router.observability.tracing import Tracer, untraced
from router.proxy.worker_reply import EventEditor, WorkerReply

logger = logging.getLogger(__name__)

_OTHER_MARKS = "the ids spell U+FDD0 or U+FDD1, which stand for images in texts"
KvVersion = Callable[[Versions], str | None]


class Recorder:
    """Puts replies that pass the judge into the radix tree, and into the store behind it, if there is one (`memory`).

    Those that belong to a group are entered in its ledger (`groups`). The order of recording is its time, in nanoseconds since
    1970, as it is with a store. `sees`: the model reads pictures, so that marks stand for them in texts.
    """

    def __init__(
        self,
        tree: RadixTree,
        judge: Judge,
        tracer: Tracer | None = None,
        memory: Memory | None = None,
        groups: Groups | None = None,
        *,
        sees: bool = False,
    ) -> None:
        self.tracer = tracer
        self.tree = tree
        self.judge = judge
        self.memory = memory
        self.groups = groups
        self.sees = sees
        self._last = 0

    def record(
        self, prompt: Prompt, asked: Expectation, reply: Reply, worker: str, kv_version: KvVersion | None = None
    ) -> Verdict:
        """Record a worker's reply, or the part of it that has come. The match of the prompt must be pinned. Raises nothing.

        `kv_version` returns that of the reply, given the versions of its tokens.
        """
        try:
            tracer = self.tracer
            with untraced if tracer is None else tracer.span("record", tokens=len(reply.ids)) as span:
                found = self.judge.judge(asked, reply, worker)
                verdict, sampled = found.verdict, found.reply
                if sampled is not None and self.sees and not _has_own_marks(prompt, sampled.text):
                    verdict, sampled = Verdict("no", ReservedCharacterError.code, _OTHER_MARKS), None
                if sampled is not None:
                    if kv_version is not None:
                        sampled = replace(sampled, kv_version=kv_version(sampled.versions))
                    self._keep(prompt, sampled, verdict)
                if span is not None:
                    span.set(outcome=verdict.outcome)
            return verdict
        except Exception:
            logger.exception("a reply could not be recorded")
            return Verdict("no", INTERNAL_ERROR)

    def _keep(self, prompt: Prompt, reply: SampledReply, verdict: Verdict) -> None:
        groups, member = self.groups, prompt.member
        namespace = prompt.match.namespace
        if self.memory is None:
            self._last = max(self._last + 1, time.time_ns())
            verdict.generation = self.tree.record(prompt.match, prompt.context, reply, serial=self._last)
            if groups is not None and member is not None:
                groups.note(self.tree, namespace, member, verdict.generation)
            return
        beside = None if groups is None or member is None else partial(groups.sampled, namespace, member)
        verdict.generation, verdict.saving = self.memory.record(prompt.match, prompt.context, reply, beside)


def _has_own_marks(prompt: Prompt, reply: str) -> bool:
    """Return whether all marks of a chain's text are those of its pictures, so that the text answers for no other picture.

    No text of a client has any, but ids may spell one: a client's own, and those that the model sampled.
    """
    text, pictures = prompt.match.text, len(prompt.media)
    return not is_reserved(reply) and text.count(OPEN) == pictures == text.count(CLOSE)


class Tally(Protocol):
    """Counts verdicts."""

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Count the verdicts on the replies of one request."""


class _ExpectedReply:
    """One generation of a request: what was asked for, and what has come so far."""

    def __init__(
        self,
        recorder: Recorder,
        prompt: Prompt,
        asked: Expectation,
        hint: RouteHint | None,
        drop: frozenset[str],
        trajectory: bool,
        media: Media | None = None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        """Expect one reply.

        Args:
            recorder: records it.
            prompt: what was sent.
            asked: what the reply must fit.
            hint: where the routing policy noted the prompt; None if it did not.
            drop: fields of `meta_info` that the client did not ask for.
            trajectory: whether the client wants the whole chain in the reply.
            media: learns the lengths of the prompt's pictures; None if it has none.
            hidden: fields of the top level that the client did not ask for.
        """
        self._media = media
        self._hidden = hidden
        self._recorder = recorder
        self._prompt = prompt
        self._asked = asked
        self._hint = hint
        self._drop = drop
        self._trajectory = trajectory
        self.worker = ""
        self.kv_version: KvVersion | None = None
        self._streamed: StreamedReply | None = None
        self._shape: EventShape | None = None
        self._cut: EventCut | None = None
        self.verdict: Verdict | None = None
        self._repeated: RepeatedPrompt | None = None
        if memoryview(prompt.packed).cast("i")[-1] in (vocabulary := recorder.judge.vocabulary).open_ends:
            self._repeated = RepeatedPrompt(vocabulary, prompt.packed, skips_special=asked.skips_special)

    def whole(self, raw: bytes | Raw) -> bytes | Raw:
        """Record a reply that came in one piece, and return what the client sees of it."""
        short, raw = None, raw if self._repeated is None else self._repeated.taken_out(raw)
        try:
            reply, short = read_reply(raw)
            self.record(reply)
        except UnreadableReplyError as error:
            self.verdict = Verdict("no", UNREADABLE, str(error))
        return self._shown(raw, self.verdict, short)

    def alike(self, event: bytes) -> bytes | None:
        """Take an event of the stream, as it is sent, if it is like one before it; return what the client sees of it.

        Return None for any other event, which is to be given to `event`.
        """
        streamed = self._streamed
        if streamed is None or self._repeated is not None or not streamed.alike(event):
            return None
        if self._shape is not streamed.shape:
            self._shape = shape = streamed.shape
            assert shape is not None
            edit = partial(edit_meta, drop=self._drop, without=self._hidden)
            self._cut = shape.cut(edit) if self._drop or self._hidden else None
        cut, values = self._cut, streamed.values
        if cut is None:
            return event
        assert values is not None
        return cut.print(cut.choose(values))

    def event(self, data: bytes) -> bytes | Raw:
        """Take the payload of an event that is not `alike`, and return what the client sees of it."""
        if not data.startswith(b"{"):
            return data
        streamed = self._streamed = self._streamed or StreamedReply()
        data = data if self._repeated is None else bytes(self._repeated.taken_out(data, streamed.ids))
        streamed.decode(data)
        if streamed.finished and self.verdict is None:
            # Recorded before the client sees the end, because the client may ask for its tokens at once.
            self.close()
            return self._shown(data, self.verdict)
        return self._shown(data, None)

    def close(self) -> None:
        """Record the part of a stream that has come, however it ended."""
        if self.verdict is not None:
            return
        streamed = self._streamed
        try:
            reply = None if streamed is None else streamed.reply()
        except UnreadableReplyError as error:
            self.verdict = Verdict("no", UNREADABLE, str(error))
            return
        if reply is not None:
            self.record(reply)
        elif streamed is None or streamed.error is None:
            self.verdict = Verdict("no", NO_REPLY, "a stream without events")
        else:
            self.verdict = Verdict("no", UNREADABLE if streamed.unreadable else WORKER_ERROR, streamed.error)

    def record(self, reply: Reply) -> None:
        if self._hint is not None and self._hint.replied is not None:
            self._hint.replied(reply.ids)
        if self._media is not None and (fault := self._as_computed(reply)) is not None:
            self.verdict = Verdict("no", MEDIA_MISMATCH, fault)
        else:
            self.verdict = self._recorder.record(self._prompt, self._asked, reply, self.worker, self.kv_version)

    def begins(self, first: bytes) -> None:
        """Learn the lengths of pictures from the first event of a stream, whose headers have not gone out yet."""
        streamed = StreamedReply()
        streamed.feed(first)
        reply = None if streamed.error is not None else streamed.reply()
        if reply is not None:
            self._as_computed(reply)  # what is wrong is told with the verdict

    def _as_computed(self, reply: Reply) -> str | None:
        """Compare the prompt with the ids that the engine computed with, and learn from them how long pictures are.

        Return what is wrong; None if all is well.
        """
        media, prompt = self._media, self._prompt
        tenant, *_ = prompt.match.namespace
        assert media is not None
        if not reply.prompt_ids:
            return "the worker does not say what ids it computed with" if prompt.unknown else None
        try:
            returned = read_list(reply.prompt_ids, "i").astype(np.int32).tobytes()
            self._prompt, lengths = prompt.learned(returned, media.family.least, reply.places)
        except (UnlikePromptError, NotNumbersError) as error:
            # Perhaps they were learned from another processor.
            media.forget(tenant, (one.digest for one in prompt.media))
            return str(error)
        media.learn(tenant, lengths)
        self._asked = replace(self._asked, prompt_tokens=len(self._prompt.packed) // ID_BYTES)
        return None

    @property
    def prompt_tokens(self) -> int:
        """Return how many tokens the prompt has, as far as that is known."""
        return len(self._prompt.packed) // ID_BYTES

    @property
    def unlearned(self) -> bool:
        """Return whether the length of a picture is not known yet."""
        return bool(self._prompt.unknown)

    def _shown(self, raw: bytes | Raw, verdict: Verdict | None, short: ShortBody | None = None) -> bytes | Raw:
        """Return a reply without the fields that only the router asked for, and with those that the client wants from it.

        A reply that cannot be edited stays as it came. `short` is the same without its logprobs.
        """
        add = None
        if self._trajectory and verdict is not None and verdict.generation is not None:
            text = self._prompt.match.text + verdict.text
            tree, memory = self._recorder.tree, self._recorder.memory
            viewer = None if self._media is None else Viewer(self._media, self._prompt.match.namespace[0])
            found = retrieval.trajectory(tree, verdict.generation, text, memory, viewer)
            add = {"trajectory": msgspec.json.encode(found)}
        hidden, streamed = self._hidden, self._streamed
        if streamed is not None and streamed.last_fields.keys().isdisjoint(hidden):
            hidden = ()
        if not self._drop and add is None and not hidden:
            return raw
        # If its logprobs are dropped anyway, an event whose beginning is known can be cut short.
        try:
            if self._drop and streamed is not None and (news := streamed.news) is not None:
                return streamed.whole(edit_meta(news, drop=self._drop, add=add, without=hidden))
            body, ids = short if short is not None and self._drop else (raw, None)
            return edit_meta(body, drop=self._drop, add=add, ids=ids, without=hidden)
        except UnreadableReplyError:
            return raw


class Responder:
    """The editor of one reply: records it, counts the verdict, and tells the client in headers."""

    def __init__(
        self,
        recorder: Recorder,
        tally: Tally,
        request: GenerateRequest,
        prompts: list[Prompt],
        hint: RouteHint,
        affinity: bytes,
        *,
        force_logprobs: bool,
        media: Media | None = None,
        verdicts: list[Verdict] | None = None,
    ) -> None:
        """`media` learns from the replies, if the prompts have pictures. `verdicts` gets those on the replies, at their end.

        `affinity` is the word by which a load balancer keeps the conversation at one router; see `affinity`.
        """
        self._recorder = recorder
        self._told_verdicts = verdicts
        self._tally = tally
        self._affinity = affinity
        self._listed = request.listed
        self._prompts = prompts
        self._streaming = self._told = False
        self._settled = 0  # records of which it is known whether they are saved
        self._verdicts: list[Verdict] | None = None
        self._memory = recorder.memory
        self._media, self._samples = media, request.samples
        self._prompt_tokens = 0
        self._counted = media is not None and not media.asks_ids(
            unknown=any(prompt.unknown for prompt in prompts), stream=request.stream
        )
        asked_by_client = bytes(request.fields.get(OURS, b"")).strip() == b"true"
        hidden = () if media is None or asked_by_client else ABOUT_PROMPT
        sent_at, steps = recorder.judge.workers.moment(), recorder.tree.clock.steps
        self._generations: list[_ExpectedReply] = []
        for number, prompt in enumerate(prompts):
            options, tokens = request.options(number), len(prompt.packed) // ID_BYTES
            self._prompt_tokens += tokens
            asked = Expectation(
                tokens,
                options.skips_special,
                force_logprobs or options.logprobs,
                options.rid,
                sent_at,
                steps,
                options.experts_from,
            )
            drop = LOGPROB_FIELDS if force_logprobs and not options.logprobs else frozenset[str]()
            for _ in range(request.samples):
                self._generations.append(
                    _ExpectedReply(
                        recorder,
                        prompt,
                        asked,
                        None if number else hint,
                        drop,
                        request.wants_trajectory,
                        media,
                        hidden,
                    )
                )

    async def follow(self, reply: WorkerReply, salts: CallSalts | None = None) -> None:
        """Record a reply as it is read, and edit it. What is no stream is recorded at once.

        `salts`: those of its request. Raises UpstreamBrokenError.
        """
        for number, generation in enumerate(self._generations):
            generation.worker = reply.worker
            if salts is not None:
                generation.kv_version = partial(salts.version, number)
        if self._memory is not None:
            reply.settle = self.saved
        if reply.stream:
            self._streaming = True
            if self._media is not None and self._generations[0].unlearned and len(self._prompts) == 1:
                first = await reply.first_event()
                for generation in self._generations:
                    generation.begins(first)
            self._tell(reply, "pending")  # the verdicts are still open
            if self._memory is not None:
                if self._memory.away:
                    reply.added.append(NOT_SAVED)
                reply.holder = self
            if self._listed:
                reply.add_step(EventEditor(self._listed_event, self._listed_alike))
            else:
                only = self._generations[0]
                reply.add_step(EventEditor(only.event, only.alike))
            return
        if not reply.complete:
            await reply.gather()
        if reply.status == 200:
            listed = self._listed
            reply.body = await self._recorded(reply.body) if listed else bytes(self._generations[0].whole(reply.body))
        else:
            for generation in self._generations:
                generation.verdict = Verdict("no", WORKER_ERROR, f"status {reply.status}")
        verdicts = self.close()
        self._tell(reply, verdicts[0].header if len(verdicts) == 1 else summary(verdicts))
        if self._memory is not None and not await self.saved():
            reply.added.append(NOT_SAVED)

    def _listed_alike(self, event: bytes) -> bytes | None:
        # Like the events of a generation are only those with its index.
        number = event_index(event)
        return self._generations[number].alike(event) if 0 <= number < len(self._generations) else None

    def _listed_event(self, data: bytes) -> bytes | Raw:
        if not data.startswith(b"{"):
            return data
        number = event_index(data)
        return self._generations[number].event(data) if 0 <= number < len(self._generations) else data

    def close(self) -> list[Verdict]:
        """End the reply, complete or not: record what was streamed, count the verdicts once, and return them."""
        if self._verdicts is None:
            verdicts: list[Verdict] = []
            for generation in self._generations:
                if self._streaming:
                    generation.close()
                verdicts.append(generation.verdict or Verdict("no", NO_REPLY))
            self._verdicts = verdicts
            self._tally.count(verdicts)
        return self._verdicts

    def over(self, _: WorkerReply | None = None) -> None:
        """End the reply, and let go of what its prompts continue. However it ended, a client keeps what it was streamed."""
        self.close()
        if self._told_verdicts is not None:
            self._told_verdicts += [one.verdict for one in self._generations if one.verdict is not None]
        tree = self._recorder.tree
        for prompt in self._prompts:
            tree.unpin(prompt.match)

    def holds(self) -> bool:
        """Return whether a piece of a stream has to wait for records of which it is not known yet whether they are saved."""
        recorded = 0
        for one in self._generations:
            recorded += one.verdict is not None and one.verdict.saving is not None
        return recorded > self._settled

    async def held(self, piece: bytes) -> bytes:
        """Return a piece of a stream when all records are saved, or the stream has told that they are not."""
        if await self.saved() or self._told:
            return piece
        self._told = True
        return NOT_SAVED_COMMENT + piece

    async def saved(self) -> bool:
        """Wait until it is known whether the records are saved; return whether all of them are."""
        saved, settled = True, 0
        for generation in self._generations:
            saving = None if generation.verdict is None else generation.verdict.saving
            if saving is not None:
                saved = await asyncio.shield(saving) and saved
                settled += 1
        self._settled = settled
        return saved

    async def _recorded(self, body: bytes) -> bytes:
        """Record a list of replies, and return what the client sees of them."""
        try:
            replies = split_list(body, len(self._generations))
        except UnreadableReplyError as error:
            for generation in self._generations:
                generation.verdict = Verdict("no", UNREADABLE, str(error))
            return body
        shown: list[bytes | Raw] = []
        for generation, raw in zip(self._generations, replies, strict=True):
            shown.append(generation.whole(raw))
            await asyncio.sleep(0)  # a batch may be large
        if all(seen is raw for seen, raw in zip(shown, replies, strict=True)):
            return body
        return b"[%b]" % b",".join(map(bytes, shown))

    def _computed_tokens(self) -> int | None:
        """Return how many tokens the prompts have with their pictures; None while the length of a picture is not known."""
        first = self._generations[:: self._samples]
        return None if any(one.unlearned for one in first) else sum(one.prompt_tokens for one in first)

    def _tell(self, reply: WorkerReply, recorded: str) -> None:
        """Tell the client in headers what becomes of the replies, and how the prompts were made."""
        reused, reasons = 0, dict[str, None]()
        for prompt in self._prompts:
            reused += prompt.reused
            reasons.update(dict.fromkeys(prompt.reasons))
        reply.added += (
            (RECORDED, recorded.replace("\n", " ").encode("latin-1", "replace")),
            (b"x-radix-reused-tokens", b"%d" % reused),
        )
        sent = self._prompt_tokens if self._media is None else self._computed_tokens()
        if sent is not None:
            reply.added.append((b"x-radix-prompt-tokens", b"%d" % sent))
        reply.added.append((AFFINITY, self._affinity))
        if self._counted:
            reasons["media_count_checked"] = None
        if reasons:
            reply.added.append((b"x-radix-reasons", ", ".join(reasons).encode()))
