"""One generation of a completion: from a worker's reply to what its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from middleware_hub.chat import refusals
from middleware_hub.chat.answer import Answer, TokenLogprob
from middleware_hub.chat.sampled_tokens import SampledTokens, answer_of
from middleware_hub.dialects.completion import CompletionRequest
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.reply import Reply, UnreadableReplyError, further_fields, read_fields, read_reply
from router.engines.form.stream import StreamedReply
from router.engines.json import JSON_ERRORS


class CompletionAnswer:
    """Reads one generation, whole or as its stream comes. Raises UpstreamError for anything but a reply of `/generate`."""

    def __init__(self, request: CompletionRequest, vocabulary: Vocabulary) -> None:
        self._tokens = SampledTokens(vocabulary, request.logprobs)
        self._streamed = StreamedReply(added=[])
        self._alternatives = bool(request.logprobs)
        self._token_ids = request.token_ids
        self.answer: Answer | None = None
        """The answer; for a stream, without the text and the logprobs that were sent before."""

    def whole(self, raw: bytes | Raw) -> Answer:
        try:
            reply, short = read_reply(raw)
            if self._alternatives:
                self._tokens.take_tops(read_fields(raw)[1], len(reply.ids))
            return self._answer(reply, *read_fields(short.body), content=reply.text, logprobs=self._tokens.all(reply))
        except (UnreadableReplyError, *JSON_ERRORS) as error:
            raise refusals.unreadable(error) from error

    def event(self, data: bytes) -> str:
        """Return the text that an event of the stream adds; the last event sets `answer`.

        Raises RouterError for an event that says why there is no reply.
        """
        streamed = self._streamed
        refusals.feed(streamed, data)
        try:
            text = self._tokens.event(streamed)
            if streamed.finished and self.answer is None:
                reply = streamed.reply()
                assert reply is not None, "there was an event"
                self.answer = self._answer(reply, streamed.last_fields, streamed.last_meta)
        except (UnreadableReplyError, *JSON_ERRORS) as error:
            raise refusals.unreadable(error) from error
        return text

    def news(self) -> Sequence[TokenLogprob] | None:
        """Return the logprobs of the stream's tokens since the last call; None if unwanted, or if there are none."""
        return self._tokens.news(self._streamed) or None

    def _answer(self, reply: Reply, fields: dict[str, Raw], meta: dict[str, Raw], **known: Any) -> Answer:
        extra = further_fields(fields, meta)
        if self._token_ids:
            known |= {"ids": [*reply.ids], "prompt_ids": extra.pop("prompt_token_ids", None)}
        return answer_of(reply, meta, extra=extra, **known)
