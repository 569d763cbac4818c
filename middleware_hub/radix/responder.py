"""The way back of one recorded `/generate`: the reply goes on to the client, and is recorded from the same bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Raw
from starlette.types import Message, Send

from middleware_hub.radix import retrieval
from middleware_hub.radix.prompting import Prompt
from middleware_hub.radix.recording import INTERNAL_ERROR, UNREADABLE, Asked, Recorder, Verdict, summary
from router.engines.sglang import (
    LOGPROB_FIELDS,
    EventSplitter,
    GenerateRequest,
    Reply,
    StreamedReply,
    UnreadableReplyError,
    edit_meta,
    event_data,
    event_index,
    read_reply,
    split_list,
)
from router.http.asgi import RouteHint

logger = logging.getLogger(__name__)


class Tally(Protocol):
    """Whoever counts what became of replies."""

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Take note of those of one request."""


class _Generation:
    """One of the generations of a request: what was asked for, and what has come of it."""

    def __init__(
        self,
        recorder: Recorder,
        prompt: Prompt,
        asked: Asked,
        hint: RouteHint | None,
        *,
        drop_logprobs: bool,
        trajectory: bool,
    ) -> None:
        """`hint`: what was told of its prompt to whoever chose the worker; None if nothing was."""
        self._recorder = recorder
        self._prompt = prompt
        self._asked = asked
        self._hint = hint
        self._drop = LOGPROB_FIELDS if drop_logprobs else frozenset[str]()
        self._trajectory = trajectory
        self.worker = ""
        self.streamed = StreamedReply()
        self.verdict: Verdict | None = None

    def whole(self, raw: bytes | Raw) -> bytes | Raw:
        """Record a reply that came in one piece; returns what the client gets to see of it."""
        bare = raw
        try:
            reply, bare = read_reply(raw)
            self.record(reply)
        except UnreadableReplyError as error:
            self.verdict = Verdict("no", UNREADABLE, str(error))
        return self._shown(raw, self.verdict, bare if self._drop else raw)

    def event(self, data: bytes) -> bytes | Raw:
        """Take in an event of the stream; returns what the client gets to see of it."""
        self.streamed.feed(data)
        if self.streamed.finished and self.verdict is None:
            # Before the client can know that it is over: it may ask for its tokens at once.
            self.close()
            return self._shown(data, self.verdict, data)
        return self._shown(data, None, data)

    def close(self) -> None:
        """The stream is over, in whatever way: record what came."""
        if self.verdict is None:
            try:
                reply = self.streamed.reply()
            except UnreadableReplyError as error:
                self.verdict = Verdict("no", UNREADABLE, str(error))
                return
            if reply is not None:
                self.record(reply)
            else:
                self.verdict = Verdict("no", "no tokens were sampled", self.streamed.error or "a stream without events")

    def record(self, reply: Reply) -> None:
        """Remember a reply."""
        if self._hint is not None:
            self._hint.reply(reply.ids)
        try:
            with self._recorder.tracer.span("record", tokens=len(reply.ids)) as span:
                self.verdict = self._recorder.record(self._prompt, self._asked, reply, self.worker)
                span.set(outcome=self.verdict.outcome)
        except Exception:
            logger.exception("a reply could not be recorded")
            self.verdict = Verdict("no", INTERNAL_ERROR)

    def _shown(self, raw: bytes | Raw, verdict: Verdict | None, bare: bytes | Raw) -> bytes | Raw:
        """Without what only we asked for, with what the client asked of us; as it came if it cannot be edited.

        `bare` is what to edit: `raw`, less what is dropped in any case.
        """
        add = None
        if self._trajectory and verdict is not None and verdict.generation is not None:
            text = self._prompt.match.text + verdict.text
            found = retrieval.trajectory(self._recorder.tree, verdict.generation, text)
            add = {"trajectory": msgspec.json.encode(found)}
        if not self._drop and add is None:
            return raw
        # Short are events of which a part is known, and which lose their logprobs in any case.
        news = self.streamed.news if self._drop else None
        try:
            if news is not None:
                return self.streamed.whole(edit_meta(news, drop=self._drop, add=add))
            return edit_meta(bare, drop=self._drop, add=add)
        except UnreadableReplyError:
            return raw


class Responder:
    """Stands in the place of the client's `send` for the application inside."""

    def __init__(
        self,
        recorder: Recorder,
        tally: Tally,
        request: GenerateRequest,
        prompts: list[Prompt],
        send: Send,
        hint: RouteHint,
        *,
        force_logprobs: bool,
    ) -> None:
        self._tally = tally
        self._send = send
        self._listed = request.listed
        self._prompts = prompts
        self._start: Message | None = None
        self._body: list[bytes] = []
        self._events: EventSplitter | None = None
        self._counted = False
        sent_at = recorder.judge.workers.moment()
        self._generations = [
            _Generation(
                recorder,
                prompt,
                Asked(
                    len(prompt.ids),
                    request.skips_special(number),
                    force_logprobs or request.asked_for_logprobs(number),
                    request.rid(number),
                    sent_at,
                    recorder.tree.clock.steps,
                ),
                hint if number == 0 else None,
                drop_logprobs=force_logprobs and not request.asked_for_logprobs(number),
                trajectory=request.wants_trajectory,
            )
            for number, prompt in enumerate(prompts)
            for _ in range(request.samples)
        ]

    async def send(self, message: Message) -> None:
        """What the application inside calls with the worker's reply."""
        if message["type"] == "http.response.start":
            self._start = message
            worker = dict(message["headers"]).get(b"x-router-worker", b"").decode("latin-1")
            for generation in self._generations:
                generation.worker = worker
            if message["status"] == 200 and _is_stream(message):
                self._events = EventSplitter()
                await self._send(self._head("pending"))
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        elif self._events is not None:
            await self._stream(self._events, message)
        else:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole(b"".join(self._body))

    def close(self) -> None:
        """The reply is over, whether it came to its end or not: record what was streamed, count what became of it."""
        if self._events is not None:
            for generation in self._generations:
                generation.close()
        if not self._counted:
            self._counted = True
            self._tally.count([generation.verdict or Verdict("no", "no reply") for generation in self._generations])

    async def _whole(self, body: bytes) -> None:
        assert self._start is not None
        if self._start["status"] == 200:
            body = await self._recorded(body)
        else:
            for generation in self._generations:
                generation.verdict = Verdict("no", "worker error", f"status {self._start['status']}")
        self.close()
        head = self._head(summary([generation.verdict or Verdict("no") for generation in self._generations]))
        head["headers"].append((b"content-length", b"%d" % len(body)))
        await self._send(head)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _recorded(self, body: bytes) -> bytes:
        if not self._listed:
            return bytes(self._generations[0].whole(body))
        try:
            replies = split_list(body, len(self._generations))
        except UnreadableReplyError as error:
            for generation in self._generations:
                generation.verdict = Verdict("no", UNREADABLE, str(error))
            return body
        shown = []
        for generation, raw in zip(self._generations, replies, strict=True):
            shown.append(bytes(generation.whole(raw)))
            await asyncio.sleep(0)  # a batch may be large
        return b"[%b]" % b",".join(shown)

    async def _stream(self, events: EventSplitter, message: Message) -> None:
        out = [self._event(event) for event in events.feed(message.get("body", b""))]
        more = message.get("more_body", False)
        if not more:
            out.append(events.flush())
        body = b"".join(out)
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None or not data.startswith(b"{"):
            return event
        number = event_index(data) if self._listed else 0
        if not 0 <= number < len(self._generations):
            return event
        shown = self._generations[number].event(data)
        return event if shown is data else b"data: " + bytes(shown) + b"\n\n"

    def _head(self, recorded: str) -> Message:
        assert self._start is not None
        headers = [h for h in self._start["headers"] if h[0] != b"content-length"]
        headers += [
            (b"x-radix-recorded", recorded.replace("\n", " ").encode("latin-1", "replace")),
            (b"x-radix-reused-tokens", b"%d" % sum(prompt.reused for prompt in self._prompts)),
            (b"x-radix-prompt-tokens", b"%d" % sum(len(prompt.ids) for prompt in self._prompts)),
        ]
        reasons = dict.fromkeys(reason for prompt in self._prompts for reason in prompt.match.reasons)
        if reasons:
            headers.append((b"x-radix-reasons", ", ".join(reasons).encode()))
        return {"type": "http.response.start", "status": self._start["status"], "headers": headers}


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])
