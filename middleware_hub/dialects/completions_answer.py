"""What a worker says of one generation, as the client of a completion is told it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.chat.messages import Answer, Finish, TokenLogprob
from middleware_hub.chat.refusals import refusal
from middleware_hub.dialects.completions_requests import CompletionRequest
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.sglang import Reply, StreamedReply, UnreadableReplyError, read_reply
from router.engines.sglang.json import JSON_ERRORS
from router.engines.sglang.outcome import refusal_status
from router.engines.sglang.reply import LogprobEntry, Usage, further_fields, read_fields
from router.errors import UpstreamError

_Tops = list[list[LogprobEntry] | None]
_decode_tops = msgspec.json.Decoder(_Tops | None).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_usage = msgspec.json.Decoder(Usage).decode


class Told:
    """One generation, whole or as its stream comes. Raises UpstreamError for what is no reply of `/generate`.

    Args:
        request: what the client wants to be told.
        vocabulary: spells tokens, for their logprobs.
    """

    def __init__(self, request: CompletionRequest, vocabulary: Vocabulary) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._streamed = StreamedReply(added=[])
        self._tops: _Tops = []
        self._shown = 0
        self.answer: Answer | None = None
        """How it ended; of a stream without its text and its logprobs, which were told before."""

    def whole(self, raw: bytes | Raw) -> Answer:
        """A reply in one piece."""
        try:
            reply, short = read_reply(raw)
            if self._request.logprobs:
                self._take_tops(read_fields(raw)[1], len(reply.ids))
            return self._answer(reply, *read_fields(short), text=reply.text, logprobs=self._entries(reply))
        except (UnreadableReplyError, *JSON_ERRORS) as error:
            raise _unreadable(error) from error

    def event(self, data: bytes) -> str:
        """The text that an event of the stream has added; `answer` is there when it was the last one.

        Raises RouterError for an event that says why there is no reply.
        """
        streamed = self._streamed
        streamed.feed(data)
        if streamed.error is not None:
            raise refusal(refusal_status(data) or 502, streamed.error)
        status = refusal_status(data) if streamed.finished else None
        if status is not None:
            # A worker that cannot serve a request says so in an abort with a status.
            raise refusal(status, bytes(streamed.last_meta["finish_reason"]))
        try:
            if self._request.logprobs:
                self._take_tops(streamed.last_meta, len(streamed.logprobs))
            added = streamed.added or []
            text = "".join([_decode_text(piece) for piece in added])
            added.clear()
            if streamed.finished and self.answer is None:
                reply = streamed.reply()
                assert reply is not None, "there was an event"
                self.answer = self._answer(reply, streamed.last_fields, streamed.last_meta)
        except (UnreadableReplyError, *JSON_ERRORS) as error:
            raise _unreadable(error) from error
        return text

    def news(self) -> list[TokenLogprob] | None:
        """The logprobs of a stream's tokens since the last call; None if nobody wants them, or there are none."""
        if self._request.logprobs is None or len(self._streamed.logprobs) <= self._shown:
            return None
        found = self._spelled(self._streamed.logprobs, self._shown)
        self._shown = len(self._streamed.logprobs)
        return found

    def _entries(self, reply: Reply) -> list[TokenLogprob] | None:
        if self._request.logprobs is None:
            return None
        return self._spelled([*zip(reply.logprobs or (), reply.logprob_ids or (), strict=False)], 0)

    def _take_tops(self, meta: dict[str, Raw], tokens: int) -> None:
        """Alternatives of an event: of all tokens so far, or of those that are new."""
        raw = meta.get("output_top_logprobs")
        new = (None if raw is None else _decode_tops(raw)) or []
        if len(new) == tokens:
            self._tops = new
        else:
            self._tops += new

    def _spelled(self, entries: Sequence[Any], begin: int) -> list[TokenLogprob]:
        """`entries`, from one of them on; they begin with `[logprob, id]`."""
        piece, tops, wanted = self._vocabulary.piece, self._tops, self._request.logprobs or 0
        found = []
        for number in range(begin, len(entries)):
            logprob, token, *_ = entries[number]
            best = (tops[number] if number < len(tops) else None) or []
            top: list[Any] = [(one[1], piece(one[1]), one[0]) for one in best[:wanted]]
            found.append(TokenLogprob(token, piece(token), logprob, top))
        return found

    def _answer(
        self,
        reply: Reply,
        fields: dict[str, Raw],
        meta: dict[str, Raw],
        *,
        text: str = "",
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> Answer:
        usage = _decode_usage(msgspec.json.encode(meta))
        return Answer(
            generation_id=reply.request_id or "",
            content=text,
            finish=_finish(reply),
            matched=reply.matched,
            prompt_tokens=reply.prompt_tokens or 0,
            completion_tokens=len(reply.ids),
            cached_tokens=usage.cached_tokens or 0,
            reasoning_tokens=usage.reasoning_tokens or 0,
            weight_version=reply.version,
            logprobs=logprobs,
            extra=further_fields(fields, meta),
        )


def _finish(reply: Reply) -> Finish:
    if reply.finish_type == "length":
        return "length"
    return "stop" if reply.finish_type == "stop" else "abort"


def _unreadable(error: Exception) -> UpstreamError:
    return UpstreamError(f"the worker's reply is not what /generate answers: {error}")
